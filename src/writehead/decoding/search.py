"""Greedy search and sampling over a step function, independent of any model.

A step function takes tokens [rows] and a state, and returns logits [rows, vocab_size]. The result
for a row depends only on its own constraints, seed and logits.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from writehead.config import DecodeConfig
from writehead.errors import ConfigError, SearchError, ShapeError, TokenError, shown


class SearchState(Protocol):
    """The interface of a state that can be searched, such as `DecoderState`."""

    @property
    def first(self) -> Tensor:
        """The first token to feed to each row, [rows]."""

    @property
    def beam(self) -> int:
        """The number of rows per sentence; they are adjacent."""

    def expand(self, beam: int) -> Self:
        """Returns a state with `beam` rows for each row of this one."""

    def begin(self, limits: Sequence[int]) -> None:
        """Begins a search of up to limits[i] tokens for sentence i; raises if it is impossible."""

    def reorder(self, rows: Tensor) -> None:
        """Makes row i continue the previous row rows[i]."""

    def stop(self, rows: Tensor) -> None:
        """Marks the rows where `rows` is true as ended; later tokens for them are ignored."""


S = TypeVar("S", bound=SearchState)
Step = Callable[[Tensor, S], Tensor]
Choose = Callable[[Tensor, int], Tensor]  # log-probabilities [b, vocab_size], t -> tokens [b]


@dataclass(frozen=True)
class Hypothesis:
    """A decoded sequence, without eos.

    `score` is log_probability / ((5 + length) / 6)^alpha, where the length includes eos. `finished`
    is false for a sequence that was cut at its maximum length.
    """

    tokens: tuple[int, ...]
    score: float
    log_probability: float
    finished: bool


@dataclass(frozen=True, eq=False)
class Constraints:
    """The forced prefixes, and minimum and maximum lengths, of b sentences."""

    eos: int
    min_length: int
    max_lengths: Tensor  # [b]
    limits: tuple[int, ...]  # max_lengths on the host
    prefix: Tensor  # [b, longest prefix]
    prefix_lengths: Tensor  # [b]

    @classmethod
    def make(
        cls,
        config: DecodeConfig,
        eos: int,
        prefixes: Sequence[Sequence[int]] | None,
        max_lengths: Sequence[int] | None,
        b: int,
        device: torch.device,
    ) -> "Constraints":
        """Checks and returns the constraints of b sentences."""
        if b < 1:
            raise ShapeError("this state has no rows; start one with at least one sentence")
        if eos < 0:
            raise TokenError(f"eos={eos} must be a token id, at least 0")
        limits = _limits(config, max_lengths, b)
        starts = [()] * b if prefixes is None else [tuple(prefix) for prefix in prefixes]
        for name, values in (("max_lengths", limits), ("prefixes", starts)):
            if len(values) != b:
                raise ShapeError(f"got {len(values)} {name} for {b} sentences; pass one for each")
        least, most = max(1, config.min_length), config.max_length or math.inf
        for limit, prefix in zip(limits, starts, strict=True):
            if not least <= limit <= most:
                raise ConfigError(f"max_lengths has {limit}; it must be from {least} to {most}")
            if len(prefix) > limit:
                raise ConfigError(
                    f"a forced prefix has {len(prefix)} tokens, more than max_length={limit}"
                )
            if eos in prefix or min(prefix, default=0) < 0:
                raise TokenError(f"a forced prefix must contain only token ids, without eos={eos}")
        width = max(map(len, starts))
        padded = [[*prefix, *[0] * (width - len(prefix))] for prefix in starts]
        return cls(
            eos,
            config.min_length,
            torch.tensor(limits, device=device),
            tuple(limits),
            torch.tensor(padded, dtype=torch.long, device=device).view(b, width),
            torch.tensor([len(prefix) for prefix in starts], device=device),
        )

    @property
    def longest(self) -> int:
        """The largest of the maximum lengths."""
        return max(self.limits)

    def log_probabilities(self, logits: Tensor, t: int) -> Tensor:
        """Returns log P of each token at step t (from 0), or -inf for tokens that are not allowed.

        logits: [b, …, vocab_size], of any floating-point dtype; the result is float32.
        """
        vocab_size = logits.shape[-1]
        if t == 0:
            largest = max(self.eos, int(self.prefix.max()) if self.prefix.numel() else 0)
            if largest >= vocab_size:
                raise TokenError(f"token {largest} is outside the vocabulary of {vocab_size}")
        log_p = torch.log_softmax(logits.float(), dim=-1)
        tokens = torch.arange(vocab_size, device=logits.device)
        if t + 1 < self.min_length:
            log_p = log_p.masked_fill(tokens == self.eos, float("-inf"))
        if t < self.prefix.shape[1]:
            forced = (t < self.prefix_lengths).unsqueeze(1)
            excluded = forced & (tokens != self.prefix[:, t].unsqueeze(1))  # [b, vocab_size]
            log_p = log_p.masked_fill(
                excluded.view(len(excluded), *[1] * (logits.dim() - 2), vocab_size), float("-inf")
            )
        return log_p


def _limits(config: DecodeConfig, max_lengths: Sequence[int] | None, b: int) -> list[int]:
    """Returns the maximum length of each of b sentences."""
    if max_lengths is not None:
        return list(max_lengths)
    if config.max_length is None:
        raise ConfigError("the search has no length limit; set max_length, or pass max_lengths")
    return [config.max_length] * b


def next_logits(step: Step[S], tokens: Tensor, state: S) -> Tensor:
    """Calls `step` with tokens [rows]; raises ShapeError unless it returns [rows, vocab_size]."""
    logits = step(tokens, state)
    if logits.dim() != 2 or len(logits) != len(tokens):
        raise ShapeError(
            f"the step function returned logits {list(logits.shape)}; they must be "
            f"[{len(tokens)}, vocab_size]"
        )
    return logits


def length_penalty(length: Tensor | int, alpha: float) -> Tensor:
    """Returns the divisor of a log probability: ((5 + length) / 6)^alpha."""
    return ((5.0 + torch.as_tensor(length, dtype=torch.float32)) / 6.0) ** alpha


def check_options(options: object, beam: int = 1) -> DecodeConfig:
    """Returns the options with `beam` set if it was not; raises if they are not a DecodeConfig."""
    if not isinstance(options, DecodeConfig):
        raise ConfigError(
            f"options must be a DecodeConfig, not {shown(options)} of type "
            f"{type(options).__name__}; pass one, such as DecodeConfig(beam=4)"
        )
    return options.with_default_beam(beam)


def greedy(
    step: Step[S],
    state: S,
    config: DecodeConfig,
    *,
    eos: int,
    prefixes: Sequence[Sequence[int]] | None = None,
    max_lengths: Sequence[int] | None = None,
) -> list[Hypothesis]:
    """Decodes each row by always choosing the most likely token.

    `prefixes` are the tokens that each row must start with, and `max_lengths` its own limits. A
    state needs capacity for all tokens of a row, and can be searched once.
    """
    config = check_options(config)
    _check_greedy(config)
    constraints = Constraints.make(
        config, eos, prefixes, max_lengths, len(state.first), state.first.device
    )
    return _follow(step, state, constraints, config.alpha, _most_likely)


def sample(
    step: Step[S],
    state: S,
    config: DecodeConfig,
    *,
    eos: int,
    prefixes: Sequence[Sequence[int]] | None = None,
    max_lengths: Sequence[int] | None = None,
    seeds: Sequence[int] | None = None,
) -> list[Hypothesis]:
    """Samples each row from softmax(logits / temperature).

    top_k keeps the k most likely tokens, and top_p the smallest set with total probability p. Row i
    uses seeds[i], by default config.seed + i.
    """
    config = check_options(config)
    if config.temperature is None:
        raise ConfigError("sampling needs a temperature, such as 1.0")
    b, device = len(state.first), state.first.device
    constraints = Constraints.make(config, eos, prefixes, max_lengths, b, device)
    seeds = range(config.seed, config.seed + b) if seeds is None else seeds
    if len(seeds) != b:
        raise ShapeError(f"got {len(seeds)} seeds for {b} rows; pass one for each")
    choose = _make_sampler(config, seeds, constraints.longest, device)
    return _follow(step, state, constraints, config.alpha, choose)


def stream(step: Step[S], state: S, config: DecodeConfig, *, eos: int) -> Iterator[int]:
    """Yields the tokens of a state with one row as they are decoded, without eos.

    They are the tokens of `sample` if a temperature is set, and of `greedy` otherwise.
    """
    config = check_options(config)
    if len(state.first) != 1:
        raise ShapeError(f"this state has {len(state.first)} rows; stream takes one with 1 row")
    constraints = Constraints.make(config, eos, None, None, 1, state.first.device)
    if config.temperature is None:
        _check_greedy(config)
        choose: Choose = _most_likely
    else:
        choose = _make_sampler(config, [config.seed], constraints.longest, state.first.device)
    _begin(state, constraints)
    return _stream(_walk(step, state, constraints, choose), eos)


def _stream(walk: Iterator[tuple[Tensor, Tensor, Tensor]], eos: int) -> Iterator[int]:
    for tokens, log_p, _ in walk:
        check_numbers([float(log_p)])
        token = int(tokens)
        if token != eos:
            yield token


def _check_greedy(config: DecodeConfig) -> None:
    if config.width > 1 or config.temperature is not None:
        raise ConfigError("greedy search has beam=1 and no temperature; use beam_search or sample")


def _most_likely(log_p: Tensor, t: int) -> Tensor:
    return log_p.argmax(dim=-1)


def _make_sampler(
    config: DecodeConfig, seeds: Sequence[int], longest: int, device: torch.device
) -> Choose:
    """Returns a function that samples tokens, one random number per step from each row's seed."""
    for seed in seeds:
        if not -(2**63) <= seed < 2**64:
            raise ConfigError(f"seed={shown(seed)} must be from 0 to 2^64 - 1")
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    draws = torch.stack([torch.rand(longest, generator=generator) for generator in generators])
    draws = draws.to(device)
    return lambda log_p, t: _draw(log_p, draws[:, t], config)


def _draw(log_p: Tensor, u: Tensor, config: DecodeConfig) -> Tensor:
    """Returns the tokens [b] at which the cumulative probability exceeds u [b]."""
    assert config.temperature is not None
    # float32 cannot divide by values beyond these; the samples would be the same
    temperature = min(max(config.temperature, 1e-30), 1e30)
    ordered, tokens = torch.sort(log_p / temperature, dim=-1, descending=True, stable=True)
    if config.top_k is not None:
        ordered[:, config.top_k :] = float("-inf")
    p = torch.softmax(ordered, dim=-1)
    if config.top_p is not None:
        preceding = p.cumsum(dim=-1) - p
        p = p.masked_fill(preceding >= config.top_p, 0.0)
    cumulative = p.cumsum(dim=-1)
    place = (cumulative <= u.unsqueeze(1) * cumulative[:, -1:]).sum(dim=-1)
    # rounding may leave a gap at the end; a row of NaN takes any token
    place = torch.minimum(place, (p > 0.0).sum(dim=-1) - 1).clamp(min=0)
    return tokens.gather(1, place.unsqueeze(1)).squeeze(1)


def _begin(state: S, constraints: Constraints) -> None:
    """Begins a search with one row per sentence; raises if the state has beams."""
    if state.beam != 1:
        raise ConfigError(f"this state has {state.beam} beams per sentence; start one with beam=1")
    state.begin(constraints.limits)


def _walk(
    step: Step[S], state: S, constraints: Constraints, choose: Choose
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields per step, each [b]: the chosen tokens, their log P, and whether the row is live."""
    tokens = state.first
    over = torch.zeros_like(tokens, dtype=torch.bool)  # ended, or at the maximum length
    for t in range(constraints.longest):
        log_p = constraints.log_probabilities(next_logits(step, tokens, state), t)
        tokens = choose(log_p, t)
        yield tokens, log_p.gather(1, tokens.unsqueeze(1)).squeeze(1), ~over
        over = over | (tokens == constraints.eos) | (t + 1 >= constraints.max_lengths)
        if bool(over.all()):
            return
        state.stop(over)


def _follow(
    step: Step[S], state: S, constraints: Constraints, alpha: float, choose: Choose
) -> list[Hypothesis]:
    """Decodes one hypothesis per row; `choose` selects each token."""
    _begin(state, constraints)
    b, device = len(state.first), state.first.device
    produced = torch.zeros(b, constraints.longest, dtype=torch.long, device=device)
    total = torch.zeros(b, device=device)
    lengths = torch.zeros(b, dtype=torch.long, device=device)
    ended = torch.zeros(b, dtype=torch.bool, device=device)
    for t, (tokens, log_p, live) in enumerate(_walk(step, state, constraints, choose)):
        total = torch.where(live, total + log_p, total)
        produced[:, t] = tokens
        lengths += live
        ended |= live & (tokens == constraints.eos)
    scores = total / length_penalty(lengths, alpha).to(total.device)
    columns = (produced, lengths, scores, total, ended)
    return make_hypotheses(*(column.tolist() for column in columns))


def make_hypotheses(
    sequences: Iterable[Sequence[int]],
    lengths: Sequence[int],
    scores: Sequence[float],
    log_probabilities: Sequence[float],
    finished: Sequence[bool],
) -> list[Hypothesis]:
    """Returns a hypothesis per sequence; `lengths` include eos, which `finished` ones end with."""
    check_numbers(log_probabilities)
    hypotheses = []
    columns = (sequences, lengths, scores, log_probabilities, finished)
    for sequence, length, score, log_probability, is_finished in zip(*columns, strict=True):
        count = length - is_finished
        tokens = tuple(sequence if count == len(sequence) else sequence[:count])
        hypotheses.append(Hypothesis(tokens, score, log_probability, is_finished))
    return hypotheses


def check_numbers(log_probabilities: Sequence[float]) -> None:
    """Raises SearchError if a log probability is infinite or NaN."""
    if not all(map(math.isfinite, log_probabilities)):
        raise SearchError(
            "the model's logits allow no token; look for NaN in its weights, or for a forced "
            "prefix or min_length to which they give no probability"
        )
