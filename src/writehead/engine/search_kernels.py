"""The Triton kernels of `search.py`, whose reference defines their results.

In greedy and beam search, the first kernel reads all logits once. It stores the largest logit of
each CHUNK, and the sum of exponentials of each PART. The best tokens of a row are in the chunks
with the largest maxima, so only these chunks are read again. In greedy search, the program that
finishes a row last chooses its token. If any row is sampled, one kernel does all the work; a
program keeps the logits of its row in registers. Shapes are fixed and nothing waits for the host,
so a CUDA graph can capture a step.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from writehead.ops.launch import LOG2E, launch, launch_pdl, tl, triton, wait_for_previous

if TYPE_CHECKING:
    from writehead.engine.search import Search

CHUNK = 32  # logits whose largest is stored
PART = 4096  # logits that one program reads
TILE = 32768  # logits that a sampling program holds at once
NUMBER_STEPS = tl.constexpr(4)  # of a bisection, before it bisects keys

# the columns of `Search.option_table`, in the order of `SlotOptions`
MAX_LENGTH, MIN_LENGTH, PREFIX_LENGTH, N_BEST = (tl.constexpr(i) for i in range(4))
TOP_K, COUNT, ALPHA, TEMPERATURE, TOP_P, MIN_P, PENALTY = (tl.constexpr(i) for i in range(4, 11))
OPTIONS = tl.constexpr(14)
SEED, SEEDS = tl.constexpr(6), tl.constexpr(7)  # as int64
# the columns of `Search.pool_table`, in the order of `Pool`
LENGTH, FINISHED, SCORE, LOG_P, PARENT, TOKEN, LIVE = (tl.constexpr(i) for i in range(7))
POOL = tl.constexpr(7)

NONE = tl.constexpr(2147483647)  # no token
FINITE = tl.constexpr(-3.4e38)  # a base for rows of -inf; -inf - -inf would be NaN


class State(NamedTuple):
    """The tensors and sizes of a `Search`, and intermediate results of the kernels of a step."""

    options: Tensor
    numbers: Tensor  # `options` as float32
    seeds: Tensor  # `options` as int64
    pool: Tensor
    pool_numbers: Tensor  # `pool` as float32
    peaks: Tensor  # [rows, chunks], the largest allowed logit
    statistics: Tensor  # [rows, parts, 2]: largest logit, and sum of exponentials relative to it
    best_logits: Tensor  # [rows, 2 × beam]
    best_tokens: Tensor
    done: Tensor  # [rows], how many parts have been read; zero between steps
    prefix: Tensor
    seen: Tensor
    tokens: Tensor
    parents: Tensor
    live: Tensor
    lengths: Tensor
    ancestors: Tensor | None
    history_tokens: Tensor
    history_parents: Tensor
    vocab_size: int
    eos: int
    capacity: int

    @classmethod
    def of(cls, search: "Search") -> "State":
        """Returns the state of a search, with new intermediate results."""
        options, pool, device = search.option_table, search.pool_table, search.tokens.device
        numbers, pool_numbers = options.view(torch.float32), pool.view(torch.float32)
        rows, parts = len(search.tokens), triton.cdiv(search.vocab_size, PART)
        peaks = torch.empty(rows, parts * (PART // CHUNK), device=device)
        statistics = torch.empty(rows, parts, 2, device=device)
        best_logits = torch.empty(rows, 2 * search.beam, device=device)
        best_tokens = torch.empty_like(best_logits, dtype=torch.int32)
        done = torch.zeros(rows, dtype=torch.int32, device=device)
        views = options, numbers, options.view(torch.int64), pool, pool_numbers
        scratch = peaks, statistics, best_logits, best_tokens, done
        return cls(*views, *scratch, *(getattr(search, name) for name in cls._fields[10:]))


class Sizes(NamedTuple):
    """Compile-time constants; SIZE_… are powers of two."""

    CHUNK: int
    PART: int
    PARTS: int  # of a row
    CHUNKS: int  # of a row
    TILE: int
    TILES: int  # of a row
    SHIFT: int  # low bits that are equal in all logits, as float32
    BEAM: int
    TOP: int  # continuations that a step of beam search considers
    POSITIONS: int  # of the ancestors, to update at a time
    SIZE_N: int  # chunks of a row
    SIZE_P: int  # parts of a row
    SIZE_B: int  # beams
    SIZE_C: int  # continuations


def advance(state: State, beam: int, logits: Tensor, slots: Tensor, sampling: bool) -> None:
    """Runs one step; see `Search.advance`."""
    rows, parts, chunks = len(logits), state.statistics.shape[1], state.peaks.shape[1]
    tile = max(CHUNK, min(TILE, triton.next_power_of_2(state.vocab_size)))
    ring = 0 if state.ancestors is None else state.ancestors.shape[1]
    counts = CHUNK, PART, parts, chunks, tile, triton.cdiv(state.vocab_size, tile)
    shift = {torch.bfloat16: 16, torch.float16: 13}.get(logits.dtype, 0)
    beams = beam, 2 * beam, min(triton.next_power_of_2(max(ring, 1)), 128)
    padded = map(triton.next_power_of_2, (chunks, parts, beam, 2 * beam))
    sizes = Sizes(*map(tl.constexpr, (*counts, shift, *beams, *padded)))
    given = logits, logits.stride(0), slots, state, sizes
    if sampling and beam == 1:
        launch_pdl(sample_kernel, (rows,), logits)(*given, num_warps=min(16, max(1, tile // 512)))
        return
    launch_pdl(scan_kernel, (rows, parts), logits)(*given, num_warps=2)
    if beam > 1:
        launch_pdl(top_kernel, (rows,), logits)(*given, num_warps=2)
        launch_pdl(beam_kernel, (rows // beam,), logits)(*given, ring, num_warps=1)


def trace_back(state: State, beam: int, index: Tensor, texts: Tensor) -> None:
    """Writes the tokens of the pools of slots `index` [R] to texts [R, n, longest]."""
    given = index, state, texts, *texts.stride()[:2], beam
    launch(trace_kernel, texts.shape[:2])(*given, num_warps=1)


@triton.jit
def _early_eos(state, slot):
    """Returns eos if the slot may not choose it yet, otherwise -1."""
    count = tl.load(state.options + slot * OPTIONS + COUNT)
    least = tl.load(state.options + slot * OPTIONS + MIN_LENGTH)
    return tl.where(count + 1 < least, state.eos, -1)


@triton.jit
def scan_kernel(logits, stride, slots, state, sizes, PDL: tl.constexpr):
    """Reads one part of a row per program; in greedy search, the last program chooses the token."""
    wait_for_previous(PDL)
    r = tl.program_id(0).to(tl.int64)
    # the logits written last may still be in the L2 cache
    part = sizes.PARTS - 1 - tl.program_id(1)
    slot = tl.load(slots + r // sizes.BEAM).to(tl.int64)
    logits += r * stride
    banned, place = _early_eos(state, slot), r * sizes.PARTS + part
    CHUNKS: tl.constexpr = sizes.PART // sizes.CHUNK
    chunks, within = tl.arange(0, CHUNKS), tl.arange(0, sizes.CHUNK)
    tokens = part * sizes.PART + chunks[:, None] * sizes.CHUNK + within[None, :]
    x = tl.load(logits + tokens, mask=tokens < state.vocab_size, other=float("-inf")).to(tl.float32)
    peak = tl.max(x)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(state.statistics + place * 2, peak)
    tl.store(state.statistics + place * 2 + 1, tl.sum(tl.exp(x - base)))
    maxima = tl.max(tl.where(tokens == banned, float("-inf"), x), axis=1)
    tl.store(state.peaks + place * CHUNKS + chunks, maxima)
    if sizes.BEAM == 1:
        tl.debug_barrier()  # all threads have written before the part is counted
        if tl.atomic_add(state.done + r, 1, sem="acq_rel") == sizes.PARTS - 1:
            tl.store(state.done + r, 0)
            # the loads do not depend on each other, so their latencies overlap
            is_live = tl.load(state.live + slot)
            count = tl.load(state.options + slot * OPTIONS + COUNT)
            forced = tl.load(state.options + slot * OPTIONS + PREFIX_LENGTH)
            sequence = _load_sequence(state, slot)
            peaks = _load_peaks(state, r, sizes)
            one = tl.full([1], 0, tl.int64) + r
            log_z = tl.sum(_log_sum(state, one, one >= 0, sizes), axis=0)
            if is_live != 0:
                row = (logits, banned, state.vocab_size)
                values, best = _best_of_row(row, peaks, sizes, 1, 1)
                value, token = tl.max(values, axis=0), tl.max(best, axis=0)
                if count < forced:
                    token = tl.load(state.prefix + slot * state.capacity + count)
                    value = tl.load(logits + token).to(tl.float32)
                token = tl.where(token == NONE, state.eos, token)
                _append(state, slot, sequence, token, value - log_z)


@triton.jit
def _load_peaks(state, r, sizes):
    """Loads the largest allowed logit of each chunk of a row."""
    chunks = tl.arange(0, sizes.SIZE_N)
    mask = chunks < sizes.CHUNKS
    return tl.load(state.peaks + r * sizes.CHUNKS + chunks, mask=mask, other=float("-inf"))


@triton.jit
def _log_sum(state, rows, is_row, sizes):
    """Returns log Z of several rows, from the statistics of their parts."""
    parts = tl.arange(0, sizes.SIZE_P)
    at = (rows[:, None] * sizes.PARTS + parts[None, :]) * 2
    mask = is_row[:, None] & (parts < sizes.PARTS)[None, :]
    largest = tl.load(state.statistics + at, mask=mask, other=float("-inf"))
    total = tl.load(state.statistics + at + 1, mask=mask, other=0.0)
    base = tl.maximum(tl.max(largest, axis=1), FINITE)
    return base + tl.log(tl.sum(total * tl.exp(largest - base[:, None]), axis=1))


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
    logits, banned, vocab_size = row
    mask = (chosen >= 0)[:, None] & (at < vocab_size) & (at != banned)
    x = tl.load(logits + at, mask=mask, other=float("-inf")).to(tl.float32)
    values = tl.full([SIZE_C], float("-inf"), tl.float32)
    tokens = tl.full([SIZE_C], NONE, tl.int32)
    for i in tl.static_range(TOP):
        value = tl.max(x)
        is_best = (x == value) & (x > float("-inf"))
        token = tl.min(tl.where(is_best, at, NONE))
        values = tl.where(candidates == i, value, values)
        tokens = tl.where(candidates == i, token, tokens)
        x = tl.where(at == token, float("-inf"), x)
    return values, tokens


@triton.jit
def _load_sequence(state, slot):
    """Loads the sequence of a slot with one row: count, limit, alpha, log P, cache length."""
    options, length = state.options + slot * OPTIONS, tl.load(state.lengths + slot)
    alpha = tl.load(state.numbers + slot * OPTIONS + ALPHA)
    log_p = tl.load(state.pool_numbers + slot * POOL + LOG_P)
    return tl.load(options + COUNT), tl.load(options + MAX_LENGTH), alpha, log_p, length


@triton.jit
def _append(state, slot, sequence, token, log_p):
    """Appends a token with `log_p` to the sequence of a slot with one row."""
    options, entry = state.options + slot * OPTIONS, slot * POOL
    count, longest, alpha, total, length = sequence
    count += 1
    log_p += total
    is_live = (token != state.eos) & (count < longest) & (tl.abs(log_p) < float("inf"))
    tl.debug_barrier()  # all threads have read the values that are overwritten below
    tl.store(state.lengths + slot, length + 1)
    tl.store(options + COUNT, count)
    tl.store(state.pool + entry + LENGTH, count)
    tl.store(state.pool + entry + FINISHED, (token == state.eos).to(tl.int32))
    tl.store(state.pool_numbers + entry + SCORE, log_p / _penalty(count, alpha))
    tl.store(state.pool_numbers + entry + LOG_P, log_p)
    tl.store(state.history_tokens + slot * state.capacity + count - 1, token)
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
def _mass(x, peak, rate):
    """Returns the mass of logits x relative to that of `peak`; rate: log2(e) / temperature."""
    return tl.exp2((x - peak) * rate)


@triton.jit
def _load_tile(row, tile, sizes):
    """Loads a tile of a row [TILE / CHUNK, CHUNK]: its logits, penalized logits and tokens."""
    logits, banned, seen, penalty, vocab_size = row
    chunks, within = tl.arange(0, sizes.TILE // sizes.CHUNK), tl.arange(0, sizes.CHUNK)
    tokens = tile * sizes.TILE + chunks[:, None] * sizes.CHUNK + within[None, :]
    mask = tokens < vocab_size
    x = tl.load(logits + tokens, mask=mask, other=float("-inf")).to(tl.float32)
    y = x
    if penalty != 1.0:
        was_seen = tl.load(seen + tokens, mask=mask, other=0) != 0
        y = tl.where(was_seen, tl.where(x > 0.0, x / penalty, x * penalty), x)
    return x, tl.where(tokens == banned, float("-inf"), y), tokens


@triton.jit
def _read_tile(row, tile, sizes):
    """Returns the allowed logits of a tile, largest logit, sum of exponentials and best token."""
    x, y, tokens = _load_tile(row, tile, sizes)
    highest = tl.max(x)
    total = tl.sum(tl.exp(x - tl.maximum(highest, FINITE)))
    peak = tl.max(y)
    token = tl.min(tl.where(y == peak, tokens, NONE))
    return y, highest, total, peak, token


@triton.jit
def _tile(x, row, tile, sizes):
    """Returns the allowed logits of a tile: x, which is in registers, if there is only one."""
    if sizes.TILES > 1:
        _, x, _ = _load_tile(row, tile, sizes)
    return x


@triton.jit
def _reach(x, row, bound, peak, rate, sizes, BY_MASS: tl.constexpr):
    """Returns the total mass, or the count, of the tokens with logits of at least `bound`."""
    total = 0.0
    for tile in range(sizes.TILES):
        y = _tile(x, row, tile, sizes)
        each = _mass(y, peak, rate) if BY_MASS else tl.full(y.shape, 1.0, tl.float32)
        total += tl.sum(tl.where(y >= bound, each, 0.0))
    return total


@triton.jit
def _threshold(x, row, goal, lowest, peak, rate, sizes, BY_MASS: tl.constexpr):
    """Returns the highest logit, from `lowest` up, at which tokens reach the goal.

    Bisects the keys of numbers, without the low bits that are the same in all logits. The first
    steps bisect the numbers themselves, because most keys are those of numbers near zero.
    """
    _, _, _, penalty, _ = row
    shift = tl.where(penalty == 1.0, sizes.SHIFT, 0)
    low, high, steps = _key(lowest) >> shift, _key(peak) >> shift, 0
    while low < high:
        middle = (low >> 1) + (high >> 1) + (low & high & 1) + 1  # their sum may overflow
        if (steps < NUMBER_STEPS) & (lowest > float("-inf")):
            bound = 0.5 * _number(low << shift) + 0.5 * _number(high << shift)
            middle = tl.minimum(tl.maximum(_key(bound) >> shift, low + 1), high)
        steps += 1
        bound = _number(middle << shift)
        reached = _reach(x, row, bound, peak, rate, sizes, BY_MASS) >= goal
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    # rounding down must not go below `lowest`, which may be minus infinity
    bound, theta = _number(tl.maximum(low << shift, _key(lowest))), float("inf")
    for tile in range(sizes.TILES):
        y = _tile(x, row, tile, sizes)
        theta = tl.minimum(theta, tl.min(tl.where(y >= bound, y, theta)))
    return theta


@triton.jit
def _filter(x, row, peak, rate, options, numbers, sizes):
    """Applies top_k and then top_p; returns the threshold, and how many tokens equal to it stay."""
    top_p = tl.load(numbers + TOP_P)
    top_k = tl.load(options + TOP_K).to(tl.float32)
    theta, ties = float("-inf"), 0.0
    if top_k > 0.0:
        theta = _threshold(x, row, top_k, theta, peak, rate, sizes, False)
        ties = top_k - _reach(x, row, _number(_key(theta) + 1), peak, rate, sizes, False)
    if top_p < 1.0:
        mass = _reach(x, row, _number(_key(theta) + 1), peak, rate, sizes, True)
        whole = mass + ties * _mass(theta, peak, rate)
        goal = top_p * whole
        _, _, _, _, vocab_size = row
        # all tokens below this logit together have less mass than may be left out
        lowest = peak + tl.log2(tl.maximum(0.5 * (whole - goal), 1e-30) / vocab_size) / rate
        lowest = tl.maximum(lowest, theta)
        higher = _threshold(x, row, goal, lowest, peak, rate, sizes, True)
        mass = _reach(x, row, _number(_key(higher) + 1), peak, rate, sizes, True)
        more = tl.ceil((goal - mass) / tl.maximum(_mass(higher, peak, rate), 1e-37))
        theta, ties = higher, tl.where(higher == theta, tl.minimum(ties, more), more)
    return theta, ties


@triton.jit
def _kept(y, earlier, theta, ties, floor, peak, rate):
    """Returns the kept mass of each chunk of a tile y, and the ties before it and up to the end.

    Ties are tokens equal to theta; `earlier` of them are before the tile.
    """
    is_above = (y > theta) & (y >= floor)
    mass = tl.sum(tl.where(is_above, _mass(y, peak, rate), 0.0), axis=1)
    equal = tl.sum((y == theta).to(tl.float32), axis=1)
    before = earlier + tl.cumsum(equal, axis=0) - equal
    each = tl.where(theta >= floor, _mass(theta, peak, rate), 0.0)
    mass += each * tl.minimum(tl.maximum(ties - before, 0.0), equal)
    return mass, before, earlier + tl.sum(equal, axis=0)


@triton.jit
def _random(seed, t):
    """Returns the same uniform random number as in `search.py`."""
    z = seed.to(tl.uint64) + (t + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return ((z ^ (z >> 31)) >> 40).to(tl.float32) * 2.0**-24


@triton.jit
def _draw(x, row, peak, draw, options, numbers, sizes):
    """Returns the token at which the cumulative mass exceeds draw × the mass of kept tokens."""
    temperature = tl.load(numbers + TEMPERATURE)
    rate = LOG2E / temperature
    theta, ties = _filter(x, row, peak, rate, options, numbers, sizes)
    floor = peak + temperature * tl.log(tl.load(numbers + MIN_P))
    mass, before, earlier = _kept(_tile(x, row, 0, sizes), 0.0, theta, ties, floor, peak, rate)
    total = tl.sum(mass, axis=0)
    for tile in range(1, sizes.TILES):
        y = _tile(x, row, tile, sizes)
        more, _, earlier = _kept(y, earlier, theta, ties, floor, peak, rate)
        total += tl.sum(more, axis=0)
    target, start, token = draw * total, 0.0, -1
    if sizes.TILES > 1:
        earlier = 0.0
    chunks, within = tl.arange(0, sizes.TILE // sizes.CHUNK), tl.arange(0, sizes.CHUNK)
    for tile in range(sizes.TILES):
        y = _tile(x, row, tile, sizes)
        if sizes.TILES > 1:
            mass, before, earlier = _kept(y, earlier, theta, ties, floor, peak, rate)
        starts = start + tl.cumsum(mass, axis=0) - mass
        start += tl.sum(mass, axis=0)
        chunk = tl.max(tl.where((mass > 0.0) & (starts <= target), chunks, -1), axis=0)
        if chunk >= 0:
            is_chunk = chunks == chunk
            own = tl.sum(tl.where(is_chunk[:, None], y, 0.0), axis=0)  # [CHUNK]
            is_equal = (own == theta).to(tl.float32)
            rank = tl.sum(tl.where(is_chunk, before, 0.0), axis=0)
            rank = rank + tl.cumsum(is_equal, axis=0) - is_equal
            is_kept = ((own > theta) | ((own == theta) & (rank < ties))) & (own >= floor)
            each = tl.where(is_kept, _mass(own, peak, rate), 0.0)
            begins = tl.sum(tl.where(is_chunk, starts, 0.0), axis=0)
            begins = begins + tl.cumsum(each, axis=0) - each
            last = tl.max(tl.where((each > 0.0) & (begins <= target), within, 0), axis=0)
            token = tile * sizes.TILE + chunk * sizes.CHUNK + last
    return token


@triton.jit
def sample_kernel(logits, stride, slots, state, sizes, PDL: tl.constexpr):
    """Chooses the token of one row per program, by greedy search or sampling."""
    wait_for_previous(PDL)
    r = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + r).to(tl.int64)
    options, numbers = state.options + slot * OPTIONS, state.numbers + slot * OPTIONS
    count, temperature = tl.load(options + COUNT), tl.load(numbers + TEMPERATURE)
    sequence = _load_sequence(state, slot)
    seen, banned = state.seen + slot * state.vocab_size, _early_eos(state, slot)
    row = (logits + r * stride, banned, seen, tl.load(numbers + PENALTY), state.vocab_size)
    if tl.load(state.live + slot) != 0:
        x, highest, total, peak, token = _read_tile(row, 0, sizes)
        for tile in range(1, sizes.TILES):
            _, high, more, best, which = _read_tile(row, tile, sizes)
            base = tl.maximum(tl.maximum(highest, high), FINITE)
            total = total * tl.exp(highest - base) + more * tl.exp(high - base)
            highest, token = tl.maximum(highest, high), tl.where(best > peak, which, token)
            peak = tl.maximum(peak, best)
        if count < tl.load(options + PREFIX_LENGTH):
            token = tl.load(state.prefix + slot * state.capacity + count)
        elif temperature > 0.0:
            draw = _random(tl.load(state.seeds + slot * SEEDS + SEED), count)
            token = _draw(x, row, peak, draw, options, numbers, sizes)
        token = tl.where((token >= 0) & (token < state.vocab_size), token, state.eos)
        value = tl.load(logits + r * stride + token).to(tl.float32)
        log_p = value - highest - tl.log(total)
        _append(state, slot, sequence, token, log_p)
        tl.store(seen + token, 1)


@triton.jit
def top_kernel(logits, stride, slots, state, sizes, PDL: tl.constexpr):
    """Finds the 2 × BEAM best tokens of one row per program."""
    wait_for_previous(PDL)
    r = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + r // sizes.BEAM).to(tl.int64)
    is_live = tl.load(state.live + slot * sizes.BEAM)
    maxima = _load_peaks(state, r, sizes)
    row = (logits + r * stride, _early_eos(state, slot), state.vocab_size)
    if is_live != 0:
        values, tokens = _best_of_row(row, maxima, sizes, sizes.TOP, sizes.SIZE_C)
        candidates = tl.arange(0, sizes.SIZE_C)
        at, mask = r * sizes.TOP + candidates, candidates < sizes.TOP
        tl.store(state.best_logits + at, values, mask=mask)
        tl.store(state.best_tokens + at, tokens, mask=mask)


@triton.jit
def _best_of_beams(total, rank, vocab_size, sizes):
    """Returns scores, parents and tokens [SIZE_C] of the TOP best of total [beam, candidates]."""
    # rank: beam × vocab_size + token; of equal scores, the lower rank comes first
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
    """Adds sorted candidates, if new_score is finite, to the pool; returns its n_best-th score."""
    log_p, parent, token, finished = candidate
    beams, columns = tl.arange(0, sizes.SIZE_B), tl.arange(0, 8)[None, :]
    is_beam = beams < sizes.BEAM
    entries = tl.load(  # all columns as integers
        pool + beams[:, None] * POOL + columns, mask=is_beam[:, None] & (columns < LIVE), other=0
    )
    old_score = tl.load(pool_numbers + beams * POOL + SCORE, mask=is_beam, other=float("-inf"))
    # the place of each entry and candidate in the new pool
    is_new = new_score > float("-inf")
    is_better = (new_score[None, :] > old_score[:, None]).to(tl.int32)
    place = beams + tl.sum(is_better, axis=1)
    new_place = tl.cumsum(is_new.to(tl.int32), axis=0) - 1
    new_place += tl.sum((is_beam[:, None] & (is_better == 0)).to(tl.int32), axis=0)
    is_kept = is_beam & (place < sizes.BEAM) & (old_score > float("-inf"))
    is_new = is_new & (new_place < sizes.BEAM)
    tl.debug_barrier()  # all threads have read the pool
    is_column = (columns < LIVE) & ((columns != LOG_P) | (lost == 0))
    tl.store(pool + place[:, None] * POOL + columns, entries, mask=is_kept[:, None] & is_column)
    nan = tl.full([sizes.SIZE_B], float("nan"), tl.float32)
    tl.store(pool_numbers + place * POOL + LOG_P, nan, mask=is_kept & lost)
    new_place *= POOL
    tl.store(pool_numbers + new_place + SCORE, new_score, mask=is_new)
    tl.store(pool_numbers + new_place + LOG_P, tl.where(lost, float("nan"), log_p), mask=is_new)
    tl.store(pool + new_place + LENGTH, length + 0 * parent, mask=is_new)
    tl.store(pool + new_place + FINISHED, finished.to(tl.int32), mask=is_new)
    tl.store(pool + new_place + PARENT, parent, mask=is_new)
    tl.store(pool + new_place + TOKEN, token, mask=is_new)
    old_worst = tl.where(is_kept & (place == n_best - 1), old_score, float("-inf"))
    new_worst = tl.where(is_new & (new_place == (n_best - 1) * POOL), new_score, float("-inf"))
    return tl.maximum(tl.max(old_worst, axis=0), tl.max(new_worst, axis=0))


@triton.jit
def _survivors(score, parent, token, sizes):
    """Returns the first BEAM candidates that stay live, [SIZE_B] each; candidates are sorted."""
    stays = score > float("-inf")
    place = tl.cumsum(stays.to(tl.int32), axis=0) - 1
    moves = stays[None, :] & (place[None, :] == tl.arange(0, sizes.SIZE_B)[:, None])
    new_score = tl.max(tl.where(moves, score[None, :], float("-inf")), axis=1)
    new_parent = tl.sum(tl.where(moves, parent[None, :], 0), axis=1)
    return new_score, new_parent, tl.sum(tl.where(moves, token[None, :], 0), axis=1)


@triton.jit
def _continue_parents(ancestors, parent, length, ring, sizes):
    """Copies the ancestors of the parent [SIZE_B] of each row, and appends the parent."""
    beams = tl.arange(0, sizes.SIZE_B)
    for begin in range(0, tl.minimum(ring, length + 1), sizes.POSITIONS):
        positions = begin + tl.arange(0, sizes.POSITIONS)
        mask = (beams < sizes.BEAM)[:, None] & (positions < ring)[None, :]
        table = tl.load(ancestors + parent[:, None] * ring + positions[None, :], mask=mask, other=0)
        table = tl.where((positions == length % ring)[None, :], parent[:, None], table)
        tl.debug_barrier()  # all threads have read these positions
        tl.store(ancestors + beams[:, None] * ring + positions[None, :], table, mask=mask)


@triton.jit
def beam_kernel(logits, stride, slots, state, sizes, ring, PDL: tl.constexpr):
    """Extends the hypotheses of one slot per program."""
    wait_for_previous(PDL)
    place = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + place).to(tl.int64)
    row, first_row = place * sizes.BEAM, slot * sizes.BEAM  # in the logits, and in the state
    if tl.load(state.live + first_row) != 0:
        options = state.options + slot * OPTIONS
        pool, numbers = state.pool + first_row * POOL, state.pool_numbers + first_row * POOL
        count, alpha = tl.load(options + COUNT) + 1, tl.load(state.numbers + slot * OPTIONS + ALPHA)
        longest, n_best = tl.load(options + MAX_LENGTH), tl.load(options + N_BEST)
        beams, candidates = tl.arange(0, sizes.SIZE_B), tl.arange(0, sizes.SIZE_C)
        is_beam = beams < sizes.BEAM
        scores = tl.load(numbers + beams * POOL + LIVE, mask=is_beam, other=float("-inf"))
        log_z = _log_sum(state, row + beams, is_beam, sizes)
        exists = scores != float("-inf")
        # NaN or infinite logits of a live hypothesis
        lost = tl.max((exists & ~(tl.abs(log_z) < float("inf"))).to(tl.int32), axis=0) > 0

        # the candidates of all beams, [beam, 2 beam]
        at = (row + beams)[:, None] * sizes.TOP + candidates[None, :]
        mask = is_beam[:, None] & (candidates < sizes.TOP)[None, :]
        value = tl.load(state.best_logits + at, mask=mask, other=float("-inf"))
        token = tl.load(state.best_tokens + at, mask=mask, other=NONE)
        if count <= tl.load(options + PREFIX_LENGTH):
            forced = tl.load(state.prefix + slot * state.capacity + count - 1)
            x = tl.load(logits + (row + beams) * stride + forced, mask=is_beam, other=0.0)
            is_first = (candidates == 0)[None, :] & is_beam[:, None]
            value = tl.where(is_first, x.to(tl.float32)[:, None], float("-inf"))
            token = tl.where(is_first, forced, NONE)
        total = scores[:, None] + (value - log_z[:, None])
        is_never = (scores == float("-inf"))[:, None] | (value == float("-inf"))
        total = tl.where(is_never | (total != total), float("-inf"), total)
        rank = tl.where(mask & (token != NONE), beams[:, None] * state.vocab_size + token, NONE)
        score, parent, last = _best_of_beams(total, rank, state.vocab_size, sizes)
        finished = (last == state.eos) & (score != float("-inf"))
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
        step = (slot * state.capacity + count - 1) * sizes.BEAM + beams
        tl.store(state.history_tokens + step, last, mask=is_beam)
        tl.store(state.history_parents + step, parent, mask=is_beam)
        tl.store(state.tokens + first_row + beams, last.to(tl.int64), mask=is_beam)
        tl.store(state.parents + first_row + beams, first_row + parent, mask=is_beam)
        length = tl.load(state.lengths + first_row).to(tl.int32)
        if state.ancestors is not None:
            _continue_parents(state.ancestors + first_row * ring, parent, length, ring, sizes)
        tl.debug_barrier()  # all threads have read the length
        tl.store(state.lengths + first_row + beams, (length + 1).to(tl.int64), mask=is_beam)
        tl.store(options + COUNT, count)
        tl.store(state.live + first_row + beams, tl.where(done, 0, 1).to(tl.int64), mask=is_beam)


@triton.jit
def trace_kernel(slots, state, texts, slot_stride, text_stride, BEAM: tl.constexpr):
    """Traces one hypothesis of the pool per program back to its first token."""
    place, n = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + place)
    pool = state.pool + (slot * BEAM + n) * POOL
    texts += place * slot_stride + n * text_stride
    length, beam = tl.load(pool + LENGTH), tl.load(pool + PARENT)
    if length > 0:
        tl.store(texts + length - 1, tl.load(pool + TOKEN))
        for i in range(length - 1):
            t = length - 2 - i
            at = (slot * state.capacity + t) * BEAM + beam
            tl.store(texts + t, tl.load(state.history_tokens + at))
            beam = tl.load(state.history_parents + at)
