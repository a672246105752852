"""Lines of text in and out, for the command line: files, pipes and terminals."""

import functools
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from writehead.cli.resumable import ResumableFile, Source, resumable_file
from writehead.data.lines import decode_line
from writehead.errors import DataError, one_line
from writehead.util.garbage import frozen_objects

if TYPE_CHECKING:
    from writehead.data.tokenizer import Tokenizer

GROUP_BYTES = 1 << 22  # maximum size of lines that are decoded together
COMMIT_SECONDS = 1.0  # after which finished lines are written to disk


class LineReader:
    """The lines of a UTF-8 file, or of standard input if the path is "-".

    If a line is not UTF-8, `errors` "strict" raises DataError with `advice`, "replace" replaces
    invalid bytes with U+FFFD, and "skip" makes the line empty.
    """

    def __init__(self, path: str, errors: str = "strict", advice: str = "convert the text") -> None:
        self.name = "standard input" if path == "-" else path
        self.typed = path == "-" and sys.stdin is not None and sys.stdin.isatty()
        self._errors, self._advice = errors, advice
        self._file = _open_input(path)
        # reading from a pipe may block, and a terminal needs no reading ahead
        reads_ahead = not self.typed and not self._file.seekable()
        self._arrived = _PipeReader(self._file) if reads_ahead else None
        self._number = self._invalid = 0

    @property
    def is_file(self) -> bool:
        """Whether all lines can be read without waiting for a writer."""
        return not self.typed and self._arrived is None

    def __iter__(self) -> Iterator[str]:
        for group in self.groups(1024):
            yield from group

    def groups(self, most: int, first: int | None = None) -> Iterator[list[str]]:
        """Yields lists of up to `most` lines to decode together.

        The first group has up to `first` lines and each next one is up to twice as large, so that
        the first output comes early. From a pipe, a group has only lines that have arrived, so that
        the writer can wait for their output.
        """
        group: list[str] = []
        size, limit = 0, min(first or most, most)
        try:
            for raw in self._read():
                group.append(self._decode(raw))
                size += len(raw)
                waiting = self.typed or (self._arrived is not None and self._arrived.empty())
                if len(group) == limit or size >= GROUP_BYTES or waiting:
                    yield group
                    group, size, limit = [], 0, min(2 * limit, most)
        except OSError as error:
            raise DataError(
                f"{self.name} cannot be read after line {self._number}: {error.strerror}"
            ) from error
        if group:
            yield group
        self._file.close()

    def _read(self) -> Iterator[bytes]:
        if self._arrived is None:
            yield from self._file
            return
        while line := self._arrived.get():
            if isinstance(line, OSError):
                raise line
            yield line

    def _decode(self, raw: bytes) -> str:
        self._number += 1
        try:
            return decode_line(raw)
        except UnicodeDecodeError as error:
            if self._errors == "strict":
                raise DataError(
                    f"line {self._number} of {self.name} is not UTF-8 (at byte {error.start + 1}); "
                    f"{self._advice}"
                ) from error
            self._invalid += 1
            return decode_line(raw, self._errors)

    def report(self) -> None:
        """Prints the number of lines that were not UTF-8, if any, on standard error."""
        if self._invalid:
            action = "replaced by U+FFFD" if self._errors == "replace" else "treated as empty"
            say(f"{plural(self._invalid, 'line')} of {self.name} with invalid UTF-8 {action}")


class _PipeReader:
    """Reads lines from a pipe in a thread, at most GROUP_BYTES ahead of their use."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._pending = file, 0  # bytes
        self._arrived: queue.SimpleQueue[bytes | OSError] = queue.SimpleQueue()
        self._room = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            # a buffer of its own, because Python would wait for the lock of `file` at exit
            with open(self._file.fileno(), "rb", closefd=False) as lines:
                for line in lines:
                    with self._room:
                        self._room.wait_for(lambda: self._pending < GROUP_BYTES)
                        self._pending += len(line)
                    self._arrived.put(line)
            self._arrived.put(b"")
        except OSError as error:
            self._arrived.put(error)

    def empty(self) -> bool:
        """Whether no line has arrived."""
        return self._arrived.empty()

    def get(self) -> bytes | OSError:
        """Waits for the next line; returns b"" at the end."""
        line = self._arrived.get()
        if isinstance(line, bytes):
            with self._room:
                self._pending -= len(line)
                self._room.notify()
        return line


def _open_input(path: str) -> BinaryIO:
    if path == "-":
        if sys.stdin is None:
            raise DataError("standard input is closed; pass a file")
        return sys.stdin.buffer
    try:
        return open(path, "rb")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; check the path") from error


def read_lines(path: str) -> Iterator[str]:
    """Returns the lines of a UTF-8 file, or of standard input if the path is "-"."""
    return iter(LineReader(path))


def paired(groups: Iterable[list[str]], prefixes: LineReader | None) -> Iterator[list[Source]]:
    """Yields groups of lines with the prefixes of their outputs; empty without `prefixes`."""
    count = 0
    starts = None if prefixes is None else iter(prefixes)
    for lines in groups:
        group = [""] * len(lines) if starts is None else list(islice(starts, len(lines)))
        if len(group) < len(lines):
            raise DataError(f"line {count + len(group) + 1} has no prefix; add one for every line")
        yield list(zip(lines, group, strict=True))
        count += len(lines)
    if starts is not None and next(starts, None) is not None:
        raise DataError(f"there are more prefixes than the {plural(count, 'line')} of input")


def echo(tokenizer: "Tokenizer", prompt: str) -> str:
    """Returns the prompt as it precedes a continuation: some tokenizers drop spaces at its end."""
    decoded = tokenizer.decode(tokenizer.encode(prompt))
    return prompt if decoded[-1:].isspace() else prompt.rstrip()


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
        """Writes part of a line."""
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
    """Opens a `resumable_file`, or standard output if the path is "-".

    Raises FileExistsError if another process has created the file in the meantime.
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
        name, reason = "standard output" if path == "-" else path, error.strerror or error
        if path != "-" and not place.parent.exists():
            reason = f"there is no folder {place.parent}; create it"
        raise DataError(f"{name} could not be written: {reason}") from error


Counter = Callable[[float], None]  # takes finished lines; a piece of a long line is a fraction


@contextmanager
def counting(wanted: bool) -> Iterator[Counter | None]:
    """Shows a counter of finished lines if standard error is a terminal."""
    console = Console(stderr=True)
    if not (wanted and console.is_terminal):
        yield None
        return
    columns = (SpinnerColumn(), TextColumn("{task.completed:,.10g} lines"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        yield functools.partial(bar.advance, bar.add_task("", total=None))


# arguments: lines, the index of the first, progress; yields the text for each line
Answer = Callable[[Iterable[Source], int, Counter | None], Iterable[str]]


def decode_lines(
    groups: Iterable[list[Source]],
    answer: Answer,
    output: Output,
    read: str,
    *,
    typed: bool,
    shown: bool,
    continuous: bool = False,
) -> None:
    """Decodes and writes all lines of the path `read` that no earlier attempt has finished.

    Groups are decoded one after the other or, if `continuous`, without waiting for the end of each.
    Prints the line after which it resumes and, after an interruption or an error, how many lines
    are kept. With `shown`, shows a counter on the terminal.
    """
    try:
        with counting(shown) as counter, frozen_objects():
            groups = _unfinished(groups, output, "standard input" if read == "-" else read)
            for group in [chain.from_iterable(groups)] if continuous else groups:
                _decode_group(group, answer, output, counter)
                output.commit()
    except BaseException as error:
        kept = output.kept if isinstance(output, ResumableFile) else 0
        if kept:
            say(f"{plural(kept, 'line')} done and kept; run the same command again to resume")
        elif isinstance(error, KeyboardInterrupt | SystemExit) and not typed:
            say(f"interrupted: {plural(output.done, 'line')} written")
        raise


def _decode_group(
    group: Iterable[Source], answer: Answer, output: Output, counter: Counter | None
) -> None:
    """Decodes lines and adds their texts to the output."""
    taken: deque[Source] = deque()  # lines whose texts are still to come

    def take() -> Iterator[Source]:
        for source in group:
            taken.append(source)
            yield source

    committed = time.monotonic()
    for text in answer(take(), output.done, counter):
        output.add(taken.popleft(), text)
        if time.monotonic() - committed >= COMMIT_SECONDS:
            output.commit()
            committed = time.monotonic()


def _unfinished(
    groups: Iterable[list[Source]], output: Output, name: str
) -> Iterator[list[Source]]:
    """Yields the lines that no earlier attempt has finished; prints where it resumes."""
    groups = iter(groups)
    for group in groups:
        finished = output.skip(group)
        if finished < len(group):
            groups = chain([group[finished:]], groups)
            break
    if output.done:
        say(f"resuming after line {output.done:,} of {name}")
    elif isinstance(output, ResumableFile) and output.attempted:
        say("starting over: the interrupted attempt had different input or settings")
    yield from groups
