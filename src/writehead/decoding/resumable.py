"""Output files that keep their finished lines when a command is interrupted, and resume after them.

The work lies in a hidden folder beside the output, locked by its process, until all is done:

- `manifest.json` says what the text depends on: the model, the tokenizer and the options;
- `output` is the text so far;
- `journal` has one record for each finished input line: a digest of the line and the offset at
  which its text ends in `output`.
"""

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from writehead.util.files import abandoned, create_hidden, publish, sync, write_file
from writehead.util.locks import lock_file

ENDING = ".part"  # of the hidden folder's name
MANIFEST, OUTPUT, JOURNAL = "manifest.json", "output", "journal"
RECORD = struct.Struct("<8sQ")

Source = tuple[str, str]  # an input line and the prefix of its output


class ResumableFile:
    """Lines of text in a hidden folder, of which `done` are finished.

    `other_lines` is how many lines an abandoned attempt with other settings has finished.
    """

    def __init__(self, path: Path, folder: Path, descriptor: int, other_lines: int = 0) -> None:
        self.path, self.other_lines = path, other_lines
        self.done = 0
        self.changed = False  # whether the input differs from the one that was interrupted
        self.resuming = True  # while lines are compared with the journal
        self._end = 0  # of the text of all lines so far
        self._texts: list[bytes] = []
        self._records: list[bytes] = []
        self._open(folder, descriptor)
        self._size = os.fstat(self._output.fileno()).st_size

    def _open(self, folder: Path, descriptor: int) -> None:
        self.folder, self._descriptor = folder, descriptor
        self._output = _open(folder / OUTPUT)
        self._journal = _open(folder / JOURNAL)

    @property
    def kept(self) -> int:
        """How many lines an interruption keeps now: none on a file system without locks."""
        if lock_file(self._descriptor) is None:
            return 0
        return _lines(self.folder) if self.resuming else self.done

    def skip(self, sources: Sequence[Source]) -> int:
        """How many of the next input lines are finished; the first that is not ends the search."""
        for i, source in enumerate(sources):
            record = self._journal.read(RECORD.size) if self.resuming else b""
            if not self._matches(record, source):
                self._stop_resuming()
                return i
            self.done += 1
        return len(sources)

    def _matches(self, record: bytes, source: Source) -> bool:
        if len(record) < RECORD.size:
            return False
        digest, end = RECORD.unpack(record)
        if not self._end < end <= self._size:  # a record that a power cut left incomplete
            return False
        if digest != _digest(source):
            self.changed = True
            return False
        self._end = end
        return True

    def _stop_resuming(self) -> None:
        """Drops whatever follows the finished lines, except for an attempt with another input."""
        if self.resuming:
            self.resuming = False
            if self.changed:
                self._continue_in_a_copy()
            for file, size in ((self._journal, self.done * RECORD.size), (self._output, self._end)):
                file.seek(size)
                file.truncate()
                os.fsync(file.fileno())

    def _continue_in_a_copy(self) -> None:
        """Leaves this attempt for a command with its input, and continues in a copy."""
        folder, descriptor = create_hidden(self.path, ENDING, folder=True)
        for name in (MANIFEST, OUTPUT, JOURNAL):
            shutil.copyfile(self.folder / name, folder / name)
        self.close()
        self._open(folder, descriptor)

    def add(self, source: Source, text: str) -> None:
        """Appends the text of an input line; `commit` puts it on disk."""
        self._texts.append(text.encode())
        self._end += len(self._texts[-1])
        self._records.append(RECORD.pack(_digest(source), self._end))

    def commit(self) -> None:
        """Waits until all added text is on disk: first the text, then the records of it."""
        _append(self._output, b"".join(self._texts))
        _append(self._journal, b"".join(self._records))
        self.done += len(self._records)
        self._texts, self._records = [], []

    def finish(self, *, replace: bool) -> None:
        """Gives the output its name and removes the folder, and those of abandoned attempts."""
        self._stop_resuming()
        publish(self.folder / OUTPUT, self.path, replace=replace)
        self.remove()
        for folder, descriptor in abandoned(self.path, ENDING):
            shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)
        sync(self.path.parent)

    def remove(self) -> None:
        """Deletes the folder, while it is still locked."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Releases the lock, so that the next process may resume."""
        self._output.close()
        self._journal.close()
        os.close(self._descriptor)


@contextmanager
def resumable_file(
    path: Path, manifest: Mapping[str, Any], *, replace: bool
) -> Iterator[ResumableFile]:
    """A file to write, which appears at `path` when the block ends without an error.

    `replace` is that of `util.files.atomic_file`. After an error, the finished lines are kept for
    the next attempt with the same manifest, until some attempt is published.
    """
    path = Path(os.path.realpath(path))
    work = _open_work(path, json.dumps({"format": 1, **manifest}, sort_keys=True, indent=1))
    try:
        yield work
        work.finish(replace=replace)
    except BaseException:
        if work.kept == 0:
            work.remove()
        raise
    finally:
        work.close()


def _open_work(path: Path, manifest: str) -> ResumableFile:
    """The latest abandoned attempt with this manifest, or a new one."""
    same: tuple[Path, int] | None = None
    other_lines = 0
    for folder, descriptor in sorted(abandoned(path, ENDING), key=_last_change, reverse=True):
        lines = _lines(folder)
        if lines and same is None and _read(folder / MANIFEST) == manifest:
            same = folder, descriptor
            continue
        other_lines = max(other_lines, lines)
        if not lines:
            shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)
    if same is not None:
        return ResumableFile(path, *same)
    work = ResumableFile(path, *create_hidden(path, ENDING, folder=True), other_lines)
    write_file(work.folder / MANIFEST, manifest)
    sync(path.parent)
    return work


def _last_change(attempt: tuple[Path, int]) -> float:
    journal = attempt[0] / JOURNAL
    return journal.stat().st_mtime if journal.is_file() else 0.0


def _digest(source: Source) -> bytes:
    return hashlib.blake2b("\n".join(source).encode(), digest_size=8).digest()


def _open(path: Path) -> FileIO:
    """The file, made if it does not exist, for reading from its start and for writing."""
    return FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+")


def _append(file: FileIO, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]
    os.fsync(file.fileno())


def _lines(folder: Path) -> int:
    """How many lines the journal records; none where the output has its name already."""
    output, journal = folder / OUTPUT, folder / JOURNAL
    if not (output.is_file() and journal.is_file()) or output.stat().st_nlink > 1:
        return 0
    return journal.stat().st_size // RECORD.size


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None
