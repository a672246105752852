"""Attention over packed rows with Triton kernels, for training on a GPU.

A packed row holds about ten sentences, so a query sees only a small part of it. The first and last
position of each segment tell a tile which part of the memory to visit. The first kernel computes O
and the logsumexp of a tile of queries. The second computes the gradient of a tile of queries. The
third computes that of a tile of memory, summed over all queries that read it. No kernel uses atomic
additions, so results are deterministic.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op, register_autograd

from writehead.ops.available import has_triton, is_interpreted
from writehead.ops.heads import Heads
from writehead.ops.visibility import Visibility

MIN_QUERIES = 16  # the kernels are designed for whole sequences
MIN_DEPTH, MAX_DEPTH = 16, 256  # of k and v: the minimum for tensor cores, the maximum for a tile
MAX_WINDOW = 2**30  # longer than any row; the sum of a window and a position fits in int32
PADDING = -(2**31)  # the segment of queries that are padding; no memory position has it
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Tile:
    """The size of a tile, in powers of two of at least 16, and its launch options."""

    rows: int  # pairs of a query and a read-head
    memory: int  # positions of K and V
    heads: int = 16  # maximum number of read-heads of one write-head in the rows
    warps: int = 4
    stages: int = 2


# Keys: what a program's tile consists of ("query" or "memory"; "multi-head" if g = h), bytes per
# element, and the largest depth. For 2 bytes and a depth of 128, these are the fastest of about ten
# tiles on an H200, for 128 rows of 256 positions with sentences of 27 tokens (docs/benchmarks.md).
# The other tiles are small enough for smaller chips.
TILES: dict[tuple[str, int, int], Tile] = {
    ("query", 2, 128): Tile(rows=64, memory=16, stages=3),
    ("query", 2, 256): Tile(rows=32, memory=32),
    ("query", 4, 64): Tile(rows=32, memory=32),
    ("query", 4, 128): Tile(rows=16, memory=16),
    ("query", 4, 256): Tile(rows=16, memory=16, stages=1),
    ("memory", 2, 128): Tile(rows=32, memory=64, stages=3),
    ("memory multi-head", 2, 128): Tile(rows=16, memory=32, warps=2),
    ("memory", 2, 256): Tile(rows=32, memory=32),
    ("memory", 4, 64): Tile(rows=32, memory=32),
    ("memory", 4, 128): Tile(rows=16, memory=16),
    ("memory", 4, 256): Tile(rows=16, memory=16, stages=1),
}


def why_not(Q: Tensor, K: Tensor, V: Tensor, visibility: Visibility) -> str | None:
    """Returns why the kernels do not support the arguments, or None."""
    if Q.device.type != "cuda" and (torch.compiler.is_compiling() or not is_interpreted()):
        return "the packed kernels need a GPU"
    if not torch.compiler.is_compiling() and not has_triton():
        return "the packed kernels need Triton, which is not installed"
    if Q.device.type != "cuda" and Q.dtype == torch.bfloat16:
        return "Triton's interpreter computes bfloat16 products incorrectly"
    if visibility.query_segments is None or visibility.memory_segments is None:
        return "the packed kernels need segments"
    if visibility.query_positions is not None or visibility.memory_positions is not None:
        return "the packed kernels do not support query_positions and memory_positions"
    if visibility.lengths is not None:
        return "the packed kernels do not support lengths; padding is segment 0"
    if Q.shape[2] < MIN_QUERIES:
        return f"the packed kernels need at least {MIN_QUERIES} queries per row, not {Q.shape[2]}"
    if Q.dtype not in DTYPES:
        return f"the packed kernels support bfloat16, float16 and float32, not {Q.dtype}"
    for name, size in (("k", K.shape[3]), ("v", V.shape[3])):
        if not MIN_DEPTH <= size <= MAX_DEPTH or size & (size - 1):
            return (
                f"the packed kernels need {name} to be a power of two from {MIN_DEPTH} to "
                f"{MAX_DEPTH}, not {size}"
            )
    return None


def attend(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    visibility: Visibility,
    scale: float,
    noise: Tensor | None = None,
) -> Tensor:
    """Computes `attend` of Q [b, h, n, k]: [b, h, n, v], a view of a tensor [b, n, h, v].

    Segments may be any int32 numbers, in any order. If segments are not contiguous, or their
    numbers exceed both n and m, the result is the same, but tiles may visit more memory than
    necessary.
    """
    options = _options(visibility, Q.shape[2], K.shape[2], scale, noise)
    heads = [Q.shape[1], K.shape[1], K.shape[3], V.shape[3]]
    O: Tensor = _forward([Q, K, V], heads, *options)[0]  # noqa: E741
    return O


def attend_fused(
    QKV: Tensor, heads: Heads, visibility: Visibility, scale: float, noise: Tensor | None = None
) -> Tensor:
    """Computes `attend` of QKV [b, n, hk + gk + gv]; the kernels write its gradient directly."""
    options = _options(visibility, QKV.shape[1], QKV.shape[1], scale, noise)
    O: Tensor = _forward([QKV], list(astuple(heads)), *options)[0]  # noqa: E741
    return O


def _options(
    visibility: Visibility, n: int, m: int, scale: float, noise: Tensor | None
) -> tuple[Tensor | None, Tensor, Tensor, float, bool, int]:
    """Returns the arguments of `_forward` after the tensors and heads."""
    if noise is not None:
        noise = noise.to(torch.float32).contiguous()
    window = min(visibility.window or 0, MAX_WINDOW)
    return noise, *find_spans(visibility, n, m), scale, visibility.causal, window


# These operators are opaque to torch.compile, which has nothing to fuse with them; `triton_op`
# would not work in the interpreter. `tensors` are Q, K and V, or one QKV that `heads` splits.
@custom_op("writehead::packed_attention", mutates_args=())
def _forward(
    tensors: Sequence[Tensor],
    heads: Sequence[int],
    noise: Tensor | None,
    query_spans: Tensor,
    memory_spans: Tensor,
    scale: float,
    causal: bool,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Returns O [b, h, n, v], and the logsumexp of the logits in base 2, [b, h, n]."""
    O, logsumexp = _empty_outputs(tensors, heads)  # noqa: E741
    inputs = *_split(tensors, heads), noise, query_spans, memory_spans, scale, causal, window
    _Inputs(*inputs).launch("packed_forward_kernel", "query", O, logsumexp)
    return O, logsumexp


@custom_op("writehead::packed_attention_backward", mutates_args=())
def _backward(
    dO: Tensor,
    O: Tensor,  # noqa: E741
    logsumexp: Tensor,
    tensors: Sequence[Tensor],
    heads: Sequence[int],
    noise: Tensor | None,
    query_spans: Tensor,
    memory_spans: Tensor,
    scale: float,
    causal: bool,
    window: int,
) -> list[Tensor]:
    """Returns the gradients of `tensors`."""
    gradients = _empty_gradients(dO, O, logsumexp, tensors, heads)
    dQ, dK, dV = _split(gradients, heads)
    dO, O = (T.transpose(1, 2).contiguous() for T in (dO, O))  # noqa: E741
    delta = torch.empty_like(logsumexp)  # written by the first kernel, read by the second
    inputs = *_split(tensors, heads), noise, query_spans, memory_spans, scale, causal, window
    shared = _Inputs(*inputs)
    shared.launch("packed_dq_kernel", "query", dQ, _stride(dQ), O, dO, logsumexp, delta)
    outputs = dK, dV, _stride(dK), _stride(dV)
    shared.launch("packed_dkv_kernel", "memory", *outputs, dO, logsumexp, delta)
    return gradients


def _empty_outputs(
    tensors: Sequence[Tensor], heads: Sequence[int], *options: Any
) -> tuple[Tensor, Tensor]:
    Q, _, V = _split(tensors, heads)
    return _empty(Q, V.shape[3]), Q.new_empty(Q.shape[:3], dtype=torch.float32)


def _empty_gradients(
    dO: Tensor,
    O: Tensor,  # noqa: E741
    logsumexp: Tensor,
    tensors: Sequence[Tensor],
    heads: Sequence[int],
    *_: Any,
) -> list[Tensor]:
    if len(tensors) == 1:
        return [tensors[0].new_empty(tensors[0].shape)]
    return [_empty(T, T.shape[3]) for T in tensors]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.heads, noise, query_spans, memory_spans, *ctx.options = inputs
    ctx.save_for_backward(*output, noise, query_spans, memory_spans, *tensors)
    ctx.set_materialize_grads(False)  # logsumexp has no gradient, and zeros would cost time


def _differentiate(ctx: Any, dO: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    if dO is None:
        return (None,) * 8
    O, logsumexp, noise, query_spans, memory_spans, *tensors = ctx.saved_tensors  # noqa: E741
    options = noise, query_spans, memory_spans, *ctx.options
    return _backward(dO, O, logsumexp, tensors, ctx.heads, *options), *(None,) * 7


_forward.register_fake(_empty_outputs)
_backward.register_fake(_empty_gradients)
register_autograd(_forward, _differentiate, setup_context=_save)


@dataclass(frozen=True, eq=False)
class _Inputs:
    """The arguments that all kernels share."""

    Q: Tensor
    K: Tensor
    V: Tensor
    noise: Tensor | None
    query_spans: Tensor
    memory_spans: Tensor
    scale: float
    causal: bool
    window: int

    def launch(self, kernel: str, tile_of: str, *arguments: Tensor | int) -> None:
        """Launches a kernel whose programs each own a tile of queries or of memory."""
        from writehead.ops import packed_attention_kernels as kernels  # needs Triton
        from writehead.ops.launch import launch

        Q, K, V = (_as_rows(T) for T in (self.Q, self.K, self.V))
        (b, h, n, k), (_, g, m, v) = Q.shape, V.shape
        group = h // g
        tile = _choose_tile(tile_of, Q.itemsize, max(k, v), multi_head=group == 1)
        heads = min(tile.heads, tile.rows, group & -group)  # a power of two that divides the group
        if tile_of == "memory":
            programs = b * g * -(-m // tile.memory)
        else:
            programs = b * h // heads * -(-n * heads // tile.rows)
        with torch.cuda.device_of(Q):  # type: ignore[no-untyped-call]
            launch(getattr(kernels, kernel), (programs,))(
                *arguments,
                *(Q, K, V, _stride(Q), _stride(K), _stride(V)),
                *(self.query_spans, self.memory_spans),
                self.query_spans if self.noise is None else self.noise,
                *(n, m, h, self.scale),
                GROUP=group,
                DEPTH_K=k,
                DEPTH_V=v,
                CAUSAL=self.causal,
                WINDOW=self.window,
                NOISE=self.noise is not None,
                ROWS=tile.rows,
                MEMORY=tile.memory,
                HEADS=heads,
                num_warps=tile.warps,
                num_stages=tile.stages,
            )


def _choose_tile(tile_of: str, itemsize: int, depth: int, *, multi_head: bool) -> Tile:
    depths = (limit for kind, size, limit in TILES if (kind, size) == (tile_of, itemsize))
    limit = min(limit for limit in depths if limit >= depth)
    tile = TILES[tile_of, itemsize, limit]
    return TILES.get((f"{tile_of} multi-head", itemsize, limit), tile) if multi_head else tile


def _split(tensors: Sequence[Tensor], heads: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns Q, K and V, or their gradients."""
    Q, K, V = Heads(*heads).split(tensors[0]) if len(tensors) == 1 else tensors
    return Q, K, V


def _empty(T: Tensor, depth: int) -> Tensor:
    """Returns [b, heads, n, depth] in the layout of projections, [b, n, heads, depth]."""
    b, heads, n, _ = T.shape
    return T.new_empty(b, n, heads, depth).transpose(1, 2)


def _as_rows(T: Tensor) -> Tensor:
    """Returns T [b, heads, n, depth], copied unless it is columns of a projection [b n, d]."""
    b, heads, n, depth = T.shape
    by_row, by_head, _, by_column = T.stride()
    fits = (b == 1 or by_row == n * _stride(T)) and (heads == 1 or by_head == depth)
    return T if fits and by_column == 1 else T.transpose(1, 2).contiguous().transpose(1, 2)


def _stride(T: Tensor) -> int:
    """Returns the number of elements from one position of T [b, heads, n, depth] to the next."""
    return T.stride(2) if T.shape[2] > 1 else T.stride(0)


def find_spans(visibility: Visibility, n: int, m: int) -> tuple[Tensor, Tensor]:
    """Returns int32 tables of n queries [b, 3, n] and m memory positions [b, 3, m].

    For each query: its segment, the first memory position that it may see, and the end, one past
    the last. For each memory position: its segment, and the first and end of the queries that may
    see it. A span covers all visible positions and is empty if there are none. The computation does
    not synchronize, and layers that share a visibility share the tables.
    """
    return visibility.cached(("spans", n, m), lambda: _find_spans(visibility, n, m))


def _find_spans(visibility: Visibility, n: int, m: int) -> tuple[Tensor, Tensor]:
    query_segments, memory_segments = visibility.query_segments, visibility.memory_segments
    assert query_segments is not None
    assert memory_segments is not None
    size = max(n, m)
    queries, memory = _buckets(query_segments, size), _buckets(memory_segments, size)
    first, end = _bucket_spans(memory, size).gather(2, _repeat(queries)).unbind(1)  # [b, n]
    first_query, end_query = _bucket_spans(queries, size).gather(2, _repeat(memory)).unbind(1)
    end, end_query = -end, -end_query
    i, j = (torch.arange(x, dtype=torch.int32, device=queries.device) for x in (n, m))
    if visibility.causal:
        end, first_query = torch.minimum(end, i + 1), torch.maximum(first_query, j)
    if visibility.window is not None:
        window = min(visibility.window, MAX_WINDOW)
        first = torch.maximum(first, i + 1 - window)
        end_query = torch.minimum(end_query, j + window)
    segments = torch.where(queries == 0, PADDING, query_segments.to(torch.int32))
    return (
        _table(segments, first, end, queries != 0, m),
        _table(memory_segments.to(torch.int32), first_query, end_query, memory != 0, n),
    )


def _buckets(segments: Tensor, size: int) -> Tensor:
    """Returns 0 for padding, and otherwise a bucket from 1 to `size`, as in a hash table."""
    segments = segments.to(torch.int64)
    return torch.where(segments == 0, 0, (segments - 1).remainder(size) + 1)


def _bucket_spans(buckets: Tensor, size: int) -> Tensor:
    """Returns the first position in each bucket and the negated end, [b, 2, size + 1].

    The span of an empty bucket is empty.
    """
    b, m = buckets.shape
    index = torch.arange(m, dtype=torch.int32, device=buckets.device)
    ends = torch.stack([index, -1 - index]).expand(b, 2, m)
    empty = torch.full((b, 2, size + 1), m, dtype=torch.int32, device=buckets.device)
    return empty.scatter_reduce(2, _repeat(buckets), ends, "amin")


def _repeat(buckets: Tensor) -> Tensor:
    """Expands [b, n] to [b, 2, n]."""
    return buckets.unsqueeze(1).expand(-1, 2, -1)


def _table(segments: Tensor, first: Tensor, end: Tensor, valid: Tensor, size: int) -> Tensor:
    """Returns [b, 3, n]; an empty span goes from `size` to 0, so a tile does not widen."""
    valid = valid & (first < end)
    return torch.stack([segments, torch.where(valid, first, size), torch.where(valid, end, 0)], 1)
