"""Output files that keep finished lines when a command is interrupted, and resume after them.

Until all lines are finished, they are kept in a hidden folder beside the output. The process that
writes the folder locks it. The folder contains:

- `manifest.json`: everything the text depends on, which is the model, the tokenizer and the options
- `output`: the text so far
- `journal`: one record per finished input line, with a digest of the line and the offset at which
  its text ends in `output`
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

from writehead.util.files import (
    abandoned,
    create_hidden,
    link_target,
    publish,
    sync,
    write_file,
)
from writehead.util.locks import lock_file

ENDING = ".part"  # suffix of the hidden folder
MANIFEST, OUTPUT, JOURNAL = "manifest.json", "output", "journal"
RECORD = struct.Struct("<8sQ")

Source = tuple[str, str]  # an input line and the prefix of its output


class ResumableFile:
    """A file in progress, in a hidden folder, with `done` finished lines.

    `other_lines` is the number of finished lines in an abandoned attempt with other settings.
    """

    def __init__(self, path: Path, folder: Path, descriptor: int, other_lines: int = 0) -> None:
        self.path, self.other_lines = path, other_lines
        self.done = 0
        self.changed = False  # whether the input differs from that of the interrupted attempt
        self.resuming = True  # whether lines are still compared with the journal
        self._end = 0  # offset at which the text of the last line ends
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
        """The number of lines that an interruption would keep; 0 if there are no file locks."""
        if lock_file(self._descriptor) is None:
            return 0
        return _lines(self.folder) if self.resuming else self.done

    def skip(self, sources: Sequence[Source]) -> int:
        """Returns how many of the next input lines are finished, up to the first that is not."""
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
        if not self._end < end <= self._size:  # a power cut left an invalid record
            return False
        if digest != _digest(source):
            self.changed = True
            return False
        self._end = end
        return True

    def _stop_resuming(self) -> None:
        """Truncates both files after the finished lines; an attempt with another input is kept."""
        if self.resuming:
            self.resuming = False
            if self.changed:
                self._continue_in_a_copy()
            for file, size in ((self._journal, self.done * RECORD.size), (self._output, self._end)):
                file.seek(size)
                file.truncate()
                os.fsync(file.fileno())

    def _continue_in_a_copy(self) -> None:
        """Continues in a copy, so that a command with the earlier input can still resume."""
        folder, descriptor = create_hidden(self.path, ENDING, folder=True)
        for name in (MANIFEST, OUTPUT, JOURNAL):
            shutil.copyfile(self.folder / name, folder / name)
        self.close()
        self._open(folder, descriptor)

    def add(self, source: Source, text: str) -> None:
        """Appends the text of an input line; `commit` writes it to disk."""
        self._texts.append(text.encode())
        self._end += len(self._texts[-1])
        self._records.append(RECORD.pack(_digest(source), self._end))

    def commit(self) -> None:
        """Writes all added lines to disk: first their text, then their records."""
        _append(self._output, b"".join(self._texts))
        _append(self._journal, b"".join(self._records))
        self.done += len(self._records)
        self._texts, self._records = [], []

    def finish(self, *, replace: bool) -> None:
        """Moves the output to its final path; removes the folder and all abandoned attempts."""
        self._stop_resuming()
        publish(self.folder / OUTPUT, self.path, replace=replace)
        self.remove()
        for folder, descriptor in abandoned(self.path, ENDING):
            shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)
        sync(self.path.parent)

    def remove(self) -> None:
        """Deletes the folder; call it while the folder is locked."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Closes the files and releases the lock, so that another process can resume."""
        self._output.close()
        self._journal.close()
        os.close(self._descriptor)


@contextmanager
def resumable_file(
    path: Path, manifest: Mapping[str, Any], *, replace: bool
) -> Iterator[ResumableFile]:
    """Opens a file that appears at `path` when the block ends without an error.

    `replace` is as in `util.files.atomic_file`. After an error, the finished lines are kept for the
    next attempt with the same manifest. Once an attempt is complete, all others are removed.
    """
    path = link_target(path)
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
    """Opens the latest abandoned attempt with this manifest, or a new one."""
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
    """Returns the number of lines in the journal, or 0 if the output is already published."""
    output, journal = folder / OUTPUT, folder / JOURNAL
    if not (output.is_file() and journal.is_file()) or output.stat().st_nlink > 1:
        return 0
    return journal.stat().st_size // RECORD.size


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None
