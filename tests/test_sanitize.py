import sanitize
from helpers import KERNELS


def test_every_launched_kernel_is_watched():
    assert set(sanitize.kernels()) >= KERNELS | {"_out_of_bounds_kernel", "_racing_kernel"}
