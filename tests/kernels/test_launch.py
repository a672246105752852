"""Launches, and rehearsals in which kernels are compiled only."""

import threading

import pytest
from triton.runtime import _async_compile

from writehead.kernels.launch import launch, rehearse


class Kernel:
    """Notes what is asked of it, and compiles as Triton does: by `work` in another thread."""

    def __init__(self, work=lambda: "compiled"):
        self.asked, self.binary, self.work = [], None, work

    def __getitem__(self, grid):
        return lambda *args, **named: self.asked.append(("run", grid, args, named))

    def warmup(self, *args, grid, **named):
        self.asked.append(("compile", grid, args, named))
        mode = _async_compile.active_mode.get()
        mode.submit(id(self), self.work, lambda binary: setattr(self, "binary", binary))


def fail():
    raise OSError(28, "no space left")


def test_a_launch_runs_and_in_a_rehearsal_it_compiles_only():
    kernel = Kernel()
    launch(kernel, (3, 2))(1, num_warps=4)
    rehearse(lambda: launch(kernel, (3, 2))(1, num_warps=4))
    asked = (3, 2), (1,), {"num_warps": 4}
    assert kernel.asked == [("run", *asked), ("compile", *asked)]
    assert kernel.binary == "compiled"


def test_kernels_of_a_rehearsal_compile_concurrently_also_after_one_that_failed():
    with pytest.raises(OSError, match="no space left"):
        rehearse(lambda: launch(Kernel(fail), (1,))())
    meeting = threading.Barrier(3, timeout=30)
    kernels = [Kernel(meeting.wait) for _ in range(3)]
    rehearse(lambda: [launch(kernel, (1,))() for kernel in kernels])
    assert sorted(kernel.binary for kernel in kernels) == [0, 1, 2]
