"""Checks tensors that callers pass."""

from collections.abc import Sequence

import torch
from torch import Tensor

from writehead.errors import ShapeError, WriteheadError


def check_integers(
    name: str,
    T: object,
    shape: Sequence[int],
    device: torch.device,
    *,
    least: int = 0,
    most: int,
    error: type[WriteheadError] = ShapeError,
) -> None:
    """Raises ShapeError unless T is an integer tensor of this shape on this device.

    On the CPU, also raises `error` if a value is out of range; elsewhere, the check would be slow.
    """
    if not isinstance(T, Tensor):
        raise ShapeError(f"{name} must be a tensor, not {type(T).__name__}; use torch.tensor")
    expected, actual = list(shape), list(T.shape)
    if actual != expected or T.device != device or T.dtype not in (torch.int64, torch.int32):
        raise ShapeError(
            f"{name} must be integers {expected} on {device}, not {T.dtype} {actual} on {T.device}"
        )
    if device.type == "cpu" and not least <= int(T.min()) <= int(T.max()) <= most:
        wrong = int(T.max() if T.min() >= least else T.min())
        raise error(f"{name} must be from {least} to {most}, not {wrong}")
