"""How the demo opens: the bundled model translates, before any other is trained."""

import time
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from writehead.decoding import Engine
from writehead.errors import RunError
from writehead.model.bundled import has_bundled_run

SENTENCES = (
    "The committee will vote on the report tomorrow.",
    "We must do more to protect our rivers and forests.",
    "Tom asked Mary whether she wanted to go swimming.",
    "Could you tell me where the nearest station is?",
)


def open_box(device: str, console: Console) -> dict[str, Any] | None:
    """Our sentences as the bundled model translates them, and the seconds that it took.

    None where the package has no such model, or a damaged one.
    """
    if not has_bundled_run():
        console.print("[bold]1. The bundled model[/] is not here: this writehead has none")
        return None
    console.print("[bold]1. The bundled model[/] translates, English to German, beam 4")
    began = time.perf_counter()
    try:
        engine = Engine.load(device=device)
    except RunError as error:
        console.print(Text(f"   it cannot: {error}"))
        return None
    loaded = time.perf_counter()
    texts = [output.text for output in engine.translate(SENTENCES)]
    return {
        "load_s": loaded - began,
        "translate_s": time.perf_counter() - loaded,
        "sentences": [
            {"source": source, "translation": text}
            for source, text in zip(SENTENCES, texts, strict=True)
        ],
    }


def show_box(found: dict[str, Any], console: Console) -> None:
    """The sentences side by side with their translations, and how long it took."""
    columns = (Column(name, overflow="fold") for name in ("English", "German"))
    table = Table(*columns, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for one in found["sentences"]:
        table.add_row(Text(one["source"]), Text(one["translation"]))
    console.print(table)
    console.print(how_long(found), style="dim")


def how_long(found: dict[str, Any]) -> str:
    """A sentence on the time that it took."""
    return (
        f"Loaded in {found['load_s']:.1f} s; {len(found['sentences'])} sentences translated in "
        f"{found['translate_s']:.1f} s."
    )
