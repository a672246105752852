"""The command-line application: commands register with `app`, and `main` prints errors.

PyTorch takes seconds to load, so each command imports the modules that need it when it runs.
"""

import errno
import logging
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from typer.core import TyperGroup

from writehead import __version__
from writehead.cli.streams import discard_output, open_streams
from writehead.errors import WriteheadError, one_line
from writehead.util.threads import use_threads

OUT_OF_MEMORY = "not enough memory; ask for less at a time"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # errors of a disk during writing


class Page(Console):
    """A console on which a closed pipe is no error, as for the other output of commands."""

    def on_broken_pipe(self) -> None:
        """Raises BrokenPipeError; rich would exit with code 1."""
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
    """The group of commands; if the reader of the output exits early, that is no error."""

    def list_commands(self, ctx: Any) -> list[str]:
        verbs = super().list_commands(ctx)
        return [*(name for name in VERBS if name in verbs), *sorted(set(verbs) - set(VERBS))]

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError as error:
            discard_output()
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


def _use_threads(given: int | None) -> int | None:
    use_threads(given)
    return given


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Transformers that decode fast because their keys and values have one head."""


Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        callback=_use_threads,
        help="Number of CPU threads. Default: OMP_NUM_THREADS, or one per available core.",
    ),
]


def main() -> None:
    """Runs the command line; a WriteheadError prints one red line and exits with code 2."""
    open_streams()
    try:
        with _logging(), _ending_in_order():
            try:
                app()
            finally:
                sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except WriteheadError as error:
        _fail(str(error))
    except MemoryError:
        _fail(OUT_OF_MEMORY)
    except RuntimeError as error:  # PyTorch has no exception class for CPU memory
        if not re.search("out of memory|allocate memory", str(error)):
            raise
        _fail(OUT_OF_MEMORY)
    except OSError as error:  # one that no command handles, such as for standard output
        place = "" if error.filename is None else f"{error.filename}: "
        if error.filename is None and error.errno in FULL:  # errors for other files have a name
            place = "standard output could not be written: "
        discard_output()
        if error.filename is None and error.errno == errno.EBADF:
            _fail("standard output is closed; redirect it to a file or to /dev/null")
        _fail(f"{place}{error.strerror or error}")


def _fail(sentence: str) -> NoReturn:
    """Prints an error message and exits with code 2."""
    with suppress(OSError):  # if standard error cannot be written, only the exit code remains
        console = Console(stderr=True, soft_wrap=True, emoji=False, markup=False)
        console.print(f"error: {one_line(sentence)}", style="red")
    sys.exit(2)


class _Messages(logging.Handler):
    """Prints each log record as one line on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            line = f"{record.levelname.lower()}: {one_line(record.getMessage())}"
            print(line, file=sys.stderr, flush=True)


@contextmanager
def _logging() -> Iterator[None]:
    """Prints the library's warnings inside the block."""
    log, handler = logging.getLogger("writehead"), _Messages(logging.WARNING)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


@contextmanager
def _ending_in_order() -> Iterator[None]:
    """Makes SIGTERM raise SystemExit, so that temporary files are removed.

    Commands that save their work first install their own handler.
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
