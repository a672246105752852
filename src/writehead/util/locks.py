"""A lock that is released when its process ends, even if the process is killed."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

# from file systems without locks; EBADF from NFS, which locks only files open for writing
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EBADF)


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Tries to lock the file at `path` until the block ends; yields whether that succeeded.

    The lock is the operating system's, not the existence of the file, so a file left by a killed
    process is free. The file is removed at the end. On a file system without locks, every process
    gets the lock.
    """
    file = _acquire(path)
    try:
        yield file is not None
    finally:
        if file is not None:
            if _is_at(path, file):  # false if the file was removed or replaced by a new owner's
                path.unlink(missing_ok=True)  # while locked, so that no new owner's file is removed
            file.close()


def _acquire(path: Path) -> IO[str] | None:
    """Opens and locks the file; returns None if another process has locked it."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
        if lock_file(file.fileno()) is False:
            file.close()
            return None
        if _is_at(path, file):  # the previous owner may have removed it after we opened it
            return file
        file.close()


def _is_at(path: Path, file: IO[str]) -> bool:
    """Whether the open file is still the one at `path`."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def lock_file(descriptor: int) -> bool | None:
    """Whether this process holds the lock on an open file now; None if locks do not work there."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return None
    return True
