"""A product of one row with a large weight, whose norm, activation and residual cost no launch.

With one row a product is the reading of its weight. A program owns some columns of the result and
reads its part of the weight once. It begins to read before the kernel in front of it has ended
(see `launch.py`), since a weight never changes. The norm's gain is applied to the row as it is
read and its root at the end, so that the sum of squares is taken on the way.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from writehead.kernels.launch import chained, hand_over, wait_for_input


@dataclass(frozen=True)
class Tile:
    """Columns of the result, and depth read at a time, and how a program is run."""

    columns: int
    depth: int
    warps: int


@dataclass(frozen=True, eq=False)
class Norm:
    """The RMS norm of a product's input."""

    gain: Tensor  # [d]
    epsilon: float


def choose_tile(depth: int) -> Tile:
    """The tile for a weight of `depth` columns; on an H200 the best or nearly so of nine."""
    return Tile(8, 1024, 4) if depth <= 1024 else Tile(4, 2048, 4)


def row_linear(
    X: Tensor,
    W: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    relu: bool = False,
    residual: Tensor | None = None,
    scale: float = 1.0,
    tile: Tile | None = None,
) -> Tensor:
    """scale × norm(X) W^T + bias, [1, columns], through relu, or added to `residual` in place.

    X: [1, depth]. W: [columns, depth].
    """
    columns, depth = W.shape
    tile = tile or choose_tile(depth)
    Y = residual
    if Y is None:
        Y = torch.empty(1, columns, dtype=X.dtype, device=X.device)
    chain = chained(X)
    _linear_kernel[(triton.cdiv(columns, tile.columns),)](
        X,
        W,
        W if bias is None else bias,
        W if norm is None else norm.gain,
        Y,
        columns,
        depth,
        0.0 if norm is None else norm.epsilon,
        float(scale),
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        BIAS=bias is not None,
        NORM=norm is not None,
        RELU=relu,
        RESIDUAL=residual is not None,
        CHAINED=bool(chain),
        num_warps=tile.warps,
        **chain,
    )
    return Y


@triton.jit
def _linear_kernel(
    X,
    W,
    bias,
    gain,
    Y,
    columns,
    depth,
    epsilon,
    scale,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    RELU: tl.constexpr,
    RESIDUAL: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One program owns some columns of the result: it reads their weights once, and the row."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = (column < columns)[:, None]
    at = tl.arange(0, DEPTH)
    start = W + column[:, None].to(tl.int64) * depth
    w = tl.load(start + at[None, :], mask=is_column & (at < depth)[None, :], other=0.0)
    wait_for_input(CHAINED)
    hand_over(CHAINED)
    acc = tl.zeros([COLUMNS], tl.float32)
    squares = 0.0
    for first in range(0, depth, DEPTH):
        here = first + at
        coming = here + DEPTH
        x = tl.load(X + here, mask=here < depth, other=0.0).to(tl.float32)
        w_next = tl.load(
            start + coming[None, :], mask=is_column & (coming < depth)[None, :], other=0.0
        )
        if NORM:
            squares += tl.sum(x * x, axis=0)
            x = x * tl.load(gain + here, mask=here < depth, other=0.0).to(tl.float32)
        acc += tl.sum(w.to(tl.float32) * x[None, :], axis=1)
        w = w_next
    if NORM:
        acc = acc * tl.rsqrt(squares / depth + epsilon)
    acc = acc * scale
    if BIAS:
        acc += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)
    if RELU:
        acc = tl.maximum(acc, 0.0)
    if RESIDUAL:
        acc += tl.load(Y + column, mask=column < columns, other=0.0).to(tl.float32)
    tl.store(Y + column, acc.to(Y.dtype.element_ty), mask=column < columns)
