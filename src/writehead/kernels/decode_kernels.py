"""The Triton kernels of `decode`, which says what their tensors are and launches them.

A program of `attend_kernel` owns a row of K and V; one of `combine_kernel` puts together what the
programs of several parts found.
"""

import triton
import triton.language as tl

from writehead.kernels.launch import hand_over, wait_for_input


@triton.jit
def attend_kernel(
    Q,
    q_stride,
    K,
    V,
    k_row,
    k_head,
    k_position,
    v_row,
    v_head,
    v_position,
    lengths,
    growing,
    ancestors,
    O,  # noqa: E741
    part_O,
    part_statistics,
    X,
    x_row,
    d,
    epsilon,
    size,
    scale,
    G: tl.constexpr,
    SHARE: tl.constexpr,
    BEAMS: tl.constexpr,
    SIZE_Q: tl.constexpr,
    SIZE_K: tl.constexpr,
    SIZE_V: tl.constexpr,
    POSITIONS: tl.constexpr,
    SPLITS: tl.constexpr,
    SIZE_D: tl.constexpr,
    APPENDS: tl.constexpr,
    ANCESTORS: tl.constexpr,
    PADDED: tl.constexpr,
    EARLY: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One program owns a row of K and V, a write-head of it, and a part of its positions.

    It reads its queries, then K and V once, tile by tile, with a running softmax in base 2.
    """
    head, row = tl.program_id(0) % G, (tl.program_id(0) // G).to(tl.int64)
    part = tl.program_id(1) if SPLITS > 1 else 0
    queries = tl.arange(0, SIZE_Q)
    is_query = queries < BEAMS * SHARE
    rows = row * BEAMS + queries // SHARE  # of Q and O
    heads = head * SHARE + queries % SHARE
    ks, vs = tl.arange(0, SIZE_K), tl.arange(0, SIZE_V)

    length = tl.load(lengths + row).to(tl.int32)
    alive = tl.sum(tl.load(growing + rows, mask=is_query, other=0)) > 0
    slot = length % size  # where the new position goes
    there = tl.minimum(length, size)
    end = tl.where(alive, size if PADDED else there, 0)
    width = tl.cdiv(tl.cdiv(end, SPLITS), POSITIONS) * POSITIONS
    begin = part * width
    end = tl.minimum(end, begin + width)

    # lengths and what a cache holds are older than the kernel in front, queries are not
    if EARLY:
        k_tile, v_tile = _load_tile(
            K,
            V,
            k_row,
            k_head,
            k_position,
            v_row,
            v_head,
            v_position,
            ancestors,
            row,
            head,
            size,
            begin,
            end,
            SIZE_K,
            SIZE_V,
            POSITIONS,
            ANCESTORS,
        )
    wait_for_input(CHAINED)
    hand_over(CHAINED)
    q = tl.load(
        Q + rows[:, None] * q_stride + heads[:, None] * SIZE_K + ks[None, :],
        mask=is_query[:, None],
        other=0.0,
    )
    if SIZE_D > 0:
        ds = tl.arange(0, SIZE_D)
        if BEAMS == 1:
            x = tl.load(X + row * x_row + ds, mask=ds < d, other=0.0).to(tl.float32)
            root = tl.rsqrt(tl.sum(x * x, axis=0) / d + epsilon)
            q = (q.to(tl.float32) * root).to(q.dtype)
        else:
            roots = tl.zeros([SIZE_Q], tl.float32)
            for beam in tl.static_range(BEAMS):
                x = tl.load(X + (row * BEAMS + beam) * x_row + ds, mask=ds < d, other=0.0)
                x = x.to(tl.float32)
                one = tl.rsqrt(tl.sum(x * x, axis=0) / d + epsilon)
                roots = tl.where(queries // SHARE == beam, one, roots)
            q = (q.to(tl.float32) * roots[:, None]).to(q.dtype)
    largest = tl.full([SIZE_Q], float("-inf"), tl.float32)
    total = tl.zeros([SIZE_Q], tl.float32)
    acc = tl.zeros([SIZE_Q, SIZE_V], tl.float32)
    if APPENDS:
        if part == 0:
            new = Q + row * q_stride + G * SHARE * SIZE_K
            k_new = tl.load(new + head * SIZE_K + ks)
            v_new = tl.load(new + G * SIZE_K + head * SIZE_V + vs)
            if SIZE_D > 0:
                k_new = (k_new.to(tl.float32) * root).to(k_new.dtype)
                v_new = (v_new.to(tl.float32) * root).to(v_new.dtype)
            tl.store(K + row * k_row + head * k_head + slot * k_position + ks, k_new, mask=alive)
            tl.store(V + row * v_row + head * v_head + slot * v_position + vs, v_new, mask=alive)
            largest = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], axis=1) * scale
            total += 1.0
            acc += v_new.to(tl.float32)[None, :]
    if EARLY:
        largest, total, acc = _attend_tile(
            q,
            k_tile,
            v_tile,
            largest,
            total,
            acc,
            begin,
            end,
            there,
            slot,
            scale,
            POSITIONS,
            APPENDS,
            PADDED,
        )
        begin += POSITIONS
    for first in range(begin, end, POSITIONS):
        k_tile, v_tile = _load_tile(
            K,
            V,
            k_row,
            k_head,
            k_position,
            v_row,
            v_head,
            v_position,
            ancestors,
            row,
            head,
            size,
            first,
            end,
            SIZE_K,
            SIZE_V,
            POSITIONS,
            ANCESTORS,
        )
        largest, total, acc = _attend_tile(
            q,
            k_tile,
            v_tile,
            largest,
            total,
            acc,
            first,
            end,
            there,
            slot,
            scale,
            POSITIONS,
            APPENDS,
            PADDED,
        )
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    place = rows * (G * SHARE) + heads
    if SPLITS == 1:
        tl.store(
            O + place[:, None] * SIZE_V + vs[None, :],
            acc.to(O.dtype.element_ty),
            mask=is_query[:, None],
        )
    else:
        count = tl.num_programs(0).to(tl.int64) * BEAMS * SHARE
        mine = place + part * count
        tl.store(part_O + mine[:, None] * SIZE_V + vs[None, :], acc, mask=is_query[:, None])
        tl.store(part_statistics + mine * 2, largest, mask=is_query)
        tl.store(part_statistics + mine * 2 + 1, total, mask=is_query)


@triton.jit
def _load_tile(
    K,
    V,
    k_row,
    k_head,
    k_position,
    v_row,
    v_head,
    v_position,
    ancestors,
    row,
    head,
    size,
    first,
    end,
    SIZE_K: tl.constexpr,
    SIZE_V: tl.constexpr,
    POSITIONS: tl.constexpr,
    ANCESTORS: tl.constexpr,
):
    """K and V at the positions from `first` on, before `end`."""
    at = first + tl.arange(0, POSITIONS)
    inside = at < end
    holder = row
    if ANCESTORS:
        holder = tl.load(ancestors + row * size + at, mask=inside, other=0)[:, None]
    ks, vs = tl.arange(0, SIZE_K)[None, :], tl.arange(0, SIZE_V)[None, :]
    k_at, v_at = head * k_head + at * k_position, head * v_head + at * v_position
    k = tl.load(K + holder * k_row + k_at[:, None] + ks, mask=inside[:, None], other=0.0)
    v = tl.load(V + holder * v_row + v_at[:, None] + vs, mask=inside[:, None], other=0.0)
    return k, v


@triton.jit
def _attend_tile(
    q,
    k,
    v,
    largest,
    total,
    acc,
    first,
    end,
    there,
    slot,
    scale,
    POSITIONS: tl.constexpr,
    APPENDS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """The running softmax after one more tile: its largest logit, sum, and weighted values."""
    at = first + tl.arange(0, POSITIONS)
    is_there = at < tl.minimum(there, end)
    if APPENDS:
        is_there = is_there & (at != slot)  # in a full ring, what the new position replaces
    if PADDED:  # slots that hold nothing may hold NaN, which no weight makes 0
        v = tl.where(is_there[:, None], v, tl.zeros_like(v))
    logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    logits = tl.where(is_there[None, :], logits, float("-inf"))
    now = tl.maximum(largest, tl.max(logits, axis=1))
    base = tl.where(now == float("-inf"), 0.0, now)  # nothing seen yet
    p = tl.exp2(logits - base[:, None])
    kept = tl.exp2(largest - base)
    total = total * kept + tl.sum(p, axis=1)
    acc = tl.dot(p.to(v.dtype), v, acc * kept[:, None], input_precision="ieee")
    return now, total, acc


@triton.jit
def combine_kernel(
    part_O,
    part_statistics,
    O,  # noqa: E741
    count,
    SPLITS: tl.constexpr,
    SIZE_S: tl.constexpr,
    SIZE_V: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One program owns one row and read-head: the mean of its parts by their shares."""
    wait_for_input(CHAINED)
    hand_over(CHAINED)
    place = tl.program_id(0).to(tl.int64)
    parts, vs = tl.arange(0, SIZE_S), tl.arange(0, SIZE_V)
    is_part = parts < SPLITS
    at = parts.to(tl.int64) * count + place
    largest = tl.load(part_statistics + at * 2, mask=is_part, other=float("-inf"))
    total = tl.load(part_statistics + at * 2 + 1, mask=is_part, other=0.0)
    values = tl.load(part_O + at[:, None] * SIZE_V + vs[None, :], mask=is_part[:, None], other=0.0)
    peak = tl.max(largest, axis=0)
    share = total * tl.exp2(largest - tl.where(peak == float("-inf"), 0.0, peak))
    whole = tl.sum(share, axis=0)
    result = tl.sum(values * share[:, None], axis=0) / tl.where(whole == 0.0, 1.0, whole)
    tl.store(O + place * SIZE_V + vs, result.to(O.dtype.element_ty))
