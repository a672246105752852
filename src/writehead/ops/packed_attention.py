"""Attention over packed rows with Triton kernels, for training on a GPU.

A packed row holds about ten sentences, so a query sees only a small part of it. The first and last
position of each segment tell a tile which part of the memory to visit. The first kernel computes O
and the logsumexp of a tile of queries, the second its gradient, and the third that of a tile of
memory, summed over all queries that read it. Without atomic additions, results are deterministic.

The rows of a tile are pairs of a query and a read-head. HEADS read-heads that share a write-head
are adjacent, so a tile of ROWS holds ROWS / HEADS queries. A tile with few queries sees a short
span of the memory, and reads K and V once for all its heads. Multi-head attention has HEADS = 1.

Spans limit the positions that a tile visits, and segments decide which of them are visible. A
segment is any int32 number; if it is not contiguous, tiles visit more memory than necessary. Logits
are in base 2, for exp2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import custom_op, register_autograd

from writehead.ops.available import KERNEL_DEPTHS, KERNEL_DTYPES, needs_gradient
from writehead.ops.heads import Heads
from writehead.ops.launch import LOG2E, launch, multiply, tl, triton
from writehead.ops.visibility import Visibility
from writehead.util.devices import runs_triton

Tensors = Sequence[Tensor]

MIN_QUERIES = 16  # the kernels are designed for whole sequences
MAX_WINDOW = 2**30  # longer than any row; the sum of a window and a position fits in int32
PADDING = -(2**31)  # the segment of queries that are padding; no memory position has it
PAST_END = tl.constexpr(PADDING)  # the segment of queries past the last


@dataclass(frozen=True)
class Tile:
    """The size of a tile, in powers of two of at least 16, and its launch options."""

    rows: int  # pairs of a query and a read-head
    memory: int  # positions of K and V
    heads: int = 16  # maximum number of read-heads of one write-head in the rows
    warps: int = 4
    stages: int = 2


# For 2 bytes per element and depths of up to 128, by what a program's tile consists of, and whether
# g = h: the fastest of about ten tiles on an H200, for 128 rows of 256 positions with sentences of
# 27 tokens (docs/benchmarks.md).
TUNED_TILES = {
    "query": Tile(rows=64, memory=16, stages=3),
    "query multi-head": Tile(rows=64, memory=16, stages=3),
    "memory": Tile(rows=32, memory=64, stages=3),
    "memory multi-head": Tile(rows=16, memory=32, warps=2),
}
# By bytes per element and the largest depth, small enough for smaller chips.
TILES = {
    (2, 256): Tile(rows=32, memory=32),
    (4, 64): Tile(rows=32, memory=32),
    (4, 128): Tile(rows=16, memory=16),
    (4, 256): Tile(rows=16, memory=16, stages=1),
}


def why_not(Q: Tensor, K: Tensor, V: Tensor, visibility: Visibility) -> str | None:
    """Returns why the kernels do not support the arguments, or None."""
    n, k, v = Q.shape[2], K.shape[3], V.shape[3]
    is_interpreted_bfloat16 = Q.is_cpu and Q.dtype == torch.bfloat16
    faults = (
        (not runs_triton(Q), "the kernels need a GPU and Triton"),
        (is_interpreted_bfloat16, "Triton's interpreter computes bfloat16 products incorrectly"),
        (visibility.query_segments is None, "the kernels need segments"),
        (visibility.query_positions is not None, "the kernels do not support query_positions"),
        (visibility.lengths is not None, "the kernels do not support lengths; use segment 0"),
        (n < MIN_QUERIES, f"the kernels need at least {MIN_QUERIES} queries per row, not {n}"),
        (Q.dtype not in KERNEL_DTYPES, f"the kernels need 16 or 32 bits, not {Q.dtype}"),
        (not {k, v} <= KERNEL_DEPTHS, f"k={k} and v={v} must be powers of two from 16 to 256"),
    )
    return next((reason for is_fault, reason in faults if is_fault), None)


def attend(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    visibility: Visibility,
    scale: float,
    noise: Tensor | None,
    fused: Tensor | None = None,
) -> Tensor:
    """Computes `attend` of Q [b, h, n, k]: [b, h, n, v], a view of a tensor [b, n, h, v]."""
    tensors = [Q, K, V] if fused is None else [fused]
    shape = [Q.shape[1], K.shape[1], K.shape[3], V.shape[3]]
    shape += [visibility.causal, min(visibility.window or 0, MAX_WINDOW)]
    spans = visibility.cached("spans", lambda: find_spans(visibility))  # shared by layers
    fixed = [*spans, *([] if noise is None else [noise.to(torch.float32).contiguous()])]
    inputs = tensors, fixed, shape, scale
    if torch.compiler.is_compiling() or needs_gradient(*tensors):
        O: Tensor = _forward(*inputs)[0]  # noqa: E741
        return O
    return _run_forward(*inputs)[0]  # the first call of an operator imports PyTorch's compiler


# These operators are opaque to torch.compile, which has nothing to fuse with them; `triton_op`
# would not work in the interpreter. `tensors` are Q, K and V, or one QKV. `fixed` has the spans of
# queries and memory, and the noise, if any. `shape` is h, g, k, v, causal, and the window or 0.
def _run_forward(
    tensors: Tensors, fixed: Tensors, shape: Sequence[int], scale: float
) -> tuple[Tensor, Tensor]:
    """Returns O [b, h, n, v], and the logsumexp of the logits in base 2, [b, h, n]."""
    outputs = _empty_outputs(tensors, fixed, shape)
    _launch(packed_forward_kernel, "query", outputs, (tensors, fixed, shape, scale))
    return outputs


_forward = custom_op("writehead::packed_attention", _run_forward, mutates_args=())


@custom_op("writehead::packed_attention_backward", mutates_args=())
def _backward(
    own: Tensors, tensors: Tensors, fixed: Tensors, shape: Sequence[int], scale: float
) -> list[Tensor]:
    """Returns the gradients of `tensors`; own: dO, O and the logsumexp."""
    gradients = _empty_gradients(own, tensors)
    dQ, dK, dV = (_rows(T) for T in _split(gradients, shape))
    dO, O = (T.transpose(1, 2).contiguous() for T in own[:2])  # noqa: E741
    delta = torch.empty_like(own[2])  # written by the first kernel, read by the second
    shared = tensors, fixed, shape, scale
    _launch(packed_dq_kernel, "query", (dQ, O, dO, own[2], delta), shared)
    _launch(packed_dkv_kernel, "memory", (dK, dV, dO, own[2], delta), shared)
    return gradients


def _empty_outputs(
    tensors: Tensors, _: object, shape: Sequence[int], *__: object
) -> tuple[Tensor, Tensor]:
    Q, _, V = _split(tensors, shape)
    return _empty(Q, V.shape[3]), Q.new_empty(Q.shape[:3], dtype=torch.float32)


def _empty_gradients(_: object, tensors: Tensors, *__: object) -> list[Tensor]:
    if len(tensors) == 1:
        return [tensors[0].new_empty(tensors[0].shape)]
    return [_empty(T, T.shape[3]) for T in tensors]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, fixed, ctx.shape, ctx.scale = inputs
    ctx.fixed = len(fixed)
    ctx.save_for_backward(*output, *fixed, *tensors)
    ctx.set_materialize_grads(False)  # logsumexp has no gradient, and zeros would cost time


def _differentiate(ctx: Any, dO: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    O, logsumexp, *rest = ctx.saved_tensors  # noqa: E741
    fixed, tensors = rest[: ctx.fixed], rest[ctx.fixed :]
    gradients: list[Any] = [None] * len(tensors)
    if dO is not None:
        gradients = _backward([dO, O, logsumexp], tensors, fixed, ctx.shape, ctx.scale)
    return gradients, [None] * len(fixed), None, None


_forward.register_fake(_empty_outputs)
_backward.register_fake(_empty_gradients)
register_autograd(_forward, _differentiate, setup_context=_save)


class Inputs(NamedTuple):
    """The arguments that all kernels share; those in capitals are compile-time constants."""

    Q: tuple[Tensor, int]  # with the elements from one position to the next
    K: tuple[Tensor, int]
    V: tuple[Tensor, int]
    query_spans: Tensor
    memory_spans: Tensor
    noise: Tensor | None  # factors of the weights after the softmax, which are applied to V
    n: int
    m: int
    h: int
    scale: float
    GROUP: int  # read-heads of a write-head
    DEPTH_K: int
    DEPTH_V: int
    CAUSAL: bool
    WINDOW: int  # 0 if there is none
    ROWS: int
    MEMORY: int
    HEADS: int


def _launch(kernel: Any, tile_of: str, own: tuple[Any, ...], shared: tuple[Any, ...]) -> None:
    """Launches a kernel, with a program per tile; `shared` are the arguments of `_forward`."""
    tensors, fixed, (h, g, k, v, *limits), scale = shared
    Q, K, V = (_rows(T) for T in _split(tensors, shared[2]))
    b, n, m, group = len(Q[0]), Q[0].shape[2], K[0].shape[2], h // g
    tile = _choose_tile(tile_of, Q[0].itemsize, max(k, v), multi_head=group == 1)
    heads = min(tile.heads, tile.rows, group & -group)  # a power of two that divides the group
    if tile_of == "memory":
        programs = b * g * triton.cdiv(m, tile.memory)
    else:
        programs = b * h // heads * triton.cdiv(n * heads, tile.rows)
    noise = fixed[2] if len(fixed) > 2 else None
    constants = map(tl.constexpr, (group, k, v, *limits, tile.rows, tile.memory, heads))
    inputs = Inputs(Q, K, V, fixed[0], fixed[1], noise, n, m, h, scale, *constants)
    with torch.cuda.device_of(Q[0]):
        launch(kernel, (programs,))(*own, inputs, num_warps=tile.warps, num_stages=tile.stages)


def _choose_tile(tile_of: str, itemsize: int, depth: int, *, multi_head: bool) -> Tile:
    if itemsize == 2 and depth <= 128:
        return TUNED_TILES[f"{tile_of} multi-head" if multi_head else tile_of]
    return next(
        tile for (size, limit), tile in TILES.items() if size == itemsize and depth <= limit
    )


def _split(tensors: Tensors, shape: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns Q, K and V, or their gradients."""
    Q, K, V = Heads(*shape[:4]).split(tensors[0]) if len(tensors) == 1 else tensors
    return Q, K, V


def _empty(T: Tensor, depth: int) -> Tensor:
    """Returns [b, heads, n, depth] in the layout of projections, [b, n, heads, depth]."""
    b, heads, n, _ = T.shape
    return T.new_empty(b, n, heads, depth).transpose(1, 2)


def _rows(T: Tensor) -> tuple[Tensor, int]:
    """Returns T [b, heads, n, depth], and the number of elements from one position to the next.

    T is copied unless it is columns of a projection [b n, d].
    """
    b, heads, n, depth = T.shape
    by_row, by_head, stride, by_column = T.stride()
    stride = stride if n > 1 else by_row
    fits = (b == 1 or by_row == n * stride) and (heads == 1 or by_head == depth)
    return (T, stride) if fits and by_column == 1 else _rows(_empty(T, depth).copy_(T))


def find_spans(visibility: Visibility) -> tuple[Tensor, Tensor]:
    """Returns int32 tables of n queries [b, 3, n] and m memory positions [b, 3, m].

    They are the segment of each, the first memory position that it sees, or query that sees it, and
    the end, one past the last. The span is empty if there are none.
    """
    given = visibility.query_segments, visibility.memory_segments
    queries, memory = (T.to(torch.int32).contiguous() for T in given if T is not None)
    n, m = queries.shape[1], memory.shape[1]
    first, end = _matches(queries, memory)  # [b, n]
    first_query, end_query = (first, end) if given[0] is given[1] else _matches(memory, queries)
    i, j = (torch.arange(x, dtype=torch.int32, device=queries.device) for x in (n, m))
    if visibility.causal:
        end, first_query = torch.minimum(end, i + 1), torch.maximum(first_query, j)
    if visibility.window is not None:
        window = min(visibility.window, MAX_WINDOW)
        first = torch.maximum(first, i + 1 - window)
        end_query = torch.minimum(end_query, j + window)
    segments = torch.where(queries == 0, PADDING, queries)
    return _table(segments, first, end, m), _table(memory, first_query, end_query, n)


def _matches(segments: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the first and the end of the positions of `others` in the segment of each position.

    The span of padding, and of a segment that `others` does not have, goes from its size to 0.
    """
    size = others.shape[1]
    ordered, index = others.sort(dim=1, stable=True)  # positions of one segment stay in order
    start, stop = (torch.searchsorted(ordered, segments, right=right) for right in (False, True))
    found, index = (start < stop) & (segments != 0), index.to(torch.int32)
    first, last = index.gather(1, start.clamp(max=size - 1)), index.gather(1, (stop - 1).clamp(0))
    return torch.where(found, first, size), torch.where(found, last + 1, 0)


def _table(segments: Tensor, first: Tensor, end: Tensor, size: int) -> Tensor:
    """Returns [b, 3, n]; an empty span goes from `size` to 0, so a tile does not widen."""
    valid = first < end
    return torch.stack([segments, torch.where(valid, first, size), torch.where(valid, end, 0)], 1)


@triton.jit
def _load(T, b, head, i, n, valid, DEPTH: tl.constexpr):
    """Loads [len(i), DEPTH] of T [batch, n, heads, DEPTH], or zeros where `valid` is false."""
    data, stride = T  # stride: elements from i to i + 1
    # this order of the sum needs the fewest registers
    offsets = b * n * stride + head.to(tl.int64) * DEPTH + i.to(tl.int64) * stride
    pointers = data + offsets[:, None] + tl.arange(0, DEPTH)[None, :]
    return tl.load(pointers, mask=valid[:, None], other=0.0)


@triton.jit
def _store(T, X, b, head, i, n, DEPTH: tl.constexpr):
    """Stores X [len(i), DEPTH] in T as `_load` reads it, where i < n."""
    data, stride = T
    offsets = (b * n + i) * stride + head * DEPTH
    pointers = data + offsets[:, None] + tl.arange(0, DEPTH)[None, :]
    tl.store(pointers, X.to(data.dtype.element_ty), mask=(i < n)[:, None])


@triton.jit
def _load_spans(spans, b, i, n, size, segment):
    """Loads the segments, starts and ends at i; past n, `segment` and an empty span."""
    spans += b * 3 * n + i
    valid = i < n
    segments = tl.load(spans, mask=valid, other=segment)
    starts = tl.load(spans + n, mask=valid, other=size)
    return segments, starts, tl.load(spans + 2 * n, mask=valid, other=0)


@triton.jit
def _load_factors(inputs, b, write_head, j, valid):
    """Loads the factors [len(j), 1] of memory positions j from the noise [b, g, m]."""
    row = b * (inputs.h // inputs.GROUP) + write_head
    return tl.load(inputs.noise + row * inputs.m + j, mask=valid, other=0.0)[:, None]


@triton.jit
def _query_tile(inputs):
    """Returns this program's queries.

    These are their row and write-head, and for each of ROWS: the query, its read-head and segment,
    and whether it sees anything; the first and end of the memory that they see; and Q.
    """
    QUERIES: tl.constexpr = inputs.ROWS // inputs.HEADS
    tiles, groups = tl.cdiv(inputs.n, QUERIES), inputs.h // inputs.HEADS
    program, r = tl.program_id(0), tl.arange(0, inputs.ROWS)
    i = program % tiles * QUERIES + r // inputs.HEADS
    head = program // tiles % groups * inputs.HEADS
    b, heads = (program // tiles // groups).to(tl.int64), head + r % inputs.HEADS
    segment, starts, ends = _load_spans(inputs.query_spans, b, i, inputs.n, inputs.m, PAST_END)
    start, end, sees = tl.min(starts), tl.max(ends), starts < ends
    q = _load(inputs.Q, b, heads, i, inputs.n, sees, inputs.DEPTH_K)
    return b, head // inputs.GROUP, i, heads, segment, sees, start, end, q


@triton.jit
def _visible(q_segment, m_segment, i, j, inputs):
    """Returns whether query i may see memory position j; the arguments broadcast."""
    visible = q_segment == m_segment
    if inputs.CAUSAL:
        visible = visible & (j <= i)
    if inputs.WINDOW > 0:
        visible = visible & (j > i - inputs.WINDOW)
    return visible


@triton.jit
def _read_memory(inputs, q, q_segment, b, write_head, i, first, end):
    """Returns K and V from position `first` on, the logits of q, and which of them are visible."""
    j = first + tl.arange(0, inputs.MEMORY)
    valid = j < end
    m_segment = tl.load(inputs.memory_spans + b * 3 * inputs.m + j, mask=valid, other=0)
    k = _load(inputs.K, b, write_head, j, inputs.m, valid, inputs.DEPTH_K)
    v = _load(inputs.V, b, write_head, j, inputs.m, valid, inputs.DEPTH_V)
    logits = tl.dot(q, tl.trans(k), input_precision="ieee") * (inputs.scale * LOG2E)
    visible = _visible(q_segment[:, None], m_segment[None, :], i[:, None], j[None, :], inputs)
    if inputs.noise is not None:
        v = (v * _load_factors(inputs, b, write_head, j, valid)).to(v.dtype)
    return k, v, logits, visible


@triton.jit
def attend_tile(logits, v, largest, total, acc):
    """Returns the running softmax after one more tile: largest logit, sum, weighted values."""
    now = tl.maximum(largest, tl.max(logits, axis=1))
    base = tl.where(now == float("-inf"), 0.0, now)  # -inf - -inf would be NaN
    p = tl.exp2(logits - base[:, None])
    kept = tl.exp2(largest - base)
    total = total * kept + tl.sum(p, axis=1)
    acc = tl.dot(p.to(v.dtype), v, acc * kept[:, None], input_precision="ieee")
    return now, total, acc


@triton.jit
def packed_forward_kernel(O, logsumexp, inputs):  # noqa: E741
    """Computes O and logsumexp of one tile of queries per program."""
    n, h = inputs.n, inputs.h
    DEPTH_V: tl.constexpr = inputs.DEPTH_V
    b, write_head, i, heads, q_segment, _sees, start, end, q = _query_tile(inputs)
    row_max = tl.full([inputs.ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([inputs.ROWS], tl.float32)
    o = tl.zeros([inputs.ROWS, DEPTH_V], tl.float32)
    for first in range(start, end, inputs.MEMORY):
        _, v, logits, visible = _read_memory(inputs, q, q_segment, b, write_head, i, first, end)
        logits = tl.where(visible, logits, float("-inf"))
        row_max, row_sum, o = attend_tile(logits, v, row_max, row_sum, o)
    fully_masked = row_sum == 0.0
    row_sum = tl.where(fully_masked, 1.0, row_sum)
    _store((O, h * DEPTH_V), o / row_sum[:, None], b, heads, i, n, DEPTH_V)
    log_sum = tl.where(fully_masked, 0.0, row_max + tl.log2(row_sum))
    tl.store(logsumexp + (b * h + heads) * n + i, log_sum, mask=i < n)


@triton.jit
def packed_dq_kernel(dQ, O, dO, logsumexp, delta, inputs):  # noqa: E741
    """Computes dQ, and delta for `packed_dkv_kernel`, of one tile of queries per program.

    delta = sum(weights · d_weights) = sum(O dO). In float32, an additional pass over the memory
    computes the first sum from the same products as dQ. The gradient of a query that sees one
    position is then exactly zero, as in plain PyTorch. In 16 bits, rounding hides the difference.
    """
    n, h = inputs.n, inputs.h
    DEPTH_V: tl.constexpr = inputs.DEPTH_V
    b, write_head, i, heads, q_segment, sees, start, end, q = _query_tile(inputs)
    do = _load((dO, h * DEPTH_V), b, heads, i, n, sees, DEPTH_V)
    row = (b * h + heads) * n + i
    log_sum = tl.load(logsumexp + row, mask=i < n, other=0.0)
    TWO_PASSES: tl.constexpr = dO.dtype.element_ty == tl.float32
    if TWO_PASSES:
        row_delta = tl.zeros([inputs.ROWS], tl.float32)
    else:
        o = _load((O, h * DEPTH_V), b, heads, i, n, sees, DEPTH_V)
        row_delta = tl.sum(multiply(o.to(tl.float32), do.to(tl.float32)), 1)

    dq = tl.zeros([inputs.ROWS, inputs.DEPTH_K], tl.float32)
    for PASS in tl.static_range(0 if TWO_PASSES else 1, 2):
        for first in range(start, end, inputs.MEMORY):
            k, v, logits, visible = _read_memory(inputs, q, q_segment, b, write_head, i, first, end)
            weights = tl.exp2(tl.where(visible, logits - log_sum[:, None], float("-inf")))
            d_weights = tl.dot(do, tl.trans(v), input_precision="ieee")
            if PASS == 0:
                row_delta += tl.sum(multiply(weights, d_weights), 1)
            else:
                d_logits = weights * (d_weights - row_delta[:, None])
                dq = tl.dot(d_logits.to(k.dtype), k, dq, input_precision="ieee")

    tl.store(delta + row, row_delta, mask=i < n)
    _store(dQ, dq * inputs.scale, b, heads, i, n, inputs.DEPTH_K)


@triton.jit
def packed_dkv_kernel(dK, dV, dO, logsumexp, delta, inputs):
    """Computes dK and dV of one tile of a write-head's memory per program."""
    n, m, h = inputs.n, inputs.m, inputs.h
    GROUP: tl.constexpr = inputs.GROUP
    HEADS: tl.constexpr = inputs.HEADS
    DEPTH_K: tl.constexpr = inputs.DEPTH_K
    DEPTH_V: tl.constexpr = inputs.DEPTH_V
    program = tl.program_id(0)
    tiles = tl.cdiv(m, inputs.MEMORY)
    j = program % tiles * inputs.MEMORY + tl.arange(0, inputs.MEMORY)
    write_head = program // tiles % (h // GROUP)
    b = (program // tiles // (h // GROUP)).to(tl.int64)
    m_segment, starts, ends = _load_spans(inputs.memory_spans, b, j, m, n, 0)
    start, end = tl.min(starts), tl.max(ends)
    k = _load(inputs.K, b, write_head, j, m, starts < ends, DEPTH_K)
    v = _load(inputs.V, b, write_head, j, m, starts < ends, DEPTH_V)
    if inputs.noise is not None:
        factors = _load_factors(inputs, b, write_head, j, j < m)
        v = (v * factors).to(v.dtype)

    r = tl.arange(0, inputs.ROWS)
    spans = tl.cdiv(tl.maximum(end - start, 0), inputs.ROWS // HEADS)
    dk = tl.zeros([inputs.MEMORY, DEPTH_K], tl.float32)
    dv = tl.zeros([inputs.MEMORY, DEPTH_V], tl.float32)
    for tile in range(0, spans * (GROUP // HEADS)):  # of all queries and heads that read it
        heads = write_head * GROUP + tile // spans * HEADS + r % HEADS
        i = start + tile % spans * (inputs.ROWS // HEADS) + r // HEADS
        valid = i < end
        q_segment = tl.load(inputs.query_spans + b * 3 * n + i, mask=valid, other=PAST_END)
        q = _load(inputs.Q, b, heads, i, n, valid, DEPTH_K)
        do = _load((dO, h * DEPTH_V), b, heads, i, n, valid, DEPTH_V)
        row = (b * h + heads) * n + i
        log_sum = tl.load(logsumexp + row, mask=valid, other=0.0)
        row_delta = tl.load(delta + row, mask=valid, other=0.0)
        # transposed, [MEMORY, ROWS], as the products for dv and dk need them
        logits = tl.dot(k, tl.trans(q), input_precision="ieee") * (inputs.scale * LOG2E)
        visible = _visible(q_segment[None, :], m_segment[:, None], i[None, :], j[:, None], inputs)
        weights = tl.exp2(tl.where(visible, logits - log_sum[None, :], float("-inf")))
        dv = tl.dot(weights.to(do.dtype), do, dv, input_precision="ieee")
        d_weights = tl.dot(v, tl.trans(do), input_precision="ieee")
        d_logits = weights * (d_weights - row_delta[None, :])
        dk = tl.dot(d_logits.to(q.dtype), q, dk, input_precision="ieee")

    if inputs.noise is not None:
        dv *= factors
    _store(dK, dk * inputs.scale, b, write_head, j, m, DEPTH_K)
    _store(dV, dv, b, write_head, j, m, DEPTH_V)
