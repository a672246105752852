"""The command-line application: commands register with `app`, and `main` prints errors.

PyTorch takes seconds to load, so each command imports the modules that need it when it runs.
"""

import errno
import io
import logging
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from typer import Option
from typer.core import TyperGroup

from writehead import __version__
from writehead.errors import WriteheadError, one_line

HELP = "Fast Transformer decoding with multi-query and grouped-query attention."
# in the order in which people start to use them
COMMANDS = ["demo", "presets", "explain", "prepare", "train", "average", "convert", "quantize"]
COMMANDS += ["import", "export", "evaluate", "translate", "generate", "serve", "bench"]
COMMANDS += ["reproduce", "report"]
MIN_WIDTH, PIPE_WIDTH = 80, 10_000  # of tables, in a terminal and in a pipe or file
STREAM_ERRORS = (errno.EBADF, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class Page(Console):
    """Standard output for tables, which are not cut off to fit a pipe or a narrow terminal.

    It is not an error if the reader closes the pipe early.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.width = max(self.width, MIN_WIDTH) if self.is_terminal else PIPE_WIDTH

    def on_broken_pipe(self) -> None:
        """Raises BrokenPipeError; rich would exit with code 1."""
        raise BrokenPipeError


class _Commands(TyperGroup):
    """The group of all commands. It exits with code 0 if the reader closes the output pipe."""

    def list_commands(self, ctx: Any) -> list[str]:
        return COMMANDS

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
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
    rich_markup_mode="rich",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"writehead {__version__}")
        raise typer.Exit()


@app.callback(help=HELP)
def _root(
    version: Annotated[
        bool, Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Runs the command line; a WriteheadError prints one red line and exits with code 2."""
    open_streams()
    try:
        with _session():
            try:
                app()
            finally:
                sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except WriteheadError as error:
        _fail(str(error))
    except (MemoryError, RuntimeError) as error:  # PyTorch has no exception class for CPU memory
        if not isinstance(error, MemoryError) and not re.search("(of|ate) memory", str(error)):
            raise
        _fail("not enough memory; use a smaller batch or a smaller model")
    except OSError as error:  # errors of files that commands write have a name
        discard_output()
        guess = "standard output could not be written" if error.errno in STREAM_ERRORS else None
        place = error.filename or guess
        _fail(": ".join(str(part) for part in (place, error.strerror or error) if part))


def _fail(sentence: str) -> NoReturn:
    """Prints an error message and exits with code 2."""
    with suppress(OSError):  # if standard error cannot be written, only the exit code remains
        console = Console(stderr=True, soft_wrap=True, emoji=False, markup=False)
        console.print(f"error: {one_line(sentence)}", style="red")
    sys.exit(2)


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"{record.levelname.lower()}: {one_line(record.getMessage())}"


@contextmanager
def _session() -> Iterator[None]:
    """Prints the library's warnings; makes SIGTERM raise SystemExit so that files are closed."""
    log, handler = logging.getLogger("writehead"), logging.StreamHandler()
    handler.setFormatter(_OneLine())
    log.addHandler(handler)
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        log.removeHandler(handler)


def open_streams() -> None:
    """Opens the null device for closed streams, and replaces characters that cannot be encoded.

    The null device takes the descriptor of the closed stream, so that no file opened later gets it.
    Writing to a closed standard output still fails, because its replacement is read-only.
    """
    for name, flags in (("stdin", os.O_RDONLY), ("stdout", os.O_RDONLY), ("stderr", os.O_WRONLY)):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, flags)
            os.set_inheritable(descriptor, True)
            if name != "stdin":
                opened = os.fdopen(descriptor, "w", encoding="utf-8", closefd=False)
                setattr(sys, name, opened)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace" if stream is sys.stdout else "backslashreplace")


def discard_output() -> None:
    """Discards unwritten data of standard output, so that flushing it at exit cannot fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
