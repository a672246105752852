"""The records of all benchmarks as tables for a terminal."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from writehead.bench.attention import GROUPS
from writehead.bench.context import OURS as OURS_AT_CONTEXT
from writehead.bench.decode import OURS, PYTORCH, quickest, search_name

NONE = "–"
TEXT = ("model", "search", "system")  # columns that are aligned to the left

Cells = Iterable[Sequence[object]]


def show(result: dict[str, Any], page: Console) -> None:
    """Prints the table of a record and its notes."""
    if chip := result.get("chip"):
        page.print(f"{chip['name']}: {chip['source']}\n", highlight=False, soft_wrap=True)
    title, head, cells = {
        "attention": _attention,
        "context": _context,
        "decode": _decode,
        "train": _train,
        "translate": _translate,
    }[result["bench"]](result)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for i, column in enumerate(head):
        left = column in TEXT
        table.add_column(
            column,
            justify="left" if left else "right",
            style="" if i else "cyan",
            no_wrap=left,
            overflow="fold",
        )
    for row in cells:
        table.add_row(*map(_shown, row))
    page.print(title, style="bold", markup=False, highlight=False)
    page.print(table)
    page.print()
    for note in [*result.get("notes", ()), *_absences(result.get("rows", ()))]:
        page.print(note, style="dim", markup=False, highlight=False, soft_wrap=True)


def _shown(value: object) -> str:
    """Three digits of a float, without an exponent."""
    if value is None:
        return NONE
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _attention(result: dict[str, Any]) -> tuple[str, list[str], Cells]:
    first = result["rows"][0]
    title = (
        f"Attention of one query per row, h={first['h']}, k=v={first['k']}, {result['dtype']}: "
        f"microseconds"
    )

    def cells() -> Iterator[list[object]]:
        for row in result["rows"]:
            times = [row["best"].get(group, {}).get("us") for group in GROUPS]
            best = times[0] or min(filter(None, times), default=None)
            rate = best and row["kv_bytes"] / best / 1e3
            yield [row["b"], row["m"], row["g"], *times, row["floor_us"], rate]

    return title, ["b", "m", "g", *GROUPS, "floor", "GB/s"], cells()


def _decode(result: dict[str, Any]) -> tuple[str, list[str], Cells]:
    rows, config = result["rows"], result["config"]
    title = (
        f"Milliseconds per decoding step, {config['source']} + {config['target']} tokens, "
        f"{result['dtype']}"
    )
    labels = dict.fromkeys(
        label
        for row in rows
        for label, measured in row["measured"].items()
        if "step_ms" in measured
    )

    def cells() -> Iterator[list[object]]:
        for row in rows:
            setting, lengths = row["setting"], config["lengths"][-1]
            ours = quickest(row, OURS[lengths])
            token = ours and ours["us_per_token"]
            yield [
                *(row["preset"], setting["batch"], search_name(setting["beam"])),
                *(_median(row["measured"].get(label, {}), "step_ms") for label in labels),
                row["floor"]["step_ms"][lengths],
                ours and f"{ours['share_of_floor']:.0%}",
                token and f"{_shown(token['encoder'])} + {_shown(token['decoder'])}",
            ]

    head = ["model", "batch", "search", *labels, "floor", "floor/ours", "ours, µs per token"]
    return title, head, cells()


def _context(result: dict[str, Any]) -> tuple[str, list[str], Cells]:
    title = "A step after a context: milliseconds; attention of one layer: microseconds"

    def cells() -> Iterator[list[object]]:
        for row in result["rows"]:
            measured, alone = row["measured"], row["attention"]
            rate = alone.get("bytes_per_second")
            yield [
                *(row["preset"], row["batch"], row["context"]),
                *(
                    _median(measured.get(name, {}), "step_ms")
                    for name in (OURS_AT_CONTEXT, PYTORCH)
                ),
                *(row["floor"]["step_ms"], _median(alone, "us")),
                *(row["floor"]["attention_us"], rate and rate / 1e9),
            ]

    head = ["model", "batch", "context", "ours", PYTORCH, "floor", "attention", "floor", "GB/s"]
    return title, head, cells()


def _translate(result: dict[str, Any]) -> tuple[str, list[str], Cells]:
    title = f"{result['sentences']:,} lines of {result['input']}, {result['dtype']}"

    def cells() -> Iterator[list[object]]:
        for name, engine in result["engines"].items():
            for search, found in engine.get("searches", {}).items():
                yield [
                    *(name, search, engine["load_s"], engine["first_sentence_s"]),
                    *(found["sentences_per_second"], found["tokens_per_second"]),
                    result["equal_lines"].get(name, {}).get(search),
                ]

    head = ["system", "search", "load, s", "first sentence, s", "sentences/s", "tokens/s"]
    return title, [*head, "lines equal to ours"], cells()


def _train(result: dict[str, Any]) -> tuple[str, list[str], Cells]:
    cells = [
        [
            *(row["name"], row["step_ms"], row["us_per_token"], row["floor_us_per_token"]),
            *(f"{row['utilisation']:.1%}", f"{row['fill']:.1%}"),
        ]
        for row in result["rows"]
    ]
    head = ["model", "ms per step", "µs per token", "floor, µs", "utilisation", "rows filled"]
    return "Training steps", head, cells


def _median(measured: dict[str, Any], key: str) -> float | None:
    times = measured.get(key)
    return None if times is None else float(times["median"])


def _absences(rows: Iterable[dict[str, Any]]) -> list[str]:
    """The reasons of missing measurements, each once with the models that it holds for."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        for label, measured in row.get("measured", {}).items():
            if reason := measured.get("absent"):
                reasons.setdefault(f"{label}: {reason}", []).append(row.get("preset", ""))
    return [f"{text} ({', '.join(dict.fromkeys(names))})" for text, names in reasons.items()]
