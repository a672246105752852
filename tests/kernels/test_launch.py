"""Launches, and rehearsals in which they compile only."""

import threading

import pytest

triton = pytest.importorskip("triton")

from writehead.kernels.launch import launch, rehearse  # noqa: E402


def active_mode():
    return triton.runtime._async_compile.active_mode.get()


class Kernel:
    """Writes down what is asked of it; compiles as Triton does, by `work` in another thread."""

    def __init__(self, work=lambda: "compiled"):
        self.said, self.found, self.work = [], None, work

    def __getitem__(self, grid):
        return lambda *args, **named: self.said.append(("run", grid, args, named))

    def warmup(self, *args, grid, **named):
        self.said.append(("compile", grid, args, named))
        active_mode().submit(id(self), self.work, self._finish)

    def _finish(self, found):
        self.found = found


def no_room():
    raise OSError(28, "no space left")


def test_a_launch_runs_and_in_a_rehearsal_it_compiles_only():
    kernel = Kernel()
    launch(kernel, (3, 2))(1, num_warps=4)
    rehearse(lambda: launch(kernel, (3, 2))(1, num_warps=4))
    assert kernel.found == "compiled"
    launch(kernel, (5,))(2)
    assert kernel.said == [
        ("run", (3, 2), (1,), {"num_warps": 4}),
        ("compile", (3, 2), (1,), {"num_warps": 4}),
        ("run", (5,), (2,), {}),
    ]


def test_kernels_of_a_rehearsal_are_compiled_at_the_same_time():
    meeting = threading.Barrier(3, timeout=30)
    kernels = [Kernel(meeting.wait) for _ in range(3)]

    def work():
        for kernel in kernels:
            launch(kernel, (1,))()

    rehearse(work)
    assert sorted(kernel.found for kernel in kernels) == [0, 1, 2]


@pytest.mark.parametrize("fails", ["the work", "a compilation"])
def test_after_a_rehearsal_that_failed_the_next_one_is_as_the_first(fails):
    broken, sound = Kernel(no_room), Kernel()

    def work():
        if fails == "the work":
            raise OSError(28, "no space left")
        launch(broken, (1,))()

    with pytest.raises(OSError, match="no space left"):
        rehearse(work)
    assert active_mode() is None
    rehearse(lambda: launch(sound, (1,))())
    assert sound.found == "compiled"
