"""A fair sample of lines of any number, in the memory of the sample alone."""

import math
import random
from collections.abc import Iterator, Sequence

from writehead.data.cleaning import normalise

LONGEST = 1000  # characters of a line that a sample keeps, which bounds its memory


class Reservoir:
    """Keeps `size` of the lines added, each with the same chance; the same for the same seed.

    Li's Algorithm L: how many lines to pass over is drawn at once, so that most cost nothing.
    """

    def __init__(self, size: int, seed: str) -> None:
        self._size = size
        self._random = random.Random(seed)
        self._kept: list[str | None] = []
        self._seen = 0
        self._next = 0
        self._weight = 1.0

    def add(self, lines: Sequence[str | None]) -> None:
        """Considers some more lines."""
        begin = self._seen
        self._seen += len(lines)
        while self._next < self._seen:
            line = lines[self._next - begin]
            kept = None if line is None else line[:LONGEST]
            if len(self._kept) < self._size:
                self._kept.append(kept)
                if len(self._kept) < self._size:
                    self._next += 1
                    continue
            else:
                self._kept[self._random.randrange(self._size)] = kept
            self._weight *= math.exp(math.log(1.0 - self._random.random()) / self._size)
            gap = math.log(1.0 - self._random.random()) / math.log1p(-self._weight)
            self._next += math.floor(gap) + 1

    def lines(self) -> Iterator[str]:
        """The lines kept, normalised; those with nothing in them are left out."""
        for line in self._kept:
            text = normalise(line or "")
            if text:
                yield text
