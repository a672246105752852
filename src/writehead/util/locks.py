"""File locks that are released when their process ends, even if it is killed."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

# errors of file systems without locks; EBADF is from NFS, which locks only files open for writing
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EBADF)


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Tries to lock the file at `path` until the block ends; yields whether that succeeded.

    On a file system without locks, every process gets the lock.
    """
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            acquired = lock_file(file.fileno()) is not False
            if acquired and not _is_at(path, file):
                continue  # the previous owner removed the file after it was opened here
            try:
                yield acquired
            finally:
                if acquired and _is_at(path, file):  # else it belongs to a new owner
                    path.unlink(missing_ok=True)
            return


def _is_at(path: Path, file: IO[str]) -> bool:
    """Returns whether the open file is still the one at `path`."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def lock_file(descriptor: int) -> bool | None:
    """Tries to lock an open file; returns whether it did, or None if there are no file locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return None
    return True
