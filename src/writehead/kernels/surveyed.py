"""The product that makes logits, and what `choose.survey` notes of them, in one kernel.

So nobody reads the logits again but where the best of them lie. For many rows that pass would
take a quarter of the product's time. A program owns one tile of logits after another; while it
notes what is in one, the copy engine of a Hopper GPU brings what the next is made of.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from writehead.kernels.choose import Candidates
from writehead.kernels.launch import chained, hand_over, launch, wait_for_input

FEWEST = 1024  # rows for which it was measured to be the quicker
LINE = 64  # elements that the depth must be a multiple of
EVEN = 8  # and the columns, for the copy engine


@dataclass(frozen=True)
class SurveyTile:
    """Rows and columns of the logits, and depth at a time, and how a program is run."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def choose_survey_tile(rows: int, depth: int, columns: int, like: Tensor) -> SurveyTile | None:
    """The tile for X [rows, depth] and W [columns, depth], of the dtype and device of `like`.

    None where the product and the survey are as quick apart.
    """
    if like.dtype not in (torch.bfloat16, torch.float16) or not chained(like):
        return None
    if rows < FEWEST or depth % LINE or columns % EVEN:
        return None
    return SurveyTile(128, 256, 64, 8, 3)


def surveyed_linear(
    X: Tensor, W: Tensor, out: Candidates, tile: SurveyTile, *, vocabulary: int
) -> Tensor:
    """X W^T, [rows, columns]; fills `out.largest` and `out.statistics` as `survey` does.

    X: [rows, depth]. W: [columns, depth]. Chunks and parts of `out` are as wide as the tile.
    """
    (rows, depth), columns = X.shape, len(W)
    parts = out.statistics.shape[1]
    assert out.chunk == tile.columns
    assert out.largest.shape == (rows, parts)
    Y = torch.empty(rows, columns, dtype=X.dtype, device=X.device)
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)
    programs = min(tiles, _count_processors(X.device))
    chain = chained(X)
    launch(_surveyed_kernel, (programs,))(
        TensorDescriptor.from_tensor(X, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(W, [tile.columns, tile.depth]),
        TensorDescriptor.from_tensor(Y, [tile.rows, tile.columns]),
        out.largest,
        out.statistics,
        rows,
        columns,
        depth,
        vocabulary,
        parts,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        PROGRAMS=programs,
        CHAINED=bool(chain),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **chain,
    )
    return Y


@functools.cache
def _count_processors(device: torch.device) -> int:
    """The multiprocessors of a device, which have room for one program each."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit
def _surveyed_kernel(
    X,
    W,
    Y,
    largest,
    statistics,
    rows,
    columns,
    depth,
    vocabulary,
    parts,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PROGRAMS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One program owns every PROGRAMS-th tile. X, W and Y are descriptors.

    Tiles one behind the other have the same columns: what is read of W is read by all at a time.
    """
    wait_for_input(CHAINED)
    hand_over(CHAINED)
    high = tl.cdiv(rows, ROWS)
    for tile in tl.range(
        tl.program_id(0), high * tl.cdiv(columns, COLUMNS), PROGRAMS, flatten=True
    ):
        first_row, part = tile % high * ROWS, tile // high
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in range(0, depth, DEPTH):
            x = X.load([first_row, first])
            w = W.load([part * COLUMNS, first])
            acc = tl.dot(x, tl.trans(w), acc)
        y = acc.to(Y.dtype)
        Y.store([first_row, part * COLUMNS], y)
        row, column = first_row + tl.arange(0, ROWS), part * COLUMNS + tl.arange(0, COLUMNS)
        y = tl.where((column < vocabulary)[None, :], y.to(tl.float32), float("-inf"))
        peak = tl.max(y, axis=1)
        base = tl.where(peak == float("-inf"), 0.0, peak)
        total = tl.sum(tl.exp(y - base[:, None]), axis=1)
        is_there = (row < rows) & (part < parts)  # a part past the vocabulary has no place
        place = row.to(tl.int64) * parts + part
        tl.store(largest + place, peak, mask=is_there)
        tl.store(statistics + place * 2, peak, mask=is_there)
        tl.store(statistics + place * 2 + 1, total, mask=is_there)
