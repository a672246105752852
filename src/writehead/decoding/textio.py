"""How the command line reads and writes lines of text: files, pipes and terminals."""

import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from writehead.decoding.pipes import Arrivals
from writehead.decoding.resumable import ResumableFile, Source, resumable_file
from writehead.errors import DataError, one_line

READ_AHEAD = 4096  # lines to read from a pipe while earlier lines are decoded
GROUP_BYTES = 1 << 22  # maximum size of lines that are decoded together
COUNTED = 1 << 30  # larger files are not counted beforehand; this many bytes take about a second
PACKED = (b"\x1f\x8b", b"\xfd7zXZ", b"BZh", b"\x28\xb5\x2f\xfd")  # magic of gzip, xz, bzip2, zstd
SEPARATORS = "\t\n\v\f\r\x85\u2028\u2029"  # tabs precede scores; some readers end lines at others
ONE_LINE: dict[int, str | None] = {
    **dict.fromkeys((*range(0x20), *range(0x7F, 0xA0))),  # control characters
    **{ord(separator): " " for separator in SEPARATORS},
}


class LineReader:
    """The lines of a UTF-8 file, or of standard input if the path is "-".

    A line ends with LF or CRLF. `errors` selects how to treat a line that is not UTF-8. "strict"
    raises DataError with `advice`, or asks for the line again at a terminal. "replace" replaces
    invalid bytes with U+FFFD. "skip" makes the line empty. `bad` counts replaced and skipped lines.
    """

    def __init__(self, path: str, errors: str = "strict", advice: str = "convert the text") -> None:
        self.name = _name(path)
        self.typed = is_interactive(path)
        self.bad = 0
        self._errors, self._advice = errors, advice
        self._file = _open_input(path)
        self._arrivals = None
        if not self.typed and _is_pipe(self._file):
            self._arrivals = Arrivals(self._file, READ_AHEAD, GROUP_BYTES)
        self._number = 0

    def __iter__(self) -> Iterator[str]:
        for group in self.groups(1024):
            yield from group

    def groups(self, most: int, first: int | None = None) -> Iterator[list[str]]:
        """Yields lists of up to `most` lines to decode together.

        From a pipe, a group is the lines that have arrived, so that the writer can wait for their
        output. From a file, the first group has `first` lines and each group is twice as large as
        the last, so that the first output comes soon and an early interruption keeps it.
        """
        if self.typed:
            groups: Iterable[list[bytes]] = ([raw] for raw in self._file)
        elif self._arrivals is not None:
            groups = self._arrivals.groups(most)
        else:
            groups = _chunks(self._file, most, first or most)
        try:
            for group in groups:
                lines = [line for raw in group if (line := self._decode(raw)) is not None]
                if lines:
                    yield lines
        except OSError as error:
            raise DataError(
                f"{self.name} cannot be read after line {self._number}: {error.strerror}; check "
                f"the disk and try again"
            ) from error

    def _decode(self, raw: bytes) -> str | None:
        """Decodes a line; returns None if the user must type it again."""
        self._number += 1
        raw = raw.removesuffix(b"\n").removesuffix(b"\r")
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            if self._number == 1 and raw.startswith(PACKED):
                raise DataError(f"{self.name} is compressed; decompress it first") from error
            wrong = f"line {self._number} of {self.name} is not UTF-8 (at byte {error.start + 1})"
            if self._errors != "strict":
                self.bad += 1
                return raw.decode("utf-8", "replace") if self._errors == "replace" else ""
            if not self.typed:
                raise DataError(f"{wrong}; {self._advice}") from error
            say(f"{wrong}; type it again")
            return None

    def report(self) -> None:
        """Prints how many lines were not UTF-8, if any, on standard error."""
        if self.bad:
            replaced = "invalid bytes replaced by U+FFFD"
            what = replaced if self._errors == "replace" else "treated as empty"
            say(f"{plural(self.bad, 'line')} of {self.name} with invalid UTF-8: {what}")


def read_lines(path: str) -> Iterator[str]:
    """Returns the lines of a UTF-8 file, or of standard input if the path is "-"."""
    return iter(LineReader(path))


def _name(path: str) -> str:
    return "standard input" if path == "-" else path


def _open_input(path: str) -> BinaryIO:
    if path == "-":
        if sys.stdin is None:
            raise DataError("standard input is closed; pass a file")
        return sys.stdin.buffer
    if Path(path).is_dir():
        raise DataError(f"{path} is a folder; pass a text file")
    try:
        return open(path, "rb")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; check the path") from error


def _is_pipe(file: BinaryIO) -> bool:
    """Whether reading may block until another process writes."""
    try:
        return not stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except OSError:  # bytes in memory
        return False


def _chunks(file: BinaryIO, most: int, first: int) -> Iterator[list[bytes]]:
    """Yields groups of `first` lines, then twice as many each time up to `most`; fewer if long."""
    with file:
        group: list[bytes] = []
        size, limit = 0, min(first, most)
        for raw in file:
            group.append(raw)
            size += len(raw)
            if len(group) == limit or size >= GROUP_BYTES:
                yield group
                group, size, limit = [], 0, min(2 * limit, most)
        if group:
            yield group


def paired(groups: Iterable[list[str]], prefixes: LineReader | None) -> Iterator[list[Source]]:
    """Yields groups of lines, each with the prefix of its output, empty without `prefixes`."""
    count = 0
    starts = None if prefixes is None else iter(prefixes)
    for lines in groups:
        given = [""] * len(lines) if starts is None else list(islice(starts, len(lines)))
        if len(given) < len(lines):
            raise DataError(f"line {count + len(given) + 1} has no prefix; add one for every line")
        yield list(zip(lines, given, strict=True))
        count += len(lines)
    if starts is not None and next(starts, None) is not None:
        raise DataError(
            f"there are more prefixes than the {plural(count, 'line')} of input; give one per line"
        )


def utf8(text: str) -> str:
    """Returns a prompt from the command line; raises DataError if it is not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError("the prompt is not UTF-8; convert it to UTF-8") from error
    return text


def is_interactive(path: str) -> bool:
    """Whether a user types the lines at a terminal."""
    return path == "-" and sys.stdin is not None and sys.stdin.isatty()


class Stream:
    """Standard output, a pipe or a device: text is written at once and cannot be resumed."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.done = 0

    def skip(self, sources: Sequence[Source]) -> int:
        """Returns 0, because no lines are finished in advance."""
        return 0

    def write(self, text: str) -> None:
        """Writes a part of a line."""
        self._file.write(text.encode())
        self._file.flush()

    def add(self, source: Source, text: str) -> None:
        """Writes the output for an input line."""
        self.write(text)
        self.done += 1

    def commit(self) -> None:
        """Does nothing, because `add` has written the text."""


Output = Stream | ResumableFile


@contextmanager
def writing(
    path: str, manifest: Callable[[], Mapping[str, Any]], *, replace: bool
) -> Iterator[Output]:
    """Opens an output file, or standard output if the path is "-".

    A regular file appears when the block ends; `resumable_file` describes its manifest and the
    lines that it keeps after an error. Raises FileExistsError if another process has created the
    file in the meantime.
    """
    place = Path(path)
    try:
        if path == "-":
            yield Stream(sys.stdout.buffer)
        elif place.exists() and not place.is_file():  # a pipe or a device cannot be replaced
            with place.open("wb") as file:
                yield Stream(file)
        else:
            with resumable_file(place, manifest(), replace=replace) as output:
                yield output
    except (BrokenPipeError, FileExistsError):
        raise
    except OSError as error:
        name = "standard output" if path == "-" else path
        raise DataError(f"{name} could not be written: {error.strerror or error}") from error


def plain_line(text: str) -> str:
    """The text without control characters, on one line whatever the reader takes for its end."""
    return text.translate(ONE_LINE)


def say(sentence: str) -> None:
    """Prints a sentence on standard error, unless that is closed."""
    if sys.stderr is not None:  # else print would take standard output
        print(one_line(sentence), file=sys.stderr, flush=True)


def plural(count: int, noun: str) -> str:
    """Formats a count with its noun, such as "1 line" or "1,024 lines"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


@dataclass
class Tally:
    """Counts decoded lines, including parts of long lines, and knows where they are written."""

    output: Output
    name: str  # of the input
    show: "_Counter | None" = None
    decoded: float = 0.0

    def progress(self, count: float) -> None:
        """Adds `count` decoded lines."""
        self.decoded += count
        if self.show is not None:
            self.show(count)

    def unfinished(self, groups: Iterable[list[Source]]) -> Iterator[list[Source]]:
        """Yields lines that an interrupted attempt has not finished; prints where it resumes."""
        output = self.output
        if isinstance(output, ResumableFile) and output.other_lines:
            say(
                f"starting over: the interrupted attempt had other settings; its "
                f"{plural(output.other_lines, 'line')} are kept until the output is complete"
            )
        began = False
        for group in groups:
            count = 0 if began else output.skip(group)
            if self.show is not None and count:
                self.show.skip(count)
            if count == len(group):
                continue
            if not began:
                self._say_resumed()
            began = True
            yield group[count:]
        if not began:
            self._say_resumed()

    def _say_resumed(self) -> None:
        if not isinstance(self.output, ResumableFile):
            return
        done, changed = self.output.done, self.output.changed
        why = f"{self.name} has changed; " if changed else ""
        if done:
            say(f"{why}resuming after line {done:,} of {self.name}")
        elif changed:
            say(f"{why}starting over")

    def fate(self) -> str:
        """Describes the lines that remain after an interruption."""
        if isinstance(self.output, ResumableFile):
            if self.output.kept == 0:
                return "no line is kept"
            return (
                f"{plural(self.output.kept, 'line')} done and kept; run the same command again to "
                f"resume"
            )
        written = f"{plural(self.output.done, 'line')} written"
        lost = int(self.decoded + 1e-6) - self.output.done  # three thirds may sum to less than 1
        return f"{written}; {lost:,} more decoded but not written" if lost > 0 else written


@contextmanager
def tallying(output: Output, read: str, *, typed: bool, shown: bool) -> Iterator[Tally]:
    """Tallies the lines `read` from a path, with a counter on the terminal if `shown`.

    After an interruption, prints how many lines are kept or written, unless each `typed` line was
    answered on standard output. After an error, prints how many lines the output file keeps.
    """
    tally = Tally(output, _name(read))
    try:
        with counting(shown, read) as tally.show:
            yield tally
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt | SystemExit)
        if isinstance(output, ResumableFile):
            if interrupted or output.kept:
                say(f"{'interrupted' if interrupted else 'stopped'}: {tally.fate()}")
        elif interrupted and not typed:
            say(f"interrupted: {tally.fate()}")
        raise


class _Counter:
    """Shows how many lines are decoded, and how many per second."""

    def __init__(self, bar: Progress, total: int | None) -> None:
        of = "" if total is None else f" of {total:,}"
        self._bar = bar
        self._task = bar.add_task("", total=total, done="0", of=of, speed="0")
        self._skipped = 0

    def __call__(self, count: float) -> None:
        self._bar.advance(self._task, count)
        task = self._bar.tasks[self._task]
        speed = (task.completed - self._skipped) / (task.elapsed or 1.0)
        self._bar.update(self._task, done=_few_digits(task.completed), speed=_few_digits(speed))

    def skip(self, count: int) -> None:
        """Adds `count` lines that an earlier attempt has decoded."""
        self._skipped += count
        self(count)


@contextmanager
def counting(wanted: bool, read: str = "-") -> Iterator[_Counter | None]:
    """Shows a counter of decoded lines on standard error if that is a terminal.

    If the lines are `read` from a file that is not too large, the counter shows their total.
    """
    console = Console(stderr=True)
    if not (wanted and console.is_terminal):
        yield None
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.fields[done]}{task.fields[of]} lines, {task.fields[speed]} per second"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        yield _Counter(bar, _count_lines(read))


def _count_lines(path: str) -> int | None:
    """Counts the lines of a regular file; returns None if the file is too large."""
    place = Path(path)
    if path == "-" or not place.is_file() or place.stat().st_size > COUNTED:
        return None
    count, last = 0, b"\n"
    with place.open("rb") as file:
        while part := file.read(1 << 20):
            count, last = count + part.count(b"\n"), part
    return count + (not last.endswith(b"\n"))


def _few_digits(count: float) -> str:
    """Formats a count, with a fraction if it is small: parts of a long line are progress too."""
    return f"{count:.3g}" if count < 100 else f"{count:,.0f}"
