"""The Triton kernels of `packed_attention.py`.

The rows of a tile are pairs of a query and a read-head. HEADS read-heads that share a write-head
are adjacent, so a tile of ROWS holds ROWS / HEADS queries. A tile with few queries sees a short
span of the memory, and reads K and V once for all its heads. Multi-head attention has HEADS = 1.

Spans limit the positions that a tile visits, and segments decide which of them are visible, so a
segment does not have to be contiguous. With NOISE, each memory position has a factor for its weight
after the softmax, which is applied to V. Logits are in base 2, for exp2.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
PADDING = tl.constexpr(-(2**31))  # the segment of queries past the last


@triton.jit
def _load(T, b, head, i, n, stride, valid, DEPTH: tl.constexpr):
    """Loads [len(i), DEPTH] of T [batch, n, heads, DEPTH], or zeros where `valid` is false.

    stride: the number of elements from i to i + 1.
    """
    # this order of the sum needs the fewest registers
    offsets = b * n * stride + head.to(tl.int64) * DEPTH + i.to(tl.int64) * stride
    pointers = T + offsets[:, None] + tl.arange(0, DEPTH)[None, :]
    return tl.load(pointers, mask=valid[:, None], other=0.0)


@triton.jit
def _store(T, X, b, head, i, n, stride, DEPTH: tl.constexpr):
    """Stores X [len(i), DEPTH] in T as `_load` reads it, where i < n."""
    offsets = (b * n + i) * stride + head * DEPTH
    pointers = T + offsets[:, None] + tl.arange(0, DEPTH)[None, :]
    tl.store(pointers, X.to(T.dtype.element_ty), mask=(i < n)[:, None])


@triton.jit
def _load_spans(spans, b, i, n, size, segment):
    """Loads the segments, starts and ends at i; past n, `segment` and an empty span."""
    spans += b * 3 * n + i
    valid = i < n
    segments = tl.load(spans, mask=valid, other=segment)
    starts = tl.load(spans + n, mask=valid, other=size)
    return segments, starts, tl.load(spans + 2 * n, mask=valid, other=0)


@triton.jit
def _load_factors(noise, b, g, write_head, j, m, valid):
    """Loads the factors [len(j), 1] of memory positions j from noise [b, g, m]."""
    return tl.load(noise + (b * g + write_head) * m + j, mask=valid, other=0.0)[:, None]


@triton.jit
def _query_tile(n, h, ROWS: tl.constexpr, HEADS: tl.constexpr):
    """Returns this program's batch row, queries [ROWS], read-heads [ROWS] and first read-head."""
    tiles = tl.cdiv(n, ROWS // HEADS)
    program = tl.program_id(0)
    r = tl.arange(0, ROWS)
    i = program % tiles * (ROWS // HEADS) + r // HEADS
    head = program // tiles % (h // HEADS) * HEADS
    b = (program // tiles // (h // HEADS)).to(tl.int64)
    return b, i, head + r % HEADS, head


@triton.jit
def _visible(q_segment, m_segment, i, j, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Returns whether query i may see memory position j; the arguments broadcast."""
    visible = q_segment == m_segment
    if CAUSAL:
        visible = visible & (j <= i)
    if WINDOW > 0:
        visible = visible & (j > i - WINDOW)
    return visible


@triton.jit
def packed_forward_kernel(
    O,  # noqa: E741
    logsumexp,
    Q,
    K,
    V,
    q_stride,
    k_stride,
    v_stride,
    query_spans,
    memory_spans,
    noise,
    n,
    m,
    h,
    scale,
    GROUP: tl.constexpr,
    DEPTH_K: tl.constexpr,
    DEPTH_V: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    NOISE: tl.constexpr,
    ROWS: tl.constexpr,
    MEMORY: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Computes O and logsumexp of one tile of queries per program."""
    b, i, heads, head = _query_tile(n, h, ROWS, HEADS)
    write_head = head // GROUP
    q_segment, starts, ends = _load_spans(query_spans, b, i, n, m, PADDING)
    start, end = tl.min(starts), tl.max(ends)
    q = _load(Q, b, heads, i, n, q_stride, starts < ends, DEPTH_K)

    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    o = tl.zeros([ROWS, DEPTH_V], tl.float32)
    for first in range(start, end, MEMORY):
        j = first + tl.arange(0, MEMORY)
        valid = j < end
        m_segment = tl.load(memory_spans + b * 3 * m + j, mask=valid, other=0)
        k = _load(K, b, write_head, j, m, k_stride, valid, DEPTH_K)
        v = _load(V, b, write_head, j, m, v_stride, valid, DEPTH_V)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E)
        visible = _visible(
            q_segment[:, None], m_segment[None, :], i[:, None], j[None, :], CAUSAL, WINDOW
        )
        logits = tl.where(visible, logits, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(logits, 1))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)  # -inf - -inf would be NaN
        weights = tl.exp2(logits - base[:, None])
        rescale = tl.exp2(row_max - base)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        o = o * rescale[:, None]
        if NOISE:
            v = (v * _load_factors(noise, b, h // GROUP, write_head, j, m, valid)).to(v.dtype)
        o = tl.dot(weights.to(v.dtype), v, o, input_precision="ieee")
        row_max = new_max

    fully_masked = row_sum == 0.0
    row_sum = tl.where(fully_masked, 1.0, row_sum)
    _store(O, o / row_sum[:, None], b, heads, i, n, h * DEPTH_V, DEPTH_V)
    log_sum = tl.where(fully_masked, 0.0, row_max + tl.log2(row_sum))
    tl.store(logsumexp + (b * h + heads) * n + i, log_sum, mask=i < n)


@triton.jit
def packed_dq_kernel(
    dQ,
    dq_stride,
    O,  # noqa: E741
    dO,
    logsumexp,
    delta,
    Q,
    K,
    V,
    q_stride,
    k_stride,
    v_stride,
    query_spans,
    memory_spans,
    noise,
    n,
    m,
    h,
    scale,
    GROUP: tl.constexpr,
    DEPTH_K: tl.constexpr,
    DEPTH_V: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    NOISE: tl.constexpr,
    ROWS: tl.constexpr,
    MEMORY: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Computes dQ, and delta for `packed_dkv_kernel`, of one tile of queries per program.

    delta = sum(weights · d_weights) = sum(O dO). In float32, an additional pass over the memory
    computes the first sum from the same products as dQ. The gradient of a query that sees one
    position is then exactly zero, as in plain PyTorch. In 16 bits, rounding hides the difference.
    """
    b, i, heads, head = _query_tile(n, h, ROWS, HEADS)
    write_head = head // GROUP
    q_segment, starts, ends = _load_spans(query_spans, b, i, n, m, PADDING)
    start, end = tl.min(starts), tl.max(ends)
    sees = starts < ends
    q = _load(Q, b, heads, i, n, q_stride, sees, DEPTH_K)
    do = _load(dO, b, heads, i, n, h * DEPTH_V, sees, DEPTH_V)
    row = (b * h + heads) * n + i
    log_sum = tl.load(logsumexp + row, mask=i < n, other=0.0)
    TWO_PASSES: tl.constexpr = Q.dtype.element_ty == tl.float32
    if TWO_PASSES:
        row_delta = tl.zeros([ROWS], tl.float32)
    else:
        o = _load(O, b, heads, i, n, h * DEPTH_V, sees, DEPTH_V)
        row_delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)

    dq = tl.zeros([ROWS, DEPTH_K], tl.float32)
    for PASS in tl.static_range(0 if TWO_PASSES else 1, 2):
        for first in range(start, end, MEMORY):
            j = first + tl.arange(0, MEMORY)
            valid = j < end
            m_segment = tl.load(memory_spans + b * 3 * m + j, mask=valid, other=0)
            k = _load(K, b, write_head, j, m, k_stride, valid, DEPTH_K)
            v = _load(V, b, write_head, j, m, v_stride, valid, DEPTH_V)
            logits = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E)
            visible = _visible(
                q_segment[:, None], m_segment[None, :], i[:, None], j[None, :], CAUSAL, WINDOW
            )
            weights = tl.exp2(tl.where(visible, logits - log_sum[:, None], float("-inf")))
            if NOISE:
                v = (v * _load_factors(noise, b, h // GROUP, write_head, j, m, valid)).to(v.dtype)
            d_weights = tl.dot(do, tl.trans(v), input_precision="ieee")
            if PASS == 0:
                row_delta += tl.sum(weights * d_weights, 1)
            else:
                d_logits = weights * (d_weights - row_delta[:, None])
                dq = tl.dot(d_logits.to(k.dtype), k, dq, input_precision="ieee")

    tl.store(delta + row, row_delta, mask=i < n)
    _store(dQ, dq * scale, b, heads, i, n, dq_stride, DEPTH_K)


@triton.jit
def packed_dkv_kernel(
    dK,
    dV,
    dk_stride,
    dv_stride,
    dO,
    logsumexp,
    delta,
    Q,
    K,
    V,
    q_stride,
    k_stride,
    v_stride,
    query_spans,
    memory_spans,
    noise,
    n,
    m,
    h,
    scale,
    GROUP: tl.constexpr,
    DEPTH_K: tl.constexpr,
    DEPTH_V: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    NOISE: tl.constexpr,
    ROWS: tl.constexpr,
    MEMORY: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Computes dK and dV of one tile of a write-head's memory per program.

    One loop visits the tiles of all queries and read-heads that read this memory.
    """
    program = tl.program_id(0)
    tiles = tl.cdiv(m, MEMORY)
    j = program % tiles * MEMORY + tl.arange(0, MEMORY)
    write_head = program // tiles % (h // GROUP)
    b = (program // tiles // (h // GROUP)).to(tl.int64)
    m_segment, starts, ends = _load_spans(memory_spans, b, j, m, n, 0)
    start, end = tl.min(starts), tl.max(ends)
    k = _load(K, b, write_head, j, m, k_stride, starts < ends, DEPTH_K)
    v = _load(V, b, write_head, j, m, v_stride, starts < ends, DEPTH_V)
    if NOISE:
        factors = _load_factors(noise, b, h // GROUP, write_head, j, m, j < m)
        v = (v * factors).to(v.dtype)

    r = tl.arange(0, ROWS)
    spans = tl.cdiv(tl.maximum(end - start, 0), ROWS // HEADS)
    dk = tl.zeros([MEMORY, DEPTH_K], tl.float32)
    dv = tl.zeros([MEMORY, DEPTH_V], tl.float32)
    for tile in range(0, spans * (GROUP // HEADS)):
        heads = write_head * GROUP + tile // spans * HEADS + r % HEADS
        i = start + tile % spans * (ROWS // HEADS) + r // HEADS
        valid = i < end
        q_segment = tl.load(query_spans + b * 3 * n + i, mask=valid, other=PADDING)
        q = _load(Q, b, heads, i, n, q_stride, valid, DEPTH_K)
        do = _load(dO, b, heads, i, n, h * DEPTH_V, valid, DEPTH_V)
        row = (b * h + heads) * n + i
        log_sum = tl.load(logsumexp + row, mask=valid, other=0.0)
        row_delta = tl.load(delta + row, mask=valid, other=0.0)
        # transposed, [MEMORY, ROWS], as the products for dv and dk need them
        logits = tl.dot(k, tl.trans(q), input_precision="ieee") * (scale * LOG2E)
        visible = _visible(
            q_segment[None, :], m_segment[:, None], i[None, :], j[:, None], CAUSAL, WINDOW
        )
        weights = tl.exp2(tl.where(visible, logits - log_sum[None, :], float("-inf")))
        dv = tl.dot(weights.to(do.dtype), do, dv, input_precision="ieee")
        d_weights = tl.dot(v, tl.trans(do), input_precision="ieee")
        d_logits = weights * (d_weights - row_delta[None, :])
        dk = tl.dot(d_logits.to(q.dtype), q, dk, input_precision="ieee")

    if NOISE:
        dv *= factors
    _store(dK, dk * scale, b, write_head, j, m, dk_stride, DEPTH_K)
    _store(dV, dv, b, write_head, j, m, dv_stride, DEPTH_V)
