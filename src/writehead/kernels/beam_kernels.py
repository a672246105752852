"""The Triton kernels of `beams`, which says what their tensors are and launches them.

A program of `pick_kernel` owns a row and finds its best tokens by what `survey` noted of it; one of
`beam_kernel` owns a sentence and all its beams; one of `trace_kernel` owns a hypothesis.
"""

import triton
import triton.language as tl

from writehead.kernels.choose import best_of_row, load_peaks, log_sum
from writehead.kernels.launch import hand_over, wait_for_input


@triton.jit
def pick_kernel(
    logits,
    stride,
    largest,
    clock,
    min_length,
    growing,
    out_logits,
    out_tokens,
    vocab_size,
    eos,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    SIZE_N: tl.constexpr,
    TOP: tl.constexpr,
    SIZE_C: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One program owns one row."""
    wait_for_input(CHAINED)
    hand_over(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    alive, chosen, least = tl.load(growing + row), tl.load(clock), tl.load(min_length)
    peaks = load_peaks(largest, row, CHUNKS, SIZE_N)
    if alive != 0:
        banned = tl.where(chosen >= least, -1, eos)
        values, tokens = best_of_row(
            logits + row * stride,
            peaks,
            vocab_size,
            banned,
            CHUNK,
            CHUNKS,
            SIZE_N,
            TOP,
            SIZE_C,
        )
        candidates = tl.arange(0, SIZE_C)
        tl.store(out_logits + row * TOP + candidates, values, mask=candidates < TOP)
        tl.store(out_tokens + row * TOP + candidates, tokens, mask=candidates < TOP)


@triton.jit
def _take(vector, places, place):
    """The element of a small vector whose place is given."""
    return tl.sum(tl.where(places == place, vector, tl.zeros_like(vector)), axis=0)


@triton.jit
def _penalty(length, alpha):
    """((5 + length) / 6)^alpha."""
    return tl.exp2(alpha * tl.log2((5.0 + length.to(tl.float32)) / 6.0))


@triton.jit
def _rank(total, rank, vocab_size, TOP: tl.constexpr, SIZE_C: tl.constexpr):
    """The TOP best of total [beam, candidates], in order: scores, parents and tokens [SIZE_C].

    rank: beam × vocabulary + token, by which equals are told apart.
    """
    LATE: tl.constexpr = 2147483647
    candidates = tl.arange(0, SIZE_C)
    scores = tl.full([SIZE_C], float("-inf"), tl.float32)
    ranks = tl.zeros([SIZE_C], tl.int32)
    for i in tl.static_range(TOP):
        best = tl.max(tl.max(total, axis=1), axis=0)
        which = tl.min(tl.min(tl.where(total == best, rank, LATE), axis=1), axis=0)
        scores = tl.where(candidates == i, best, scores)
        ranks = tl.where(candidates == i, which, ranks)
        total = tl.where(rank == which, float("-inf"), total)
    ranks = tl.where(scores == float("-inf"), 0, ranks)
    return scores, ranks // vocab_size, ranks % vocab_size


@triton.jit
def _keep(field, place, takes_old, old, new, filled):
    """Writes one field of one hypothesis of the pool: what was there, or what is new."""
    tl.store(field + place, tl.where(takes_old, old, new.to(old.dtype)), mask=filled)


@triton.jit
def _join_pool(
    pool_scores,
    pool_log_p,
    pool_steps,
    pool_rows,
    pool_tokens,
    pool_ended,
    first_row,
    new_score,
    score,
    parent,
    token,
    ended,
    step,
    lost,
    BEAM: tl.constexpr,
    N_BEST: tl.constexpr,
    SIZE_B: tl.constexpr,
    SIZE_C: tl.constexpr,
):
    """Adds the candidates that have a new_score [SIZE_C] to the pool, behind equals in it.

    Returns the score of the n-th best then.
    """
    LATE: tl.constexpr = 2147483647
    beams, candidates = tl.arange(0, SIZE_B), tl.arange(0, SIZE_C)
    is_beam = beams < BEAM
    old_score = tl.load(pool_scores + first_row + beams, mask=is_beam, other=float("-inf"))
    p_log_p = tl.load(pool_log_p + first_row + beams, mask=is_beam, other=float("-inf"))
    p_step = tl.load(pool_steps + first_row + beams, mask=is_beam, other=0)
    p_row = tl.load(pool_rows + first_row + beams, mask=is_beam, other=0)
    p_token = tl.load(pool_tokens + first_row + beams, mask=is_beam, other=0)
    p_ended = tl.load(pool_ended + first_row + beams, mask=is_beam, other=0)
    tl.debug_barrier()  # the pool has been read, and is now written
    worst = float("-inf")
    for i in tl.static_range(BEAM):
        best_old, best_new = tl.max(old_score, axis=0), tl.max(new_score, axis=0)
        takes_old = best_old >= best_new
        best = tl.maximum(best_old, best_new)
        old = tl.min(tl.where(old_score == best_old, beams, LATE), axis=0)
        new = tl.min(tl.where(new_score == best_new, candidates, LATE), axis=0)
        gone_old, gone_new = tl.where(takes_old, old, -1), tl.where(takes_old, -1, new)
        old_score = tl.where(beams == gone_old, float("-inf"), old_score)
        new_score = tl.where(candidates == gone_new, float("-inf"), new_score)
        place, filled = first_row + i, best != float("-inf")
        tl.store(pool_scores + place, best)
        sum_p = tl.where(takes_old, _take(p_log_p, beams, old), _take(score, candidates, new))
        tl.store(pool_log_p + place, tl.where(lost, float("nan"), sum_p), mask=filled)
        row = first_row + _take(parent, candidates, new)
        ends = _take(ended.to(tl.int32), candidates, new)
        _keep(pool_steps, place, takes_old, _take(p_step, beams, old), step, filled)
        _keep(pool_rows, place, takes_old, _take(p_row, beams, old), row, filled)
        last = _take(token, candidates, new)
        _keep(pool_tokens, place, takes_old, _take(p_token, beams, old), last, filled)
        _keep(pool_ended, place, takes_old, _take(p_ended, beams, old), ends, filled)
        if i == N_BEST - 1:
            worst = best
    return worst


@triton.jit
def _survivors(
    score, parent, token, BEAM: tl.constexpr, SIZE_B: tl.constexpr, SIZE_C: tl.constexpr
):
    """The BEAM best of 2 BEAM candidates, the earlier of equals first: [SIZE_B] each."""
    LATE: tl.constexpr = 2147483647
    beams, candidates = tl.arange(0, SIZE_B), tl.arange(0, SIZE_C)
    n_score = tl.full([SIZE_B], float("-inf"), tl.float32)
    n_parent = tl.zeros([SIZE_B], tl.int32)
    n_token = tl.zeros([SIZE_B], tl.int32)
    unused = candidates < 2 * BEAM
    for i in tl.static_range(BEAM):
        best = tl.max(tl.where(unused, score, float("-inf")), axis=0)
        which = tl.min(tl.where(unused & (score == best), candidates, LATE), axis=0)
        unused = unused & (candidates != which)
        n_score = tl.where(beams == i, best, n_score)
        n_parent = tl.where(beams == i, _take(parent, candidates, which), n_parent)
        n_token = tl.where(beams == i, _take(token, candidates, which), n_token)
    return n_score, n_parent, n_token


@triton.jit
def _trade_places(
    ancestors,
    first_row,
    holder,
    length,
    size,
    BEAM: tl.constexpr,
    SIZE_B: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Lets each row read what its parent, row `holder` [SIZE_B], read, and its newest position."""
    beams = tl.arange(0, SIZE_B)
    is_beam, slot = beams < BEAM, length % size
    for begin in range(0, tl.minimum(size, length + 1), SLOTS):
        slots = begin + tl.arange(0, SLOTS)
        mask = is_beam[:, None] & (slots < size)[None, :]
        table = tl.load(ancestors + holder[:, None] * size + slots[None, :], mask=mask, other=0)
        own = (holder[:, None] + tl.zeros([1, SLOTS], tl.int64)).to(table.dtype)
        table = tl.where((slots == slot)[None, :], own, table)
        tl.debug_barrier()  # all rows have been read, and are now written
        rows = (first_row + beams)[:, None]
        tl.store(ancestors + rows * size + slots[None, :], table, mask=mask)


@triton.jit
def beam_kernel(
    logits,
    stride,
    found_logits,
    found_tokens,
    statistics,
    clock,
    prefix,
    prefix_lengths,
    max_lengths,
    next_tokens,
    lengths,
    growing,
    history,
    parents,
    live,
    pool_scores,
    pool_log_p,
    pool_steps,
    pool_rows,
    pool_tokens,
    pool_ended,
    ancestors,
    prefix_width,
    vocab_size,
    eos,
    size,
    alpha,
    BEAM: tl.constexpr,
    N_BEST: tl.constexpr,
    PARTS: tl.constexpr,
    SIZE_B: tl.constexpr,
    SIZE_C: tl.constexpr,
    SIZE_P: tl.constexpr,
    SLOTS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One program owns one sentence."""
    wait_for_input(CHAINED)
    hand_over(CHAINED)
    sentence = tl.program_id(0).to(tl.int64)
    all_rows = tl.num_programs(0).to(tl.int64) * BEAM
    first_row = sentence * BEAM
    TOP: tl.constexpr = 2 * BEAM
    LATE: tl.constexpr = 2147483647
    if tl.load(growing + first_row) != 0:
        chosen_so_far = tl.load(clock).to(tl.int32)  # these tokens included
        beams, candidates = tl.arange(0, SIZE_B), tl.arange(0, SIZE_C)
        is_beam = beams < BEAM
        log_live = tl.load(live + first_row + beams, mask=is_beam, other=float("-inf"))
        log_z = log_sum(statistics, first_row + beams, is_beam, PARTS, SIZE_P)
        # one live beam without numbers, and whatever else is found means nothing
        is_lost = (log_live != float("-inf")) & ~(tl.abs(log_z) < float("inf"))
        lost = tl.max(is_lost.to(tl.int32), axis=0) > 0

        # the candidates of all beams, as [beam, 2 beam]
        at = (first_row + beams)[:, None] * TOP + candidates[None, :]
        is_there = is_beam[:, None] & (candidates < TOP)[None, :]
        value = tl.load(found_logits + at, mask=is_there, other=float("-inf"))
        token = tl.load(found_tokens + at, mask=is_there, other=LATE)
        if chosen_so_far <= tl.load(prefix_lengths + sentence):
            forced = tl.load(prefix + sentence * prefix_width + chosen_so_far - 1).to(tl.int32)
            said = tl.load(logits + (first_row + beams) * stride + forced, mask=is_beam, other=0.0)
            is_first = (candidates == 0)[None, :] & is_beam[:, None]
            value = tl.where(is_first, said.to(tl.float32)[:, None], float("-inf"))
            token = tl.where(is_first, forced, LATE)
        total = log_live[:, None] + (value - log_z[:, None])
        hopeless = (log_live == float("-inf"))[:, None] | (value == float("-inf"))
        total = tl.where(hopeless | (total != total), float("-inf"), total)
        rank = tl.where(is_there & (token != LATE), beams[:, None] * vocab_size + token, LATE)
        score, parent, last = _rank(total, rank, vocab_size, TOP, SIZE_C)
        ended = (last == eos) & (score != float("-inf"))
        longest = tl.load(max_lengths + sentence).to(tl.int32)
        cut = chosen_so_far >= longest

        # those of the first `beam` that end here, or are cut, join the pool
        ends_now = (ended | cut) & (candidates < BEAM)
        new_score = tl.where(ends_now, score / _penalty(chosen_so_far, alpha), float("-inf"))
        worst = _join_pool(
            pool_scores,
            pool_log_p,
            pool_steps,
            pool_rows,
            pool_tokens,
            pool_ended,
            first_row,
            new_score,
            score,
            parent,
            last,
            ended,
            chosen_so_far - 1,
            lost,
            BEAM,
            N_BEST,
            SIZE_B,
            SIZE_C,
        )
        # the best of the others live on, as long as they could still enter the n-best
        left = tl.where(ended | cut, float("-inf"), score)
        n_score, n_parent, n_token = _survivors(left, parent, last, BEAM, SIZE_B, SIZE_C)
        most = tl.where(alpha >= 0.0, longest, chosen_so_far + 1)
        over = (tl.max(n_score, axis=0) / _penalty(most, alpha) <= worst) | lost
        tl.store(live + first_row + beams, tl.where(over, float("-inf"), n_score), mask=is_beam)
        tl.store(next_tokens + first_row + beams, n_token, mask=is_beam)
        then = (chosen_so_far - 1).to(tl.int64) * all_rows + first_row + beams
        tl.store(history + then, n_token, mask=is_beam)
        tl.store(parents + then, first_row + n_parent, mask=is_beam)

        length = tl.load(lengths + first_row).to(tl.int32)
        _trade_places(ancestors, first_row, first_row + n_parent, length, size, BEAM, SIZE_B, SLOTS)
        tl.store(lengths + first_row + beams, length + 1, mask=is_beam)
        tl.store(growing + first_row + beams, tl.where(over, 0, 1), mask=is_beam)


@triton.jit
def trace_kernel(
    history_tokens,
    history_parents,
    pool_steps,
    pool_rows,
    pool_tokens,
    texts,
    rows,
    most,
    BEAM: tl.constexpr,
    N_BEST: tl.constexpr,
):
    """One program owns one hypothesis of the pool, and follows it back to its first token."""
    place = tl.program_id(0).to(tl.int64)
    at = place // N_BEST * BEAM + place % N_BEST
    text, step = texts + place * most, tl.load(pool_steps + at)
    row = tl.load(pool_rows + at).to(tl.int64)
    tl.store(text + step, tl.load(pool_tokens + at))
    for i in range(step):
        t = (step - 1 - i).to(tl.int64)
        tl.store(text + t, tl.load(history_tokens + t * rows + row))
        row = tl.load(history_parents + t * rows + row).to(tl.int64)
