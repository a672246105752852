"""The floor: bandwidth and matrix rate as they are on this device now, and what follows of them.

A floor is `cost`'s: each part of the work takes the larger of bytes over bandwidth and operations
over rate. `explain` counts in the same way, by a chip's known figures instead of measured ones.
"""

import os
from typing import Any

import torch

from writehead import cost
from writehead.bench.timing import time_calls
from writehead.config import ModelConfig
from writehead.training.throughput import PRODUCT, matrix_rate

BLOCK = {"cuda": 1 << 31, "cpu": 1 << 27}  # bytes that are read, far more than any cache holds
RUNS = 10  # of which the best counts


def measure_chip(device: torch.device, dtype: torch.dtype) -> cost.Chip:
    """This device as `cost` sees a chip: the better of a large copy and a large sum, a product."""
    kind = "cuda" if device.type == "cuda" else "cpu"
    size = PRODUCT[kind]
    copied, summed = _bandwidths(device, BLOCK[kind])
    # a CPU may be slower in half the bytes, in which its products need not be computed
    kinds = [dtype, torch.float32] if kind == "cpu" and dtype.itemsize < 4 else [dtype]
    rate, name = max(
        (matrix_rate(device, one, size), str(one).removeprefix("torch.")) for one in kinds
    )
    return cost.Chip(
        name=torch.cuda.get_device_name(device) if kind == "cuda" else "cpu",
        memory=_memory(device),
        bandwidth=max(copied, summed),
        flops=rate,
        source=(
            f"measured just before: a copy at {copied / 1e9:,.0f} GB/s, a sum at "
            f"{summed / 1e9:,.0f} GB/s, a {size}³ {name} product at {rate / 1e12:.3g} TFLOP/s"
        ),
    )


def decode_floor(config: ModelConfig, setting: cost.Setting, chip: cost.Chip) -> dict[str, Any]:
    """Least milliseconds of the encoder and of the mean decoder step, padded and by true length."""
    steps = {
        lengths: cost.decoder_sequence(config, setting, padded=lengths == "padded").floor(chip)
        / setting.target
        for lengths in ("padded", "true")
    }
    encoder = cost.encoder(config, setting).floor(chip)
    return {
        "encoder_ms": encoder * 1e3,
        "step_ms": {lengths: seconds * 1e3 for lengths, seconds in steps.items()},
        "step_parts_ms": {
            part.name: part.floor(chip) / setting.target * 1e3
            for part in cost.decoder_sequence(config, setting, padded=True).parts
        },
    }


def _bandwidths(device: torch.device, size: int) -> tuple[float, float]:
    """Bytes a second of a copy, read and written, and of a sum, which reads only."""
    block = torch.rand(size // 4, device=device)
    copy = torch.empty_like(block)
    seconds = [
        min(time_calls([work] * 2, device, repeats=RUNS).repeats)
        for work in (lambda: copy.copy_(block), block.sum)
    ]
    return 2 * block.nbytes / seconds[0], block.nbytes / seconds[1]


def _memory(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
