"""Defines Triton kernels, launches them, and compiles them in parallel.

Triton is optional, so kernels import `triton` and `tl` from here. Without Triton, `triton.jit`
returns the kernel as a plain function, which no op calls.

A kernel launched by `launch_pdl` may start while the previous kernel of the stream is still running
(programmatic dependent launch, PDL). It calls `wait_for_previous` before it reads the output of
that kernel. Before that, it can read weights and the output of earlier kernels.
"""

import functools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, ContextVar
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from writehead.util.devices import has_triton, supports_pdl

if has_triton():
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
else:
    triton = tl = SimpleNamespace(jit=lambda kernel: kernel, constexpr=lambda value: value)

NUM_SMS = 132  # multiprocessors of an H200, for which tiles are tuned
LOG2E = tl.constexpr(math.log2(math.e))  # for exp2, which is faster than exp
COMPILE_THREADS = 16  # more than the kernels of a step
_compiles_only: ContextVar[bool] = ContextVar("compiles_only", default=False)


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """Returns a function that launches `kernel`; inside `compile_kernels`, it only compiles it."""
    if _compiles_only.get():
        return functools.partial(kernel.warmup, grid=grid)
    launched: Callable[..., Any] = kernel[grid]
    return launched


def launch_pdl(kernel: Any, grid: tuple[int, ...], T: Tensor) -> Callable[..., Any]:
    """Returns `launch` with PDL if T's device supports it; the kernel's PDL says whether."""
    if not supports_pdl(T.device):
        return functools.partial(launch(kernel, grid), PDL=False)
    return functools.partial(launch(kernel, grid), PDL=True, launch_pdl=True)


def compile_kernels(work: Callable[[], object]) -> None:
    """Calls `work`, whose launches compile their kernels in parallel without running them.

    Everything else in `work` runs as usual, on memory that no kernel has written.
    """
    device = torch.cuda.current_device() if torch.cuda.is_available() else -1

    def load(future: Any) -> None:
        with torch.cuda.device(device):
            getattr(future.result(), "run", None)  # builds the launcher, with a C compiler

    def compile_all() -> None:
        _compiles_only.set(True)
        with ThreadPoolExecutor(COMPILE_THREADS) as threads:
            with triton.AsyncCompileMode(threads) as mode:
                work()
            list(threads.map(load, mode.future_kernels.values()))

    Context().run(compile_all)  # an error must not leave Triton's mode set


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Waits for the previous kernel to end, so that its writes are visible; lets the next start."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def multiply(x, y):
    """Returns x * y, rounded (not fused), so that all threads of a reduction get the same sum."""
    return tl.fma(x, y, 0.0)
