"""§2.4, §3: attention of one new position a row over its cache, or over the encoder's memory.

One program owns one row of K and V, one write-head of it and one part of its positions. The
queries of all read-heads that share the write-head, times the beams that share the row, are the
rows of its tile, so K and V are read once. Lengths are read on the device and bound the loop:
padding costs nothing. Where rows are too few to fill the chip the positions are split, and a
second kernel puts the parts together.

The new position's K and V come with the queries: the program that reads the first part begins its
softmax with them and writes them into the cache, which no program of this step reads there.

Queries may come from rows before their norm (`Unnormed`): its root, which is one number a row, is
then taken and applied here, and the norm needs no pass of its own.
"""

import functools
import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from writehead.kernels.decode_kernels import attend_kernel, combine_kernel
from writehead.kernels.launch import chained, launch

# programs: one for each multiprocessor of an H200; those that long memories were measured with, of
# which 2048 took 1% less with a stage less; far more
FEW, SOME, MANY = 132, 1024, 8192
SPLITS = 128  # at most; more would make the second kernel the longer one
# positions up to which a memory is short, and past which it is long; past 4096, with more programs
# than FEW, tiles twice as large took 1% less (measured with 8192)
SHORT, LONG, LONGER = 64, 512, 4096
WIDE = 256  # bytes of a head, from which on 32 KB of K are as many positions as a tile may have
LOG2E = 1.4426950408889634
MOST_QUERIES = 128  # rows of a tile: read-heads that share a write-head, times beams


@dataclass(frozen=True, eq=False)
class Unnormed:
    """The rows X [rows, d] that queries, keys and values were made of without their RMS norm.

    The norm's gain is in the projections, its root is taken here.
    """

    X: Tensor
    epsilon: float


@dataclass(frozen=True)
class Tile:
    """Positions read at a time, and how a program is run."""

    positions: int
    warps: int
    stages: int
    early: bool = False  # whether the first tile is read before the queries are there


def choose_tile(
    width: int,
    itemsize: int,
    programs: int,
    positions: int,
    room: float = math.inf,
    *,
    appends: bool = False,
    beams: bool = False,
) -> Tile:
    """The tile for heads of `width` = max(k, v) elements, as measured on an H200.

    Many programs of one warp hide each other's waiting, few must ask for more at once, and one
    that reads long memories for most. `room` is the shared memory that a program may have.
    """
    # size: bytes of K in a tile
    each = width * itemsize
    if positions > LONGER and programs > FEW:
        size, warps, stages, early = 32768, 4, 3, False
    elif positions > LONG and each >= WIDE and _fills(programs, positions, _count(32768, each)):
        # of these a multiprocessor has room for one: of smaller ones, which are launched while
        # others still run, some would have two and some none
        size, warps, stages, early = 32768, 4, 3, False
    elif positions > LONG:
        size, warps, stages, early = 16384, 4, 4 if programs <= SOME else 3, False
    elif programs <= FEW:
        size, warps, stages, early = 16384 if appends else 32768, 4, 2, True
    elif programs >= MANY and not appends and not beams:
        size, warps, stages, early = 16384, 2, 2, False
    elif programs >= MANY or beams:
        size, warps, stages, early = 4096, 1, 3 if appends else 2, False
    else:
        size, warps, stages, early = 8192 if positions > SHORT else 4096, 1, 2, True
    count = _count(size, each)
    needed = MOST_QUERIES * each // 2  # for queries and results; it is less but for wide beams
    while (stages - 1) * 2 * count * each + needed > room and (stages > 2 or count > 16):
        stages, count = (stages - 1, count) if stages > 2 else (stages, count // 2)
    return Tile(count, warps, stages, early)


def _count(size: int, each: int) -> int:
    """The positions of a tile: how many of `each` bytes are about `size`."""
    return max(16, min(128, int(triton.next_power_of_2(size // each))))


@functools.cache
def _room(device: torch.device) -> float:
    """The shared memory that a program may have on a device."""
    if device.type != "cuda":
        return math.inf
    index = torch.cuda.current_device() if device.index is None else device.index
    return float(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


def choose_splits(programs: int, positions: int, tile: Tile) -> int:
    """In how many parts to read up to `positions`, so that the chip is full of programs."""
    return max(1, min(FEW // programs, SPLITS, _most_splits(positions, tile.positions)))


def _most_splits(positions: int, at_a_time: int) -> int:
    """In how many parts it pays to read `positions`."""
    return positions // (2 * at_a_time)


def _fills(programs: int, positions: int, at_a_time: int) -> bool:
    """Whether a few programs become as many as the chip takes."""
    wanted = min(FEW // programs, SPLITS)
    return programs <= FEW and _most_splits(positions, at_a_time) >= wanted


def append_and_attend(
    QKV: Tensor,
    K: Tensor,
    V: Tensor,
    lengths: Tensor,
    growing: Tensor,
    ancestors: Tensor | None,
    *,
    heads: int,
    scale: float,
    unnormed: Unnormed | None = None,
    padded: bool = False,
    tile: Tile | None = None,
    splits: int | None = None,
) -> Tensor:
    """O [rows, h v] of one new position a row, whose K and V are written into the cache.

    QKV: [rows, h k + g k + g v], of the new position. K [rows, g, size, k] and V [rows, g, size, v]
    are one layer's cache, in which position p lies in slot p mod size. lengths: [rows], positions
    already there, not changed here. growing: [rows], 0 where a row has ended: nothing of it is
    read or written. ancestors: [rows, size], whose row holds each slot. `padded` reads all slots
    whatever the lengths.
    """
    options = _Options(heads, scale, unnormed, padded, tile, splits)
    return _launch(QKV, K, V, lengths, growing, ancestors, options, appends=True)


def attend_memory(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    lengths: Tensor,
    growing: Tensor,
    *,
    heads: int,
    scale: float,
    unnormed: Unnormed | None = None,
    padded: bool = False,
    tile: Tile | None = None,
    splits: int | None = None,
) -> Tensor:
    """O [rows × beams, h v] of queries Q [rows × beams, h k] over a fixed memory.

    K: [rows, g, m, k], V: [rows, g, m, v], of which the first lengths [rows] positions are real.
    Heads and positions may lie in either order. growing: [rows × beams], 0 where a row has ended:
    its memory is not read once no other beam of it is left. The rest is as in `append_and_attend`.
    """
    options = _Options(heads, scale, unnormed, padded, tile, splits)
    return _launch(Q, K, V, lengths, growing, None, options, appends=False)


@dataclass(frozen=True, eq=False)
class _Options:
    """What the two public functions are asked for alike."""

    heads: int
    scale: float
    unnormed: Unnormed | None
    padded: bool
    tile: Tile | None
    splits: int | None


def _launch(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    lengths: Tensor,
    growing: Tensor,
    ancestors: Tensor | None,
    options: _Options,
    *,
    appends: bool,
) -> Tensor:
    """O [rows of Q, h v], in tiles and splits that fit."""
    rows, g, size, k = K.shape
    v, beams, heads = V.shape[3], len(Q) // rows, options.heads
    tile = options.tile
    if tile is None:
        tile = choose_tile(
            max(k, v),
            K.element_size(),
            rows * g,
            size,
            _room(K.device),
            appends=appends,
            beams=beams > 1 or ancestors is not None,
        )
    splits = options.splits or choose_splits(rows * g, size, tile)
    O = Q.new_empty(len(Q), heads * v)  # noqa: E741
    parts = _Parts.make(splits, len(Q), heads, v, Q.device)
    X, d, epsilon = Q, 0, 0.0
    if options.unnormed is not None:
        X, epsilon = options.unnormed.X, options.unnormed.epsilon
        d = X.shape[1]
    chain = chained(Q)
    launch(attend_kernel, (rows * g, splits))(
        Q,
        Q.stride(0),
        K,
        V,
        *K.stride()[:3],
        *V.stride()[:3],
        lengths,
        growing,
        lengths if ancestors is None else ancestors,
        O,
        parts.O,
        parts.statistics,
        X,
        X.stride(0),
        d,
        epsilon,
        size,
        options.scale * LOG2E,
        G=g,
        SHARE=heads // g,
        BEAMS=beams,
        SIZE_Q=max(16, triton.next_power_of_2(heads // g * beams)),
        SIZE_K=k,
        SIZE_V=v,
        POSITIONS=tile.positions,
        SPLITS=splits,
        SIZE_D=triton.next_power_of_2(d) if d else 0,
        APPENDS=appends,
        ANCESTORS=ancestors is not None,
        PADDED=options.padded,
        EARLY=tile.early,
        CHAINED=bool(chain),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **chain,
    )
    parts.combine(O, heads, v)
    return O


@dataclass(frozen=True, eq=False)
class _Parts:
    """What the programs of several splits leave for the second kernel; with one split, nothing."""

    splits: int
    O: Tensor  # [splits, rows, h, v] float32, each over its own sum  # noqa: E741
    statistics: Tensor  # [splits, rows, h, 2] float32: largest logit in base 2, and sum

    @classmethod
    def make(cls, splits: int, rows: int, heads: int, v: int, device: torch.device) -> "_Parts":
        shape = (splits, rows, heads) if splits > 1 else (0, 0, 0)
        values, statistics = (
            torch.empty(*shape, last, dtype=torch.float32, device=device) for last in (v, 2)
        )
        return cls(splits, values, statistics)

    def combine(self, O: Tensor, heads: int, v: int) -> None:  # noqa: E741
        """Writes the whole of each row's result into O [rows, h v]."""
        if self.splits == 1:
            return
        chain = chained(O)
        launch(combine_kernel, (len(O) * heads,))(
            self.O,
            self.statistics,
            O,
            len(O) * heads,
            SPLITS=self.splits,
            SIZE_S=triton.next_power_of_2(self.splits),
            SIZE_V=v,
            CHAINED=bool(chain),
            num_warps=4,
            **chain,
        )
