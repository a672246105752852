"""The least time that this device needs, from its measured bandwidth and matrix rate.

A floor is the one of `cost`: each part of the work takes the larger of bytes over bandwidth and
operations over matrix rate.
"""

import os
from typing import Any

import torch

from writehead import cost
from writehead.bench.timing import time_calls
from writehead.config import ModelConfig
from writehead.training.throughput import PRODUCT, matrix_rate

BLOCK = {"cuda": 1 << 31, "cpu": 1 << 27}  # bytes to read, more than any cache holds
REPEATS = 10  # the best one counts


def measure_chip(device: torch.device, dtype: torch.dtype) -> cost.Chip:
    """Measures the bandwidth, as the better of a copy and a sum, and the matrix rate."""
    kind = "cuda" if device.type == "cuda" else "cpu"
    size = PRODUCT[kind]
    copied, summed = _bandwidths(device, BLOCK[kind])
    # on a CPU, 16-bit products may be slower than float32, which a program may use instead
    dtypes = [dtype, torch.float32] if kind == "cpu" and dtype.itemsize < 4 else [dtype]
    rate, name = max(
        (matrix_rate(device, one, size), str(one).removeprefix("torch.")) for one in dtypes
    )
    if kind == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return cost.Chip(
        name=torch.cuda.get_device_name(device) if kind == "cuda" else "cpu",
        memory=float(memory),
        bandwidth=max(copied, summed),
        flops=rate,
        source=(
            f"measured: a copy at {copied / 1e9:,.0f} GB/s, a sum at {summed / 1e9:,.0f} GB/s, "
            f"a {size}³ {name} product at {rate / 1e12:.3g} TFLOP/s"
        ),
    )


def decode_floor(config: ModelConfig, setting: cost.Setting, chip: cost.Chip) -> dict[str, Any]:
    """Least milliseconds of the encoder and of the mean decoding step."""
    steps = {
        lengths: cost.decoder_sequence(config, setting, padded=lengths == "padded").floor(chip)
        / setting.target
        * 1e3
        for lengths in ("padded", "true")
    }
    return {"encoder_ms": cost.encoder(config, setting).floor(chip) * 1e3, "step_ms": steps}


def _bandwidths(device: torch.device, size: int) -> tuple[float, float]:
    """Bytes per second of a copy, which reads and writes, and of a sum, which only reads."""
    block = torch.rand(size // 4, device=device)
    copy = torch.empty_like(block)
    seconds = [
        min(time_calls([work] * 2, device, repeats=REPEATS).repeats)
        for work in (lambda: copy.copy_(block), block.sum)
    ]
    return 2 * block.nbytes / seconds[0], block.nbytes / seconds[1]
