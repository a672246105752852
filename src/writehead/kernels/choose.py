"""The next tokens, chosen on the device: what `decoding/search.py` and `beam.py` say, in kernels.

`survey` reads all logits once: the largest of every CHUNK of them, and each part's share of the
softmax. The best tokens of a row lie in the chunks with the largest of these, so only those are
looked at again: by `choose_greedy`, which owns a row, or by `pick`, for `choose_beam`, which owns
a sentence. They add up scores and write all that the next step reads. All of it has fixed shapes
and waits for nobody, so that a step can be captured whole.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from writehead.kernels.launch import chained, hand_over, wait_for_input

CHUNK = 32  # logits of which the largest is noted
PART = 4096  # logits that one program of `survey` reads
NEVER = float("-inf")


@dataclass(frozen=True, eq=False)
class Candidates:
    """What is known of each row's logits: enough to choose from, and for the softmax.

    largest: [rows, chunks]. statistics: [rows, parts, 2], largest logit and the sum of
    exponentials over it. logits, tokens: [rows, top], the best of the row in order.
    """

    largest: Tensor
    statistics: Tensor
    logits: Tensor
    tokens: Tensor

    @classmethod
    def make(cls, rows: int, vocabulary: int, top: int, device: torch.device) -> "Candidates":
        """Room for the `top` best of each row."""
        parts = triton.cdiv(vocabulary, PART)
        return cls(
            torch.empty(rows, parts * (PART // CHUNK), device=device),
            torch.empty(rows, parts, 2, device=device),
            torch.empty(rows, top, device=device),
            torch.empty(rows, top, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, eq=False)
class Limits:
    """What a search may do, on the device: see `decoding.search.Constraints`.

    clock: [1], how many tokens have been chosen; a step adds one before it chooses.
    prefix: [b, width], of which the first prefix_lengths [b] are forced. max_lengths: [b].
    """

    clock: Tensor
    prefix: Tensor
    prefix_lengths: Tensor
    max_lengths: Tensor
    min_length: Tensor  # [1]


@dataclass(frozen=True, eq=False)
class Rows:
    """What a search and a decoder say to each other about each row: [rows] tensors.

    tokens: to be fed next. lengths: positions in the cache. growing: 0 where a row has ended.
    """

    tokens: Tensor
    lengths: Tensor
    growing: Tensor


@dataclass(frozen=True, eq=False)
class History:
    """What was chosen when: [steps, rows]. parents is the row that each token continues."""

    tokens: Tensor
    parents: Tensor


@dataclass(frozen=True, eq=False)
class Pool:
    """The best ended hypotheses of each sentence, best first: [b, beam] each.

    steps and rows: when the last token was chosen, and the row before it. tokens: that token.
    """

    scores: Tensor
    log_p: Tensor
    steps: Tensor
    rows: Tensor
    tokens: Tensor
    ended: Tensor


def survey(logits: Tensor, out: Candidates, *, vocabulary: int) -> None:
    """Fills `out.largest` and `out.statistics` from the first `vocabulary` of logits [rows, …]."""
    rows, parts, _ = out.statistics.shape
    chain = chained(logits)
    _survey_kernel[(rows, parts)](
        logits,
        logits.stride(0),
        out.largest,
        out.statistics,
        vocabulary,
        CHUNK=CHUNK,
        PART=PART,
        CHAINED=bool(chain),
        num_warps=2,
        **chain,
    )


def choose_greedy(
    logits: Tensor,
    found: Candidates,
    limits: Limits,
    rows: Rows,
    history: History,
    log_p: Tensor,
    *,
    vocabulary: int,
    end: int,
) -> None:
    """Takes each row's likeliest token, or the forced one, and adds its log-probability."""
    count, parts, _ = found.statistics.shape
    chain = chained(logits)
    _greedy_kernel[(count,)](
        logits,
        logits.stride(0),
        found.largest,
        found.statistics,
        limits.clock,
        limits.min_length,
        limits.prefix,
        limits.prefix_lengths,
        limits.max_lengths,
        rows.tokens,
        rows.lengths,
        rows.growing,
        history.tokens,
        log_p,
        limits.prefix.shape[1],
        vocabulary,
        end,
        CHUNK=CHUNK,
        CHUNKS=found.largest.shape[1],
        SIZE_N=triton.next_power_of_2(found.largest.shape[1]),
        PARTS=parts,
        SIZE_P=triton.next_power_of_2(parts),
        CHAINED=bool(chain),
        num_warps=2,
        **chain,
    )


def choose_beam(
    logits: Tensor,
    found: Candidates,
    limits: Limits,
    rows: Rows,
    history: History,
    live: Tensor,
    pool: Pool,
    ancestors: Tensor,
    *,
    vocabulary: int,
    end: int,
    n_best: int,
    alpha: float,
) -> None:
    """One step of beam search: `_Beams.advance` of `decoding/beam.py`, and the rows' new order.

    live: [b, beam], the log-probability of each live hypothesis. ancestors: [rows, size].
    """
    b, beam = live.shape
    parts, size = found.statistics.shape[1], ancestors.shape[1]
    chain = chained(logits)
    _pick_kernel[(b * beam,)](
        logits,
        logits.stride(0),
        found.largest,
        limits.clock,
        limits.min_length,
        rows.growing,
        found.logits,
        found.tokens,
        vocabulary,
        end,
        CHUNK=CHUNK,
        CHUNKS=found.largest.shape[1],
        SIZE_N=triton.next_power_of_2(found.largest.shape[1]),
        TOP=2 * beam,
        SIZE_C=triton.next_power_of_2(2 * beam),
        CHAINED=bool(chain),
        num_warps=2,
        **chain,
    )
    _beam_kernel[(b,)](
        logits,
        logits.stride(0),
        found.logits,
        found.tokens,
        found.statistics,
        limits.clock,
        limits.prefix,
        limits.prefix_lengths,
        limits.max_lengths,
        rows.tokens,
        rows.lengths,
        rows.growing,
        history.tokens,
        history.parents,
        live,
        pool.scores,
        pool.log_p,
        pool.steps,
        pool.rows,
        pool.tokens,
        pool.ended,
        ancestors,
        limits.prefix.shape[1],
        vocabulary,
        end,
        size,
        float(alpha),
        BEAM=beam,
        N_BEST=n_best,
        PARTS=parts,
        SIZE_B=triton.next_power_of_2(beam),
        SIZE_C=triton.next_power_of_2(2 * beam),
        SIZE_P=triton.next_power_of_2(parts),
        SLOTS=min(triton.next_power_of_2(size), 128),
        CHAINED=bool(chain),
        num_warps=1,
        **chain,
    )


@triton.jit
def _survey_kernel(
    logits,
    stride,
    largest,
    statistics,
    vocabulary,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One program owns one part of one row."""
    wait_for_input(CHAINED)
    hand_over(CHAINED)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    parts = tl.num_programs(1)
    CHUNKS: tl.constexpr = PART // CHUNK
    chunks, within = tl.arange(0, CHUNKS), tl.arange(0, CHUNK)
    tokens = part * PART + chunks[:, None] * CHUNK + within[None, :]
    x = tl.load(logits + row * stride + tokens, mask=tokens < vocabulary, other=float("-inf"))
    x = x.to(tl.float32)
    peaks = tl.max(x, axis=1)
    peak = tl.max(peaks, axis=0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.sum(tl.exp(x - base), axis=1), axis=0)
    place = row * parts + part
    tl.store(largest + place * CHUNKS + chunks, peaks)
    tl.store(statistics + place * 2, peak)
    tl.store(statistics + place * 2 + 1, total)


@triton.jit
def _best(
    logits,
    largest,
    vocabulary,
    banned,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    SIZE_N: tl.constexpr,
    TOP: tl.constexpr,
    SIZE_C: tl.constexpr,
):
    """The TOP largest logits of a row but for the token `banned`, in order, and their tokens."""
    LATE: tl.constexpr = 2147483647
    chunks, within = tl.arange(0, SIZE_N), tl.arange(0, CHUNK)
    peaks = tl.load(largest + chunks, mask=chunks < CHUNKS, other=float("-inf"))
    if banned >= 0:  # its chunk's largest may be its own
        chunk = banned // CHUNK
        at = chunk * CHUNK + within
        allowed = (at < vocabulary) & (at != banned)
        x = tl.load(logits + at, mask=allowed, other=float("-inf")).to(tl.float32)
        peaks = tl.where(chunks == chunk, tl.max(x, axis=0), peaks)
    candidates = tl.arange(0, SIZE_C)
    chosen = tl.zeros([SIZE_C], tl.int32)
    for i in tl.static_range(TOP):
        peak = tl.max(peaks, axis=0)
        which = tl.min(tl.where(peaks == peak, chunks, LATE), axis=0)
        chosen = tl.where(candidates == i, which, chosen)
        peaks = tl.where(chunks == which, float("-inf"), peaks)
    at = chosen[:, None] * CHUNK + within[None, :]
    allowed = (candidates < TOP)[:, None] & (at < vocabulary) & (at != banned)
    allowed = allowed & (chosen >= 0)[:, None] & (chosen < CHUNKS)[:, None]
    x = tl.load(logits + at, mask=allowed, other=float("-inf")).to(tl.float32)
    values = tl.full([SIZE_C], float("-inf"), tl.float32)
    tokens = tl.full([SIZE_C], LATE, tl.int32)
    for i in tl.static_range(TOP):
        value = tl.max(tl.max(x, axis=1), axis=0)
        token = tl.min(tl.min(tl.where((x == value) & allowed, at, LATE), axis=1), axis=0)
        values = tl.where(candidates == i, value, values)
        tokens = tl.where(candidates == i, token, tokens)
        x = tl.where(at == token, float("-inf"), x)
    return values, tokens


@triton.jit
def _pick_kernel(
    logits,
    stride,
    largest,
    clock,
    min_length,
    growing,
    out_logits,
    out_tokens,
    vocabulary,
    end,
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
    if tl.load(growing + row) != 0:
        banned = tl.where(tl.load(clock) >= tl.load(min_length), -1, end)
        values, tokens = _best(
            logits + row * stride,
            largest + row * CHUNKS,
            vocabulary,
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
def _log_sum(statistics, rows, is_row, PARTS: tl.constexpr, SIZE_P: tl.constexpr):
    """log Z of each of several rows, from the statistics of its parts."""
    parts = tl.arange(0, SIZE_P)
    at = rows[:, None] * PARTS + parts[None, :]
    mask = is_row[:, None] & (parts < PARTS)[None, :]
    largest = tl.load(statistics + at * 2, mask=mask, other=float("-inf"))
    total = tl.load(statistics + at * 2 + 1, mask=mask, other=0.0)
    peak = tl.max(largest, axis=1)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    return base + tl.log(tl.sum(total * tl.exp(largest - base[:, None]), axis=1))


@triton.jit
def _greedy_kernel(
    logits,
    stride,
    largest,
    statistics,
    clock,
    min_length,
    prefix,
    prefix_lengths,
    max_lengths,
    next_tokens,
    lengths,
    growing,
    history,
    log_p,
    prefix_width,
    vocabulary,
    end,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    SIZE_N: tl.constexpr,
    PARTS: tl.constexpr,
    SIZE_P: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One program owns one row."""
    wait_for_input(CHAINED)
    hand_over(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    alive = tl.load(growing + row)
    if alive != 0:
        chosen_so_far = tl.load(clock).to(tl.int32)  # this token's included
        banned = tl.where(chosen_so_far >= tl.load(min_length), -1, end)
        values, tokens = _best(
            logits + row * stride,
            largest + row * CHUNKS,
            vocabulary,
            banned,
            CHUNK,
            CHUNKS,
            SIZE_N,
            1,
            1,
        )
        value, token = tl.max(values, axis=0), tl.max(tokens, axis=0)
        if chosen_so_far <= tl.load(prefix_lengths + row):
            token = tl.load(prefix + row * prefix_width + chosen_so_far - 1).to(tl.int32)
            value = tl.load(logits + row * stride + token).to(tl.float32)
        one = tl.full([1], 0, tl.int64) + row
        log_z = tl.sum(_log_sum(statistics, one, one >= 0, PARTS, SIZE_P), axis=0)
        token = tl.where(token == 2147483647, end, token)  # no number among the logits
        tl.store(log_p + row, tl.load(log_p + row) + value - log_z)
        tl.store(history + (chosen_so_far - 1).to(tl.int64) * rows + row, token)
        tl.store(next_tokens + row, token)
        tl.store(lengths + row, tl.load(lengths + row) + 1)
        goes_on = (token != end) & (chosen_so_far < tl.load(max_lengths + row))
        tl.store(growing + row, goes_on.to(alive.dtype))


@triton.jit
def _take(vector, places, place):
    """The element of a small vector whose place is given."""
    return tl.sum(tl.where(places == place, vector, tl.zeros_like(vector)), axis=0)


@triton.jit
def _beam_kernel(
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
    vocabulary,
    end,
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
    """One program owns one sentence. "Place" is where something stands among its beams."""
    wait_for_input(CHAINED)
    hand_over(CHAINED)
    sentence = tl.program_id(0).to(tl.int64)
    all_rows = tl.num_programs(0).to(tl.int64) * BEAM
    first_row = sentence * BEAM
    TOP: tl.constexpr = 2 * BEAM
    LATE: tl.constexpr = 2147483647
    alive = tl.load(growing + first_row)
    if alive != 0:
        chosen_so_far = tl.load(clock).to(tl.int32)  # these tokens included
        beams = tl.arange(0, SIZE_B)
        is_beam = beams < BEAM
        log_live = tl.load(live + first_row + beams, mask=is_beam, other=float("-inf"))
        log_z = _log_sum(statistics, first_row + beams, is_beam, PARTS, SIZE_P)
        # one live beam without numbers, and whatever else is found means nothing
        is_lost = (log_live != float("-inf")) & ~(tl.abs(log_z) < float("inf"))
        lost = tl.max(is_lost.to(tl.int32), axis=0) > 0

        # the candidates of all beams, as [beam, 2 beam]
        inner = tl.arange(0, SIZE_C)
        at = (first_row + beams)[:, None] * TOP + inner[None, :]
        is_there = is_beam[:, None] & (inner < TOP)[None, :]
        value = tl.load(found_logits + at, mask=is_there, other=float("-inf"))
        token = tl.load(found_tokens + at, mask=is_there, other=LATE)
        if chosen_so_far <= tl.load(prefix_lengths + sentence):
            forced = tl.load(prefix + sentence * prefix_width + chosen_so_far - 1).to(tl.int32)
            said = tl.load(logits + (first_row + beams) * stride + forced, mask=is_beam, other=0.0)
            is_first = (inner == 0)[None, :] & is_beam[:, None]
            value = tl.where(is_first, said.to(tl.float32)[:, None], float("-inf"))
            token = tl.where(is_first, forced, LATE)
        total = log_live[:, None] + (value - log_z[:, None])
        hopeless = (log_live == float("-inf"))[:, None] | (value == float("-inf"))
        total = tl.where(hopeless | (total != total), float("-inf"), total)
        # the order of equals: by beam, then by token
        rank = tl.where(is_there & (token != LATE), beams[:, None] * vocabulary + token, LATE)

        # the 2 beam best, in order
        candidates = tl.arange(0, SIZE_C)
        c_score = tl.full([SIZE_C], float("-inf"), tl.float32)
        c_rank = tl.zeros([SIZE_C], tl.int32)
        for i in tl.static_range(TOP):
            best = tl.max(tl.max(total, axis=1), axis=0)
            which = tl.min(tl.min(tl.where(total == best, rank, LATE), axis=1), axis=0)
            c_score = tl.where(candidates == i, best, c_score)
            c_rank = tl.where(candidates == i, which, c_rank)
            total = tl.where(rank == which, float("-inf"), total)
        c_rank = tl.where(c_score == float("-inf"), 0, c_rank)
        c_parent = c_rank // vocabulary
        c_token = c_rank % vocabulary
        c_ended = (c_token == end) & (c_score != float("-inf"))
        longest = tl.load(max_lengths + sentence).to(tl.int32)
        cut = chosen_so_far >= longest

        # those of the first `beam` that end here join the pool, behind equals that were there
        penalty = tl.exp2(alpha * tl.log2((5.0 + chosen_so_far.to(tl.float32)) / 6.0))
        ends_now = (c_ended | cut) & (candidates < BEAM)
        new_score = tl.where(ends_now, c_score / penalty, float("-inf"))
        p_score = tl.load(pool_scores + first_row + beams, mask=is_beam, other=float("-inf"))
        p_log_p = tl.load(pool_log_p + first_row + beams, mask=is_beam, other=float("-inf"))
        p_step = tl.load(pool_steps + first_row + beams, mask=is_beam, other=0)
        p_row = tl.load(pool_rows + first_row + beams, mask=is_beam, other=0)
        p_token = tl.load(pool_tokens + first_row + beams, mask=is_beam, other=0)
        p_ended = tl.load(pool_ended + first_row + beams, mask=is_beam, other=0)
        old_score = p_score
        tl.debug_barrier()  # the pool has been read, and is now written
        worst = float("-inf")
        for i in tl.static_range(BEAM):
            best_old = tl.max(old_score, axis=0)
            best_new = tl.max(new_score, axis=0)
            takes_old = best_old >= best_new
            best = tl.maximum(best_old, best_new)
            old = tl.min(tl.where(old_score == best_old, beams, LATE), axis=0)
            new = tl.min(tl.where(new_score == best_new, candidates, LATE), axis=0)
            gone_old, gone_new = tl.where(takes_old, old, -1), tl.where(takes_old, -1, new)
            old_score = tl.where(beams == gone_old, float("-inf"), old_score)
            new_score = tl.where(candidates == gone_new, float("-inf"), new_score)
            place = first_row + i
            filled = best != float("-inf")
            tl.store(pool_scores + place, best)
            sum_p = tl.where(takes_old, _take(p_log_p, beams, old), _take(c_score, candidates, new))
            tl.store(pool_log_p + place, tl.where(lost, float("nan"), sum_p), mask=filled)
            step = (chosen_so_far - 1).to(p_step.dtype)
            tl.store(
                pool_steps + place,
                tl.where(takes_old, _take(p_step, beams, old), step),
                mask=filled,
            )
            parent = (first_row + _take(c_parent, candidates, new)).to(p_row.dtype)
            tl.store(
                pool_rows + place,
                tl.where(takes_old, _take(p_row, beams, old), parent),
                mask=filled,
            )
            tl.store(
                pool_tokens + place,
                tl.where(
                    takes_old,
                    _take(p_token, beams, old),
                    _take(c_token, candidates, new).to(p_token.dtype),
                ),
                mask=filled,
            )
            tl.store(
                pool_ended + place,
                tl.where(
                    takes_old,
                    _take(p_ended, beams, old),
                    _take(c_ended.to(tl.int32), candidates, new).to(p_ended.dtype),
                ),
                mask=filled,
            )
            if i == N_BEST - 1:
                worst = best

        # the best of the others live on
        l_score = tl.where(c_ended | cut | (candidates >= TOP), float("-inf"), c_score)
        n_score = tl.full([SIZE_B], float("-inf"), tl.float32)
        n_parent = tl.zeros([SIZE_B], tl.int32)
        n_token = tl.zeros([SIZE_B], tl.int32)
        unused = candidates < TOP
        for i in tl.static_range(BEAM):
            best = tl.max(tl.where(unused, l_score, float("-inf")), axis=0)
            which = tl.min(tl.where(unused & (l_score == best), candidates, LATE), axis=0)
            unused = unused & (candidates != which)
            n_score = tl.where(beams == i, best, n_score)
            n_parent = tl.where(beams == i, _take(c_parent, candidates, which), n_parent)
            n_token = tl.where(beams == i, _take(c_token, candidates, which), n_token)
        most = tl.where(alpha >= 0.0, longest, chosen_so_far + 1).to(tl.float32)
        bound = tl.max(n_score, axis=0) / tl.exp2(alpha * tl.log2((5.0 + most) / 6.0))
        over = (bound <= worst) | lost
        tl.store(live + first_row + beams, tl.where(over, float("-inf"), n_score), mask=is_beam)
        tl.store(next_tokens + first_row + beams, n_token, mask=is_beam)
        then = (chosen_so_far - 1).to(tl.int64) * all_rows + first_row + beams
        tl.store(history + then, n_token, mask=is_beam)
        tl.store(parents + then, first_row + n_parent, mask=is_beam)

        # rows trade places: each reads what its parent read, and the parent's newest position
        length = tl.load(lengths + first_row).to(tl.int32)
        slot = length % size
        holder = first_row + n_parent
        for begin in range(0, tl.minimum(size, length + 1), SLOTS):
            slots = begin + tl.arange(0, SLOTS)
            mask = is_beam[:, None] & (slots < size)[None, :]
            table = tl.load(ancestors + holder[:, None] * size + slots[None, :], mask=mask, other=0)
            own = (holder[:, None] + tl.zeros([1, SLOTS], tl.int64)).to(table.dtype)
            table = tl.where((slots == slot)[None, :], own, table)
            tl.debug_barrier()
            tl.store(
                ancestors + (first_row + beams)[:, None] * size + slots[None, :], table, mask=mask
            )
        tl.store(lengths + first_row + beams, length + 1, mask=is_beam)
        goes_on = tl.where(over, 0, 1)
        tl.store(growing + first_row + beams, goes_on, mask=is_beam)
