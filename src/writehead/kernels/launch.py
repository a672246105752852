"""How one kernel follows another: on a Hopper GPU, before the other has ended.

A kernel launched with `**chained(T)` may start while the one in front of it still runs. Before it
reads what that one wrote it waits, by `wait_for_input`. `hand_over` lets the next one start; it
comes after the wait, so that whatever is older than the kernel in front is complete, and may be
read before the wait. Kernels that know nothing of this simply come after one another.

In `rehearse` a launch compiles its kernel and does nothing else. All kernels of a step are compiled
at the same time so, where at their first launches each would wait for its own.
"""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, ContextVar
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MOST_THREADS = 16  # that compile: more than a step has kernels
_is_rehearsal: ContextVar[bool] = ContextVar("is_rehearsal", default=False)


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """What launches `kernel` on `grid`, given its arguments; in a rehearsal, what compiles it."""
    if _is_rehearsal.get():
        return functools.partial(kernel.warmup, grid=grid)
    launched: Callable[..., Any] = kernel[grid]
    return launched


def rehearse(work: Callable[[], object]) -> None:
    """Calls `work`, whose launches compile only, side by side; then all its kernels are there.

    What else `work` does is done, with whatever is in the memory that its kernels would write.
    """

    def compile_all() -> None:
        _is_rehearsal.set(True)
        with ThreadPoolExecutor(MOST_THREADS) as threads, triton.AsyncCompileMode(threads):
            work()

    # a context of its own, since Triton's mode outlives an error in it
    Context().run(compile_all)


def is_rehearsal() -> bool:
    """Whether launches compile only."""
    return _is_rehearsal.get()


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
