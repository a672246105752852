"""The Triton kernels of `packed`, which says what their tensors are and launches them.

A tile's rows are pairs of a query and a read-head: SHARED read-heads of one write-head stand side
by side, so that a tile of ROWS holds ROWS / SHARED queries. Few queries have a narrow range of
visible memory, and K and V are read once for all heads of the tile. Multi-head has SHARED = 1.

With NOISE the weight of a memory position is multiplied, after the softmax, by its factor: O is
softmax(Q K^T) diag(noise) V. The factor is applied to V, which is rounded then: a query that sees
one position gets exactly its row of that.

Everything is masked by segment as well as bounded by range, so a segment need not be contiguous.
Offsets of batch rows, heads and positions are 64-bit. Logits are kept times log2(e), for exp2.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
NOWHERE = tl.constexpr(-(2**31))  # the segment of a query that there is not


@triton.jit
def _rows(T, row, head, position, by_row, by_head, by_position, DEPTH: tl.constexpr):
    """Pointers [rows, DEPTH] into T [b, heads, positions, DEPTH] by all strides but the last."""
    start = row * by_row + head.to(tl.int64) * by_head + position.to(tl.int64) * by_position
    return T + start[:, None] + tl.arange(0, DEPTH)[None, :]


@triton.jit
def _own_rows(T, row, head, position, heads, positions, DEPTH: tl.constexpr):
    """Pointers [rows, DEPTH] into a tensor that we laid out, as [b, positions, heads, DEPTH]."""
    start = ((row * positions + position) * heads + head) * DEPTH
    return T + start[:, None] + tl.arange(0, DEPTH)[None, :]


@triton.jit
def _factors(noise, row, write_head, j, g, m, there):
    """The factors [positions, 1] of memory positions j, of noise [b, g, m]."""
    return tl.load(noise + (row * g + write_head) * m + j, mask=there, other=0.0)[:, None]


@triton.jit
def _query_tile(n, h, ROWS: tl.constexpr, SHARED: tl.constexpr):
    """This program's batch row, queries [ROWS], read-heads [ROWS] and the first of them."""
    tiles = tl.cdiv(n, ROWS // SHARED)
    program = tl.program_id(0)
    r = tl.arange(0, ROWS)
    i = program % tiles * (ROWS // SHARED) + r // SHARED
    head = program // tiles % (h // SHARED) * SHARED
    row = (program // tiles // (h // SHARED)).to(tl.int64)
    return row, i, head + r % SHARED, head


@triton.jit
def _visible(reader, segment, i, j, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Which pairs may be seen, of queries and memory that broadcast against each other."""
    seen = reader == segment
    if CAUSAL:
        seen = seen & (j <= i)
    if WINDOW > 0:
        seen = seen & (j > i - WINDOW)
    return seen


@triton.jit
def forward(
    Q,
    K,
    V,
    O,  # noqa: E741
    logsumexp,
    queries,
    memory,
    noise,
    q_b,
    q_h,
    q_i,
    k_b,
    k_g,
    k_j,
    v_b,
    v_g,
    v_j,
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
    SHARED: tl.constexpr,
):
    """O and logsumexp. A program owns a tile of queries, and reduces over their memory."""
    row, i, heads, head = _query_tile(n, h, ROWS, SHARED)
    there = i < n
    reader = tl.load(queries + row * 3 * n + i, mask=there, other=NOWHERE)
    lo = tl.load(queries + (row * 3 + 1) * n + i, mask=there, other=m)
    hi = tl.load(queries + (row * 3 + 2) * n + i, mask=there, other=0)
    first, last = tl.min(lo), tl.max(hi)
    sees = lo < hi
    q = tl.load(_rows(Q, row, heads, i, q_b, q_h, q_i, DEPTH_K), mask=sees[:, None], other=0.0)

    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DEPTH_V], tl.float32)
    for start in range(first, last, MEMORY):
        j = start + tl.arange(0, MEMORY)
        inside = j < last
        segment = tl.load(memory + row * 3 * m + j, mask=inside, other=0)
        k = tl.load(
            _rows(K, row, head // GROUP, j, k_b, k_g, k_j, DEPTH_K), mask=inside[:, None], other=0.0
        )
        v = tl.load(
            _rows(V, row, head // GROUP, j, v_b, v_g, v_j, DEPTH_V), mask=inside[:, None], other=0.0
        )
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E)
        seen = _visible(reader[:, None], segment[None, :], i[:, None], j[None, :], CAUSAL, WINDOW)
        logits = tl.where(seen, logits, float("-inf"))
        higher = tl.maximum(highest, tl.max(logits, 1))
        # a query that has seen nothing yet would subtract infinity from itself
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(logits - base[:, None])
        fade = tl.exp2(highest - base)
        total = total * fade + tl.sum(weights, 1)
        mixed = mixed * fade[:, None]
        if NOISE:
            v = (v * _factors(noise, row, head // GROUP, j, h // GROUP, m, inside)).to(v.dtype)
        mixed = tl.dot(weights.to(v.dtype), v, mixed, input_precision="ieee")
        highest = higher

    nothing = total == 0.0
    mixed = mixed / tl.where(nothing, 1.0, total)[:, None]
    out = _own_rows(O, row, heads, i, h, n, DEPTH_V)
    tl.store(out, mixed.to(O.dtype.element_ty), mask=there[:, None])
    sums = tl.where(nothing, 0.0, highest + tl.log2(tl.where(nothing, 1.0, total)))
    tl.store(logsumexp + (row * h + heads) * n + i, sums, mask=there)


@triton.jit
def backward_queries(
    Q,
    K,
    V,
    O,  # noqa: E741
    dO,
    logsumexp,
    delta,
    dQ,
    queries,
    memory,
    noise,
    q_b,
    q_h,
    q_i,
    k_b,
    k_g,
    k_j,
    v_b,
    v_g,
    v_j,
    o_b,
    o_h,
    o_i,
    d_b,
    d_h,
    d_i,
    dq_b,
    dq_h,
    dq_i,
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
    SHARED: tl.constexpr,
):
    """dQ, and delta for `backward_memory`. A program owns a tile of queries.

    delta is the sum of a query's weights times their gradients, which is sum(O dO). In float32 a
    turn before the one for dQ sums the very products that it will be taken from: a query that sees
    one position then has a difference of exactly zero, as plain PyTorch has it. That reads K and V
    twice, so 16 bits, whose own rounding is larger, do without.
    """
    row, i, heads, head = _query_tile(n, h, ROWS, SHARED)
    there = i < n
    reader = tl.load(queries + row * 3 * n + i, mask=there, other=NOWHERE)
    lo = tl.load(queries + (row * 3 + 1) * n + i, mask=there, other=m)
    hi = tl.load(queries + (row * 3 + 2) * n + i, mask=there, other=0)
    first, last = tl.min(lo), tl.max(hi)
    sees = (lo < hi)[:, None]
    q = tl.load(_rows(Q, row, heads, i, q_b, q_h, q_i, DEPTH_K), mask=sees, other=0.0)
    do = tl.load(_rows(dO, row, heads, i, d_b, d_h, d_i, DEPTH_V), mask=sees, other=0.0)
    sums = tl.load(logsumexp + (row * h + heads) * n + i, mask=there, other=0.0)
    EXACT: tl.constexpr = Q.dtype.element_ty == tl.float32
    if EXACT:
        shift = tl.zeros([ROWS], tl.float32)
    else:
        o = tl.load(_rows(O, row, heads, i, o_b, o_h, o_i, DEPTH_V), mask=sees, other=0.0)
        shift = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)

    dq = tl.zeros([ROWS, DEPTH_K], tl.float32)
    for TURN in tl.static_range(0 if EXACT else 1, 2):
        for start in range(first, last, MEMORY):
            j = start + tl.arange(0, MEMORY)
            inside = j < last
            segment = tl.load(memory + row * 3 * m + j, mask=inside, other=0)
            k = tl.load(
                _rows(K, row, head // GROUP, j, k_b, k_g, k_j, DEPTH_K),
                mask=inside[:, None],
                other=0.0,
            )
            v = tl.load(
                _rows(V, row, head // GROUP, j, v_b, v_g, v_j, DEPTH_V),
                mask=inside[:, None],
                other=0.0,
            )
            logits = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E)
            seen = _visible(
                reader[:, None], segment[None, :], i[:, None], j[None, :], CAUSAL, WINDOW
            )
            weights = tl.exp2(tl.where(seen, logits - sums[:, None], float("-inf")))
            if NOISE:
                v = (v * _factors(noise, row, head // GROUP, j, h // GROUP, m, inside)).to(v.dtype)
            d_weights = tl.dot(do, tl.trans(v), input_precision="ieee")
            if TURN == 0:
                shift += tl.sum(weights * d_weights, 1)
            else:
                d_logits = weights * (d_weights - shift[:, None])
                dq = tl.dot(d_logits.to(k.dtype), k, dq, input_precision="ieee")

    tl.store(delta + (row * h + heads) * n + i, shift, mask=there)
    out = _rows(dQ, row, heads, i, dq_b, dq_h, dq_i, DEPTH_K)
    tl.store(out, (dq * scale).to(dQ.dtype.element_ty), mask=there[:, None])


@triton.jit
def backward_memory(
    Q,
    K,
    V,
    dO,
    logsumexp,
    delta,
    dK,
    dV,
    queries,
    memory,
    noise,
    q_b,
    q_h,
    q_i,
    k_b,
    k_g,
    k_j,
    v_b,
    v_g,
    v_j,
    d_b,
    d_h,
    d_i,
    dk_b,
    dk_g,
    dk_j,
    dv_b,
    dv_g,
    dv_j,
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
    SHARED: tl.constexpr,
):
    """dK and dV. A program owns a tile of one write-head's memory, and reduces over its readers.

    It keeps K and V, and takes the read-heads of its group and their queries in tiles of ROWS, all
    in one loop. Nobody else writes what it does, so nothing is added atomically.
    """
    program = tl.program_id(0)
    tiles = tl.cdiv(m, MEMORY)
    j = program % tiles * MEMORY + tl.arange(0, MEMORY)
    write_head = program // tiles % (h // GROUP)
    row = (program // tiles // (h // GROUP)).to(tl.int64)
    there = j < m
    segment = tl.load(memory + row * 3 * m + j, mask=there, other=0)
    lo = tl.load(memory + (row * 3 + 1) * m + j, mask=there, other=n)
    hi = tl.load(memory + (row * 3 + 2) * m + j, mask=there, other=0)
    first, last = tl.min(lo), tl.max(hi)
    seen_by_any = (lo < hi)[:, None]
    k = tl.load(_rows(K, row, write_head, j, k_b, k_g, k_j, DEPTH_K), mask=seen_by_any, other=0.0)
    v = tl.load(_rows(V, row, write_head, j, v_b, v_g, v_j, DEPTH_V), mask=seen_by_any, other=0.0)
    if NOISE:
        factors = _factors(noise, row, write_head, j, h // GROUP, m, there)
        v = (v * factors).to(v.dtype)

    r = tl.arange(0, ROWS)
    spans = tl.cdiv(tl.maximum(last - first, 0), ROWS // SHARED)
    dk = tl.zeros([MEMORY, DEPTH_K], tl.float32)
    dv = tl.zeros([MEMORY, DEPTH_V], tl.float32)
    for turn in range(0, spans * (GROUP // SHARED)):
        heads = write_head * GROUP + turn // spans * SHARED + r % SHARED
        i = first + turn % spans * (ROWS // SHARED) + r // SHARED
        inside = i < last
        reader = tl.load(queries + row * 3 * n + i, mask=inside, other=NOWHERE)
        q = tl.load(
            _rows(Q, row, heads, i, q_b, q_h, q_i, DEPTH_K), mask=inside[:, None], other=0.0
        )
        do = tl.load(
            _rows(dO, row, heads, i, d_b, d_h, d_i, DEPTH_V), mask=inside[:, None], other=0.0
        )
        sums = tl.load(logsumexp + (row * h + heads) * n + i, mask=inside, other=0.0)
        shift = tl.load(delta + (row * h + heads) * n + i, mask=inside, other=0.0)
        # transposed, [MEMORY, ROWS], so that both products that follow take them as they are
        logits = tl.dot(k, tl.trans(q), input_precision="ieee") * (scale * LOG2E)
        seen = _visible(reader[None, :], segment[:, None], i[None, :], j[:, None], CAUSAL, WINDOW)
        weights = tl.exp2(tl.where(seen, logits - sums[None, :], float("-inf")))
        dv = tl.dot(weights.to(do.dtype), do, dv, input_precision="ieee")
        d_weights = tl.dot(v, tl.trans(do), input_precision="ieee")
        d_logits = weights * (d_weights - shift[None, :])
        dk = tl.dot(d_logits.to(q.dtype), q, dk, input_precision="ieee")

    out = _rows(dK, row, write_head, j, dk_b, dk_g, dk_j, DEPTH_K)
    tl.store(out, (dk * scale).to(dK.dtype.element_ty), mask=there[:, None])
    if NOISE:
        # once for all readers, whose weights of one position have one factor
        dv *= factors
    out = _rows(dV, row, write_head, j, dv_b, dv_g, dv_j, DEPTH_V)
    tl.store(out, dv.to(dV.dtype.element_ty), mask=there[:, None])
