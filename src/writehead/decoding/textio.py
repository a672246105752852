"""Lines in and out of files and pipes, as the command line's verbs read and write them."""

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from writehead.errors import DataError

Write = Callable[[str], None]
COUNTED = 1 << 30  # bytes of a file whose lines are counted beforehand, in about a second
PACKED = (b"\x1f\x8b", b"\xfd7zXZ", b"BZh", b"\x28\xb5\x2f\xfd")  # how gzip, xz, bzip2, zstd begin


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
                    if number == 1 and raw.startswith(PACKED):
                        raise DataError(
                            f"{name} is compressed; unpack it first, and give what comes out"
                        ) from error
                    wrong = f"line {number} of {name} is not UTF-8 (its byte {error.start + 1})"
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
        yield _answer
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


def _answer(text: str) -> None:
    """Writes to standard output, at once."""
    try:
        _say(sys.stdout.buffer, text)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise DataError(
            f"standard output could not be written: {error.strerror or error}"
        ) from error


def one_line(text: str) -> str:
    """The text without line ends, so that line i of the output is that of line i of the input."""
    return re.sub(r"[\r\n]+", " ", text)


@dataclass
class Tally:
    """How many lines are decoded, those in parts by their parts, and how many are written."""

    show: Callable[[float], None] | None = None
    decoded: float = 0.0
    written: int = 0

    def progress(self, count: float) -> None:
        """`count` more lines are decoded."""
        self.decoded += count
        if self.show is not None:
            self.show(count)

    def fate(self, path: str) -> str:
        """What an interruption leaves of the lines for a path."""
        whole = int(self.decoded + 1e-6)  # thirds of a line may add up to a little less than one
        if path != "-" and (Path(path).is_file() or not Path(path).exists()):
            fate = "is left as it was" if Path(path).exists() else "was not made"
            return f"{whole:,} lines were decoded; {path} {fate}, since it comes whole"
        said = f"{self.written:,} of {whole:,} decoded lines are written"
        if self.written >= whole:
            return said
        return f"{said}; the others are lost, since lines read together are written together"


@contextmanager
def tallying(path: str, shown: bool, read: str, *, typed: bool) -> Iterator[Tally]:
    """A tally of lines that are read, decoded and written to a path, with a counter if `shown`.

    An interruption says what became of them, unless they are typed and answered one by one.
    """
    tally = Tally()
    try:
        with counting(shown, read) as tally.show:
            yield tally
    except KeyboardInterrupt:
        if not typed and sys.stderr is not None:
            print(f"interrupted: {tally.fate(path)}", file=sys.stderr, flush=True)
        raise


@contextmanager
def counting(wanted: bool, read: str = "-") -> Iterator[Callable[[float], None] | None]:
    """What to tell of lines as they finish: a counter on standard error if it is a terminal.

    It shows how many there are where they are `read` from a file that is quickly counted.
    """
    console = Console(stderr=True)
    if not (wanted and console.is_terminal):
        yield None
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.fields[done]}{task.fields[of]} lines, {task.fields[speed]} a second"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        total = _count_lines(read)
        of = "" if total is None else f" of {total:,}"
        task = bar.add_task("", total=total, done="0", of=of, speed="0")

        def tell(count: float) -> None:
            bar.advance(task, count)
            done = bar.tasks[task].completed
            speed = done / (bar.tasks[task].elapsed or 1.0)
            bar.update(task, done=_few_digits(done), speed=_few_digits(speed))

        yield tell


def _count_lines(path: str) -> int | None:
    """How many lines a file has; None where it is none, or so large that counting takes long."""
    place = Path(path)
    if path == "-" or not place.is_file() or place.stat().st_size > COUNTED:
        return None
    count, last = 0, b"\n"
    with place.open("rb") as file:
        while part := file.read(1 << 20):
            count, last = count + part.count(b"\n"), part
    return count + (not last.endswith(b"\n"))


def _few_digits(count: float) -> str:
    """A count, with a fraction where it is small: parts of a long line are progress too."""
    return f"{count:.3g}" if count < 100 else f"{count:,.0f}"
