"""The next tokens, chosen on the device: what `decoding/search.py` says, in kernels.

All logits are read once: the largest of every CHUNK of them, and each part's share of the softmax,
are noted. The best tokens of a row lie in the chunks with the largest of these, so only those are
looked at again. `choose_greedy` does both in one kernel: whichever program is the last to be done
with a part of a row chooses its token. Beams, which are chosen together, have `survey` and then
`beams.py`. They add up scores and write all that the next step reads. All of it has fixed shapes
and waits for nobody, so that a step can be captured whole.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from writehead.kernels.launch import chained, hand_over, launch, wait_for_input
from writehead.kernels.pointwise import embed_row

CHUNK = 32  # logits of which the largest is noted
PART = 4096  # logits that one program reads
NEVER = float("-inf")


@dataclass(frozen=True, eq=False)
class Candidates:
    """What is known of each row's logits: enough to choose from, and for the softmax.

    largest: [rows, chunks]. statistics: [rows, parts, 2], largest logit and the sum of
    exponentials over it. chunk: logits to each of `largest`. For beams, logits and tokens:
    [rows, top], the best of the row in order. For greedy search, done: [rows + 1], how many parts
    of each row were noted, and how many rows were chosen for; between two steps all are zero.
    """

    largest: Tensor
    statistics: Tensor
    logits: Tensor
    tokens: Tensor
    done: Tensor
    chunk: int

    @classmethod
    def make(cls, rows: int, vocab_size: int, top: int, device: torch.device) -> "Candidates":
        """Room for the `top` best of each row."""
        parts = triton.cdiv(vocab_size, PART)
        return cls(
            torch.empty(rows, parts * (PART // CHUNK), device=device),
            torch.empty(rows, parts, 2, device=device),
            torch.empty(rows, top, device=device),
            torch.empty(rows, top, dtype=torch.int32, device=device),
            torch.zeros(rows + 1, dtype=torch.int32, device=device),
            CHUNK,
        )


@dataclass(frozen=True, eq=False)
class Limits:
    """What a search may do, on the device: see `decoding.search.Constraints`.

    clock: [1], how many tokens have been chosen, where `choose_beam` counts the one it chooses.
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
    """What beams chose when: [steps, rows]. parents is the row that each token continues."""

    tokens: Tensor
    parents: Tensor


@dataclass(frozen=True, eq=False)
class Feed:
    """What the tokens that are chosen become: the input of the next step.

    E: [vocab_size, d] and P: [positions, d], embeddings. X: [rows, d], where their sums belong.
    """

    E: Tensor
    P: Tensor
    X: Tensor


def survey(logits: Tensor, out: Candidates, *, vocab_size: int) -> None:
    """Fills `out.largest` and `out.statistics` from the first `vocab_size` of logits [rows, …]."""
    rows, parts, _ = out.statistics.shape
    chain = chained(logits)
    launch(_survey_kernel, (rows, parts))(
        logits,
        logits.stride(0),
        out.largest,
        out.statistics,
        vocab_size,
        CHUNK=out.chunk,
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
    texts: Tensor,
    log_p: Tensor,
    feed: Feed,
    *,
    vocab_size: int,
    eos: int,
) -> None:
    """Takes each row's likeliest token, or the forced one, and adds its log-probability.

    texts: [rows, steps], where the tokens go. log_p: [rows]. Afterwards `feed.X` has what each row
    is to be fed, also one that has ended, and the clock has gone on.
    """
    count, parts, _ = found.statistics.shape
    d = feed.X.shape[1]
    chain = chained(logits)
    launch(_greedy_kernel, (count, parts))(
        logits,
        logits.stride(0),
        found.largest,
        found.statistics,
        found.done,
        limits.clock,
        limits.min_length,
        limits.prefix,
        limits.prefix_lengths,
        limits.max_lengths,
        rows.tokens,
        rows.lengths,
        rows.growing,
        texts,
        log_p,
        feed.E,
        feed.P,
        feed.X,
        texts.shape[1],
        limits.prefix.shape[1],
        vocab_size,
        eos,
        len(feed.P) - 1,
        d,
        CHUNK=found.chunk,
        PART=PART,
        PARTS=parts,
        SIZE_N=triton.next_power_of_2(found.largest.shape[1]),
        SIZE_P=triton.next_power_of_2(parts),
        SIZE_D=triton.next_power_of_2(d),
        CHAINED=bool(chain),
        num_warps=2,
        **chain,
    )


@triton.jit
def _survey_kernel(
    logits,
    stride,
    largest,
    statistics,
    vocab_size,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One program owns one part of one row."""
    wait_for_input(CHAINED)
    hand_over(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    part, parts = tl.program_id(1), tl.num_programs(1)
    _note_part(
        logits + row * stride,
        largest,
        statistics,
        row * parts + part,
        part,
        vocab_size,
        CHUNK,
        PART,
    )


@triton.jit
def _note_part(
    logits,
    largest,
    statistics,
    place,
    part,
    vocab_size,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
):
    """Notes one part of a row at `place`: the largest of each chunk, and its statistics."""
    CHUNKS: tl.constexpr = PART // CHUNK
    chunks, within = tl.arange(0, CHUNKS), tl.arange(0, CHUNK)
    tokens = part * PART + chunks[:, None] * CHUNK + within[None, :]
    x = tl.load(logits + tokens, mask=tokens < vocab_size, other=float("-inf")).to(tl.float32)
    peaks = tl.max(x, axis=1)
    peak = tl.max(peaks, axis=0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.sum(tl.exp(x - base), axis=1), axis=0)
    tl.store(largest + place * CHUNKS + chunks, peaks)
    tl.store(statistics + place * 2, peak)
    tl.store(statistics + place * 2 + 1, total)


@triton.jit
def load_peaks(largest, row, CHUNKS: tl.constexpr, SIZE_N: tl.constexpr):
    """The largest logit of each chunk of a row."""
    chunks = tl.arange(0, SIZE_N)
    return tl.load(largest + row * CHUNKS + chunks, mask=chunks < CHUNKS, other=float("-inf"))


@triton.jit
def best_of_row(
    logits,
    peaks,
    vocab_size,
    banned,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    SIZE_N: tl.constexpr,
    TOP: tl.constexpr,
    SIZE_C: tl.constexpr,
):
    """The TOP largest logits of a row but for the token `banned`, in order, and their tokens.

    peaks: [SIZE_N], the largest logit of each chunk, as `load_peaks` has them.
    """
    LATE: tl.constexpr = 2147483647
    chunks, within = tl.arange(0, SIZE_N), tl.arange(0, CHUNK)
    if banned >= 0:  # its chunk's largest may be its own
        chunk = banned // CHUNK
        at = chunk * CHUNK + within
        allowed = (at < vocab_size) & (at != banned)
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
    allowed = (candidates < TOP)[:, None] & (at < vocab_size) & (at != banned)
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
def log_sum(statistics, rows, is_row, PARTS: tl.constexpr, SIZE_P: tl.constexpr):
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
    done,
    clock,
    min_length,
    prefix,
    prefix_lengths,
    max_lengths,
    next_tokens,
    lengths,
    growing,
    texts,
    log_p,
    E,
    P,
    X,
    steps,
    prefix_width,
    vocab_size,
    eos,
    last_position,
    d,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    SIZE_N: tl.constexpr,
    SIZE_P: tl.constexpr,
    SIZE_D: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One program owns one part of one row; whichever of a row's is done last chooses for it."""
    CHUNKS: tl.constexpr = PARTS * (PART // CHUNK)
    wait_for_input(CHAINED)
    hand_over(CHAINED)
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    part = PARTS - 1 - tl.program_id(1)  # what was written last may be in the device's cache yet
    logits += row * stride
    _note_part(logits, largest, statistics, row * PARTS + part, part, vocab_size, CHUNK, PART)
    tl.debug_barrier()  # what all threads noted is there before one of them says so
    if tl.atomic_add(done + row, 1, sem="acq_rel") == PARTS - 1:
        tl.store(done + row, 0)
        # all that is needed is asked for at once, since each answer takes as long as all of them
        alive = tl.load(growing + row)
        chosen_so_far = tl.load(clock).to(tl.int32) + 1  # this token included
        least = tl.load(min_length)
        forced = tl.load(prefix_lengths + row)
        most = tl.load(max_lengths + row)
        length = tl.load(lengths + row)
        fed = tl.load(next_tokens + row)
        sum_so_far = tl.load(log_p + row)
        peaks = load_peaks(largest, row, CHUNKS, SIZE_N)
        one = tl.full([1], 0, tl.int64) + row
        log_z = tl.sum(log_sum(statistics, one, one >= 0, PARTS, SIZE_P), axis=0)
        if alive != 0:
            banned = tl.where(chosen_so_far >= least, -1, eos)
            values, tokens = best_of_row(
                logits, peaks, vocab_size, banned, CHUNK, CHUNKS, SIZE_N, 1, 1
            )
            value, token = tl.max(values, axis=0), tl.max(tokens, axis=0)
            if chosen_so_far <= forced:
                token = tl.load(prefix + row * prefix_width + chosen_so_far - 1).to(tl.int32)
                value = tl.load(logits + token).to(tl.float32)
            token = tl.where(token == 2147483647, eos, token)  # no number among the logits
            fed, length = token.to(fed.dtype), length + 1
            tl.store(log_p + row, sum_so_far + value - log_z)
            tl.store(texts + row * steps + chosen_so_far - 1, token)
            tl.store(next_tokens + row, fed)
            tl.store(lengths + row, length)
            goes_on = (token != eos) & (chosen_so_far < most)
            tl.store(growing + row, goes_on.to(alive.dtype))
        embed_row(E, P, X, row, fed, length, last_position, d, SIZE_D)
        tl.debug_barrier()  # all threads have read the clock
        if tl.atomic_add(done + rows, 1, sem="acq_rel") == rows - 1:
            tl.store(done + rows, 0)
            tl.store(clock, chosen_so_far)
