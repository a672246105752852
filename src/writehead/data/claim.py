"""A place that one process works at: a claim that goes with its process, however that ends."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)  # of file systems that have none


@contextmanager
def claimed(lock: Path) -> Iterator[bool]:
    """Whether this process alone holds the file `lock`, until the end of the block.

    The file goes at the end, unless it is another's by then. One that a killed process left is
    free: not the file is the claim but the system's lock on it. Where a file system has no locks,
    nobody is kept away.
    """
    file = _claim(lock)
    try:
        yield file is not None
    finally:
        if file is not None:
            if _is_at(lock, file):  # if it was removed, a next process may have made one
                lock.unlink(missing_ok=True)  # before the claim ends, or it could be the next one's
            file.close()


def _claim(lock: Path) -> IO[str] | None:
    """The file, open and locked; None where another process has it."""
    while True:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("w")
        if not _is_locked(file):
            file.close()
            return None
        if _is_at(lock, file):  # the one before may take it away after it was opened
            return file
        file.close()


def _is_at(lock: Path, file: IO[str]) -> bool:
    """Whether the file that is open is the one at that path."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), lock.stat())
    return False


def _is_locked(file: IO[str]) -> bool:
    """Whether the file could be locked, or need not be since there are no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    return True
