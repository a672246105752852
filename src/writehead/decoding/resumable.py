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

ENDING = ".part"  # of the hidden folder's name
MANIFEST, OUTPUT, JOURNAL = "manifest.json", "output", "journal"
RECORD = struct.Struct("<8sQ")

Source = tuple[str, str]  # an input line and the prefix of its output


class ResumableFile:
    """Lines of text in a hidden folder, of which `done` are finished.

    `discarded` is how many lines an abandoned attempt with other settings had finished.
    """

    def __init__(self, folder: Path, descriptor: int, discarded: int = 0) -> None:
        self.folder, self.descriptor, self.discarded = folder, descriptor, discarded
        self.done = 0
        self.changed = False  # whether the input differs from the one that was interrupted
        self.resuming = True  # while lines are compared with the journal
        self._end = 0  # of the text of all lines so far
        self._texts: list[bytes] = []
        self._records: list[bytes] = []
        self._output = _open(folder / OUTPUT)
        self._journal = _open(folder / JOURNAL)
        self._size = os.fstat(self._output.fileno()).st_size

    @property
    def kept(self) -> int:
        """How many lines an interruption keeps now."""
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
        """Drops whatever follows the finished lines."""
        if self.resuming:
            self.resuming = False
            for file, size in ((self._journal, self.done * RECORD.size), (self._output, self._end)):
                file.seek(size)
                file.truncate()
                os.fsync(file.fileno())

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

    def finish(self, path: Path, *, replace: bool) -> None:
        """Gives the output its name and removes the folder."""
        self._stop_resuming()
        publish(self.folder / OUTPUT, path, replace=replace)
        self.remove()
        sync(path.parent)

    def remove(self) -> None:
        """Deletes the folder, while it is still locked."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Releases the lock, so that the next process may resume."""
        self._output.close()
        self._journal.close()
        os.close(self.descriptor)


@contextmanager
def resumable_file(
    path: Path, manifest: Mapping[str, Any], *, replace: bool
) -> Iterator[ResumableFile]:
    """A file to write, which appears at `path` when the block ends without an error.

    `replace` is that of `util.files.atomic_file`. After an error, the finished lines are kept for
    the next attempt with the same manifest. An attempt with another manifest is removed if its
    process has ended.
    """
    path = path.resolve()
    work = _open_work(path, json.dumps({"format": 1, **manifest}, sort_keys=True, indent=1))
    try:
        yield work
        work.finish(path, replace=replace)
    except BaseException:
        if work.kept == 0:
            work.remove()
        raise
    finally:
        work.close()


def _open_work(path: Path, manifest: str) -> ResumableFile:
    """The abandoned attempt with this manifest that has most lines, or a new one.

    Removes all other abandoned attempts.
    """
    found = sorted(abandoned(path, ENDING), key=lambda one: _lines(one[0]))
    same = [one for one in found if _read(one[0] / MANIFEST) == manifest and _lines(one[0])]
    discarded = max((_lines(folder) for folder, _ in found), default=0)
    for folder, descriptor in found:
        if (folder, descriptor) not in same[-1:]:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)
    if same:
        return ResumableFile(*same[-1])
    work = ResumableFile(*create_hidden(path, ENDING, folder=True), discarded)
    write_file(work.folder / MANIFEST, manifest)
    sync(path.parent)
    return work


def _digest(source: Source) -> bytes:
    return hashlib.blake2b("\n".join(source).encode(), digest_size=8).digest()


def _open(path: Path) -> FileIO:
    """The file, made if it does not exist, for reading from its start and for writing."""
    return FileIO(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+")


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
