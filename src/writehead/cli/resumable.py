"""Output files that keep finished lines when a command is interrupted, and resume after them.

Until all lines are finished, they are kept in a hidden folder `.NAME.<hex>.part` next to the
output, which the writing process locks. The folder has three files: `manifest.json`, everything the
text depends on; `output`, the text so far; and `journal`, a record per finished input line with a
digest of the line and the offset at which its text ends in `output`.
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

from writehead.util.files import abandoned, create_hidden, link_target, publish, sync, write_file
from writehead.util.locks import lock_file

SUFFIX = ".part"
MANIFEST, OUTPUT, JOURNAL = "manifest.json", "output", "journal"
RECORD = struct.Struct("<8sQ")

Source = tuple[str, str]  # an input line and the prefix of its output


class ResumableFile:
    """A file in progress, in a hidden folder, with `done` finished lines.

    `attempted` is true if an earlier attempt, possibly with other settings, has finished lines.
    """

    def __init__(self, path: Path, folder: Path, descriptor: int, attempted: bool) -> None:
        self.path, self.folder, self.attempted = path, folder, attempted
        self.done = 0
        self._resuming = True  # whether lines are still compared with the journal
        self._end = 0  # offset at which the text of the last line ends
        self._texts: list[bytes] = []
        self._records: list[bytes] = []
        self._descriptor = descriptor
        self._output, self._journal = _open(folder / OUTPUT), _open(folder / JOURNAL)
        self._size = os.fstat(self._output.fileno()).st_size

    @property
    def kept(self) -> int:
        """The number of lines that an interruption would keep; 0 if there are no file locks."""
        if lock_file(self._descriptor) is None:
            return 0
        return _finished_lines(self.folder) if self._resuming else self.done

    def skip(self, sources: Sequence[Source]) -> int:
        """Returns how many of the next input lines are finished, up to the first that is not."""
        for i, source in enumerate(sources):
            record = self._journal.read(RECORD.size) if self._resuming else b""
            digest, end = RECORD.unpack(record) if len(record) == RECORD.size else (b"", 0)
            # a power failure may leave an invalid offset
            if digest != _digest(source) or not self._end < end <= self._size:
                self._stop_resuming()
                return i
            self._end = end
            self.done += 1
        return len(sources)

    def _stop_resuming(self) -> None:
        """Truncates both files after the finished lines."""
        if self._resuming:
            self._resuming = False
            for file, size in ((self._journal, self.done * RECORD.size), (self._output, self._end)):
                file.seek(size)
                file.truncate()
                os.fsync(file.fileno())

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
        shutil.rmtree(self.folder, ignore_errors=True)
        for folder, descriptor in abandoned(self.path, SUFFIX):
            shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)
        sync(self.path.parent)

    def close(self) -> None:
        """Closes the files and releases the lock, so that another process can resume."""
        self._output.close()
        self._journal.close()
        os.close(self._descriptor)


@contextmanager
def resumable_file(
    path: Path, manifest: Mapping[str, Any], *, replace: bool
) -> Iterator[ResumableFile]:
    """Opens a file that appears at `path` if the block succeeds, like `util.files.atomic_file`.

    After an error, the finished lines are kept for the next attempt with the same manifest. Once an
    attempt is complete, all others are removed.
    """
    path = link_target(path)
    work = _open_attempt(path, json.dumps({"format": 1, **manifest}, sort_keys=True, indent=1))
    try:
        yield work
        work.finish(replace=replace)
    except BaseException:
        if work.kept == 0:
            shutil.rmtree(work.folder, ignore_errors=True)  # while it is locked
        raise
    finally:
        work.close()


def _open_attempt(path: Path, manifest: str) -> ResumableFile:
    """Opens an abandoned attempt with this manifest, or a new one."""
    match: tuple[Path, int] | None = None
    attempted = False
    for folder, descriptor in abandoned(path, SUFFIX):
        lines = _finished_lines(folder)
        attempted = attempted or lines > 0
        if lines and match is None and (folder / MANIFEST).read_bytes() == manifest.encode():
            match = folder, descriptor
            continue
        if not lines:
            shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)
    if match is None:
        match = create_hidden(path, SUFFIX, folder=True)
        write_file(match[0] / MANIFEST, manifest)
        sync(path.parent)
    return ResumableFile(path, *match, attempted)


def _finished_lines(folder: Path) -> int:
    """Returns the number of finished lines in a folder, or 0 if its output is published."""
    files = [folder / name for name in (OUTPUT, JOURNAL, MANIFEST)]
    if not all(file.is_file() for file in files) or files[0].stat().st_nlink > 1:
        return 0
    return files[1].stat().st_size // RECORD.size


def _digest(source: Source) -> bytes:
    return hashlib.blake2b("\n".join(source).encode(), digest_size=8).digest()


def _open(path: Path) -> FileIO:
    """Opens a file for reading from its start and for writing, and creates it if needed."""
    return FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+")


def _append(file: FileIO, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]
    os.fsync(file.fileno())
