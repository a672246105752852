"""Products of some rows with a weight by tensor cores, chained to their neighbours.

They let the next kernel begin early, and ask for their own weights before the one in front has
ended (see `launch.py`): where products take few microseconds, waiting is much of a step.

A program owns a tile of the result. The copy engine of a Hopper GPU brings both operands, through
descriptors, and fills what lies past their edges with zeros.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from writehead.kernels.launch import chained, hand_over, launch, wait_for_input

LINE = 64  # elements, of two bytes, that one request to the device's cache brings
FEWEST, MOST = 33, 256  # rows for which these are the quicker
WIDEST, DEEPEST = 1280, 1024  # columns and depth of a weight up to which they were measured


@dataclass(frozen=True)
class TileShape:
    """Rows and columns of the result, and depth at a time, and how a program is run.

    early: elements of each weight column that are asked for before the input is there.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    early: int = 0


def choose_shape(X: Tensor, W: Tensor, widest: int = WIDEST) -> TileShape | None:
    """The tile for X [rows, depth] and W [columns, depth]; None where the library is as quick.

    As measured on an H200 with weights of 1024 × 1024 and 1280 × 1024. `widest` allows more
    columns, for who knows that they pay.
    """
    rows, (columns, depth) = len(X), W.shape
    if X.dtype not in (torch.bfloat16, torch.float16) or not chained(X):
        return None
    if not FEWEST <= rows <= MOST or columns > widest or depth > DEEPEST or depth % LINE:
        return None
    return TileShape(64, 32, 128, 4, 4, early=DEEPEST)


def tiled_linear(
    X: Tensor,
    W: Tensor,
    shape: TileShape,
    *,
    residual: Tensor | None = None,
    beside: Tensor | None = None,
) -> Tensor:
    """X W^T, [rows, columns], plus `residual`, which stays as it is.

    X: [rows, depth]. W: [columns, depth]. Both are contiguous. Where `residual` has fewer columns,
    those of `beside` go on; their rows may lie apart.
    """
    (rows, depth), columns = X.shape, len(W)
    assert X.is_contiguous()
    assert W.is_contiguous()
    added = [T for T in (residual, beside) if T is not None]
    assert all(T.stride(1) == 1 for T in added)
    assert not added or sum(T.shape[1] for T in added) == columns
    Y = torch.empty(rows, columns, dtype=X.dtype, device=X.device)
    first, second = Y if residual is None else residual, Y if beside is None else beside
    chain = chained(X)
    launch(_tiles_kernel, (triton.cdiv(rows, shape.rows), triton.cdiv(columns, shape.columns)))(
        TensorDescriptor.from_tensor(X, [shape.rows, shape.depth]),
        TensorDescriptor.from_tensor(W, [shape.columns, shape.depth]),
        W,
        first,
        first.stride(0),
        first.shape[1],
        second,
        second.stride(0),
        Y,
        rows,
        columns,
        depth,
        ROWS=shape.rows,
        COLUMNS=shape.columns,
        DEPTH=shape.depth,
        LINE=LINE,
        LINES=triton.next_power_of_2(min(shape.early, depth) // LINE) if chain else 0,
        RESIDUAL=residual is not None,
        BESIDE=beside is not None,
        CHAINED=bool(chain),
        num_warps=shape.warps,
        num_stages=shape.stages,
        **chain,
    )
    return Y


@triton.jit
def _tiles_kernel(
    X,
    W,
    weights,
    residual,
    r_row,
    width,
    beside,
    b_row,
    Y,
    rows,
    columns,
    depth,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    LINE: tl.constexpr,
    LINES: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BESIDE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One program owns a tile of Y. X and W are descriptors; `weights` points to W."""
    first_row, first_column = tl.program_id(0) * ROWS, tl.program_id(1) * COLUMNS
    row, column = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
    if LINES > 0:
        _ask_for(weights, column, columns, depth, LINE, LINES)
    wait_for_input(CHAINED)
    hand_over(CHAINED)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, depth, DEPTH):
        x = X.load([first_row, first])
        w = W.load([first_column, first])
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    out = row[:, None].to(tl.int64) * columns + column[None, :]
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    if RESIDUAL:
        at = residual + row[:, None].to(tl.int64) * r_row + column[None, :]
        acc += tl.load(at, mask=mask & (column < width)[None, :], other=0.0).to(tl.float32)
    if BESIDE:
        at = beside + row[:, None].to(tl.int64) * b_row + (column - width)[None, :]
        acc += tl.load(at, mask=mask & (column >= width)[None, :], other=0.0).to(tl.float32)
    tl.store(Y + out, acc.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def _ask_for(weights, column, columns, depth, LINE: tl.constexpr, LINES: tl.constexpr):
    """Has the device's cache read the first LINES lines of some columns, of LINE elements each."""
    at = tl.minimum(tl.arange(0, LINES) * LINE, depth - 1)
    place = weights + tl.minimum(column, columns - 1)[:, None].to(tl.int64) * depth + at[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [place],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
