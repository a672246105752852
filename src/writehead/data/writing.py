"""Writes the token files of a split."""

import os
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from writehead.data.workers import Encoded


class SplitWriter:
    """The growing `.tokens` and `.offsets` files of a split, two a side."""

    def __init__(self, folder: Path, split: str, sides: tuple[str, ...]) -> None:
        self._sides = sides
        self._files: list[tuple[IO[bytes], IO[bytes]]] = [
            (
                (folder / f"{split}.{side}.tokens").open("wb"),
                (folder / f"{split}.{side}.offsets").open("wb"),
            )
            for side in sides
        ]
        self._tokens = [0] * len(sides)
        self._sequences = 0
        for _, offsets in self._files:
            offsets.write(np.zeros(1, dtype=np.uint64).tobytes())

    def add(self, part: Encoded, keep: NDArray[np.bool_]) -> None:
        """Appends those sequences of a chunk for which `keep` is true."""
        self._sequences += int(keep.sum())
        for side, (tokens, offsets) in enumerate(self._files):
            lengths = part.lengths[side]
            tokens.write(part.tokens[side][np.repeat(keep, lengths)].tobytes())
            ends = np.cumsum(lengths[keep], dtype=np.uint64) + np.uint64(self._tokens[side])
            offsets.write(ends.tobytes())
            self._tokens[side] = int(ends[-1]) if len(ends) else self._tokens[side]

    def finish(self) -> dict[str, Any]:
        """The split's sizes, once all of it is on disk."""
        for file in chain.from_iterable(self._files):
            file.flush()
            os.fsync(file.fileno())
        counts = {f"{side}_tokens": n for side, n in zip(self._sides, self._tokens, strict=True)}
        return {"sequences": self._sequences, **counts}

    def __enter__(self) -> "SplitWriter":
        return self

    def __exit__(self, *_: object) -> None:
        for file in chain.from_iterable(self._files):
            with suppress(OSError):  # after `finish` there is nothing left to fail
                file.close()
