"""How one kernel follows another: on a Hopper GPU, before the other has ended.

A kernel launched with `**chained(T)` may start while the one in front of it still runs. Before it
reads what that one wrote it waits, by `wait_for_input`. `hand_over` lets the next one start; it
comes after the wait, so that whatever is older than the kernel in front is complete, and may be
read before the wait. Kernels that know nothing of this simply come after one another.

Inside `rehearsing` a launch compiles its kernel and does nothing else. All kernels of a step are
compiled at the same time so, where at their first launches each would wait for its own.
"""

import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MOST_THREADS = 16  # that compile: as many as a step has kernels
_is_rehearsal: ContextVar[bool] = ContextVar("is_rehearsal", default=False)


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """What launches `kernel` on `grid`, given its arguments; in a rehearsal, what compiles it."""
    if _is_rehearsal.get():
        return functools.partial(kernel.warmup, grid=grid)
    launched: Callable[..., Any] = kernel[grid]
    return launched


@contextmanager
def rehearsing() -> Iterator[None]:
    """Makes launches compile only, side by side; at the end of the block all kernels are there."""
    threads = ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), "compiler")
    with threads, triton.AsyncCompileMode(threads):
        before = _is_rehearsal.set(True)
        try:
            yield
        finally:
            _is_rehearsal.reset(before)


def chained(T: Tensor) -> dict[str, bool]:
    """The options of a launch on T's device that may start early; none where that is unknown."""
    return {"launch_pdl": True} if T.is_cuda and _is_hopper(T.device) else {}


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def wait_for_input(CHAINED: tl.constexpr):
    """Returns when the kernel in front has ended and its writes can be read."""
    if CHAINED:
        gdc_wait()


@triton.jit
def hand_over(CHAINED: tl.constexpr):
    """Lets the next kernel start."""
    if CHAINED:
        gdc_launch_dependents()
