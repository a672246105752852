"""The matrix rate that a device reaches, by which utilisation is told."""

import time

import torch

from writehead.util.devices import wait_for

PRODUCT = {"cuda": 8192, "cpu": 1024}  # its size; a smaller one would not fill a GPU


def matrix_rate(device: torch.device, dtype: torch.dtype, size: int = 0) -> float:
    """Operations a second of a size³ product of random matrices, by the best of ten runs."""
    size = size or PRODUCT["cuda" if device.type == "cuda" else "cpu"]
    A, B = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    for _ in range(3):
        A @ B
    times = []
    for _ in range(10):
        wait_for(device)
        began = time.perf_counter()
        A @ B
        wait_for(device)
        times.append(time.perf_counter() - began)
    return 2 * size**3 / min(times)
