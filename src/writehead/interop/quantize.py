"""Writes quantized copies of runs and Hugging Face models."""

from dataclasses import dataclass
from pathlib import Path

import torch

from writehead.config import QuantizationConfig
from writehead.errors import RunError
from writehead.interop.pretrained import RunFacts, read_source
from writehead.runs.folder import check_different, check_place, run_directory, write_model
from writehead.runs.quantization import FLOAT16_MAX, quantize_tensors


@dataclass(frozen=True)
class Quantized:
    """Sizes before and after quantization, and the largest error |W - W'| / |W| of a matrix."""

    bytes_before: int
    bytes_after: int
    error: float
    matrix: str


def quantize_run(
    run: Path | str,
    output: Path | str,
    config: QuantizationConfig | None = None,
    *,
    overwrite: bool = False,
) -> Quantized:
    """Writes a quantized copy of `run` to `output`; replaces a run only with `overwrite`."""
    output, config = Path(output), config or QuantizationConfig()
    check_place(output, overwrite)
    source = read_source(run, dtype=torch.float32)
    if source.quantization is not None:
        bits = source.quantization.bits
        raise RunError(f"{run} already has {bits} bits; quantize the original run")
    check_different(output, source.folder)
    for name, W in source.weights.items():
        if not bool((W.abs() <= FLOAT16_MAX).all()):
            raise RunError(f"{run}: {name!r} has a weight beyond the range of float16")
    before = RunFacts.read(source.folder).bytes
    with run_directory(output, overwrite=overwrite) as fresh:
        tensors, errors = quantize_tensors(source.weights, config)
        write_model(fresh, source.config, tensors, source.files, config)
    matrix = max(errors, key=errors.__getitem__)
    return Quantized(before, RunFacts.read(output).bytes, errors[matrix], matrix)
