"""The product of 1 to 256 rows and a weight, fused with norm, activation, gate and residual.

With few rows, the cost of a product is that of reading the weight. A program owns some columns of
the result and reads their weights once. Weights never change, so it starts to read them before the
previous kernel has ended. It reads whole rows of X, so it also computes the statistics of the norm
and applies them to the sums:

    rms:    norm(x) W^T = r x W^T,                             r = 1 / sqrt(mean(x²) + epsilon)
    layer:  norm(x) W^T = r (x W^T - mean(x) column_sums(W)),  r = 1 / sqrt(var(x) + epsilon)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from writehead.ops.launch import launch, launch_dependents, pdl, wait_for_previous

if TYPE_CHECKING:
    from torch import Tensor

    from writehead.ops.linear import Epilogue, Weight

CACHE_LINE = 128  # bytes
GATE_COLUMNS = 1024  # per program of `gate`
TMA_ALIGNMENT = 16  # bytes; required of rows by tensor descriptors


@dataclass(frozen=True)
class Tile:
    """The work of one program of a product.

    method: "vector" is for one row and does not use tensor cores. "split" divides the depth among
        the warps of a program. "tile" copies its operands with tensor descriptors.
    columns: rows of W per program; a gated product has half as many columns.
    depth: elements per iteration; for "split", per warp.
    ahead: whether to load the first weights before the previous kernel has ended.
    prefetch: elements of each row of W to fetch into L2 before the previous kernel has ended.
    """

    method: Literal["vector", "split", "tile"]
    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    ahead: bool = False
    prefetch: int = 0


def choose_tile(X: Tensor, W: Tensor) -> Tile:
    """Returns the tile for X [rows, depth] and W [columns, depth], by measurements on an H200."""
    rows, depth = X.shape
    if rows == 1:
        if depth <= 1024:
            return Tile("vector", 1, 4, 1024, 4, 1, ahead=True)
        return Tile("vector", 1, 4, 4096, 8, 1, ahead=True)
    if X.dtype == torch.float32:  # exact, without tensor cores; not tuned for speed
        return Tile("split", 16, 16, 16, 4, 2)
    if rows <= 16:
        deep = Tile("split", 16, 8, 128, 4, 4)
        return deep if depth > 1024 else Tile("split", 16, 8, 256, 4, 1, ahead=True)
    if not _has_descriptors(X, W):
        return Tile("split", 32, 8, 128, 4, 3)
    return Tile("tile", 64, 32, 128, 4, 4, prefetch=1024)


def _has_descriptors(X: Tensor, W: Tensor) -> bool:
    """Returns whether the rows of X and W are aligned for tensor descriptors."""
    row = W.shape[1] * W.element_size()
    return all(size % TMA_ALIGNMENT == 0 for size in (X.data_ptr(), W.data_ptr(), row))


def small_rows(X: Tensor, weight: Weight, epilogue: Epilogue, tile: Tile | None = None) -> Tensor:
    """Returns `linear` of X [rows, depth], which must be contiguous: [rows, columns or f]."""
    W, bias, norm, residual = weight.W, weight.bias, weight.norm, epilogue.residual
    rows, depth = X.shape
    tile = tile or choose_tile(X, W)
    columns = len(W) // 2 if epilogue.gated else len(W)
    own = tile.columns // 2 if epilogue.gated else tile.columns  # columns of Y per program
    Y = torch.empty(rows, columns, dtype=X.dtype, device=X.device)
    options = pdl(X)
    x_tiles: Any = X
    w_tiles: Any = W
    if tile.method == "tile":
        x_tiles = TensorDescriptor.from_tensor(X, [tile.rows, tile.depth])
        w_tiles = TensorDescriptor.from_tensor(W, [own, tile.depth])
    line = CACHE_LINE // W.element_size()
    lines = triton.next_power_of_2(triton.cdiv(min(tile.prefetch, depth), line))
    launch(linear_kernel, (triton.cdiv(rows, tile.rows), triton.cdiv(columns, own)))(
        X,
        W,
        x_tiles,
        w_tiles,
        W if bias is None else bias,
        W if weight.column_sums is None else weight.column_sums,
        Y if residual is None else residual,
        Y,
        rows,
        columns,
        depth,
        0.0 if norm is None else norm.epsilon,
        float(epilogue.scale),
        METHOD=tile.method,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        WARPS=tile.warps,
        DEPTH=tile.depth,
        NORM="" if norm is None else norm.kind,
        BIAS=bias is not None,
        ACTIVATION=epilogue.activation or "",
        GATED=epilogue.gated,
        RESIDUAL=residual is not None,
        AHEAD=tile.ahead,
        LINE=line,
        LINES=lines if options and tile.prefetch else 0,
        EVICTION="evict_first" if weight.streamed and rows == 1 else "",
        PDL=bool(options),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **options,
    )
    return Y


def gate(Z: Tensor, activation: str | None) -> Tensor:
    """Returns activation(first f columns) * (last f columns) of contiguous Z [rows, 2 f]."""
    rows, f = len(Z), Z.shape[1] // 2
    Y = torch.empty(rows, f, dtype=Z.dtype, device=Z.device)
    options = pdl(Z)
    launch(_gate_kernel, (rows, triton.cdiv(f, GATE_COLUMNS)))(
        Z,
        Y,
        f,
        ACTIVATION=activation or "",
        COLUMNS=GATE_COLUMNS,
        PDL=bool(options),
        num_warps=4,
        **options,
    )
    return Y


@triton.jit
def linear_kernel(
    X,  # [rows, depth]
    W,  # [columns, depth], or [2 columns, depth] if GATED
    x_tiles,  # descriptors of X and W, for the tile method
    w_tiles,
    bias,
    column_sums,
    residual,  # [rows, columns]
    Y,  # [rows, columns]
    rows,
    columns,
    depth,
    epsilon,
    scale,
    METHOD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WARPS: tl.constexpr,
    DEPTH: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    AHEAD: tl.constexpr,
    LINE: tl.constexpr,
    LINES: tl.constexpr,
    EVICTION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes ROWS rows of Y per program, in the columns that COLUMNS rows of W produce."""
    OWN: tl.constexpr = COLUMNS // 2 if GATED else COLUMNS
    first_row, first_column = tl.program_id(0) * ROWS, tl.program_id(1) * OWN
    row, column = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, OWN)
    c = tl.arange(0, COLUMNS)
    if GATED:  # rows j and j + f of W are adjacent
        w_row, is_w_row = first_column + c // 2 + (c % 2) * columns, first_column + c // 2 < columns
    else:
        w_row, is_w_row = column, column < columns
    w_start = W + w_row.to(tl.int64) * depth
    if METHOD == "vector":
        at = tl.arange(0, DEPTH)[None, :]
        x_at, w_at = X + at, w_start[:, None] + at
        is_w = is_w_row[:, None]
    elif METHOD == "split":
        at = tl.arange(0, WARPS)[:, None, None] * DEPTH + tl.arange(0, DEPTH)[None, None, :]
        x_at, w_at = X + row[None, :, None] * depth + at, w_start[None, :, None] + at
        is_x, is_w = (row < rows)[None, :, None], is_w_row[None, :, None]

    # loads that do not depend on the previous kernel
    if AHEAD:
        w = tl.load(w_at, mask=is_w & (at < depth), other=0.0, eviction_policy=EVICTION)
    if LINES > 0:
        _prefetch(W, w_row, (2 if GATED else 1) * columns - 1, depth, LINE, LINES)
    if BIAS:
        b = tl.load(bias + w_row, mask=is_w_row, other=0.0).to(tl.float32)
    if NORM == "layer":
        w_sum = tl.load(column_sums + w_row, mask=is_w_row, other=0.0)
    wait_for_previous(PDL)
    launch_dependents(PDL)
    out = row[:, None].to(tl.int64) * columns + column[None, :]
    is_out = (row < rows)[:, None] & (column < columns)[None, :]
    if RESIDUAL:
        r = tl.load(residual + out, mask=is_out, other=0.0)

    if METHOD == "vector":
        y, total, squares = _vector(x_at, w_at, w, at, is_w, depth, COLUMNS, DEPTH, NORM, EVICTION)
    elif METHOD == "split":
        if not AHEAD:
            w = 0
        y, total, squares = _split(
            x_at, w_at, w, at, is_x, is_w, depth, ROWS, COLUMNS, WARPS, DEPTH, NORM, AHEAD
        )
    else:
        y, total, squares = _tile(
            x_tiles,
            w_tiles,
            first_row,
            first_column,
            columns,
            depth,
            ROWS,
            COLUMNS,
            DEPTH,
            NORM,
            GATED,
        )

    if NORM == "layer":
        mean = total / depth
        y = y - mean[:, None] * w_sum[None, :]
        squares = tl.maximum(squares - total * mean, 0.0)
    if NORM != "":
        y = y * tl.rsqrt(squares / depth + epsilon)[:, None]
    y = y * scale
    if BIAS:
        y += b[None, :]
    if GATED:
        y, gate = tl.split(tl.reshape(y, [ROWS, OWN, 2]))
        y = _activate(y, ACTIVATION) * gate
    else:
        y = _activate(y, ACTIVATION)
    if RESIDUAL:
        y += r.to(tl.float32)
    tl.store(Y + out, y.to(Y.dtype.element_ty), mask=is_out)


@triton.jit
def _vector(
    x_at,
    w_at,
    w,
    at,
    is_w,
    depth,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    NORM: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """Returns x W^T [1, COLUMNS] of one row, and the row's sum and sum of squares [1]."""
    acc = tl.zeros([COLUMNS], tl.float32)
    total, squares = tl.zeros([1], tl.float32), tl.zeros([1], tl.float32)
    for first in range(0, depth, DEPTH):
        coming = first + DEPTH
        x = tl.load(x_at + first, mask=first + at < depth, other=0.0).to(tl.float32)
        w_next = tl.load(
            w_at + coming, mask=is_w & (coming + at < depth), other=0.0, eviction_policy=EVICTION
        )
        if NORM == "layer":
            total += tl.sum(x, axis=1)
        if NORM != "":
            squares += tl.sum(x * x, axis=1)
        acc += tl.sum(w.to(tl.float32) * x, axis=1)
        w = w_next
    return acc[None, :], total, squares


@triton.jit
def _split(
    x_at,
    w_at,
    w,
    at,
    is_x,
    is_w,
    depth,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WARPS: tl.constexpr,
    DEPTH: tl.constexpr,
    NORM: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Returns X W^T [ROWS, COLUMNS] and statistics of X; each warp sums its part of the depth."""
    acc = tl.zeros([WARPS, ROWS, COLUMNS], tl.float32)
    total, squares = tl.zeros([WARPS, ROWS], tl.float32), tl.zeros([WARPS, ROWS], tl.float32)
    for first in range(0, depth, WARPS * DEPTH):
        x = tl.load(x_at + first, mask=is_x & (first + at < depth), other=0.0)
        if AHEAD:
            coming = first + WARPS * DEPTH
            w_next = tl.load(w_at + coming, mask=is_w & (coming + at < depth), other=0.0)
            acc = tl.dot(x, tl.trans(w, 0, 2, 1), acc, input_precision="ieee")
            w = w_next
        else:
            w_now = tl.load(w_at + first, mask=is_w & (first + at < depth), other=0.0)
            acc = tl.dot(x, tl.trans(w_now, 0, 2, 1), acc, input_precision="ieee")
        if NORM == "layer":
            total += tl.sum(x.to(tl.float32), axis=2)
        if NORM != "":
            squares += tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=2)
    return tl.sum(acc, axis=0), tl.sum(total, axis=0), tl.sum(squares, axis=0)


@triton.jit
def _tile(
    x_tiles,
    w_tiles,
    first_row,
    first_column,
    columns,
    depth,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
):
    """Returns X W^T [ROWS, COLUMNS] and statistics of X; descriptors load zeros past the edges."""
    OWN: tl.constexpr = COLUMNS // 2 if GATED else COLUMNS
    acc, gate = tl.zeros([ROWS, OWN], tl.float32), tl.zeros([ROWS, OWN], tl.float32)
    total, squares = tl.zeros([ROWS, 16], tl.float32), tl.zeros([ROWS, ROWS], tl.float32)
    for first in range(0, depth, DEPTH):
        x = x_tiles.load([first_row, first])
        w = w_tiles.load([first_column, first])
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
        if GATED:
            w = w_tiles.load([first_column + columns, first])
            gate = tl.dot(x, tl.trans(w), gate, input_precision="ieee")
        if NORM != "":
            squares = tl.dot(x, tl.trans(x), squares, input_precision="ieee")
        if NORM == "layer":
            ones = tl.full([DEPTH, 16], 1.0, x.dtype)
            total = tl.dot(x, ones, total, input_precision="ieee")
    if GATED:
        acc = tl.reshape(tl.join(acc, gate), [ROWS, COLUMNS])
    return acc, tl.max(total, axis=1), _diagonal(squares, ROWS)


@triton.jit
def _diagonal(squares, ROWS: tl.constexpr):
    """Returns the sums of squares of the rows of X, the diagonal of X X^T [ROWS, ROWS].

    A product computes them because Triton 3.7 reuses the buffer of a tile too early if both
    registers and an asynchronous product read it.
    """
    row = tl.arange(0, ROWS)
    return tl.sum(tl.where(row[:, None] == row[None, :], squares, 0.0), axis=1)


@triton.jit
def _prefetch(W, w_row, last_row, depth, LINE: tl.constexpr, LINES: tl.constexpr):
    """Fetches the first LINES cache lines of LINE elements of each row `w_row` of W into L2."""
    at = tl.minimum(tl.arange(0, LINES) * LINE, depth - 1)[None, :]
    start = W + tl.minimum(w_row, last_row).to(tl.int64) * depth
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [start[:, None] + at],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _gate_kernel(Z, Y, f, ACTIVATION: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr):
    """Computes COLUMNS columns of one row per program."""
    wait_for_previous(PDL)
    launch_dependents(PDL)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    z = tl.load(Z + row * 2 * f + column, mask=column < f, other=0.0).to(tl.float32)
    factor = tl.load(Z + row * 2 * f + f + column, mask=column < f, other=0.0).to(tl.float32)
    y = _activate(z, ACTIVATION) * factor
    tl.store(Y + row * f + column, y.to(Y.dtype.element_ty), mask=column < f)


@triton.jit
def _activate(y, ACTIVATION: tl.constexpr):
    """Returns the activation of y."""
    if ACTIVATION == "relu":
        y = tl.where(y < 0.0, 0.0, y)  # keeps NaN
    elif ACTIVATION == "gelu":
        y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # tanh(u) = 2 sigmoid(2 u) - 1
        y = y * tl.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))
    elif ACTIVATION == "silu":
        y = y * tl.sigmoid(y)
    return y
