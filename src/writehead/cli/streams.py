"""Makes the standard streams usable even if they are closed or use a limited encoding."""

import fcntl
import io
import os
import sys


def open_streams() -> None:
    """Replaces closed streams, and characters that the encoding of a stream cannot represent.

    Writing to a closed standard output fails with EBADF. Messages to a closed standard error are
    lost. Each replacement uses the descriptor of its stream, so that no file opened later gets it.
    """
    if sys.stdin is None:
        _occupy(0, os.O_RDONLY)
    if sys.stdout is None:
        sys.stdout = os.fdopen(_occupy(1, os.O_RDONLY), "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(_occupy(2, os.O_WRONLY), "w", encoding="utf-8", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace" if stream is sys.stdout else "backslashreplace")


def output_is_closed() -> bool:
    """Whether standard output was closed when the process started; see `open_streams`."""
    try:
        flags = fcntl.fcntl(sys.stdout.fileno(), fcntl.F_GETFL)
    except (OSError, ValueError, io.UnsupportedOperation):  # not a file, as in a test
        return False
    return flags & os.O_ACCMODE == os.O_RDONLY


def discard_output() -> None:
    """Discards unwritten data of standard output, so that flushing it at exit cannot fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _occupy(descriptor: int, flags: int) -> int:
    """Opens the null device, as `descriptor` if that is closed; returns the open descriptor."""
    fresh = os.open(os.devnull, flags)
    try:
        os.fstat(descriptor)
    except OSError:
        os.dup2(fresh, descriptor)
        os.close(fresh)
        return descriptor
    if fresh == descriptor:
        os.set_inheritable(fresh, True)
    return fresh
