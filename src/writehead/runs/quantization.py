"""Quantizes matrices to small integers with scales: W = (code - 2^(bits-1)) × scale.

The codes of a row are packed without gaps; each group of columns has a float16 scale. Code 0 is
unused, so that the others are symmetric around zero.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from writehead.config import QuantizationConfig

CODES, SCALES = ".integers", ".scales"  # suffixes of tensor names in a run
CLIPS = tuple(0.97**i for i in range(32))  # fractions of a group's largest weight: 1 to 0.39
BLOCK = 2**17  # weights quantized together: few enough for the processor's cache
FLOAT16_MIN, FLOAT16_MAX = 2.0**-24, 65504.0


def pack(codes: Tensor, bits: int) -> Tensor:
    """Packs codes [rows, columns] into bytes [rows, ⌈columns × bits / 8⌉].

    A row is one string of bits, lowest first: column j has the bits from j × bits.
    """
    stream = _bits(codes, bits).flatten(1)
    stream = pad(stream, (0, -stream.shape[1] % 8))
    return _integers(stream.reshape(len(codes), -1, 8))


def unpack(packed: Tensor, bits: int, columns: int) -> Tensor:
    """Reverses `pack`: returns codes [rows, columns], uint8."""
    stream = _bits(packed, 8).flatten(1)[:, : columns * bits]
    return _integers(stream.reshape(len(packed), columns, bits))


def dequantize(codes: Tensor, scales: Tensor, config: QuantizationConfig) -> Tensor:
    """Returns the float32 matrix of codes [rows, columns] and scales [rows, groups]."""
    columns = codes.shape[1]
    integers = codes.float() - (1 << (config.bits - 1))
    factors = scales.float().repeat_interleave(_width(columns, config), dim=1)
    return integers * factors[:, :columns]


def quantize(W: Tensor, config: QuantizationConfig) -> tuple[Tensor, Tensor]:
    """Returns codes [rows, columns], uint8, and scales [rows, groups], float16."""
    blocks = torch.split(W, max(1, BLOCK // W.shape[1]))
    codes, scales = zip(*(_quantize_rows(block, config) for block in blocks), strict=True)
    return torch.cat(codes), torch.cat(scales)


def quantize_tensors(
    weights: dict[str, Tensor], config: QuantizationConfig
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Returns the tensors to store, and the relative error |W - W'| / |W| of each matrix."""
    tensors: dict[str, Tensor] = {}
    errors: dict[str, float] = {}
    for name, W in weights.items():
        if W.dim() != 2:  # gains and biases are few and sensitive
            tensors[name] = W
            continue
        codes, scales = quantize(W, config)
        tensors[name + CODES], tensors[name + SCALES] = pack(codes, config.bits), scales
        difference = torch.linalg.norm(W - dequantize(codes, scales, config))
        errors[name] = float(difference / torch.linalg.norm(W).clamp(min=FLOAT16_MIN))
    return tensors, errors


def dequantize_tensors(
    tensors: dict[str, Tensor], shapes: dict[str, torch.Size], config: QuantizationConfig
) -> dict[str, Tensor]:
    """Reverses `quantize_tensors` for weights of these shapes; raises ValueError if they differ."""
    weights = dict(tensors)
    for name, shape in shapes.items():
        if len(shape) != 2:
            continue
        rows, columns = shape
        groups, width = -(-columns // _width(columns, config)), -(-columns * config.bits // 8)
        packed, scales = (weights.pop(name + kind, torch.empty(0)) for kind in (CODES, SCALES))
        expected = (torch.uint8, (rows, width)), (torch.float16, (rows, groups))
        if ((packed.dtype, packed.shape), (scales.dtype, scales.shape)) != expected:
            raise ValueError(f"{name} is not stored in {config.words}")
        codes = unpack(packed, config.bits, columns)
        if not bool((scales.isfinite() & (scales > 0)).all()) or not bool(codes.all()):
            raise ValueError(f"{name} has an invalid code or scale")
        weights[name] = dequantize(codes, scales, config)
    return weights


def _quantize_rows(W: Tensor, config: QuantizationConfig) -> tuple[Tensor, Tensor]:
    """Quantizes rows; clips the largest weights of a group if that reduces the squared error."""
    rows, columns = W.shape
    group = _width(columns, config)
    G = pad(W, (0, -columns % group)).reshape(rows, -1, group)  # zeros add no error
    most = (1 << (config.bits - 1)) - 1
    largest = G.abs().amax(dim=2, keepdim=True)  # [rows, groups, 1]
    scales, smallest = torch.empty_like(largest), torch.full_like(largest, torch.inf)
    for clip in CLIPS:
        trial = (largest * (clip / most)).clamp(min=FLOAT16_MIN).half().float()
        error = (G - _round(G, trial, most) * trial).square_().sum(dim=2, keepdim=True)
        scales = torch.where(error < smallest, trial, scales)
        smallest = torch.minimum(error, smallest)
    codes = (_round(G, scales, most) + (1 << (config.bits - 1))).to(torch.uint8)
    return codes.flatten(1)[:, :columns], scales.squeeze(2).half()


def _round(G: Tensor, scales: Tensor, most: int) -> Tensor:
    return (G / scales).round_().clamp_(-most, most)


def _bits(codes: Tensor, count: int) -> Tensor:
    """Returns the bits [..., count] of unsigned integers of 8 bits, lowest first."""
    return (codes.unsqueeze(-1) >> torch.arange(count, dtype=torch.uint8, device=codes.device)) & 1


def _integers(bits: Tensor) -> Tensor:
    """Reverses `_bits`."""
    places = torch.arange(bits.shape[-1], dtype=torch.uint8, device=bits.device)
    return (bits << places).sum(dim=-1, dtype=torch.uint8)


def _width(columns: int, config: QuantizationConfig) -> int:
    return min(config.group or columns, columns)
