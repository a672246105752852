"""Greedy search, sampling and beam search over any step function, with the reference `Search`."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

from writehead.config import DecodeConfig, check_options
from writehead.engine.search import NO_TOKEN, Hypothesis, Options, Search, Targets, make_hypotheses
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
        """Begins a search of up to limits[i] tokens for sentence i; raises if it does not fit."""

    def reorder(self, rows: Tensor) -> None:
        """Makes row i continue the previous row rows[i]."""

    def stop(self, rows: Tensor) -> None:
        """Marks the rows where `rows` is true as ended; later tokens for them are ignored."""


S = TypeVar("S", bound=SearchState)
# takes tokens [rows] and a state; returns logits [rows, vocab_size]
Step = Callable[[Tensor, S], Tensor]
# takes the tokens chosen so far [rows, t] and logits [rows, vocab_size]; returns logits
Processor = Callable[[Tensor, Tensor], Tensor]


def greedy(
    step: Step[S],
    state: S,
    config: DecodeConfig,
    *,
    eos: int,
    prefixes: Sequence[Sequence[int]] | None = None,
    max_lengths: Sequence[int] | None = None,
    processors: Sequence[Processor] = (),
) -> list[Hypothesis]:
    """Decodes each row by always choosing the most likely token.

    Row i starts with prefixes[i] and has at most max_lengths[i] tokens. The state needs capacity
    for all tokens of a row, and can be searched only once. `processors` modify each step's logits.
    """
    config = check_options(config)
    if config.width > 1 or config.temperature is not None:
        raise ConfigError("greedy search has beam=1 and no temperature; use beam_search or sample")
    found = _search(step, state, config, processors, eos, prefixes, max_lengths)
    return [best for [best] in found]


def sample(
    step: Step[S],
    state: S,
    config: DecodeConfig,
    *,
    eos: int,
    prefixes: Sequence[Sequence[int]] | None = None,
    max_lengths: Sequence[int] | None = None,
    seeds: Sequence[int] | None = None,
    processors: Sequence[Processor] = (),
) -> list[Hypothesis]:
    """Samples each row from softmax(logits / temperature).

    top_k keeps the k likeliest tokens, top_p the smallest set with total probability p, and min_p
    those at least p times as likely as the top one. Row i uses seeds[i], or config.seed + i.
    """
    config = check_options(config)
    if config.temperature is None:
        raise ConfigError("sampling needs a temperature, such as 1.0")
    found = _search(step, state, config, processors, eos, prefixes, max_lengths, seeds)
    return [best for [best] in found]


def beam_search(
    step: Step[S],
    state: S,
    config: DecodeConfig,
    *,
    eos: int,
    prefixes: Sequence[Sequence[int]] | None = None,
    max_lengths: Sequence[int] | None = None,
    processors: Sequence[Processor] = (),
) -> list[list[Hypothesis]]:
    """Returns up to n_best hypotheses per sentence, best first.

    A hypothesis cut at its maximum length is ranked like the others, with finished=False. Scores
    and lengths include a forced prefix.
    """
    config = check_options(config)
    if config.temperature is not None:
        raise ConfigError("beam search does not sample; omit temperature, or use sample")
    return _search(step, state, config, processors, eos, prefixes, max_lengths)


def _make_options(
    config: DecodeConfig,
    b: int,
    eos: int,
    prefixes: Sequence[Sequence[int]] | None = None,
    max_lengths: Sequence[int] | None = None,
    seeds: Sequence[int] | None = None,
) -> list[Options]:
    """Returns the options of b sentences, checked."""
    if b < 1:
        raise ShapeError("this state has no rows; start one with at least one sentence")
    if eos < 0:
        raise TokenError(f"eos={eos} must be a token id, at least 0")
    columns: dict[str, Sequence[Any]] = {
        "max_lengths": [config.max_length] * b if max_lengths is None else max_lengths,
        "prefixes": [()] * b if prefixes is None else prefixes,
        "seeds": range(config.seed, config.seed + b) if seeds is None else seeds,
    }
    for name, values in columns.items():
        if len(values) != b:
            rows = "rows" if name == "seeds" else "sentences"
            raise ShapeError(f"got {len(values)} {name} for {b} {rows}; pass one for each")
    least, most = max(1, config.min_length), config.max_length or math.inf
    options = []
    for limit, prefix, seed in zip(*columns.values(), strict=True):
        if limit is None:
            raise ConfigError("the search has no length limit; set max_length, or pass max_lengths")
        if not least <= limit <= most:
            raise ConfigError(f"max_lengths has {limit}; it must be from {least} to {most}")
        if len(prefix) > limit:
            raise ConfigError(
                f"a forced prefix has {len(prefix)} tokens, more than max_length={limit}"
            )
        if eos in prefix or min(prefix, default=0) < 0:
            raise TokenError(f"a forced prefix must contain only token ids, without eos={eos}")
        if config.temperature is not None and not -(2**63) <= seed < 2**64:
            raise ConfigError(f"seed={shown(seed)} must be from -2^63 to 2^64 - 1")
        options.append(Options(config, limit, tuple(prefix), seed))
    return options


def _search(
    step: Step[S],
    state: S,
    config: DecodeConfig,
    processors: Sequence[Processor],
    eos: int,
    *given: Sequence[Any] | None,  # prefixes, max_lengths and seeds
) -> list[list[Hypothesis]]:
    """Runs steps until no row is live; returns the hypotheses of each sentence."""
    beam = config.width
    if state.beam == 1 and beam > 1:
        state = state.expand(beam)
    if state.beam != beam:
        raise ShapeError(
            f"this state has {state.beam} beams per sentence, not {beam}; start one with "
            f"beam={beam}"
        )
    options = _make_options(config, len(state.first) // beam, eos, *given)
    limits = [one.max_length for one in options]
    state.begin(limits)
    search, tokens = None, state.first
    texts = tokens.new_zeros(len(tokens), 0)  # tokens so far, for processors
    while search is None or bool(search.live.any()):
        if search is not None:
            tokens = search.tokens
            if processors:
                texts = torch.cat([texts[search.parents], tokens.unsqueeze(1)], dim=1)
            if beam > 1:
                state.reorder(search.parents)
            state.stop(search.live == 0)
        logits = step(tokens, state)
        for process in processors:
            shape, logits = logits.shape, process(texts, logits)
            if not isinstance(logits, Tensor) or logits.shape != shape:
                raise ShapeError(
                    f"a processor must return logits {list(shape)}, not {shown(logits)}; return "
                    f"the logits that it changed"
                )
        if logits.dim() != 2 or len(logits) != len(tokens):
            raise ShapeError(
                f"the step function returned logits {list(logits.shape)}; they must be "
                f"[{len(tokens)}, vocab_size]"
            )
        if search is None:
            sizes, targets = (len(options), beam, max(limits)), Targets(logits.shape[1], eos)
            search = Search(*sizes, targets, device=tokens.device, implementation="reference")
            search.admit(range(len(options)), options)
        search.advance(logits)
    packed = search.collect(torch.arange(len(options), device=tokens.device), config.n_best)
    found = make_hypotheses(packed.cpu().numpy(), options)
    if not all(found):
        raise SearchError(NO_TOKEN)
    return [[one.with_tuple() for one in some] for some in found]
