"""Makes the standard streams usable even if they are closed or use a limited encoding."""

import io
import os
import sys


def open_streams() -> None:
    """Opens the null device for closed streams, and replaces characters that cannot be encoded.

    Writing to a closed standard output still fails, because its replacement is read-only. Messages
    to a closed standard error are lost. The replacements take the lowest free descriptors, which
    are those of the streams, so that no file opened later gets them.
    """
    for name, flags in (("stdin", os.O_RDONLY), ("stdout", os.O_RDONLY), ("stderr", os.O_WRONLY)):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, flags)
            os.set_inheritable(descriptor, True)
            if name != "stdin":
                opened = os.fdopen(descriptor, "w", encoding="utf-8", closefd=False)
                setattr(sys, name, opened)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace" if stream is sys.stdout else "backslashreplace")


def discard_output() -> None:
    """Discards unwritten data of standard output, so that flushing it at exit cannot fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
