"""Attention by our own Triton kernels over packed rows: each tile visits its own segments' memory.

Training on a GPU is its place. A row holds some ten sentences, so that a query may see about a
ninth of it; from where each segment begins and ends, each tile knows the range it has to visit.
The plan, in `packed_kernels`: `forward` owns a tile of queries and keeps their logsumexp;
`backward_queries` owns the same tile; `backward_memory` owns a tile of one write-head's memory
and adds up over its readers. Nothing is added atomically, so results repeat bit for bit.
"""

import functools
import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op, register_autograd

from writehead.kernels.visibility import Visibility

FEW = 16  # queries under which a kernel made for whole sequences has nothing to do
LEAST, MOST = 16, 256  # of k and v; tensor cores take no fewer, and more would not fit a tile
NOWHERE = -(2**31)  # the segment of a query that is padding: no memory has it
FAR = 2**30  # a window past every row, from which int32 does not overflow
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Tile:
    """How much one program takes at a time, in powers of two of at least 16, and how it runs.

    rows: pairs of a query and a read-head. memory: positions of K and V. shared: the most
    read-heads of one write-head that stand side by side in the rows. warps, stages: Triton's.
    """

    rows: int
    memory: int
    shared: int = 16
    warps: int = 4
    stages: int = 2


# By kernel, bytes of an element, and the most that k and v may be; "alone" is for a write-head of
# one reader. Those of two bytes up to 128 are the best of about ten on an H200, at 128 rows of 256
# positions in sentences of some 27 (docs/benchmarks.md); the others have to fit smaller chips too.
TILES: dict[tuple[str, int, int], Tile] = {
    ("forward", 2, 128): Tile(rows=64, memory=16, stages=3),
    ("forward", 2, 256): Tile(rows=32, memory=32),
    ("forward", 4, 64): Tile(rows=32, memory=32),
    ("forward", 4, 128): Tile(rows=16, memory=16),
    ("forward", 4, 256): Tile(rows=16, memory=16, stages=1),
    ("backward_queries", 2, 128): Tile(rows=64, memory=16, stages=3),
    ("backward_queries", 2, 256): Tile(rows=32, memory=32),
    ("backward_queries", 4, 64): Tile(rows=32, memory=32),
    ("backward_queries", 4, 128): Tile(rows=16, memory=16),
    ("backward_queries", 4, 256): Tile(rows=16, memory=16, stages=1),
    ("backward_memory", 2, 128): Tile(rows=32, memory=64, stages=3),
    ("backward_memory alone", 2, 128): Tile(rows=16, memory=32, warps=2),
    ("backward_memory", 2, 256): Tile(rows=32, memory=32),
    ("backward_memory", 4, 64): Tile(rows=32, memory=32),
    ("backward_memory", 4, 128): Tile(rows=16, memory=16),
    ("backward_memory", 4, 256): Tile(rows=16, memory=16, stages=1),
}


def supports(Q: Tensor, K: Tensor, V: Tensor, visibility: Visibility) -> str | None:
    """None, or the sentence that says why these kernels are not for this."""
    if Q.device.type != "cuda" and (torch.compiler.is_compiling() or not _interpreted()):
        return "the packed kernels work on a GPU"
    if not torch.compiler.is_compiling() and not _has_triton():
        return "the packed kernels need Triton, which is not installed"
    if Q.device.type != "cuda" and Q.dtype == torch.bfloat16:
        return "Triton's interpreter gets products of bfloat16 wrong"
    if visibility.query_segments is None or visibility.memory_segments is None:
        return "the packed kernels are for packed rows, and these have no segments"
    if visibility.query_positions is not None or visibility.memory_positions is not None:
        return "the packed kernels take positions in their order, and these are given"
    if visibility.lengths is not None:
        return "the packed kernels know padding by its segment, 0, and here lengths are given"
    if Q.shape[2] < FEW:
        return f"the packed kernels are for whole sequences; there are {Q.shape[2]} queries a row"
    if Q.dtype not in DTYPES:
        return f"the packed kernels work in bfloat16, float16 or float32; these are {Q.dtype}"
    for name, size in (("k", K.shape[3]), ("v", V.shape[3])):
        if not LEAST <= size <= MOST or size & (size - 1):
            return (
                f"the packed kernels need {name} to be a power of two from {LEAST} to {MOST}; "
                f"it is {size}"
            )
    return None


def attend(Q: Tensor, K: Tensor, V: Tensor, visibility: Visibility, scale: float) -> Tensor:
    """[b,h,n,k] [b,g,m,k] [b,g,m,v] -> [b,h,n,v], a view of [b,n,h,v].

    Segments are any numbers that int32 holds, and need not be contiguous: those that are not, or
    that number above both n and m, are as right and make a tile visit more.
    """
    window = min(visibility.window or 0, FAR)
    queries, memory = ranges(visibility, Q.shape[2], K.shape[2])
    O: Tensor = _forward(Q, K, V, queries, memory, scale, visibility.causal, window)[0]  # noqa: E741
    return O


def ranges(visibility: Visibility, n: int, m: int) -> tuple[Tensor, Tensor]:
    """Who may be visible to whom, for n queries [b, 3, n] and m memory positions [b, 3, m], int32.

    Of a query: its segment, the first memory position that it may see and the one past the last.
    Of a memory position: its segment, and the queries that may see it likewise. No range is ever
    too narrow; one that is empty begins at the end. In plain operations, which do not wait for
    the device and which a compiler does once for all layers.
    """
    reading, held = visibility.query_segments, visibility.memory_segments
    assert reading is not None
    assert held is not None
    i, j = (torch.arange(size, dtype=torch.int32, device=reading.device) for size in (n, m))
    buckets = max(n, m)
    readers, holders = _buckets(reading, buckets), _buckets(held, buckets)
    first, last = _extents(holders, buckets).gather(2, _twice(readers)).unbind(1)  # [b, n]
    last = -last
    earliest, latest = _extents(readers, buckets).gather(2, _twice(holders)).unbind(1)  # [b, m]
    latest = -latest
    if visibility.causal:
        last, earliest = torch.minimum(last, i + 1), torch.maximum(earliest, j)
    if visibility.window is not None:
        window = min(visibility.window, FAR)
        first = torch.maximum(first, i + 1 - window)
        latest = torch.minimum(latest, j + window)
    reader = torch.where(readers == 0, NOWHERE, reading.to(torch.int32))
    return (
        _table(reader, first, last, (readers != 0) & (first < last), m),
        _table(held.to(torch.int32), earliest, latest, (holders != 0) & (earliest < latest), n),
    )


def _buckets(segments: Tensor, buckets: int) -> Tensor:
    """Each segment's bucket: 0 for padding, its own from 1 on; those past the last share theirs."""
    segments = segments.to(torch.int64)
    return torch.where(segments == 0, 0, (segments - 1).remainder(buckets) + 1)


def _extents(holders: Tensor, buckets: int) -> Tensor:
    """[b, 2, buckets+1]: the first position in each bucket, and minus the one past the last.

    Those of an empty bucket make an empty range.
    """
    b, m = holders.shape
    index = torch.arange(m, dtype=torch.int32, device=holders.device)
    ends = torch.stack([index, -1 - index]).expand(b, 2, m)
    empty = torch.full((b, 2, buckets + 1), m, dtype=torch.int32, device=holders.device)
    return empty.scatter_reduce(2, _twice(holders), ends, "amin")


def _twice(buckets: Tensor) -> Tensor:
    """[b, n] -> [b, 2, n], the index of both ends."""
    return buckets.unsqueeze(1).expand(-1, 2, -1)


def _table(segments: Tensor, first: Tensor, last: Tensor, any_: Tensor, end: int) -> Tensor:
    """[b, 3, n] of a segment and a range, which is from `end` to 0 where there is nothing."""
    return torch.stack([segments, torch.where(any_, first, end), torch.where(any_, last, 0)], dim=1)


# Opaque to the compiler, which has nothing to fuse with them. `triton_op`, which shows it the
# kernels, would refuse the interpreter's.
@custom_op("writehead::packed_forward", mutates_args=())
def _forward(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    queries: Tensor,
    memory: Tensor,
    scale: float,
    causal: bool,
    window: int,
) -> tuple[Tensor, Tensor]:
    """O [b, h, n, v] and logsumexp [b, h, n], the latter in units of log 2."""
    O, logsumexp = _empty_forward(Q, K, V, queries, memory, scale, causal, window)  # noqa: E741
    Q, K, V = (_in_rows(T) for T in (Q, K, V))
    tensors = (Q, K, V, O, logsumexp, queries, memory)
    _launch("forward", tensors, (Q, K, V), scale, causal, window)
    return O, logsumexp


@_forward.register_fake
def _empty_forward(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    queries: Tensor,
    memory: Tensor,
    scale: float,
    causal: bool,
    window: int,
) -> tuple[Tensor, Tensor]:
    return _empty(Q, V.shape[3]), Q.new_empty(Q.shape[:3], dtype=torch.float32)


@custom_op("writehead::packed_backward", mutates_args=())
def _backward(
    dO: Tensor,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    O: Tensor,  # noqa: E741
    logsumexp: Tensor,
    queries: Tensor,
    memory: Tensor,
    scale: float,
    causal: bool,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV, shaped as Q, K and V."""
    dQ, dK, dV = (_empty(T, T.shape[3]) for T in (Q, K, V))
    delta = torch.empty_like(logsumexp)
    Q, K, V, O, dO = (_in_rows(T) for T in (Q, K, V, O, dO))  # noqa: E741
    tensors = (Q, K, V, O, dO, logsumexp, delta, dQ, queries, memory)
    _launch("backward_queries", tensors, (Q, K, V, O, dO), scale, causal, window)
    # after the first, which leaves it delta
    tensors = (Q, K, V, dO, logsumexp, delta, dK, dV, queries, memory)
    _launch("backward_memory", tensors, (Q, K, V, dO), scale, causal, window)
    return dQ, dK, dV


@_backward.register_fake
def _empty_backward(
    dO: Tensor,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    O: Tensor,  # noqa: E741
    logsumexp: Tensor,
    queries: Tensor,
    memory: Tensor,
    scale: float,
    causal: bool,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(Q, Q.shape[3]), _empty(K, K.shape[3]), _empty(V, V.shape[3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    Q, K, V, queries, memory, *ctx.options = inputs
    ctx.save_for_backward(Q, K, V, *output, queries, memory)
    ctx.set_materialize_grads(False)  # of logsumexp there is none, and zeros would be work


def _differentiate(ctx: Any, dO: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    none = (None,) * 5
    if dO is None:
        return None, None, None, *none
    return *_backward(dO, *ctx.saved_tensors, *ctx.options), *none


register_autograd(_forward, _differentiate, setup_context=_save)


def _empty(T: Tensor, depth: int) -> Tensor:
    """[b, heads, n, depth] to be written; in memory [b, n, heads, depth], as projections are."""
    b, heads, n, _ = T.shape
    return T.new_empty(b, n, heads, depth).transpose(1, 2)


def _in_rows(T: Tensor) -> Tensor:
    """T with each row of its last dimension in one piece; it is T itself where that is so."""
    return T if T.stride(3) == 1 else T.contiguous()


def _tile(name: str, itemsize: int, depth: int, *, alone: bool) -> Tile:
    """The tile of a kernel for k and v of up to `depth` elements of `itemsize` bytes."""
    most = min(most for of, size, most in TILES if (of, size) == (name, itemsize) and most >= depth)
    tile = TILES[name, itemsize, most]
    return TILES.get((f"{name} alone", itemsize, most), tile) if alone else tile


def _launch(
    name: str,
    tensors: tuple[Tensor, ...],
    strided: tuple[Tensor, ...],
    scale: float,
    causal: bool,
    window: int,
) -> None:
    """Runs a kernel on its tensors, of which Q, K and V are the first, in tiles that fit them."""
    from writehead.kernels import packed_kernels  # which needs Triton, and that is optional

    Q, _, V = tensors[:3]
    (b, h, n, k), (_, g, m, v) = Q.shape, V.shape
    group = h // g
    tile = _tile(name, Q.itemsize, max(k, v), alone=group == 1)
    shared = min(tile.shared, tile.rows, group & -group)  # a power of two that divides the group
    if name == "backward_memory":
        programs = b * g * -(-m // tile.memory)
    else:
        programs = b * h // shared * -(-n * shared // tile.rows)
    with torch.cuda.device_of(Q):  # type: ignore[no-untyped-call]
        getattr(packed_kernels, name)[(programs,)](
            *tensors,
            *(stride for T in strided for stride in T.stride()[:3]),
            *(n, m, h, scale),
            GROUP=group,
            DEPTH_K=k,
            DEPTH_V=v,
            CAUSAL=causal,
            WINDOW=window,
            ROWS=tile.rows,
            MEMORY=tile.memory,
            SHARED=shared,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )


def _interpreted() -> bool:
    """Whether Triton's kernels run in Python, on tensors anywhere."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
