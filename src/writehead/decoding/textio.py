"""Lines in and out of files and pipes, as the command line's verbs read and write them."""

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from writehead.errors import DataError

Write = Callable[[str], None]


def read_lines(path: str) -> Iterator[str]:
    """The lines of a UTF-8 file, or of standard input where the path is "-", as they are read.

    A line ends with a line feed, or with a carriage return and one; it comes without either. One
    that is not UTF-8 is an error; where it was typed, it is said and left out.
    """
    if path == "-":
        if sys.stdin is None:
            raise DataError("standard input is closed; name a file of text with --input")
        return _decoded(sys.stdin.buffer, "standard input", typed=is_interactive(path))
    if Path(path).is_dir():
        raise DataError(f"{path} is a folder; give a file of text")
    try:
        return _decoded(open(path, "rb"), path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; check the path") from error


def _decoded(file: BinaryIO, name: str, *, typed: bool = False) -> Iterator[str]:
    with file:
        number = 0
        try:
            for raw in file:
                number += 1
                try:
                    line = raw.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
                except UnicodeDecodeError as error:
                    wrong = f"line {number} of {name} is not UTF-8 (its byte {error.start})"
                    if not typed:
                        raise DataError(f"{wrong}; convert the text") from error
                    if sys.stderr is not None:  # else print would take standard output
                        print(f"{wrong}; type it again", file=sys.stderr, flush=True)
                    continue
                yield line
        except OSError as error:
            raise DataError(
                f"{name} cannot be read after line {number}: {error.strerror}; check the disk"
            ) from error


def utf8(text: str) -> str:
    """The text, if it is one: an argument may hold bytes that are not."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError("the prompt is not UTF-8; convert it") from error
    return text


def is_interactive(path: str) -> bool:
    """Whether someone types the lines and waits for each answer."""
    return path == "-" and sys.stdin is not None and sys.stdin.isatty()


@contextmanager
def writing(path: str, force: bool, read: str) -> Iterator[Write]:
    """A function that writes text: to standard output where the path is "-", at once.

    A file appears when all is written, or not at all; one that is there is kept unless `force`, and
    that which is `read` is kept in any case.
    """
    if path == "-":
        yield lambda text: _say(sys.stdout.buffer, text)
        return
    place = Path(path)
    if place.is_file() and Path(read).is_file() and place.samefile(read):
        raise DataError(f"{path} is what is read; write to another place")
    if place.is_file() and not force:
        raise DataError(f"{path} exists; choose another place, or pass --force to replace it")
    try:
        if place.exists() and not place.is_file():  # a pipe or a device, which nothing replaces
            with place.open("wb") as file:
                yield lambda text: _say(file, text)
        else:
            with _replacing(place.resolve()) as file:
                yield lambda text: _put(file, text)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}") from error


@contextmanager
def _replacing(place: Path) -> Iterator[BinaryIO]:
    """A file beside `place`, which takes its place if all goes well and else is removed."""
    fresh = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        with fresh.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, place)
    finally:
        with suppress(FileNotFoundError):
            fresh.unlink()


def _put(file: BinaryIO, text: str) -> None:
    file.write(text.encode("utf-8"))


def _say(file: BinaryIO, text: str) -> None:
    _put(file, text)
    file.flush()


def one_line(text: str) -> str:
    """The text without line ends, so that line i of the output is that of line i of the input."""
    return re.sub(r"[\r\n]+", " ", text)


@contextmanager
def counting(wanted: bool) -> Iterator[Callable[[float], None] | None]:
    """What to tell of lines as they finish: a counter on standard error if it is a terminal."""
    console = Console(stderr=True)
    if not (wanted and console.is_terminal):
        yield None
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.fields[done]} lines, {task.fields[speed]} a second"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None, done="0", speed="0")

        def tell(count: float) -> None:
            bar.advance(task, count)
            done = bar.tasks[task].completed
            speed = done / (bar.tasks[task].elapsed or 1.0)
            bar.update(task, done=_few_digits(done), speed=_few_digits(speed))

        yield tell


def _few_digits(count: float) -> str:
    """A count, with a fraction where it is small: parts of a long line are progress too."""
    return f"{count:.3g}" if count < 100 else f"{count:,.0f}"
