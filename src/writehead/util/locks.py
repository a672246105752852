"""A lock that is released when its process ends, however that happens."""

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
    """Whether this process alone holds the lock file at `path`, until the end of the block.

    The operating system's lock on the file counts, not its existence, so a file that a killed
    process left is free. The file is removed at the end. On a file system without locks, every
    process gets the lock.
    """
    file = _acquire(path)
    try:
        yield file is not None
    finally:
        if file is not None:
            if _is_at(path, file):  # someone may have removed it, and a new owner made another
                path.unlink(missing_ok=True)  # while locked, so that it cannot be the next owner's
            file.close()


def _acquire(path: Path) -> IO[str] | None:
    """The file, open and locked; None where another process has it."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
        if lock_file(file.fileno()) is False:
            file.close()
            return None
        if _is_at(path, file):  # the previous owner may remove it after we opened it
            return file
        file.close()


def _is_at(path: Path, file: IO[str]) -> bool:
    """Whether the open file is still the one at that path."""
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
