"""Computes the minimum time of decoding from the device's measured bandwidth and matrix rate.

As in `cost`, each part of the work takes the larger of bytes over bandwidth and operations over
matrix rate.
"""

import os
from typing import Any

import torch

from writehead import cost
from writehead.bench.timing import time_calls
from writehead.config import ModelConfig
from writehead.training.throughput import PRODUCT, matrix_rate

BLOCK = {"cuda": 1 << 31, "cpu": 1 << 27}  # bytes to read, more than any cache has
REPEATS = 10  # the best one counts
MAX_STEPS = 32  # timed steps after the context of a language model


def measure_chip(device: torch.device, dtype: torch.dtype) -> cost.Chip:
    """Measures the bandwidth, as the better of a copy and a sum, and the matrix rate."""
    kind = "cuda" if device.type == "cuda" else "cpu"
    block = torch.rand(BLOCK[kind] // 4, device=device)
    copy = torch.empty_like(block)
    works = (lambda: copy.copy_(block), block.sum)  # one reads and writes, the other only reads
    seconds = [min(time_calls([work] * 2, device, repeats=REPEATS).repeats) for work in works]
    copied, summed = 2 * block.nbytes / seconds[0], block.nbytes / seconds[1]
    rate = matrix_rate(device, dtype, PRODUCT[kind])
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
            f"a {PRODUCT[kind]}³ product at {rate / 1e12:.3g} TFLOP/s"
        ),
    )


def timed_steps(setting: cost.Setting) -> int:
    """Returns the number of timed steps: all, or the last ones of a language model's context."""
    return setting.target if setting.source else min(MAX_STEPS, (setting.target + 1) // 2)


def decode_floor(config: ModelConfig, setting: cost.Setting, chip: cost.Chip) -> dict[str, Any]:
    """Returns the minimum milliseconds of the encoder and of the mean decoding step."""
    if not setting.source:
        count = timed_steps(setting)
        positions = range(setting.target - count, setting.target)
        floors = [cost.decoder_step(config, setting, p).floor(chip) for p in positions]
        return {"step_ms": {"true": sum(floors) / count * 1e3}}
    steps = {
        lengths: cost.decoder_sequence(config, setting, padded=lengths == "padded").floor(chip)
        / setting.target
        * 1e3
        for lengths in ("padded", "true")
    }
    return {"encoder_ms": cost.encoder(config, setting).floor(chip) * 1e3, "step_ms": steps}
