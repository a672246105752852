"""Reads the lines of a pipe as they arrive, so that a slow writer gets its output at once."""

import os
import select
import threading
from collections import deque
from collections.abc import Iterator
from typing import BinaryIO


class Arrivals:
    """The lines that have arrived from a pipe.

    A thread reads ahead up to `most` lines or `most_bytes` while the model loads and earlier lines
    are decoded, so that a fast writer fills whole groups. It reads from the file descriptor,
    because the lock of a buffered file could block process exit.
    """

    def __init__(self, file: BinaryIO, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._lines: deque[bytes] = deque()
        self._size = 0
        self._error: OSError | None = None
        self._ended = False
        self._changed = threading.Condition()
        threading.Thread(target=self._read, args=(file,), daemon=True).start()

    def groups(self, most: int) -> Iterator[list[bytes]]:
        """Yields lists of up to `most` lines that have arrived."""
        while group := self._take(most):
            yield group
        if self._error is not None:
            raise self._error

    def _take(self, most: int) -> list[bytes]:
        """Waits for a line and returns all that have arrived; returns an empty list at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._ended)
            group = [self._lines.popleft() for _ in range(min(most, len(self._lines)))]
            self._size -= sum(map(len, group))
            self._changed.notify_all()
            return group

    def _read(self, file: BinaryIO) -> None:
        begun: list[bytes] = []  # parts of a line whose end has not arrived
        try:
            while data := _read_some(file.fileno()):
                *lines, rest = data.split(b"\n")
                if lines:
                    lines[0] = b"".join(begun) + lines[0]
                    begun = []
                    self._put(lines)
                begun.append(rest)
            if last := b"".join(begun):
                self._put([last])
        except OSError as error:
            self._error = error
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _put(self, lines: list[bytes]) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: len(self._lines) < self._most and self._size < self._most_bytes
            )
            self._lines.extend(lines)
            self._size += sum(map(len, lines))
            self._changed.notify_all()


def _read_some(descriptor: int) -> bytes:
    while True:
        try:
            return os.read(descriptor, 1 << 16)
        except BlockingIOError:  # another process has made the pipe non-blocking
            select.select([descriptor], [], [])
