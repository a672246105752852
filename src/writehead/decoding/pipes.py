"""Lines of a pipe, as many at a time as have arrived: a slow writer gets its answers at once."""

import os
import select
import threading
from collections import deque
from collections.abc import Iterator


class Arrivals:
    """Lists of the lines that have arrived, at most `most` at a time.

    A thread reads ahead while earlier lines are decoded, so a fast writer fills whole lists. It
    stops when it is `most` lines or `most_bytes` ahead. It reads the bare descriptor: the lock of a
    buffered file could block the end of the process.
    """

    def __init__(self, descriptor: int, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._lines: deque[bytes] = deque()
        self._size = 0
        self._error: OSError | None = None
        self._ended = False
        self._changed = threading.Condition()
        threading.Thread(target=self._read, args=(descriptor,), daemon=True).start()

    def __iter__(self) -> Iterator[list[bytes]]:
        while group := self._take():
            yield group
        if self._error is not None:
            raise self._error

    def _take(self) -> list[bytes]:
        """What has arrived, after waiting for the first line; empty at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._ended)
            group = [self._lines.popleft() for _ in range(min(self._most, len(self._lines)))]
            self._size -= sum(map(len, group))
            self._changed.notify_all()
            return group

    def _read(self, descriptor: int) -> None:
        begun: list[bytes] = []  # parts of a line whose end has not arrived
        try:
            while data := _read_some(descriptor):
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
        except BlockingIOError:  # a pipe that its other user has made non-blocking
            select.select([descriptor], [], [])
