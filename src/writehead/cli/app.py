"""The command line's frame: the verbs hang on `app`, and `main` says an error in one line.

PyTorch takes seconds to load, so verbs import the rooms that need it when they run.
"""

import errno
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from typer.core import TyperGroup

from writehead import __version__
from writehead.errors import WriteheadError

NO_ROOM = "the memory does not hold what was asked for; ask for less at a time"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # what writing to a disk may end with


class Page(Console):
    """A console that lets a reader leave early, as the verbs do."""

    def on_broken_pipe(self) -> None:
        """Passes on what rich would turn into an exit code of 1."""
        raise BrokenPipeError


# in the order in which people come to use them
VERBS = (
    "demo",
    "presets",
    "explain",
    "prepare",
    "train",
    "average",
    "quantize",
    "evaluate",
    "translate",
    "generate",
    "bench",
    "reproduce",
    "report",
)


class _Verbs(TyperGroup):
    """The verbs; whichever runs, a reader that leaves early is no error."""

    def list_commands(self, ctx: Any) -> list[str]:
        verbs = super().list_commands(ctx)
        return [*(name for name in VERBS if name in verbs), *sorted(set(verbs) - set(VERBS))]

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError as error:
            # what is left unsaid goes nowhere, so that closing the stream cannot fail either
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit() from error
        return result


app = typer.Typer(
    name="writehead",
    cls=_Verbs,
    help="Transformers that decode fast because their keys and values have one head.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"writehead {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Transformers that decode fast because their keys and values have one head."""


def main() -> None:
    """The entry point: an error of ours is one red line and exit code 2."""
    try:
        with _ending_in_order():
            app()
    except WriteheadError as error:
        _fail(str(error))
    except MemoryError:
        _fail(NO_ROOM)
    except RuntimeError as error:  # PyTorch has no class of its own for a CPU's memory
        if not re.search("out of memory|allocate memory", str(error)):
            raise
        _fail(NO_ROOM)
    except OSError as error:  # of a place that no verb looks after, such as standard output
        place = "" if error.filename is None else f"{error.filename}: "
        if error.filename is None and error.errno in FULL:  # verbs name the files that they write
            place = "standard output could not be written: "
        if sys.stdout is not None:  # what is left unsaid goes nowhere, or closing would fail again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _fail(f"{place}{error.strerror or error}")


def _fail(sentence: str) -> NoReturn:
    """Says what went wrong and exits."""
    Console(stderr=True, soft_wrap=True).print(f"error: {sentence}", style="red", markup=False)
    sys.exit(2)


@contextmanager
def _ending_in_order() -> Iterator[None]:
    """Makes SIGTERM end a verb as an exit does, so that what is half done is cleared away.

    Verbs that have something to save first have their own way.
    """

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
