"""Choices that are the same on every machine and in every version of Python."""

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Dice:
    """A source of choices that asks nothing of `random` but its uniform floats."""

    __slots__ = ("_random",)

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed).random

    def chance(self, probability: float) -> bool:
        """True as often as that."""
        return self._random() < probability

    def below(self, n: int) -> int:
        """An integer from 0 to n - 1."""
        return int(self._random() * n)

    def one(self, of: Sequence[T]) -> T:
        """One of several, all alike."""
        return of[int(self._random() * len(of))]

    def weighted(self, choices: Sequence[tuple[float, T]]) -> T:
        """One of several, by weights that sum to one; the last takes what rounding leaves."""
        left = self._random()
        for weight, choice in choices:
            left -= weight
            if left < 0:
                return choice
        return choices[-1][1]
