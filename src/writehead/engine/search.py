"""Greedy search, sampling and beam search, with state in fixed-shape tensors on a device.

A `Search` has slots of `beam` adjacent rows. Each slot has its own options, and starts when a
request is admitted. A search does not depend on the model: `advance` takes logits and sets the
tokens to feed next. This file has the PyTorch reference; `search_kernels.py` has the kernels.

Beam search keeps `beam` live hypotheses per slot, and a pool of the best hypotheses that have
ended, ranked by log P / ((5 + length) / 6)^alpha. A step considers the 2 × beam best continuations.
Those that end enter the pool if they are among the first `beam`; the best of the others stay live.
A slot is done when no live hypothesis can still enter its n-best list.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from writehead.config import DecodeConfig
from writehead.data.tokenizer import Tokens
from writehead.engine import search_kernels
from writehead.errors import ConfigError, ShapeError, TokenError
from writehead.model.cache import KVCache
from writehead.ops.available import choose_implementation
from writehead.schema import INT32
from writehead.util.devices import runs_triton
from writehead.util.transfer import send, send_padded

NEVER = float("-inf")  # the score of a hypothesis that does not exist
HEADER = 4  # columns of a packed hypothesis before its tokens
CHUNK = 128  # logits per chunk, of which `_top_k` computes the maximum first
CACHED_LOGITS = 2**19  # logits that fit in the L2 caches of a few cores
# constants of SplitMix64 (Steele et al., 2014), as signed integers: increment, shifts and factors
GOLDEN = 0x9E3779B97F4A7C15 - 2**64
MIXERS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
NO_TOKEN = (  # the error of a request without hypotheses
    "the model's logits allow no token; look for NaN in its weights, or for a forced prefix, "
    "min_length or processor that leaves no token"
)
MAX_KERNEL_BEAM = 32  # the kernels' loops over candidates are unrolled
Ints = Sequence[int] | int


class Hypothesis(NamedTuple):
    """A decoded sequence: token ids without eos.

    `score` is log_probability / ((5 + length) / 6)^alpha, where the length includes eos.
    """

    tokens: Tokens
    score: float
    log_probability: float
    finished: bool  # false if it was cut at its maximum length

    def with_tuple(self) -> "Hypothesis":
        """Returns this hypothesis with a tuple of integers as tokens, instead of an array."""
        return self._replace(tokens=tuple(map(int, self.tokens)))


class Targets(NamedTuple):
    """The tokens that a search can choose: those below `vocab_size`, except `suppressed`."""

    vocab_size: int
    eos: int
    suppressed: Sequence[int] = ()
    ends: Sequence[int] = ()  # all act as eos


@dataclass(eq=False, slots=True)
class Options:
    """The search options of one request."""

    config: DecodeConfig
    max_length: int
    prefix: tuple[int, ...] = ()
    seed: int = 0


@dataclass(frozen=True, eq=False)
class SlotOptions:
    """The options of each slot [S], and `count`, its tokens so far."""

    max_length: Tensor
    min_length: Tensor
    prefix_length: Tensor
    n_best: Tensor
    top_k: Tensor
    count: Tensor
    alpha: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    seed: Tensor


# a row with which a search starts; the options end up in a table, which the kernels read
START = ["slot", "first", "length", "live"]
NAMES = [*START, *(field.name for field in fields(SlotOptions))]
TYPES = ["int32"] * (len(START) + 6) + ["float32"] * 5 + ["uint64"]
ROW = np.dtype([*zip(NAMES, TYPES, strict=True)], align=True)


class Pool(NamedTuple):
    """The best ended hypotheses of each slot, best first: [S, beam], int32 or float32.

    The last token of a hypothesis is `token`, which follows the live hypothesis `parent` of the
    previous step. With beam=1, the only entry is the sequence so far, whether it has ended or not.
    """

    length: Tensor
    finished: Tensor
    score: Tensor  # NEVER in an empty entry
    log_p: Tensor
    parent: Tensor
    token: Tensor


class Search:
    """Searches in `slots` slots of `beam` rows, with up to `capacity` tokens each.

    Beam j of slot s is row s × beam + j. `advance` updates the KV cache, except for K and V.
    """

    def __init__(
        self,
        slots: int,
        beam: int,
        capacity: int,
        targets: Targets,
        *,
        device: torch.device | str,
        cache: KVCache | None = None,
        implementation: str = "auto",
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.slots, self.beam, self.capacity = slots, beam, capacity
        self.vocab_size, self.eos = targets.vocab_size, targets.eos
        ends = {targets.eos, *targets.ends}
        never = {*targets.suppressed, *ends} - {targets.eos}
        self._suppressed, self._ends = (
            torch.tensor(sorted(ids), dtype=torch.long, device=device) for ids in (never, ends)
        )
        rows = slots * beam
        self.tokens = zeros(rows, dtype=torch.long)  # to feed next
        self.parents = torch.arange(rows, device=device)  # the row that each row continues
        self.live = zeros(rows, dtype=torch.long) if cache is None else cache.live
        self.lengths = zeros(rows, dtype=torch.long) if cache is None else cache.lengths
        self.ancestors = None if cache is None else cache.ancestors
        self._all = torch.arange(slots, dtype=torch.int32, device=device)
        self.option_table = zeros(slots, ROW.itemsize // 4 - len(START))
        kinds = torch.int32, torch.float32, torch.int64
        integers, floats, longs = (self.option_table.view(kind).unbind(1) for kind in kinds)
        columns = *integers[:6], *floats[6:11], longs[6]
        self.options = SlotOptions(*columns)
        self.prefix = zeros(slots, capacity)
        self.seen = zeros(slots if beam == 1 else 0, self.vocab_size, dtype=torch.uint8)
        self.history_tokens, self.history_parents = zeros(2, slots, capacity, beam)
        self.pool_table = zeros(slots, beam, 7)
        integers, floats = self.pool_table.unbind(2), self.pool_table.view(torch.float32).unbind(2)
        self.pool = Pool(*integers[:2], *floats[2:4], *integers[4:6])
        self.scores = floats[6]  # log P of the live hypotheses, or NEVER
        # the pool and scores of a new search; all beams start equal, so only the first is live
        self._empty = zeros(beam, 7)
        empty = self._empty.view(torch.float32)
        empty[:, 2], empty[:, 3], empty[1:, 6] = NEVER, 0.0 if beam == 1 else NEVER, NEVER
        self.samples = np.zeros(slots, bool)  # on the host: whether a slot needs sampling
        self.why_not_triton = None
        if not runs_triton(self.tokens):
            self.why_not_triton = "the kernels need a GPU and Triton"
        elif beam > MAX_KERNEL_BEAM:
            self.why_not_triton = f"the kernels take beams of up to {MAX_KERNEL_BEAM}, not {beam}"
        reasons = {"triton": self.why_not_triton, "reference": None}
        self._kernels: search_kernels.State | None = None
        if choose_implementation("search", implementation, reasons) == "triton":
            self._kernels = search_kernels.State.of(self)

    def admit(
        self,
        slots: Sequence[int],
        options: Sequence[Options],
        first: Ints = 0,
        lengths: Ints = 0,
        start: Callable[[NDArray[np.int32]], object] | None = None,
    ) -> None:
        """Starts a search in each of `slots`, which discards the previous one; does not wait.

        `first` are the tokens to feed first, and `lengths` the positions already in the KV cache,
        such as those of a prompt. `start` is called instead of `self.start`, with an array.
        """
        table, device = _pack(options), self.tokens.device
        table["slot"], table["first"], table["length"], table["live"] = slots, first, lengths, 1
        self.samples[table["slot"]] = self._check(options, table)
        rows = table.view(np.int32).reshape(len(table), -1)
        if start is not None:
            start(rows)
        else:
            self.start(send(rows, device))
        if width := int(table["prefix_length"].max()):
            index = send(np.array(slots, np.int64), device)
            prefixes, _ = send_padded([one.prefix for one in options], 0, device)
            self.prefix[:, :width].index_copy_(0, index, prefixes.int())
        if (table["repetition_penalty"] != 1.0).any():
            self.seen.index_fill_(0, send(np.array(slots, np.int64), device), 0)

    def start(self, rows: Tensor) -> None:
        """Starts the searches of `rows`, an int32 view of one `ROW` each."""
        index, *values = rows[:, : len(START)].long().unbind(1)
        self.option_table.index_copy_(0, index, rows[:, len(START) :])
        self.pool_table.index_copy_(0, index, self._empty.expand(len(rows), -1, -1))
        for T, value in zip((self.tokens, self.lengths, self.live), values, strict=True):
            T.view(-1, self.beam).index_copy_(0, index, value.unsqueeze(1).expand(-1, self.beam))
        if self.ancestors is not None:  # prompts are in the rows of the first beams
            self.ancestors.view(self.slots, -1).index_fill_(0, index, 0)

    def release(self, slots: Sequence[int]) -> None:
        """Ends the searches in `slots`; their results can still be collected."""
        index = send(np.array(slots, np.int64), self.tokens.device)
        self.live.view(self.slots, self.beam).index_fill_(0, index, 0)

    def advance(self, logits: Tensor, slots: Tensor | None = None, sampling: bool = True) -> None:
        """Chooses the next tokens from logits [R × beam, vocab_size or more], of any dtype.

        `slots` [R] int32 are the slots of the logits, by default the first R. Slots that are not
        live are ignored, and may be listed several times. If no slot needs sampling (`samples`),
        `sampling=False` is faster.
        """
        slots = self._all[: len(logits) // self.beam] if slots is None else slots
        R, beam, vocab_size = len(slots), self.beam, self.vocab_size
        if logits.dim() != 2 or logits.shape[1] < vocab_size or len(logits) != R * beam:
            raise ShapeError(
                f"logits have shape {list(logits.shape)}; they must be [{R * beam}, {vocab_size}], "
                f"of at most {self.slots} slots"
            )
        if len(self._ends) > 1:  # eos gets the sum of their probabilities
            logits[:, self.eos] = logits[:, self._ends].logsumexp(1)
        if len(self._suppressed):
            logits.index_fill_(1, self._suppressed, NEVER)
        if self._kernels is not None:
            search_kernels.advance(self._kernels, beam, logits, slots, sampling)
            return
        live = self.live.view(-1, beam)[slots, 0] != 0
        x, at = logits[:, :vocab_size].view(R, beam, vocab_size), slots.long()
        if live.device.type != "cpu" or not live.all():  # indexing copies the logits
            x, at = x[live], at[live]
        if len(at) == 0:
            return
        if beam == 1:
            _choose(self, x.squeeze(1).float(), at)
        else:
            _extend(self, x.float(), at)

    def collect(self, slots: Tensor, n_best: int) -> Tensor:
        """Returns the results of R slots, for `make_hypotheses`: int32 [R, n_best, …]."""
        index = slots.long().flatten()
        packed = index.new_zeros(len(index), n_best, HEADER + self.capacity, dtype=torch.int32)
        packed[:, :, :HEADER] = self.pool_table[index, :n_best, :HEADER]
        texts = packed[:, :, HEADER:]
        if self.beam == 1:
            texts[:, 0] = self.history_tokens[index, :, 0]
        elif self._kernels is not None:
            search_kernels.trace_back(self._kernels, self.beam, index, texts)
        else:
            _trace_back(self, index, texts)
        return packed

    def _check(self, options: Sequence[Options], table: NDArray[np.void]) -> NDArray[np.bool_]:
        """Returns which requests need sampling; raises if this search does not support one."""
        longest, n_best = table["max_length"].max(), table["n_best"].max()
        if table["max_length"].min() < 1 or longest > self.capacity or n_best > self.beam:
            raise ConfigError(
                f"max_length={longest} with n_best={n_best} exceeds this search of "
                f"{self.capacity} tokens with beam={self.beam}"
            )
        samples: NDArray[np.bool_] = table["temperature"] > 0.0
        samples |= table["repetition_penalty"] != 1.0
        if samples.any() and self.beam > 1:
            raise ConfigError(f"this search with beam={self.beam} cannot sample; use beam=1")
        largest = max((self.eos, *chain.from_iterable(one.prefix for one in options)))
        if largest >= self.vocab_size:
            raise TokenError(f"token {largest} is outside the vocabulary of {self.vocab_size}")
        return samples


def _pack(options: Sequence[Options]) -> NDArray[np.void]:
    """Returns a `ROW` for each request."""
    configs = {id(one.config): one.config for one in options}  # most requests share theirs
    packed = {key: _pack_config(config) for key, config in configs.items()}
    table = np.frombuffer(bytearray().join([packed[id(one.config)] for one in options]), ROW)
    table["max_length"] = [one.max_length for one in options]
    table["prefix_length"] = [len(one.prefix) for one in options]
    table["seed"] = [one.seed % 2**64 for one in options]
    return table


def _pack_config(config: DecodeConfig) -> bytes:
    temperature = 0.0  # greedy
    if config.temperature is not None:
        # float32 cannot divide by more extreme values; samples would not change
        temperature = min(max(config.temperature, 1e-30), 1e30)
    row = np.zeros(1, ROW)
    row[0] = (
        *(0 for _ in START),
        *(0, config.min_length, 0, config.n_best, min(config.top_k or 0, INT32), 0),
        *(config.alpha, temperature, config.top_p or 1.0, config.min_p or 0.0),
        *(config.repetition_penalty or 1.0, 0),
    )
    return row.tobytes()


def make_hypotheses(
    packed: NDArray[np.int32], options: Sequence[Options]
) -> list[list[Hypothesis]]:
    """Converts the result of `Search.collect`: up to n_best hypotheses of each request, or none."""
    packed = packed[: len(options)]  # rows of the unused slot may follow
    n, floats = packed.shape[1], packed.view(np.float32)
    scores, log_p = floats[:, :, 2], floats[:, :, 3]
    exists = scores != NEVER
    counts = np.where((exists & ~np.isfinite(log_p)).any(axis=1), 0, exists.sum(axis=1))
    ends = packed[:, :, 0] - packed[:, :, 1]
    texts = zip(packed[:, :, HEADER:].reshape(ends.size, -1), ends.ravel().tolist(), strict=True)
    tokens = [text[:end] for text, end in texts]
    columns = (column.ravel().tolist() for column in (scores, log_p, packed[:, :, 1] == 1))
    flat = [*map(Hypothesis, tokens, *columns)]
    limits = [min(count, one.config.n_best) for count, one in zip(counts, options, strict=True)]
    return [flat[i * n : i * n + limit] for i, limit in enumerate(limits)]


def length_penalty(length: Tensor | int, alpha: Tensor | float) -> Tensor:
    """Returns the divisor of a log probability: ((5 + length) / 6)^alpha."""
    return ((5.0 + torch.as_tensor(length, dtype=torch.float32)) / 6.0) ** alpha


def _without_early_eos(search: Search, x: Tensor, early: Tensor) -> Tensor:
    """Returns logits x [R, …, vocab_size] without eos in the rows where `early` is true."""
    is_eos = torch.arange(search.vocab_size, device=x.device) == search.eos
    return x.masked_fill(early.view(-1, *[1] * (x.dim() - 1)) & is_eos, NEVER)


def _log_z(x: Tensor, likely: Tensor) -> Tensor:
    """Returns log(sum(exp(x))) of each row of x [R, vocab_size], given a likely token [R, 1]."""
    # softmax makes fewer passes over parts that fit in a CPU's cache than logsumexp does
    size = max(1, CACHED_LOGITS // x.shape[1] if x.device.type == "cpu" else len(x))
    parts = zip(torch.split(x, size), torch.split(likely, size), strict=True)
    p = torch.cat([part.softmax(dim=1).gather(1, at) for part, at in parts])
    return (x.gather(1, likely) - p.log()).squeeze(1)


def _top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Returns the k largest elements of each row of x [R, columns] and their columns, like `topk`.

    It searches only the chunks with the largest maxima. If k = 1, the first of equal elements wins.
    """
    rows, columns = x.shape
    chunks, rest = columns // CHUNK, columns % CHUNK
    if chunks < 4 * k:
        return _full_top_k(x, k)
    maxima = x[:, : columns - rest].view(rows, chunks, CHUNK).amax(dim=2)
    best = _full_top_k(maxima, k)[1].sort(dim=1).values.unsqueeze(2)
    places = (best * CHUNK + torch.arange(CHUNK, device=x.device)).flatten(1)
    if rest:
        last = torch.arange(columns - rest, columns, device=x.device)
        places = torch.cat([places, last.expand(rows, -1)], dim=1)
    values, at = _full_top_k(x.gather(1, places), k)
    return values, places.gather(1, at)


def _full_top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    if k > 1:
        values, columns = x.topk(min(k, x.shape[1]), dim=1)
        return values, columns
    first = x.argmax(dim=1, keepdim=True)
    return x.gather(1, first), first


def _choose(search: Search, x: Tensor, at: Tensor) -> None:
    """Runs one step of greedy search or sampling on logits x [R, vocab_size] of live slots `at`."""
    options, pool = search.options, search.pool
    t, count = options.count[at].long(), options.count[at] + 1
    first, early = _top_k(x, 1)[1], count < options.min_length[at]
    token = _sample(search, x, first, at, early)
    token = torch.where(t < options.prefix_length[at], search.prefix[at, t].long(), token)
    log_p = pool.log_p[at, 0] + x.gather(1, token.unsqueeze(1)).squeeze(1) - _log_z(x, first)
    finished = token == search.eos
    over = finished | (count >= options.max_length[at]) | ~log_p.isfinite()

    search.history_tokens[at, t, 0] = token.int()
    pool.length[at, 0], pool.finished[at, 0], pool.log_p[at, 0] = count, finished.int(), log_p
    pool.score[at, 0] = log_p / length_penalty(count, options.alpha[at])
    search.seen[at, token] = 1
    search.lengths[at] += 1
    options.count[at] = count
    search.tokens[at] = token
    search.live[at] = (~over).long()


def _likeliest(search: Search, x: Tensor, first: Tensor, early: Tensor) -> Tensor:
    """Returns the likeliest allowed tokens [R]; `first` [R, 1] may contain eos too early."""
    token = first.squeeze(1)
    wrong = early & (token == search.eos)
    if wrong.any():
        token = token.clone()
        token[wrong] = _without_early_eos(search, x[wrong], wrong[wrong]).argmax(dim=1)
    return token


def _sample(search: Search, x: Tensor, first: Tensor, at: Tensor, early: Tensor) -> Tensor:
    """Returns tokens [R] drawn from logits x [R, vocab_size], or the likeliest at temperature 0.

    Three filters apply in turn: the top_k tokens, the smallest set with probability top_p, and
    tokens at least min_p times as likely as the likeliest. Of equally likely tokens, lower ids come
    first. The result is the lowest id whose cumulative probability exceeds a random number.
    """
    options = search.options
    penalty = options.repetition_penalty[at].unsqueeze(1)
    temperature = options.temperature[at].unsqueeze(1)
    if (penalty != 1.0).any():
        x = _without_early_eos(search, x, early)
        penalized = torch.where(x > 0.0, x / penalty, x * penalty)
        x = torch.where(search.seen[at] != 0, penalized, x)
        first = _top_k(x, 1)[1]
    likeliest = _likeliest(search, x, first, early)
    if not (temperature > 0.0).any():
        return likeliest
    x = _without_early_eos(search, x, early)
    y = (x - x.amax(dim=1, keepdim=True)) / torch.where(temperature > 0.0, temperature, 1.0)
    top_k, top_p, min_p = (
        T[at].unsqueeze(1) for T in (options.top_k, options.top_p, options.min_p)
    )
    mass = y.double().exp()
    if ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0)).any():
        ordered, tokens = y.sort(dim=1, descending=True, stable=True)
        kept = (torch.arange(y.shape[1], device=y.device) < top_k) | (top_k == 0)
        p = ordered.double().exp() * kept
        p /= p.sum(dim=1, keepdim=True)
        kept &= (p.cumsum(dim=1) - p < top_p) | (top_p >= 1.0)
        kept &= ordered >= min_p.log()
        mass *= torch.zeros_like(kept).scatter(1, tokens, kept)
    cumulative = mass.cumsum(dim=1)
    draw = _random(options.seed[at], options.count[at].long()).unsqueeze(1) * cumulative[:, -1:]
    # rounding may leave a gap at the end; for a row of NaN, any token will do
    last = (mass > 0.0).int().cumsum(dim=1).argmax(dim=1)
    token = torch.minimum((cumulative <= draw).sum(dim=1), last)
    return torch.where(temperature.squeeze(1) > 0.0, token, likeliest)


def _random(seed: Tensor, t: Tensor) -> Tensor:
    """Returns a uniform random number for token t of each sequence: a hash of t and the seed."""
    z = seed + (t + 1) * GOLDEN
    for shift, factor in MIXERS:
        z = (z ^ _shift_right(z, shift)) * factor
    return _shift_right(z ^ _shift_right(z, 31), 40).float() * 2.0**-24


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Shifts int64 as if it were unsigned."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _extend(search: Search, x: Tensor, at: Tensor) -> None:
    """Runs one step of beam search on logits x [R, beam, vocab_size] of live slots `at`."""
    options, pool, beam = search.options, search.pool, search.beam
    t, count = options.count[at].long(), options.count[at] + 1
    rows, early, allowed = x.flatten(0, 1), count < options.min_length[at], x
    forced = t < options.prefix_length[at]
    if forced.any():
        others = torch.arange(x.shape[2], device=x.device) != search.prefix[at, t].unsqueeze(1)
        allowed = allowed.masked_fill((forced.unsqueeze(1) & others).unsqueeze(1), NEVER)
    # one more than needed, because eos may not be allowed yet
    best, tokens = _top_k(allowed.flatten(0, 1), 2 * beam + 1)  # [R beam, 2 beam + 1]
    likely = _top_k(rows, 1)[1] if forced.any() else tokens[:, :1]
    best, tokens, log_z = (T.view(len(x), beam, -1) for T in (best, tokens, _log_z(rows, likely)))
    scores = search.scores[at]
    exists = scores != NEVER
    # NaN or infinite logits of a live hypothesis
    lost = (exists & ~log_z.squeeze(2).isfinite()).any(dim=1)
    hidden = early[:, None, None] & (tokens == search.eos) | ~exists.unsqueeze(2)
    totals = (scores.unsqueeze(2) - log_z + best).masked_fill_(hidden, NEVER)
    width = totals.shape[2]
    best, places = totals.flatten(1).topk(min(2 * beam, beam * width), dim=1)  # [R, 2 beam]
    parents, tokens = places // width, tokens.flatten(1).gather(1, places)
    finished = tokens == search.eos
    over = finished | (count >= options.max_length[at]).unsqueeze(1)

    ended = best / length_penalty(count, options.alpha[at]).unsqueeze(1)
    ended = ended.masked_fill(~over, NEVER)[:, :beam]
    # in the order of the fields of Pool
    lengths = count.unsqueeze(1).expand(-1, beam)
    joined = lengths, finished[:, :beam], ended, best[:, :beam], parents[:, :beam], tokens[:, :beam]
    order = torch.cat([pool.score[at], ended], 1).sort(dim=1, descending=True, stable=True).indices
    for field, new in zip(pool, joined, strict=True):
        field[at] = torch.cat([field[at], new.to(field.dtype)], 1).gather(1, order[:, :beam])
    pool.log_p[at[lost]] = math.nan

    best = best.masked_fill(over, NEVER)
    order = best.sort(dim=1, descending=True, stable=True).indices[:, :beam]
    best, parents, tokens = (T.gather(1, order) for T in (best, parents, tokens))
    done = lost | _decided(search, best, at, count)
    search.scores[at] = best.masked_fill(done.unsqueeze(1), NEVER)
    search.history_tokens[at, t], search.history_parents[at, t] = tokens.int(), parents.int()
    search.tokens.view(-1, beam)[at] = tokens
    search.parents.view(-1, beam)[at] = at.unsqueeze(1) * beam + parents
    lengths = search.lengths.view(-1, beam)
    if search.ancestors is not None:  # each row continues its parent
        table = search.ancestors.view(len(lengths), beam, -1)
        new = table[at].gather(1, parents.unsqueeze(2).expand(-1, -1, table.shape[2]))
        newest = (lengths[at] % table.shape[2]).unsqueeze(2)
        table[at] = new.scatter(2, newest, parents.int().unsqueeze(2))
    lengths[at] += 1
    options.count[at] = count
    search.live.view(-1, beam)[at] = (~done).long().unsqueeze(1)


def _decided(search: Search, scores: Tensor, at: Tensor, count: Tensor) -> Tensor:
    """Returns whether no live hypothesis can still enter the n-best list, [R]."""
    options, alpha = search.options, search.options.alpha[at]
    # log P never increases; the penalty is best for the longest sequence, or for the shortest
    length = torch.where(alpha >= 0.0, options.max_length[at], count + 1)
    bound = scores.amax(dim=1) / length_penalty(length, alpha)
    return bound <= search.pool.score[at, options.n_best[at].long() - 1]


def _trace_back(search: Search, index: Tensor, texts: Tensor) -> None:
    """Writes the tokens of the pools of slots `index` [R] to texts [R, n, longest]."""
    n, pool = texts.shape[1], search.pool
    last = pool.length[index, :n].long() - 1
    beam = pool.parent[index, :n].long()
    texts.scatter_(2, last.clamp(min=0).unsqueeze(2), pool.token[index, :n].unsqueeze(2))
    for t in range(int(last.max()) - 1, -1, -1):
        inside = t < last
        tokens = search.history_tokens[index, t].gather(1, beam)
        texts[:, :, t] = torch.where(inside, tokens, texts[:, :, t])
        parents = search.history_parents[index, t].gather(1, beam).long()
        beam = torch.where(inside, parents, beam)
