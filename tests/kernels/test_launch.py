"""Launches, and rehearsals in which they compile only."""

import pytest

triton = pytest.importorskip("triton")

from writehead.kernels.launch import launch, rehearsing  # noqa: E402


class Kernel:
    """What is asked of a kernel, written down."""

    def __init__(self):
        self.said = []

    def __getitem__(self, grid):
        return lambda *args, **named: self.said.append(("run", grid, args, named))

    def warmup(self, *args, grid, **named):
        mode = triton.runtime._async_compile.active_mode.get()
        self.said.append(("compile", grid, args, named, mode is not None))


def test_a_launch_runs_and_in_a_rehearsal_it_compiles_beside_the_others():
    kernel = Kernel()
    launch(kernel, (3, 2))(1, num_warps=4)
    with rehearsing():
        launch(kernel, (3, 2))(1, num_warps=4)
    launch(kernel, (5,))(2)
    assert kernel.said == [
        ("run", (3, 2), (1,), {"num_warps": 4}),
        ("compile", (3, 2), (1,), {"num_warps": 4}, True),
        ("run", (5,), (2,), {}),
    ]


def test_a_rehearsal_that_fails_is_over():
    kernel = Kernel()
    with pytest.raises(ValueError, match="no memory"), rehearsing():
        raise ValueError("no memory")
    launch(kernel, (1,))()
    assert kernel.said[0][0] == "run"
    assert triton.runtime._async_compile.active_mode.get() is None
