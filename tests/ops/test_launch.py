"""Compiling all kernels of a step in parallel."""

import threading

import pytest
from triton.runtime import _async_compile

from writehead.ops.launch import compile_kernels, launch


class Kernel:
    """Cannot run; as Triton does, compiles by calling `work` in another thread."""

    def __init__(self, work):
        self.binary, self.work = None, work

    def warmup(self, *args, grid, **options):
        mode = _async_compile.active_mode.get()
        mode.submit(id(self), self.work, lambda binary: setattr(self, "binary", binary))


def fail():
    raise OSError(28, "no space left")


def test_compile_kernels_compiles_concurrently_and_runs_nothing():
    with pytest.raises(OSError, match="no space left"):
        compile_kernels(lambda: launch(Kernel(fail), (1,))())
    barrier = threading.Barrier(3, timeout=30)
    kernels = [Kernel(barrier.wait) for _ in range(3)]
    compile_kernels(lambda: [launch(kernel, (1,))() for kernel in kernels])
    assert sorted(kernel.binary for kernel in kernels) == [0, 1, 2]
