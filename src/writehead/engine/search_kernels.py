"""The Triton kernels of `search.py`, whose reference defines their results.

The first kernel reads all logits once. It stores the largest logit of each CHUNK, and the sum of
exponentials of each PART. The best tokens of a row are in the chunks with the largest maxima, so
only these chunks are read again. In greedy search, the program that finishes a row last chooses its
token; sampling and beam search have separate kernels. Shapes are fixed and nothing waits for the
host, so a CUDA graph can capture a step.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from writehead.ops.launch import launch, launch_dependents, pdl, wait_for_previous

if TYPE_CHECKING:
    from writehead.engine.search import Search

CHUNK = 32  # logits whose largest is stored
PART = 4096  # logits that one program reads
TILE = 128  # chunks that a sampling program reads at once

# the columns of `Search.option_table`, in the order of `SlotOptions`
MAX_LENGTH, MIN_LENGTH, PREFIX_LENGTH, N_BEST = (tl.constexpr(i) for i in range(4))
TOP_K, COUNT, ALPHA, TEMPERATURE, TOP_P, MIN_P, PENALTY = (tl.constexpr(i) for i in range(4, 11))
OPTIONS = tl.constexpr(11)
# the columns of `Search.pool_table`, in the order of `Pool`
LENGTH, FINISHED, SCORE, LOG_P, PARENT, TOKEN, LIVE = (tl.constexpr(i) for i in range(7))
POOL = tl.constexpr(7)

NONE = tl.constexpr(2147483647)  # no token
LOWEST = tl.constexpr(-2139095041)  # `_key` of minus infinity


class State(NamedTuple):
    """The tensors of a `Search`; `numbers` and `pool_numbers` are float32 views of the tables."""

    options: Tensor
    numbers: Tensor
    pool: Tensor
    pool_numbers: Tensor
    prefix: Tensor
    draws: Tensor
    seen: Tensor
    tokens: Tensor
    parents: Tensor
    live: Tensor
    lengths: Tensor
    ancestors: Tensor
    history_tokens: Tensor
    history_parents: Tensor


class Scratch(NamedTuple):
    """Intermediate results that the kernels of one step pass to each other.

    peaks: [rows, chunks], the largest allowed logit. masses: [rows, chunks], the sum of
    exp((x - peak of the part) / temperature). statistics: [rows, parts, 3], the largest logit, the
    sum of exponentials relative to it, and the largest allowed logit. listed: [rows, chunks], the
    chunks with candidates. best_logits, best_tokens: [rows, 2 × beam]. done: [rows], how many parts
    have been read; zero between steps.
    """

    peaks: Tensor
    masses: Tensor
    statistics: Tensor
    listed: Tensor
    best_logits: Tensor
    best_tokens: Tensor
    done: Tensor


class Sizes(NamedTuple):
    """Compile-time constants: sizes (SIZE_…: powers of two), and the features of a search."""

    CHUNK: int
    PART: int
    PARTS: int  # of a row
    CHUNKS: int  # of a row
    TILE: int
    BEAM: int
    TOP: int  # continuations that a step of beam search considers
    POSITIONS: int  # of the ancestors, updated at a time
    SIZE_N: int  # chunks of a row
    SIZE_P: int  # parts of a row
    SIZE_B: int  # beams
    SIZE_C: int  # continuations
    SAMPLING: bool
    GREEDY: bool
    HAS_LENGTHS: bool
    HAS_SLOTS: bool
    PDL: bool


class Kernels:
    """The kernels of a search, and their buffers."""

    def __init__(self, search: "Search") -> None:
        self.search, beam, device = search, search.beam, search.tokens.device
        rows, parts = len(search.tokens), triton.cdiv(search.vocab_size, PART)
        chunks, top, sampled = parts * (PART // CHUNK), 2 * beam, rows if search.sampling else 0
        unused = search.tokens
        self.state = State(
            search.option_table,
            search.option_table.view(torch.float32),
            search.pool_table,
            search.pool_table.view(torch.float32),
            search.prefix,
            search.draws,
            search.seen,
            search.tokens,
            search.parents,
            search.live,
            unused if search.lengths is None else search.lengths,
            unused if search.ancestors is None else search.ancestors,
            search.history_tokens,
            search.history_parents,
        )
        self.scratch = Scratch(
            torch.empty(rows, chunks, device=device),
            torch.empty(sampled, chunks, device=device),
            torch.empty(rows, parts, 3, device=device),
            torch.empty(sampled, chunks, dtype=torch.int32, device=device),
            torch.empty(rows, top, device=device),
            torch.empty(rows, top, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
        )
        self.positions = 0 if search.ancestors is None else search.ancestors.shape[1]
        tile = min(triton.next_power_of_2(max(self.positions, 1)), 128)
        counts = CHUNK, PART, parts, chunks, TILE, beam, top, tile
        padded = map(triton.next_power_of_2, (chunks, parts, beam, top))
        self.parts, self.sizes = parts, (*counts, *padded)

    def advance(self, logits: Tensor, slots: Tensor | None, *, sampling: bool) -> None:
        """Runs one step; see `Search.advance`."""
        search, rows, options = self.search, len(logits), pdl(logits)
        greedy = search.beam == 1 and not sampling
        flags = sampling, greedy, search.lengths is not None, slots is not None, bool(options)
        constants = *self.sizes, *flags
        sizes = Sizes(*map(tl.constexpr, constants))
        source = logits, logits.stride(0), search.tokens if slots is None else slots
        sized = search.vocab_size, search.eos, search.capacity, sizes
        given = *source, self.state, self.scratch, *sized
        launch(scan_kernel, (rows, self.parts))(*given, num_warps=2, **options)
        if sampling:
            launch(sample_kernel, (rows,))(*given, num_warps=4, **options)
        if search.beam > 1:
            launch(top_kernel, (rows,))(*given, num_warps=2, **options)
            grid = (rows // search.beam,)
            launch(beam_kernel, grid)(*given, self.positions, num_warps=1, **options)

    def trace_back(self, index: Tensor, texts: Tensor) -> None:
        """Writes the tokens of the pools of slots `index` [R] to texts [R, n, longest]."""
        strides, search = texts.stride()[:2], self.search
        given = index, self.state, texts, *strides, search.capacity, search.beam
        launch(trace_kernel, texts.shape[:2])(*given, num_warps=1)


@triton.jit
def _slot(slots, place, sizes):
    """Returns the slot that is listed at `place`."""
    if sizes.HAS_SLOTS:
        slot = tl.load(slots + place).to(tl.int64)
    else:
        slot = place.to(tl.int64)
    return slot


@triton.jit
def _take(vector, places, place):
    """Returns the element of a small vector at `place`."""
    return tl.sum(tl.where(places == place, vector, tl.zeros_like(vector)), axis=0)


@triton.jit
def _early_eos(state, slot, eos):
    """Returns eos if the slot may not choose it yet, otherwise -1."""
    count = tl.load(state.options + slot * OPTIONS + COUNT)
    least = tl.load(state.options + slot * OPTIONS + MIN_LENGTH)
    return tl.where(count + 1 < least, eos, -1)


@triton.jit
def _allow(x, tokens, mask, row, sizes):
    """Returns logits x without the banned token, and with the repetition penalty."""
    _, banned, seen, penalty, _ = row
    if sizes.SAMPLING:
        if penalty != 1.0:
            was_seen = tl.load(seen + tokens, mask=mask, other=0) != 0
            x = tl.where(was_seen, tl.where(x > 0.0, x / penalty, x * penalty), x)
    return tl.where(tokens == banned, float("-inf"), x)


@triton.jit
def _load_allowed(tokens, mask, row, sizes):
    """Loads logits of a row; those of tokens that are not allowed are minus infinity."""
    logits, _, _, _, vocab_size = row
    mask = mask & (tokens < vocab_size)
    x = tl.load(logits + tokens, mask=mask, other=float("-inf")).to(tl.float32)
    return _allow(x, tokens, mask, row, sizes)


@triton.jit
def _scan_part(row, state, scratch, slot, part, place, sizes):
    """Stores the peaks, masses and statistics of one part of a row, at `place`."""
    CHUNKS: tl.constexpr = sizes.PART // sizes.CHUNK
    logits, _, _, _, vocab_size = row
    chunks, within = tl.arange(0, CHUNKS), tl.arange(0, sizes.CHUNK)
    tokens = part * sizes.PART + chunks[:, None] * sizes.CHUNK + within[None, :]
    mask = tokens < vocab_size
    x = tl.load(logits + tokens, mask=mask, other=float("-inf")).to(tl.float32)
    peak = tl.max(tl.max(x, axis=1), axis=0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.sum(tl.exp(x - base), axis=1), axis=0)
    tl.store(scratch.statistics + place * 3, peak)
    tl.store(scratch.statistics + place * 3 + 1, total)
    x = _allow(x, tokens, mask, row, sizes)
    maxima = tl.max(x, axis=1)
    tl.store(scratch.peaks + place * CHUNKS + chunks, maxima)
    if sizes.SAMPLING:
        peak = tl.max(maxima, axis=0)
        tl.store(scratch.statistics + place * 3 + 2, peak)
        temperature = tl.load(state.numbers + slot * OPTIONS + TEMPERATURE)
        if temperature > 0.0:
            base = tl.where(peak == float("-inf"), 0.0, peak)
            mass = tl.sum(_mass(x, base, temperature), axis=1)
            tl.store(scratch.masses + place * CHUNKS + chunks, mass)


@triton.jit
def scan_kernel(logits, stride, slots, state, scratch, vocab_size, eos, capacity, sizes):
    """Reads one part of a row per program; in greedy search, the last one chooses the token."""
    wait_for_previous(sizes.PDL)
    launch_dependents(sizes.PDL)
    r = tl.program_id(0).to(tl.int64)
    # the logits written last may still be in the L2 cache
    part = sizes.PARTS - 1 - tl.program_id(1)
    slot = _slot(slots, r // sizes.BEAM, sizes)
    penalty = 1.0
    if sizes.SAMPLING:
        penalty = tl.load(state.numbers + slot * OPTIONS + PENALTY)
    banned, seen = _early_eos(state, slot, eos), state.seen + slot * vocab_size
    row = (logits + r * stride, banned, seen, penalty, vocab_size)
    _scan_part(row, state, scratch, slot, part, r * sizes.PARTS + part, sizes)
    if sizes.GREEDY:
        tl.debug_barrier()  # all threads have written before the part is counted
        if tl.atomic_add(scratch.done + r, 1, sem="acq_rel") == sizes.PARTS - 1:
            tl.store(scratch.done + r, 0)
            # the loads do not depend on each other, so their latencies overlap
            is_live = tl.load(state.live + slot)
            count = tl.load(state.options + slot * OPTIONS + COUNT)
            forced = tl.load(state.options + slot * OPTIONS + PREFIX_LENGTH)
            sequence = _load_sequence(state, slot, sizes)
            maxima = _load_peaks(scratch, r, sizes)
            log_z = _log_sum_of_row(scratch, r, sizes)
            if is_live != 0:
                values, tokens = _best_of_row(row, maxima, sizes, 1, 1)
                value, token = tl.max(values, axis=0), tl.max(tokens, axis=0)
                if count < forced:
                    token = tl.load(state.prefix + slot * capacity + count)
                    value = tl.load(logits + r * stride + token).to(tl.float32)
                token = tl.where(token == NONE, eos, token)
                _append(state, slot, sequence, token, value - log_z, capacity, eos, sizes)


@triton.jit
def _load_peaks(scratch, r, sizes):
    """Loads the largest allowed logit of each chunk of a row."""
    chunks = tl.arange(0, sizes.SIZE_N)
    mask = chunks < sizes.CHUNKS
    return tl.load(scratch.peaks + r * sizes.CHUNKS + chunks, mask=mask, other=float("-inf"))


@triton.jit
def _log_sum(scratch, rows, is_row, sizes):
    """Returns log Z of several rows, from the statistics of their parts."""
    parts = tl.arange(0, sizes.SIZE_P)
    at = (rows[:, None] * sizes.PARTS + parts[None, :]) * 3
    mask = is_row[:, None] & (parts < sizes.PARTS)[None, :]
    largest = tl.load(scratch.statistics + at, mask=mask, other=float("-inf"))
    total = tl.load(scratch.statistics + at + 1, mask=mask, other=0.0)
    peak = tl.max(largest, axis=1)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    return base + tl.log(tl.sum(total * tl.exp(largest - base[:, None]), axis=1))


@triton.jit
def _log_sum_of_row(scratch, r, sizes):
    """Returns log Z of one row."""
    one = tl.full([1], 0, tl.int64) + r
    return tl.sum(_log_sum(scratch, one, one >= 0, sizes), axis=0)


@triton.jit
def _penalty(length, alpha):
    """Returns ((5 + length) / 6)^alpha."""
    return tl.exp2(alpha * tl.log2((5.0 + length.to(tl.float32)) / 6.0))


@triton.jit
def _best_of_row(row, peaks, sizes, TOP: tl.constexpr, SIZE_C: tl.constexpr):
    """Returns the TOP largest allowed logits of a row and their tokens, or NONE: [SIZE_C]."""
    chunks, within = tl.arange(0, sizes.SIZE_N), tl.arange(0, sizes.CHUNK)
    candidates = tl.arange(0, SIZE_C)
    chosen = tl.full([SIZE_C], -1, tl.int32)
    for i in tl.static_range(TOP):
        peak = tl.max(peaks, axis=0)
        which = tl.min(tl.where((peaks == peak) & (peaks > float("-inf")), chunks, NONE), axis=0)
        chosen = tl.where((candidates == i) & (which != NONE), which, chosen)
        peaks = tl.where(chunks == which, float("-inf"), peaks)
    at = chosen[:, None] * sizes.CHUNK + within[None, :]
    x = _load_allowed(at, (chosen >= 0)[:, None], row, sizes)
    values = tl.full([SIZE_C], float("-inf"), tl.float32)
    tokens = tl.full([SIZE_C], NONE, tl.int32)
    for i in tl.static_range(TOP):
        value = tl.max(tl.max(x, axis=1), axis=0)
        is_best = (x == value) & (x > float("-inf"))
        token = tl.min(tl.min(tl.where(is_best, at, NONE), axis=1), axis=0)
        values = tl.where(candidates == i, value, values)
        tokens = tl.where(candidates == i, token, tokens)
        x = tl.where(at == token, float("-inf"), x)
    return values, tokens


@triton.jit
def _load_sequence(state, slot, sizes):
    """Loads the sequence of a slot with one row: count, limit, alpha, log P, cache length."""
    options, length = state.options + slot * OPTIONS, slot
    if sizes.HAS_LENGTHS:
        length = tl.load(state.lengths + slot)
    alpha = tl.load(state.numbers + slot * OPTIONS + ALPHA)
    log_p = tl.load(state.pool_numbers + slot * POOL + LOG_P)
    return tl.load(options + COUNT), tl.load(options + MAX_LENGTH), alpha, log_p, length


@triton.jit
def _append(state, slot, sequence, token, log_p, capacity, eos, sizes):
    """Appends a token with `log_p` to the sequence of a slot with one row."""
    options, entry = state.options + slot * OPTIONS, slot * POOL
    count, longest, alpha, total, length = sequence
    count += 1
    log_p += total
    is_live = (token != eos) & (count < longest) & (tl.abs(log_p) < float("inf"))
    tl.debug_barrier()  # all threads have read the values that are overwritten below
    if sizes.HAS_LENGTHS:
        tl.store(state.lengths + slot, length + 1)
    tl.store(options + COUNT, count)
    tl.store(state.pool + entry + LENGTH, count)
    tl.store(state.pool + entry + FINISHED, (token == eos).to(tl.int32))
    tl.store(state.pool_numbers + entry + SCORE, log_p / _penalty(count, alpha))
    tl.store(state.pool_numbers + entry + LOG_P, log_p)
    tl.store(state.history_tokens + slot * capacity + count - 1, token)
    tl.store(state.tokens + slot, token.to(tl.int64))
    tl.store(state.live + slot, is_live.to(tl.int64))


@triton.jit
def _key(x):
    """Maps float32 x to integers in the same order."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _number(key):
    """Returns the number with this key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _middle(low, high):
    """Returns the middle of the integers from low + 1 to high."""
    return (low >> 1) + (high >> 1) + (low & high & 1) + 1


@triton.jit
def _mass(x, peak, temperature):
    """Returns the probability of logits x relative to that of `peak`."""
    return tl.exp((x - peak) / temperature)


@triton.jit
def _lower_bound(peaks, masses, peak, temperature, target, by_mass, sizes):
    """Returns a key such that the tokens at or above it reach the target mass or count.

    The bound uses only the peaks and masses of chunks: if the peak of a chunk is above x, at least
    one of its tokens is above x, and the tokens below x have at most CHUNK times the mass of x.
    """
    keys = _key(peaks)
    low, high = LOWEST + 0, _key(peak)
    for _ in range(18):
        if low < high:
            middle = _middle(low, high)
            below = sizes.CHUNK * _mass(_number(middle), peak, temperature)
            mass = tl.maximum(_mass(peaks, peak, temperature), masses - below)
            least = tl.sum(tl.where(keys >= middle, tl.where(by_mass, mass, 1.0), 0.0), axis=0)
            reached = least >= target
            low = tl.where(reached, middle, low)
            high = tl.where(reached, high, middle - 1)
    return low


@triton.jit
def _load_listed(row, listed, begin, count, sizes):
    """Loads TILE listed chunks and their allowed logits [TILE, CHUNK]."""
    places = begin + tl.arange(0, sizes.TILE)
    chunks = tl.load(listed + places, mask=places < count, other=0)
    tokens = chunks[:, None] * sizes.CHUNK + tl.arange(0, sizes.CHUNK)[None, :]
    return chunks, _load_allowed(tokens, (places < count)[:, None], row, sizes)


@triton.jit
def _weigh(key, row, listed, chunks, peak, temperature, sizes):
    """Returns the count, mass and lowest key of tokens from `key` up, and the next key below it."""
    count, mass, above, below = 0.0, 0.0, NONE + 0, LOWEST + 0
    for begin in range(0, chunks, sizes.TILE):
        _, x = _load_listed(row, listed, begin, chunks, sizes)
        keys = _key(x)
        is_above = keys >= key
        count += tl.sum(tl.sum(is_above.to(tl.float32), axis=1), axis=0)
        each = tl.where(is_above, _mass(x, peak, temperature), 0.0)
        mass += tl.sum(tl.sum(each, axis=1), axis=0)
        above = tl.minimum(above, tl.min(tl.min(tl.where(is_above, keys, NONE), axis=1), axis=0))
        below = tl.maximum(below, tl.max(tl.max(tl.where(is_above, LOWEST, keys), axis=1), axis=0))
    return count, mass, above, below


@triton.jit
def _threshold(goal, by_mass, low, high, row, listed, chunks, peak, temperature, sizes):
    """Returns the highest key in [low, high] at or above which tokens reach the mass or count.

    Also returns the count and the mass of the tokens above the key.
    """
    while low < high:
        middle = _middle(low, high)
        n, m, above, below = _weigh(middle, row, listed, chunks, peak, temperature, sizes)
        reached = tl.where(by_mass, m, n) >= goal
        high = tl.where(reached, high, tl.maximum(below, low))
        low = tl.where(reached, above, low)
    n, m, _, _ = _weigh(high + 1, row, listed, chunks, peak, temperature, sizes)
    return high, n, m


@triton.jit
def _filter(row, peaks, masses, listed, options, numbers, sizes):
    """Applies top_k, top_p and min_p; returns theta, ties, the kept mass, and the listed chunks.

    It keeps the tokens above the key `theta`, and the first `ties` tokens equal to it.
    """
    temperature, top_k = tl.load(numbers + TEMPERATURE), tl.load(options + TOP_K)
    top_p, min_p = tl.load(numbers + TOP_P), tl.load(numbers + MIN_P)
    peak, mass = tl.max(peaks, axis=0), tl.sum(masses, axis=0)
    least = _key(peak + temperature * tl.log(min_p))  # LOWEST if min_p is 0
    bound = least
    if (top_k > 0) | (top_p < 1.0):
        # a little more than top_p, since both masses are rounded
        goal = tl.where(top_k > 0, top_k.to(tl.float32), top_p * mass * 1.0001)
        bound = _lower_bound(peaks, masses, peak, temperature, goal, top_k <= 0, sizes)
    is_listed = (_key(peaks) >= bound) & (peaks > float("-inf"))
    place = tl.cumsum(is_listed.to(tl.int32), axis=0) - 1
    tl.store(listed + place, tl.arange(0, sizes.SIZE_N), mask=is_listed)
    tl.debug_barrier()  # all threads have written the list
    chunks = tl.sum(is_listed.to(tl.int32), axis=0)

    theta, ties = LOWEST + 0, 0.0
    for stage in range(2):  # top_k, and then top_p of the tokens that are left
        by_mass = stage == 1
        if tl.where(by_mass, top_p < 1.0, top_k > 0):
            goal = tl.where(by_mass, top_p * mass, top_k.to(tl.float32))
            low = tl.maximum(bound, theta)
            key, n, m = _threshold(
                goal, by_mass, low, _key(peak), row, listed, chunks, peak, temperature, sizes
            )
            each = _mass(_number(key), peak, temperature)
            more = tl.where(by_mass, tl.ceil((goal - m) / tl.maximum(each, 1e-37)), goal - n)
            more = tl.minimum(tl.maximum(more, 0.0), 1e9)
            ties = tl.where(key == theta, tl.minimum(ties, more), more)
            theta, mass = key, m + ties * each
    if (min_p > 0.0) & (least > theta):
        theta, ties = least - 1, 0.0
        _, mass, _, _ = _weigh(least, row, listed, chunks, peak, temperature, sizes)
    return theta, ties, mass, chunks


@triton.jit
def _find_chunk(target, theta, ties, row, listed, chunks, peak, temperature, sizes):
    """Returns the last listed chunk whose kept tokens start at or below cumulative mass `target`.

    Also returns the mass before it, and the number of tokens before it that are equal to theta.
    """
    chunk, start, earlier, before, equal = 0, 0.0, 0.0, 0.0, 0.0
    each = tl.where(ties > 0.0, _mass(_number(theta), peak, temperature), 0.0)
    places = tl.arange(0, sizes.TILE)
    for begin in range(0, chunks, sizes.TILE):
        ids, x = _load_listed(row, listed, begin, chunks, sizes)
        keys = _key(x)
        equals = tl.sum((keys == theta).to(tl.float32), axis=1)
        earliers = equal + tl.cumsum(equals, axis=0) - equals
        kept = tl.sum(tl.where(keys > theta, _mass(x, peak, temperature), 0.0), axis=1)
        kept += each * tl.minimum(equals, tl.maximum(ties - earliers, 0.0))
        starts = before + tl.cumsum(kept, axis=0) - kept
        last = tl.max(tl.where((kept > 0.0) & (starts <= target), places, -1), axis=0)
        if last >= 0:
            chunk = _take(ids, places, last)
            start = _take(starts, places, last)
            earlier = _take(earliers, places, last)
        before += tl.sum(kept, axis=0)
        equal += tl.sum(equals, axis=0)
    return chunk, start, earlier


@triton.jit
def _draw(row, peaks, masses, listed, draw, options, numbers, sizes):
    """Returns the token at which the cumulative mass exceeds draw × the mass of kept tokens."""
    temperature, peak = tl.load(numbers + TEMPERATURE), tl.max(peaks, axis=0)
    top_k, top_p = tl.load(options + TOP_K), tl.load(numbers + TOP_P)
    theta, ties, target, earlier = LOWEST + 0, 0.0, draw * tl.sum(masses, axis=0), 0.0
    if (top_k > 0) | (top_p < 1.0) | (tl.load(numbers + MIN_P) > 0.0):
        theta, ties, mass, chunks = _filter(row, peaks, masses, listed, options, numbers, sizes)
        target = draw * mass
        chunk, start, earlier = _find_chunk(
            target, theta, ties, row, listed, chunks, peak, temperature, sizes
        )
    else:
        ids, starts = tl.arange(0, sizes.SIZE_N), tl.cumsum(masses, axis=0) - masses
        chunk = tl.max(tl.where((masses > 0.0) & (starts <= target), ids, 0), axis=0)
        start = _take(starts, ids, chunk)
    tokens = chunk * sizes.CHUNK + tl.arange(0, sizes.CHUNK)
    x = _load_allowed(tokens, tokens >= 0, row, sizes)
    keys = _key(x)
    is_equal = (keys == theta).to(tl.float32)
    rank = earlier + tl.cumsum(is_equal, axis=0) - is_equal
    is_kept = (keys > theta) | ((keys == theta) & (rank < ties))
    mass = tl.where(is_kept, _mass(x, peak, temperature), 0.0)
    starts = start + tl.cumsum(mass, axis=0) - mass
    return tl.max(tl.where((mass > 0.0) & (starts <= target), tokens, -1), axis=0)


@triton.jit
def sample_kernel(logits, stride, slots, state, scratch, vocab_size, eos, capacity, sizes):
    """Chooses the token of one row per program, by greedy search or sampling."""
    wait_for_previous(sizes.PDL)
    launch_dependents(sizes.PDL)
    r = tl.program_id(0).to(tl.int64)
    slot = _slot(slots, r, sizes)
    options, numbers = state.options + slot * OPTIONS, state.numbers + slot * OPTIONS
    maxima = _load_peaks(scratch, r, sizes)
    log_z = _log_sum_of_row(scratch, r, sizes)
    count, temperature = tl.load(options + COUNT), tl.load(numbers + TEMPERATURE)
    sequence = _load_sequence(state, slot, sizes)
    seen, banned = state.seen + slot * vocab_size, _early_eos(state, slot, eos)
    row = (logits + r * stride, banned, seen, tl.load(numbers + PENALTY), vocab_size)
    if tl.load(state.live + slot) != 0:
        token = eos
        if count < tl.load(options + PREFIX_LENGTH):
            token = tl.load(state.prefix + slot * capacity + count)
        elif temperature > 0.0:
            chunks = tl.arange(0, sizes.SIZE_N)
            mask = chunks < sizes.CHUNKS
            part = r * sizes.PARTS + chunks // (sizes.PART // sizes.CHUNK)
            base = tl.load(scratch.statistics + part * 3 + 2, mask=mask, other=float("-inf"))
            mass = tl.load(scratch.masses + r * sizes.CHUNKS + chunks, mask=mask, other=0.0)
            mass *= _mass(base, tl.max(maxima, axis=0), temperature)
            listed = scratch.listed + r * sizes.CHUNKS
            draw = tl.load(state.draws + slot * capacity + count)
            token = _draw(row, maxima, mass, listed, draw, options, numbers, sizes)
        else:
            _, tokens = _best_of_row(row, maxima, sizes, 1, 1)
            token = tl.max(tokens, axis=0)
        token = tl.where((token >= 0) & (token < vocab_size), token, eos)
        value = tl.load(logits + r * stride + token).to(tl.float32)
        _append(state, slot, sequence, token, value - log_z, capacity, eos, sizes)
        tl.store(seen + token, 1)


@triton.jit
def top_kernel(logits, stride, slots, state, scratch, vocab_size, eos, capacity, sizes):
    """Finds the 2 × BEAM best tokens of one row per program."""
    wait_for_previous(sizes.PDL)
    launch_dependents(sizes.PDL)
    r = tl.program_id(0).to(tl.int64)
    slot = _slot(slots, r // sizes.BEAM, sizes)
    is_live = tl.load(state.live + slot * sizes.BEAM)
    maxima = _load_peaks(scratch, r, sizes)
    row = (logits + r * stride, _early_eos(state, slot, eos), state.seen, 1.0, vocab_size)
    if is_live != 0:
        values, tokens = _best_of_row(row, maxima, sizes, sizes.TOP, sizes.SIZE_C)
        candidates = tl.arange(0, sizes.SIZE_C)
        tl.store(
            scratch.best_logits + r * sizes.TOP + candidates, values, mask=candidates < sizes.TOP
        )
        tl.store(
            scratch.best_tokens + r * sizes.TOP + candidates, tokens, mask=candidates < sizes.TOP
        )


@triton.jit
def _best_of_beams(total, rank, vocab_size, sizes):
    """Returns scores, parents and tokens [SIZE_C] of the TOP best of total [beam, candidates].

    rank: beam × vocab_size + token; of equal scores, the lower rank comes first.
    """
    candidates = tl.arange(0, sizes.SIZE_C)
    scores = tl.full([sizes.SIZE_C], float("-inf"), tl.float32)
    ranks = tl.zeros([sizes.SIZE_C], tl.int32)
    for i in tl.static_range(sizes.TOP):
        best = tl.max(tl.max(total, axis=1), axis=0)
        which = tl.min(tl.min(tl.where(total == best, rank, NONE), axis=1), axis=0)
        scores = tl.where(candidates == i, best, scores)
        ranks = tl.where(candidates == i, which, ranks)
        total = tl.where(rank == which, float("-inf"), total)
    ranks = tl.where(scores == float("-inf"), 0, ranks)
    return scores, ranks // vocab_size, ranks % vocab_size


@triton.jit
def _join_pool(pool, pool_numbers, new_score, candidate, length, lost, n_best, sizes):
    """Adds the candidates with a finite new_score [SIZE_C] to the pool, after equal entries.

    Returns the n_best-th score of the pool.
    """
    log_p, parent, token, finished = candidate
    beams, candidates = tl.arange(0, sizes.SIZE_B), tl.arange(0, sizes.SIZE_C)
    is_beam, entries = beams < sizes.BEAM, beams * POOL
    old_score = tl.load(pool_numbers + entries + SCORE, mask=is_beam, other=float("-inf"))
    old_log_p = tl.load(pool_numbers + entries + LOG_P, mask=is_beam, other=float("-inf"))
    old_length = tl.load(pool + entries + LENGTH, mask=is_beam, other=0)
    old_parent = tl.load(pool + entries + PARENT, mask=is_beam, other=0)
    old_token = tl.load(pool + entries + TOKEN, mask=is_beam, other=0)
    old_finished = tl.load(pool + entries + FINISHED, mask=is_beam, other=0)
    tl.debug_barrier()  # all threads have read the pool
    worst = float("-inf")
    for i in tl.static_range(sizes.BEAM):
        best_old, best_new = tl.max(old_score, axis=0), tl.max(new_score, axis=0)
        keeps = best_old >= best_new
        best = tl.maximum(best_old, best_new)
        old = tl.min(tl.where(old_score == best_old, beams, NONE), axis=0)
        new = tl.min(tl.where(new_score == best_new, candidates, NONE), axis=0)
        old_score = tl.where(beams == tl.where(keeps, old, -1), float("-inf"), old_score)
        new_score = tl.where(candidates == tl.where(keeps, -1, new), float("-inf"), new_score)
        exists, entry = best != float("-inf"), i * POOL
        tl.store(pool_numbers + entry + SCORE, best)
        total = tl.where(keeps, _take(old_log_p, beams, old), _take(log_p, candidates, new))
        tl.store(pool_numbers + entry + LOG_P, tl.where(lost, float("nan"), total), mask=exists)
        kept = tl.where(keeps, _take(old_length, beams, old), length)
        tl.store(pool + entry + LENGTH, kept, mask=exists)
        kept = tl.where(keeps, _take(old_parent, beams, old), _take(parent, candidates, new))
        tl.store(pool + entry + PARENT, kept, mask=exists)
        kept = tl.where(keeps, _take(old_token, beams, old), _take(token, candidates, new))
        tl.store(pool + entry + TOKEN, kept, mask=exists)
        is_new = _take(finished.to(tl.int32), candidates, new)
        kept = tl.where(keeps, _take(old_finished, beams, old), is_new)
        tl.store(pool + entry + FINISHED, kept, mask=exists)
        worst = tl.where(i == n_best - 1, best, worst)
    return worst


@triton.jit
def _survivors(score, parent, token, sizes):
    """Returns the BEAM best of 2 BEAM candidates, [SIZE_B] each; of equals, the earlier first."""
    beams, candidates = tl.arange(0, sizes.SIZE_B), tl.arange(0, sizes.SIZE_C)
    new_score = tl.full([sizes.SIZE_B], float("-inf"), tl.float32)
    new_parent = tl.zeros([sizes.SIZE_B], tl.int32)
    new_token = tl.zeros([sizes.SIZE_B], tl.int32)
    unused = candidates < sizes.TOP
    for i in tl.static_range(sizes.BEAM):
        best = tl.max(tl.where(unused, score, float("-inf")), axis=0)
        which = tl.min(tl.where(unused & (score == best), candidates, NONE), axis=0)
        unused = unused & (candidates != which)
        new_score = tl.where(beams == i, best, new_score)
        new_parent = tl.where(beams == i, _take(parent, candidates, which), new_parent)
        new_token = tl.where(beams == i, _take(token, candidates, which), new_token)
    return new_score, new_parent, new_token


@triton.jit
def _continue_parents(ancestors, parent, length, size, sizes):
    """Sets the ancestors of each row of a slot to those of its parent [SIZE_B], then the parent."""
    beams = tl.arange(0, sizes.SIZE_B)
    for begin in range(0, tl.minimum(size, length + 1), sizes.POSITIONS):
        positions = begin + tl.arange(0, sizes.POSITIONS)
        mask = (beams < sizes.BEAM)[:, None] & (positions < size)[None, :]
        table = tl.load(ancestors + parent[:, None] * size + positions[None, :], mask=mask, other=0)
        table = tl.where((positions == length % size)[None, :], parent[:, None], table)
        tl.debug_barrier()  # all threads have read these positions
        tl.store(ancestors + beams[:, None] * size + positions[None, :], table, mask=mask)


@triton.jit
def beam_kernel(logits, stride, slots, state, scratch, vocab_size, eos, capacity, sizes, size):
    """Extends the hypotheses of one slot per program."""
    wait_for_previous(sizes.PDL)
    launch_dependents(sizes.PDL)
    place = tl.program_id(0).to(tl.int64)
    slot = _slot(slots, place, sizes)
    row, first_row = place * sizes.BEAM, slot * sizes.BEAM  # in the logits, and in the state
    if tl.load(state.live + first_row) != 0:
        options = state.options + slot * OPTIONS
        pool, numbers = state.pool + first_row * POOL, state.pool_numbers + first_row * POOL
        count, alpha = tl.load(options + COUNT) + 1, tl.load(state.numbers + slot * OPTIONS + ALPHA)
        longest, n_best = tl.load(options + MAX_LENGTH), tl.load(options + N_BEST)
        beams, candidates = tl.arange(0, sizes.SIZE_B), tl.arange(0, sizes.SIZE_C)
        is_beam = beams < sizes.BEAM
        scores = tl.load(numbers + beams * POOL + LIVE, mask=is_beam, other=float("-inf"))
        log_z = _log_sum(scratch, row + beams, is_beam, sizes)
        exists = scores != float("-inf")
        # NaN or infinite logits of a live hypothesis
        lost = tl.max((exists & ~(tl.abs(log_z) < float("inf"))).to(tl.int32), axis=0) > 0

        # the candidates of all beams, [beam, 2 beam]
        at = (row + beams)[:, None] * sizes.TOP + candidates[None, :]
        mask = is_beam[:, None] & (candidates < sizes.TOP)[None, :]
        value = tl.load(scratch.best_logits + at, mask=mask, other=float("-inf"))
        token = tl.load(scratch.best_tokens + at, mask=mask, other=NONE)
        if count <= tl.load(options + PREFIX_LENGTH):
            forced = tl.load(state.prefix + slot * capacity + count - 1)
            x = tl.load(logits + (row + beams) * stride + forced, mask=is_beam, other=0.0)
            is_first = (candidates == 0)[None, :] & is_beam[:, None]
            value = tl.where(is_first, x.to(tl.float32)[:, None], float("-inf"))
            token = tl.where(is_first, forced, NONE)
        total = scores[:, None] + (value - log_z[:, None])
        is_never = (scores == float("-inf"))[:, None] | (value == float("-inf"))
        total = tl.where(is_never | (total != total), float("-inf"), total)
        rank = tl.where(mask & (token != NONE), beams[:, None] * vocab_size + token, NONE)
        score, parent, last = _best_of_beams(total, rank, vocab_size, sizes)
        finished = (last == eos) & (score != float("-inf"))
        over = finished | (count >= longest)

        ends = over & (candidates < sizes.BEAM)
        new_score = tl.where(ends, score / _penalty(count, alpha), float("-inf"))
        candidate = (score, parent, last, finished)
        worst = _join_pool(pool, numbers, new_score, candidate, count, lost, n_best, sizes)
        # the others stay live if one of them can still enter the n-best list
        score = tl.where(over, float("-inf"), score)
        score, parent, last = _survivors(score, parent, last, sizes)
        length = tl.where(alpha >= 0.0, longest, count + 1)
        done = (tl.max(score, axis=0) / _penalty(length, alpha) <= worst) | lost
        score = tl.where(done, float("-inf"), score)
        tl.store(numbers + beams * POOL + LIVE, score, mask=is_beam)
        step = (slot * capacity + count - 1) * sizes.BEAM + beams
        tl.store(state.history_tokens + step, last, mask=is_beam)
        tl.store(state.history_parents + step, parent, mask=is_beam)
        tl.store(state.tokens + first_row + beams, last.to(tl.int64), mask=is_beam)
        tl.store(state.parents + first_row + beams, first_row + parent, mask=is_beam)
        if sizes.HAS_LENGTHS:
            length = tl.load(state.lengths + first_row).to(tl.int32)
            if size > 0:
                ancestors = state.ancestors + first_row * size
                _continue_parents(ancestors, parent, length, size, sizes)
            tl.debug_barrier()  # all threads have read the length
            tl.store(state.lengths + first_row + beams, (length + 1).to(tl.int64), mask=is_beam)
        tl.store(options + COUNT, count)
        tl.store(state.live + first_row + beams, tl.where(done, 0, 1).to(tl.int64), mask=is_beam)


@triton.jit
def trace_kernel(slots, state, texts, slot_stride, text_stride, capacity, BEAM: tl.constexpr):
    """Traces one hypothesis of the pool back to its first token, per program."""
    place, n = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + place)
    pool = state.pool + (slot * BEAM + n) * POOL
    texts += place * slot_stride + n * text_stride
    length, beam = tl.load(pool + LENGTH), tl.load(pool + PARENT)
    if length > 0:
        tl.store(texts + length - 1, tl.load(pool + TOKEN))
        for i in range(length - 1):
            t = length - 2 - i
            at = (slot * capacity + t) * BEAM + beam
            tl.store(texts + t, tl.load(state.history_tokens + at))
            beam = tl.load(state.history_parents + at)
