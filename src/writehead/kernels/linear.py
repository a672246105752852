"""Products of one row or few with a large weight, whose norm and residual cost no launch.

With few rows a product is the reading of its weight. A program owns some columns of the result and
reads its part of the weight once. It begins to read before the kernel in front of it has ended
(see `launch.py`), since a weight never changes.

One row (`row_linear`) needs no tensor cores. The norm's gain is applied to the row as it is read
and its root at the end, so that the sum of squares is taken on the way. Where all weights together
do not stay in the device's cache until the next step, they may leave it first, so that what this
step writes and reads stays. Up to 32 rows (`rows_linear`) are one tile of tensor cores, and the
warps of a program divide the depth.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from writehead.kernels.decode import Unnormed
from writehead.kernels.launch import chained, hand_over, launch, wait_for_input

MOST_ROWS = 32  # of `rows_linear`
DEEPEST = 1024  # of a weight for which more than 16 rows pay


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
    """The tile for a weight of `depth` columns; on an H200 the best or nearly so of sixteen."""
    return Tile(4, 1024, 4) if depth <= 1024 else Tile(4, 4096, 8)


def row_linear(
    X: Tensor,
    W: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    relu: bool = False,
    residual: Tensor | None = None,
    beside: Tensor | None = None,
    scale: float = 1.0,
    passing: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """scale × norm(X) W^T + bias, [1, columns], through relu, plus `residual`.

    X: [1, depth]. W: [columns, depth]. Where `residual` has fewer columns, those of `beside` go on.
    `passing` has W leave the device's cache before all else.
    """
    columns, depth = W.shape
    added = [T.shape[1] for T in (residual, beside) if T is not None]
    assert not added or sum(added) == columns
    tile = tile or choose_tile(depth)
    Y = torch.empty(1, columns, dtype=X.dtype, device=X.device)
    chain = chained(X)
    launch(_linear_kernel, (triton.cdiv(columns, tile.columns),))(
        X,
        W,
        W if bias is None else bias,
        W if norm is None else norm.gain,
        Y if residual is None else residual,
        Y if beside is None else beside,
        Y,
        columns if residual is None else residual.shape[1],
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
        BESIDE=beside is not None,
        EVICTION="evict_first" if passing else "",
        CHAINED=bool(chain),
        num_warps=tile.warps,
        **chain,
    )
    return Y


@dataclass(frozen=True)
class RowsTile:
    """What a program of `rows_linear` takes at a time: `parts` × `depth` of its columns' weights.

    ahead: whether it holds the first of them before its input is there.
    """

    rows: int
    columns: int
    parts: int
    depth: int
    stages: int
    ahead: bool


def few_rows(X: Tensor, W: Tensor) -> bool:
    """Whether `rows_linear` is the quicker way to a product of X [rows, depth] with W."""
    if X.dtype not in (torch.bfloat16, torch.float16):
        return False
    return 1 < len(X) <= (MOST_ROWS if W.shape[1] <= DEEPEST else 16)


def choose_rows_tile(rows: int, depth: int) -> RowsTile:
    """The tile for a weight of `depth` columns; on an H200 the best of seven to ten."""
    if rows > 16:
        return RowsTile(32, 8, 4, 128, 3, ahead=False)
    if depth > DEEPEST:
        return RowsTile(16, 8, 4, 128, 4, ahead=False)
    return RowsTile(16, 8, 4, 256, 1, ahead=True)


def rows_linear(
    X: Tensor,
    W: Tensor,
    *,
    residual: Tensor | None = None,
    unnormed: Unnormed | None = None,
    tile: RowsTile | None = None,
) -> Tensor:
    """X W^T, [rows, columns], plus `residual`, which stays as it is.

    X: [rows, depth], up to 32 of them. W: [columns, depth]. What `unnormed` says X was made of
    without its norm gives each row a factor: the root that is missing.
    """
    rows, (columns, depth) = len(X), W.shape
    tile = tile or choose_rows_tile(rows, depth)
    Y = torch.empty(rows, columns, dtype=X.dtype, device=X.device)
    source, d, epsilon = X, 0, 0.0
    if unnormed is not None:
        source, epsilon = unnormed.X, unnormed.epsilon
        d = source.shape[1]
    chain = chained(X)
    launch(_rows_kernel, (triton.cdiv(columns, tile.columns),))(
        X,
        W,
        Y if residual is None else residual,
        source,
        Y,
        rows,
        columns,
        depth,
        d,
        epsilon,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        PARTS=tile.parts,
        DEPTH=tile.depth,
        SIZE_D=triton.next_power_of_2(d) if d else 0,
        RESIDUAL=residual is not None,
        AHEAD=tile.ahead,
        CHAINED=bool(chain),
        num_warps=tile.parts,
        num_stages=tile.stages,
        **chain,
    )
    return Y


@triton.jit
def _rows_kernel(
    X,
    W,
    residual,
    source,
    Y,
    rows,
    columns,
    depth,
    d,
    epsilon,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    DEPTH: tl.constexpr,
    SIZE_D: tl.constexpr,
    RESIDUAL: tl.constexpr,
    AHEAD: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One program owns some columns of the result; each of its warps sums over its own depth."""
    row, column = tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.arange(0, PARTS)[:, None, None] * DEPTH + tl.arange(0, DEPTH)[None, None, :]
    is_row, is_column = (row < rows)[None, :, None], (column < columns)[None, :, None]
    x_at = X + row[None, :, None] * depth + at
    w_at = W + column[None, :, None].to(tl.int64) * depth + at
    STEP: tl.constexpr = PARTS * DEPTH
    acc = tl.zeros([PARTS, ROWS, COLUMNS], tl.float32)
    if AHEAD:
        w = tl.load(w_at, mask=is_column & (at < depth), other=0.0)
        wait_for_input(CHAINED)
        hand_over(CHAINED)
        for first in range(0, depth, STEP):
            x = tl.load(x_at + first, mask=is_row & (first + at < depth), other=0.0)
            coming = first + STEP
            w_next = tl.load(w_at + coming, mask=is_column & (coming + at < depth), other=0.0)
            acc = tl.dot(x, tl.trans(w, 0, 2, 1), acc, input_precision="ieee")
            w = w_next
    else:
        wait_for_input(CHAINED)
        hand_over(CHAINED)
        for first in range(0, depth, STEP):
            x = tl.load(x_at + first, mask=is_row & (first + at < depth), other=0.0)
            w = tl.load(w_at + first, mask=is_column & (first + at < depth), other=0.0)
            acc = tl.dot(x, tl.trans(w, 0, 2, 1), acc, input_precision="ieee")
    y = tl.sum(acc, axis=0)
    if SIZE_D > 0:
        ds = tl.arange(0, SIZE_D)
        is_there = (row < rows)[:, None] & (ds < d)[None, :]
        s = tl.load(source + row[:, None] * d + ds[None, :], mask=is_there, other=0.0)
        s = s.to(tl.float32)
        y = y * tl.rsqrt(tl.sum(s * s, axis=1) / d + epsilon)[:, None]
    out = row[:, None] * columns + column[None, :]
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    if RESIDUAL:
        y += tl.load(residual + out, mask=mask, other=0.0).to(tl.float32)
    tl.store(Y + out, y.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def _linear_kernel(
    X,
    W,
    bias,
    gain,
    residual,
    beside,
    Y,
    width,
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
    BESIDE: tl.constexpr,
    EVICTION: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One program owns some columns of the result: it reads their weights once, and the row."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = (column < columns)[:, None]
    at = tl.arange(0, DEPTH)
    start = W + column[:, None].to(tl.int64) * depth
    mask = is_column & (at < depth)[None, :]
    w = tl.load(start + at[None, :], mask=mask, other=0.0, eviction_policy=EVICTION)
    wait_for_input(CHAINED)
    hand_over(CHAINED)
    acc = tl.zeros([COLUMNS], tl.float32)
    squares = 0.0
    for first in range(0, depth, DEPTH):
        here = first + at
        coming = here + DEPTH
        x = tl.load(X + here, mask=here < depth, other=0.0).to(tl.float32)
        mask = is_column & (coming < depth)[None, :]
        w_next = tl.load(start + coming[None, :], mask=mask, other=0.0, eviction_policy=EVICTION)
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
        acc += tl.load(residual + column, mask=column < width, other=0.0).to(tl.float32)
    if BESIDE:
        past = (column >= width) & (column < columns)
        acc += tl.load(beside + column - width, mask=past, other=0.0).to(tl.float32)
    tl.store(Y + column, acc.to(Y.dtype.element_ty), mask=column < columns)
