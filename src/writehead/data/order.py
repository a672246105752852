"""The order of an epoch: a permutation that is ours, so that no library's release changes it."""

import numpy as np
from numpy.typing import NDArray

_STEP = 0x9E3779B97F4A7C15
_BITS = (1 << 64) - 1


def epoch_order(seed: int, epoch: int, count: int) -> NDArray[np.uint32 | np.uint64]:
    """A permutation of 0 … count-1 that follows from the seed and the epoch alone.

    Indices are sorted by splitmix64 of themselves and a key; it maps no two to the same value, so
    there are no ties to break.
    """
    key = _mix_one(_mix_one(seed & _BITS) ^ ((epoch * _STEP) & _BITS))
    values = np.arange(count, dtype=np.uint64) ^ np.uint64(key)
    order = np.argsort(_mix(values))
    return order.astype(np.uint32 if count <= 1 << 32 else np.uint64)


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64 of each value; unsigned integers wrap around, as it wants."""
    z = z * np.uint64(_STEP) + np.uint64(_STEP)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _mix_one(value: int) -> int:
    return int(_mix(np.array([value], dtype=np.uint64))[0])
