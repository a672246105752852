"""Measures the matrix rate of a device, the base of its utilisation."""

import time

import torch

from writehead.ops.linear import Weight, linear
from writehead.util.devices import wait_for

PRODUCT = {"cuda": 8192, "cpu": 1024}  # matrix size; smaller matrices would not fill a GPU


def matrix_rate(device: torch.device, dtype: torch.dtype, size: int = 0) -> float:
    """Returns operations per second of a product of two size × size matrices, best of ten."""
    size = size or PRODUCT["cuda" if device.type == "cuda" else "cpu"]
    A, B = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    weight = Weight(B).pack()  # on a CPU, decoding uses this faster layout

    @torch.no_grad()
    def multiply() -> None:
        linear(A, weight)

    for _ in range(3):
        multiply()
    times = []
    for _ in range(10):
        wait_for(device)
        started = time.perf_counter()
        multiply()
        wait_for(device)
        times.append(time.perf_counter() - started)
    return 2 * size**3 / min(times)
