"""Greedy search and sampling over a step function, independent of any model.

A step function takes tokens [rows] and a state, and returns logits [rows, vocab_size]. The result
of a row depends only on its own limits, seed and logits.
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
    """What a search needs of a state; `DecoderState` is one."""

    @property
    def first(self) -> Tensor:
        """[rows], the tokens to feed first."""

    @property
    def beam(self) -> int:
        """How many neighbouring rows belong to one sentence."""

    def expand(self, beam: int) -> Self:
        """The state with `beam` rows for each of its own."""

    def begin(self, limits: Sequence[int]) -> None:
        """A search of up to limits[i] tokens for sentence i begins; raises where it cannot."""

    def reorder(self, rows: Tensor) -> None:
        """Row i goes on from what was row rows[i]."""

    def stop(self, rows: Tensor) -> None:
        """Rows where `rows` is true have ended; what they are fed from now on means nothing."""


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
    """What each of b sentences must begin with, and how long it may and must be."""

    eos: int
    min_length: int
    max_lengths: Tensor  # [b]
    limits: tuple[int, ...]  # the same, on the host
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
        """Constraints for b sentences, checked."""
        if b < 1:
            raise ShapeError("this state has no rows; start one with at least one sentence")
        if eos < 0:
            raise TokenError(f"eos={eos} is not a token id")
        limits = _limits(config, max_lengths, b)
        starts = [()] * b if prefixes is None else [tuple(prefix) for prefix in prefixes]
        for name, given in (("max_lengths", limits), ("prefixes", starts)):
            if len(given) != b:
                raise ShapeError(f"{len(given)} {name} for {b} sentences; give one each")
        least, most = max(1, config.min_length), config.max_length or math.inf
        for limit, prefix in zip(limits, starts, strict=True):
            if not least <= limit <= most:
                raise ConfigError(f"a row's max_length={limit} must be from {least} to {most}")
            if len(prefix) > limit:
                raise ConfigError(
                    f"a forced prefix of {len(prefix)} tokens does not fit max_length={limit}"
                )
            if eos in prefix or min(prefix, default=0) < 0:
                raise TokenError(
                    f"a forced prefix must hold token ids other than the end token {eos}"
                )
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
        """The most steps that any sentence may take."""
        return max(self.limits)

    def log_probabilities(self, logits: Tensor, t: int) -> Tensor:
        """log P of each token as the t-th from 0, -inf where it is not allowed.

        logits: [b, …, vocab_size], of any floating type; the result is float32.
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
            other = forced & (tokens != self.prefix[:, t].unsqueeze(1))  # [b, vocab_size]
            log_p = log_p.masked_fill(
                other.view(len(other), *[1] * (logits.dim() - 2), vocab_size), float("-inf")
            )
        return log_p


def _limits(config: DecodeConfig, max_lengths: Sequence[int] | None, b: int) -> list[int]:
    """How long each of b rows may become."""
    if max_lengths is not None:
        return list(max_lengths)
    if config.max_length is None:
        raise ConfigError("there is no length limit; set max_length, or pass max_lengths")
    return [config.max_length] * b


def next_logits(step: Step[S], tokens: Tensor, state: S) -> Tensor:
    """What `step` returns for tokens [rows], once its shape is seen to be [rows, vocab_size]."""
    logits = step(tokens, state)
    if logits.dim() != 2 or len(logits) != len(tokens):
        raise ShapeError(
            f"the step function returned logits {list(logits.shape)}; they must be "
            f"[{len(tokens)}, vocab_size]"
        )
    return logits


def length_penalty(length: Tensor | int, alpha: float) -> Tensor:
    """((5 + length) / 6)^alpha: what a log-probability is divided by."""
    return ((5.0 + torch.as_tensor(length, dtype=torch.float32)) / 6.0) ** alpha


def check_options(options: object, beam: int = 1) -> DecodeConfig:
    """Returns the options of a search, with its default `beam` if none is set."""
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
    return _follow(step, state, constraints, config.alpha, _likeliest)


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
        raise ShapeError(f"{len(seeds)} seeds for {b} rows; give one each")
    choose = _drawer(config, seeds, constraints.longest, device)
    return _follow(step, state, constraints, config.alpha, choose)


def stream(step: Step[S], state: S, config: DecodeConfig, *, eos: int) -> Iterator[int]:
    """Yields the tokens of a state with one row as they are decoded, without eos.

    They are the tokens of `sample` if a temperature is set, and of `greedy` otherwise.
    """
    config = check_options(config)
    if len(state.first) != 1:
        raise ShapeError(f"this state has {len(state.first)} rows; only one can be streamed")
    constraints = Constraints.make(config, eos, None, None, 1, state.first.device)
    if config.temperature is None:
        _check_greedy(config)
        choose: Choose = _likeliest
    else:
        choose = _drawer(config, [config.seed], constraints.longest, state.first.device)
    _begin(state, constraints)
    return _stream(_walk(step, state, constraints, choose), eos)


def _stream(walk: Iterator[tuple[Tensor, Tensor, Tensor]], eos: int) -> Iterator[int]:
    for tokens, gained, _ in walk:
        check_numbers([float(gained)])
        token = int(tokens)
        if token != eos:
            yield token


def _check_greedy(config: DecodeConfig) -> None:
    if config.width > 1 or config.temperature is not None:
        raise ConfigError("greedy search has beam=1 and no temperature; use beam_search or sample")


def _likeliest(log_p: Tensor, t: int) -> Tensor:
    return log_p.argmax(dim=-1)


def _drawer(
    config: DecodeConfig, seeds: Sequence[int], longest: int, device: torch.device
) -> Choose:
    """Draws up to `longest` tokens a row: one number a step, from the row's own generator."""
    for seed in seeds:
        if not -(2**63) <= seed < 2**64:
            raise ConfigError(f"seed={shown(seed)} must be from 0 to 2^64 - 1")
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    draws = torch.stack([torch.rand(longest, generator=generator) for generator in generators])
    draws = draws.to(device)
    return lambda log_p, t: _draw(log_p, draws[:, t], config)


def _draw(log_p: Tensor, u: Tensor, config: DecodeConfig) -> Tensor:
    """The tokens [b] at which the cumulative probability passes u [b]."""
    assert config.temperature is not None
    # what float32 can divide by; past either limit the draw would be the same
    temperature = min(max(config.temperature, 1e-30), 1e30)
    ordered, tokens = torch.sort(log_p / temperature, dim=-1, descending=True, stable=True)
    if config.top_k is not None:
        ordered[:, config.top_k :] = float("-inf")
    p = torch.softmax(ordered, dim=-1)
    if config.top_p is not None:
        before = p.cumsum(dim=-1) - p
        p = p.masked_fill(before >= config.top_p, 0.0)
    reached = p.cumsum(dim=-1)
    place = (reached <= u.unsqueeze(1) * reached[:, -1:]).sum(dim=-1)
    # where rounding left a gap at the end; a row without numbers takes any token
    place = torch.minimum(place, (p > 0.0).sum(dim=-1) - 1).clamp(min=0)
    return tokens.gather(1, place.unsqueeze(1)).squeeze(1)


def _begin(state: S, constraints: Constraints) -> None:
    """Makes sure that a state can be walked from, before its first step."""
    if state.beam != 1:
        raise ConfigError(f"this state has {state.beam} beams per sentence; start one with beam=1")
    state.begin(constraints.limits)


def _walk(
    step: Step[S], state: S, constraints: Constraints, choose: Choose
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Step by step: the tokens [b] chosen, their log-probabilities, and whether each counts."""
    tokens = state.first
    over = torch.zeros_like(tokens, dtype=torch.bool)  # ended, or as long as may be
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
    """One hypothesis a row, each next token by `choose` from log-probabilities [b, vocab_size]."""
    _begin(state, constraints)
    b, device = len(state.first), state.first.device
    produced = torch.zeros(b, constraints.longest, dtype=torch.long, device=device)
    total = torch.zeros(b, device=device)
    lengths = torch.zeros(b, dtype=torch.long, device=device)
    ended = torch.zeros(b, dtype=torch.bool, device=device)
    for t, (tokens, gained, live) in enumerate(_walk(step, state, constraints, choose)):
        total = torch.where(live, total + gained, total)
        produced[:, t] = tokens
        lengths += live
        ended |= live & (tokens == constraints.eos)
    scores = total / length_penalty(lengths, alpha).to(total.device)
    columns = (produced, lengths, scores, total, ended)
    return make_hypotheses(*(column.tolist() for column in columns))


def make_hypotheses(
    texts: Iterable[Sequence[int]],
    lengths: Sequence[int],
    scores: Sequence[float],
    log_probabilities: Sequence[float],
    finished: Sequence[bool],
) -> list[Hypothesis]:
    """The hypotheses of these lengths, whose last tokens are end tokens where `finished`."""
    check_numbers(log_probabilities)
    made = []
    columns = (texts, lengths, scores, log_probabilities, finished)
    for text, length, score, log_probability, is_finished in zip(*columns, strict=True):
        count = length - is_finished
        tokens = tuple(text if count == len(text) else text[:count])
        made.append(Hypothesis(tokens, score, log_probability, is_finished))
    return made


def check_numbers(log_probabilities: Sequence[float]) -> None:
    """Raises where no token could be chosen, or the model's logits are not numbers."""
    if not all(map(math.isfinite, log_probabilities)):
        raise SearchError(
            "the model's logits leave no token to choose; look for NaN in its weights, or for a "
            "forced prefix or a min_length that they rule out"
        )
