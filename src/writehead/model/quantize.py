"""A run in few bits: the same model, its matrices as small integers with scales.

Only what is stored changes: `load_run` makes floating-point numbers of them again. Scales are
those of the least squared error among several clippings, since a matrix has few large weights
and room for few steps: cutting the largest off makes the steps smaller for all others.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from writehead.config import QuantizationConfig
from writehead.errors import RunError
from writehead.model.bits import INTEGERS, SCALES, dequantize, group_width, is_quantized, pack
from writehead.model.runs import (
    TOKENIZER,
    WEIGHTS,
    check_place,
    copy_tokenizer,
    make_bare_model,
    read_config,
    read_quantization,
    read_weights,
    run_bytes,
    run_directory,
    write_model,
)

CLIPS = tuple(0.97**i for i in range(32))  # of the largest weight of a group: 1 to 0.39
AT_ONCE = 2**17  # weights: what a processor's cache holds, three times as fast as a whole matrix
SMALLEST, LARGEST = 2.0**-24, 65504  # of the numbers above 0 that float16 has


@dataclass(frozen=True)
class Quantized:
    """What quantizing a run came to: bytes of the run, and the matrix that it changed most.

    `error` is that matrix's, |W - W'| / |W| by the root of the sum of squares.
    """

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
    """Writes the run at `output` whose weights are those of `run` in few bits.

    A run that is there is replaced if `overwrite`, unless it is the one that is read.
    """
    run, output, config = Path(run), Path(output), config or QuantizationConfig()
    before = read_quantization(run)
    if before is not None:
        raise RunError(
            f"{run} is in {before.bits} bits already; quantize the run that it was made from"
        )
    check_place(output, overwrite)
    if output.exists() and output.samefile(run):
        raise RunError(f"{output} is what is read; choose another place")
    model = read_config(run)
    expected = make_bare_model(model)
    weights = read_weights(run, expected, dtype=torch.float32)
    for name, W in weights.items():
        if not bool((W.abs() <= LARGEST).all()):
            raise RunError(
                f"{run / WEIGHTS}: {name!r} has a weight that is not a number, or above {LARGEST}, "
                f"the largest of a float16 scale; quantize a run that has none"
            )
    with run_directory(output, overwrite=overwrite) as fresh:
        tensors, errors = _quantize_all(weights, config)
        write_model(fresh, model, tensors, config)
        if (run / TOKENIZER).is_file():
            copy_tokenizer(run / TOKENIZER, fresh)
    matrix = max(errors, key=errors.__getitem__)
    return Quantized(run_bytes(run), run_bytes(output), errors[matrix], matrix)


def quantize(W: Tensor, config: QuantizationConfig) -> tuple[Tensor, Tensor]:
    """Codes, uint8 [rows, columns], and scales, float16 [rows, groups], of W [rows, columns]."""
    parts = torch.split(W, max(1, AT_ONCE // W.shape[1]))
    codes, scales = zip(*(_quantize_rows(part, config) for part in parts), strict=True)
    return torch.cat(codes), torch.cat(scales)


def _quantize_rows(W: Tensor, config: QuantizationConfig) -> tuple[Tensor, Tensor]:
    """What `quantize` returns, of some rows."""
    rows, columns = W.shape
    group = group_width(columns, config)
    G = pad(W, (0, -columns % group)).reshape(rows, -1, group)  # zeros cost no error
    most = (1 << (config.bits - 1)) - 1
    largest = G.abs().amax(dim=2, keepdim=True)  # [rows, groups, 1]
    scales = torch.empty_like(largest)
    least = torch.full_like(largest, torch.inf)
    for clip in CLIPS:
        tried = (largest * (clip / most)).clamp(min=SMALLEST).half().float()
        error = (G - _round(G, tried, most) * tried).square_().sum(dim=2, keepdim=True)
        scales = torch.where(error < least, tried, scales)
        least = torch.minimum(error, least)
    codes = (_round(G, scales, most) + (1 << (config.bits - 1))).to(torch.uint8)
    return codes.flatten(1)[:, :columns], scales.squeeze(2).half()


def _round(G: Tensor, scales: Tensor, most: int) -> Tensor:
    """The whole numbers from -most to most that are nearest to G / scales."""
    return (G / scales).round_().clamp_(-most, most)


def _quantize_all(
    weights: dict[str, Tensor], config: QuantizationConfig
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """What to store, by its name in the file, and the relative error of each matrix."""
    tensors: dict[str, Tensor] = {}
    errors: dict[str, float] = {}
    for name, W in weights.items():
        if not is_quantized(W.shape):
            tensors[name] = W
            continue
        codes, scales = quantize(W, config)
        tensors[name + INTEGERS], tensors[name + SCALES] = pack(codes, config.bits), scales
        lost = torch.linalg.norm(W - dequantize(codes, scales, config))
        errors[name] = float(lost / torch.linalg.norm(W).clamp(min=SMALLEST))
    return tensors, errors
