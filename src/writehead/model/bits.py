"""Weights in few bits: integers packed densely into bytes, and the matrix that they stand for.

A matrix is stored as codes, an integer each, with a scale for each group of columns of a row:
W = (code - 2^(bits-1)) × scale. Code 0 is not used, so that the others lie evenly around zero.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from writehead.config import QuantizationConfig

# what is added to a matrix's name in the file
INTEGERS, SCALES = ".integers", ".scales"


def pack(codes: Tensor, bits: int) -> Tensor:
    """Bytes [rows, ⌈columns × bits / 8⌉] of codes [rows, columns], each below 2^bits.

    The bits of a row are one string, lowest first: column j has those from j × bits on.
    """
    rows, columns = codes.shape
    eights = pad(codes, (0, -columns % 8)).reshape(rows, -1, 8)
    # eight codes are `bits` whole bytes, and fit one word
    words = _join([eights[..., i] for i in range(8)], bits)
    packed = torch.stack([(words >> (8 * j)) & 0xFF for j in range(bits)], dim=2)
    return packed.to(torch.uint8).flatten(1)[:, : _bytes(columns, bits)].contiguous()


def unpack(packed: Tensor, bits: int, columns: int) -> Tensor:
    """The codes [rows, columns], uint8, of bytes that `pack` made."""
    rows = packed.shape[0]
    eights = pad(packed, (0, -packed.shape[1] % bits)).reshape(rows, -1, bits)
    words = _join([eights[..., j] for j in range(bits)], 8)
    mask = (1 << bits) - 1
    codes = torch.stack([((words >> (bits * i)) & mask).to(torch.uint8) for i in range(8)], dim=2)
    return codes.flatten(1)[:, :columns]


def dequantize(codes: Tensor, scales: Tensor, config: QuantizationConfig) -> Tensor:
    """The matrix, float32 [rows, columns], of codes [rows, columns] and scales [rows, groups]."""
    columns = codes.shape[1]
    integers = codes.float() - (1 << (config.bits - 1))
    spread = scales.float().repeat_interleave(group_width(columns, config), dim=1)
    return integers * spread[:, :columns]


def group_width(columns: int, config: QuantizationConfig) -> int:
    """How many columns share a scale: a row's where there is no group, or one as wide."""
    return min(config.group or columns, columns)


def stored_shapes(shape: torch.Size, config: QuantizationConfig) -> tuple[list[int], list[int]]:
    """The shapes in which a matrix of `shape` is stored: of its packed codes and its scales."""
    rows, columns = shape
    groups = -(-columns // group_width(columns, config))
    return [rows, _bytes(columns, config.bits)], [rows, groups]


def is_quantized(shape: torch.Size) -> bool:
    """Whether a parameter of that shape is stored in few bits: matrices are, gains and biases not.

    A model has few of the latter, and they bear rounding badly.
    """
    return len(shape) == 2


def damage(codes: Tensor, scales: Tensor) -> str | None:
    """What is wrong with codes and scales that were read, or None."""
    if not bool((scales.isfinite() & (scales > 0)).all()):
        return "has a scale that is not a number above 0"
    if not bool(codes.all()):
        return "has an integer out of range"
    return None


def _join(parts: list[Tensor], bits: int) -> Tensor:
    """64-bit words of which part i has the bits from i × bits on."""
    words = torch.zeros_like(parts[0], dtype=torch.int64)
    for i, part in enumerate(parts):
        words |= part.long() << (bits * i)
    return words


def _bytes(columns: int, bits: int) -> int:
    return -(-columns * bits // 8)
