"""How the results of `bench` begin, are told of while they grow, are kept and are drawn."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from writehead.bench.record import ResultFile


def begin(
    name: str, place: Any, kind: Any, tell: Callable[[str], None]
) -> tuple[dict[str, Any], Any]:
    """A result that says what it was made by, and the chip as it is now."""
    from writehead.bench.floor import measure_chip
    from writehead.bench.record import environment

    tell("bandwidth and matrix rate")
    chip = measure_chip(place, kind)
    result = {
        "bench": name,
        "environment": environment(place),
        "device": place.type,
        "dtype": str(kind).removeprefix("torch."),
        "chip": dataclasses.asdict(chip),
    }
    return result, chip


def check(
    output: Path | None, force: bool, bench: str, plot: Path | None = None
) -> "ResultFile | None":
    """Returns the file for a result; raises before the benchmark if it cannot be written."""
    from writehead.bench.record import check_output, check_writable

    file = check_output(output, force, bench)
    if plot is not None:
        import writehead.bench.plots  # noqa: F401  raises if matplotlib is not installed

        check_writable(plot / "decode-context.svg")
    return file


@contextmanager
def keeping(result: dict[str, Any], file: "ResultFile | None") -> Iterator[Callable[[], None]]:
    """A call that writes the result so far, marked as partial until the block has ended.

    Before the first call nothing is written: what was there may be worth more than nothing.
    """
    calls = 0

    def save() -> None:
        nonlocal calls
        calls += 1
        if file is not None:
            file.write({**result, "partial": True})

    try:
        yield save
    except KeyboardInterrupt:
        if file is None:
            kept = "nothing is kept" + (", since no --output was given" if calls else "")
        elif calls:
            save()
            kept = f"{file.path} has the results so far, marked as partial"
        else:
            fate = "is unchanged" if file.path.exists() else "was not created"
            kept = f"there is no result yet, and {file.path} {fate}"
        typer.echo(f"interrupted; {kept}", err=True)
        raise typer.Exit(130) from None
    if file is not None:
        file.write(result)
        typer.echo(f"written: {file.path}", err=True)


def draw(result: dict[str, Any], folder: Path) -> None:
    """Draws the sweeps of a result, and says where."""
    from writehead.bench import plots

    for path in plots.draw(result, folder):
        typer.echo(f"drawn: {path}", err=True)


@contextmanager
def telling() -> Iterator[Callable[[str], None]]:
    """Says on standard error what is measured: in place on a terminal, elsewhere a line each."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    if not console.is_terminal:
        yield lambda text: console.print(text, markup=False)
        return
    with console.status("") as status:
        yield status.update
