"""How one kernel follows another: on a Hopper GPU, before the other has ended.

A kernel launched with `**chained(T)` may start while the one in front of it still runs. Before it
reads what that one wrote it waits, by `wait_for_input`. `hand_over` lets the next one start; it
comes after the wait, so that whatever is older than the kernel in front is complete, and may be
read before the wait. Kernels that know nothing of this simply come after one another.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


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
