"""Copies between the host and a device that do not wait for the device."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

STAGING_BUFFERS = 8
HOST_COPIES = 3  # of each tensor; all but the newest may still be unread


def send(T: Tensor | NDArray[Any], device: torch.device) -> Tensor:
    """Copies a tensor or an array from the host to a device without waiting."""
    # without pinned memory, the copy would wait for earlier work
    T = T if isinstance(T, Tensor) else torch.from_numpy(T)
    return T.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else T.to(device)


def send_padded(
    sequences: Sequence[Sequence[int] | NDArray[Any]], padding: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Copies sequences to rows [b, n] of a device, with padding, and their lengths [b]."""
    lengths = np.array([len(one) for one in sequences])
    used = np.arange(lengths.max()) < lengths[:, None]
    rows = np.full(used.shape, padding)
    rows[used] = np.concatenate(sequences)
    return send(rows, device), send(lengths, device)


class Staging:
    """Pinned memory for one copy to a device at a time."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.int32)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def send(self, rows: NDArray[Any], to: Tensor, padding: Sequence[int]) -> None:
        """Copies rows, followed by padding, to a tensor; waits only for the previous copy."""
        self._copied.synchronize()
        if len(self._memory) < to.numel():
            self._memory = torch.empty(to.numel(), dtype=torch.int32, pin_memory=True)
        staged = self._memory[: to.numel()].view(to.shape)
        array = staged.numpy()
        array[: len(rows)], array[len(rows) :] = rows, padding
        to.copy_(staged, non_blocking=True)
        self._copied.record()


class StagedCopies:
    """Copies to a device; up to STAGING_BUFFERS of them can be in flight."""

    def __init__(self) -> None:
        self._buffers = deque(Staging() for _ in range(STAGING_BUFFERS))

    def send(self, rows: NDArray[Any], to: Tensor, padding: Sequence[int]) -> None:
        """Copies rows, followed by padding, to a tensor on the device; does not wait."""
        self._buffers.rotate()
        self._buffers[0].send(rows, to, padding)


class HostCopy:
    """An asynchronous copy of a tensor to the host; reading it waits for the device."""

    def __init__(self, T: Tensor) -> None:
        self._copy = torch.empty(T.shape, dtype=T.dtype, pin_memory=T.is_cuda)
        self._event = torch.cuda.Event() if T.is_cuda else None  # type: ignore[no-untyped-call]
        self.start(T)

    def start(self, T: Tensor) -> None:
        """Starts another copy; T has the same shape."""
        self._copy.copy_(T, non_blocking=True)
        if self._event is not None:
            self._event.record()

    def numpy(self) -> Any:
        """Waits until the copy is complete; returns it in memory that is not pinned."""
        if self._event is None:
            return self._copy.numpy()
        self._event.synchronize()
        return self._copy.numpy().copy()


class HostCopies:
    """Copies to the host of tensors with fixed addresses; reuses the oldest copy of a tensor."""

    def __init__(self) -> None:
        self._copies: dict[int, deque[HostCopy]] = {}  # by the address of the tensor

    def start(self, T: Tensor) -> HostCopy:
        """Starts copying a tensor; the copy remains valid during HOST_COPIES - 1 more."""
        copies = self._copies.setdefault(T.data_ptr(), deque())
        if len(copies) < HOST_COPIES:
            copies.append(HostCopy(T))
        else:
            copies.rotate(-1)
            copies[-1].start(T)
        return copies[-1]
