"""Lines of text in and out, for the command line: files, pipes and terminals."""

import os
import queue
import select
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

from rich.console import Console
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TimeElapsedColumn

from writehead.decoding.resumable import ResumableFile, Source, resumable_file
from writehead.errors import DataError, one_line

CHUNK_BYTES = 1 << 16
READ_AHEAD = 64  # chunks to read from a pipe while earlier lines are decoded
GROUP_BYTES = 1 << 22  # maximum size of lines that are decoded together
MAX_COUNTED_BYTES = 1 << 30  # the lines of larger files are not counted beforehand
COMPRESSED = (b"\x1f\x8b", b"\xfd7zXZ", b"BZh", b"\x28\xb5\x2f\xfd")  # gzip, xz, bzip2, zstd
SEPARATORS = "\t\n\v\f\r\x85\u2028\u2029"  # tabs precede scores; some readers end lines at others
ONE_LINE: dict[int, str | None] = {
    **dict.fromkeys((*range(0x20), *range(0x7F, 0xA0))),  # control characters
    **{ord(separator): " " for separator in SEPARATORS},
}


class LineReader:
    """The lines of a UTF-8 file, or of standard input if the path is "-".

    A line ends with LF or CRLF. `errors` selects what to do with a line that is not UTF-8: "strict"
    raises DataError with `advice`, or asks for the line again at a terminal; "replace" replaces
    invalid bytes with U+FFFD; "skip" makes the line empty.
    """

    def __init__(self, path: str, errors: str = "strict", advice: str = "convert the text") -> None:
        self.name = "standard input" if path == "-" else path
        self.typed = path == "-" and sys.stdin is not None and sys.stdin.isatty()
        self._errors, self._advice = errors, advice
        self._file = _open_input(path)
        self._pipe = None if self.typed or not _is_pipe(self._file) else _Pipe(self._file)
        self._number = self._invalid = 0

    def __iter__(self) -> Iterator[str]:
        for group in self.groups(1024):
            yield from group

    def groups(self, most: int, first: int | None = None) -> Iterator[list[str]]:
        """Yields lists of up to `most` lines to decode together.

        From a pipe, a group has the lines that have arrived, so that the writer can wait for their
        output. From a file, the first group has `first` lines and each group is twice as large as
        the last, so that the first output comes early.
        """
        if self.typed:
            groups: Iterable[list[bytes]] = ([raw] for raw in self._file)
        elif self._pipe is not None:
            groups = self._pipe.groups(most)
        else:
            groups = _file_groups(self._file, most, first or most)
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
            if self._number == 1 and raw.startswith(COMPRESSED):
                raise DataError(f"{self.name} is compressed; decompress it first") from error
            if self._errors != "strict":
                self._invalid += 1
                return raw.decode("utf-8", "replace") if self._errors == "replace" else ""
            fault = f"line {self._number} of {self.name} is not UTF-8 (at byte {error.start + 1})"
            if not self.typed:
                raise DataError(f"{fault}; {self._advice}") from error
            say(f"{fault}; type it again")
            return None

    def report(self) -> None:
        """Prints how many lines were not UTF-8, if any, on standard error."""
        if self._invalid:
            replaced = "invalid bytes replaced by U+FFFD"
            what = replaced if self._errors == "replace" else "treated as empty"
            say(f"{plural(self._invalid, 'line')} of {self.name} with invalid UTF-8: {what}")


class _Pipe:
    """The lines of a pipe, which a thread reads ahead while earlier lines are decoded."""

    def __init__(self, file: BinaryIO) -> None:
        # an empty chunk is the end of the file
        self._chunks: queue.Queue[bytes | OSError] = queue.Queue(READ_AHEAD)
        threading.Thread(target=self._read, args=(file.fileno(),), daemon=True).start()

    def groups(self, most: int) -> Iterator[list[bytes]]:
        """Yields lists of up to `most` lines that have arrived."""
        lines: list[bytes] = []
        begun: list[bytes] = []  # parts of a line whose end has not arrived
        size = 0
        while chunk := self._chunks.get():
            if isinstance(chunk, OSError):
                raise chunk
            *ended, rest = chunk.split(b"\n")
            if ended:
                lines += [b"".join((*begun, ended[0])), *ended[1:]]
                begun = []
            begun.append(rest)
            size += len(chunk)
            while lines and (len(lines) >= most or size >= GROUP_BYTES or self._chunks.empty()):
                yield lines[:most]
                del lines[:most]
                size = sum(map(len, lines))
        if last := b"".join(begun):
            lines.append(last)
        for i in range(0, len(lines), most):
            yield lines[i : i + most]

    def _read(self, descriptor: int) -> None:
        # reads the descriptor, because the lock of a buffered file could block process exit
        chunk: bytes | OSError = b"\n"
        while chunk and isinstance(chunk, bytes):
            try:
                chunk = os.read(descriptor, CHUNK_BYTES)
            except BlockingIOError:  # another process has made the pipe non-blocking
                select.select([descriptor], [], [])
                continue
            except OSError as error:
                chunk = error
            self._chunks.put(chunk)


def _open_input(path: str) -> BinaryIO:
    if path == "-":
        if sys.stdin is None:
            raise DataError("standard input is closed; pass a file")
        return sys.stdin.buffer
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


def _file_groups(file: BinaryIO, most: int, first: int) -> Iterator[list[bytes]]:
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


def read_lines(path: str) -> Iterator[str]:
    """Returns the lines of a UTF-8 file, or of standard input if the path is "-"."""
    return iter(LineReader(path))


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


def plain_line(text: str) -> str:
    """Removes control characters and replaces line separators with spaces."""
    return text.translate(ONE_LINE)


def say(sentence: str) -> None:
    """Prints a sentence on standard error, unless that is closed."""
    if sys.stderr is not None:  # print would use standard output instead
        print(one_line(sentence), file=sys.stderr, flush=True)


def plural(count: int, noun: str) -> str:
    """Formats a count with its noun, such as "1 line" or "1,024 lines"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


class Stream:
    """Standard output, a pipe or a device: text is written immediately and cannot be resumed."""

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
        """Writes the output of an input line."""
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

    A regular file appears when the block succeeds; see `resumable_file` for its manifest. Raises
    FileExistsError if another process has created the file in the meantime.
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


class _Rate(ProgressColumn):
    """Finished lines, with parts of long lines as fractions, and lines per second."""

    def render(self, task: Task) -> str:
        total = "" if task.total is None else f" of {task.total:,}"
        done = f"{round(task.completed, 1):,.12g}"
        return f"{done}{total} lines, {task.speed or 0.0:,.1f} per second"


class Counter:
    """A display of finished lines."""

    def __init__(self, bar: Progress, total: int | None) -> None:
        self._bar, self._task = bar, bar.add_task("", total=total)

    def __call__(self, count: float) -> None:
        """Adds finished lines."""
        self._bar.advance(self._task, count)

    def skip(self, done: int) -> None:
        """Sets the lines that an earlier attempt has finished, which do not count as speed."""
        self._bar.reset(self._task, completed=done)


@contextmanager
def counting(wanted: bool, read: str = "-") -> Iterator[Counter | None]:
    """Shows a counter of the lines `read` from a path if standard error is a terminal."""
    console = Console(stderr=True)
    if not (wanted and console.is_terminal):
        yield None
        return
    with Progress(
        SpinnerColumn(), _Rate(), TimeElapsedColumn(), console=console, transient=True
    ) as bar:
        yield Counter(bar, _count_lines(Path(read)))


def _count_lines(path: Path) -> int | None:
    """Counts the lines of a regular file; returns None if the file is too large."""
    if not path.is_file() or path.stat().st_size > MAX_COUNTED_BYTES:
        return None
    with path.open("rb") as file:
        return sum(1 for _ in file)


# arguments: a group of lines, the index of its first line, progress; yields text per line
Answer = Callable[[list[Source], int, Counter | None], Iterable[str]]


def decode_lines(
    groups: Iterable[list[Source]],
    answer: Answer,
    output: Output,
    read: str,
    *,
    typed: bool,
    shown: bool,
) -> None:
    """Decodes and writes all lines that no earlier attempt has finished.

    Prints where an earlier attempt is resumed and, after an interruption or an error, which lines
    are kept. The lines are `read` from a path. If `shown`, a counter is shown on the terminal.
    """
    resumable = output if isinstance(output, ResumableFile) else None
    name = "standard input" if read == "-" else read
    try:
        with counting(shown, read) as counter:
            for group in _unfinished(groups, output, name, counter):
                texts = answer(group, output.done, counter)
                for source, text in zip(group, texts, strict=True):
                    output.add(source, text)
                output.commit()
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt | SystemExit)
        kept = 0 if resumable is None else resumable.kept
        if kept:
            say(
                f"{'interrupted' if interrupted else 'stopped'}: {plural(kept, 'line')} done and "
                f"kept; run the same command again to resume"
            )
        elif interrupted and resumable is not None:
            say("interrupted: no line is kept")
        elif interrupted and not typed:
            say(f"interrupted: {plural(output.done, 'line')} written")
        raise


def _unfinished(
    groups: Iterable[list[Source]], output: Output, name: str, counter: Counter | None
) -> Iterator[list[Source]]:
    """Yields the lines that no earlier attempt has finished; prints where it is resumed."""
    if isinstance(output, ResumableFile) and output.other_lines:
        say(
            f"starting over: the interrupted attempt had other settings; its "
            f"{plural(output.other_lines, 'line')} are kept until the output is complete"
        )
    groups = iter(groups)
    for group in groups:
        finished = output.skip(group)
        if finished < len(group):
            groups = chain([group[finished:]], groups)
            break
    if isinstance(output, ResumableFile):
        reason = f"{name} has changed; " if output.changed else ""
        if output.done:
            say(f"{reason}resuming after line {output.done:,} of {name}")
        elif reason:
            say(f"{reason}starting over")
    if counter is not None:
        counter.skip(output.done)
    yield from groups
