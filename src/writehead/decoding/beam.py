"""Beam search over a step function, with the length penalty ((5 + length) / 6)^alpha.

Every sentence keeps `beam` live hypotheses, and the best that have ended. A step considers the
2 × beam best continuations: those that end, if among the first `beam`, join the ended; the best of
the others live on. A sentence is done when none of its live hypotheses could still enter its
n-best, whatever came next; that is seen from its own numbers alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from writehead.config import DecodeConfig
from writehead.decoding.search import (
    Constraints,
    Hypothesis,
    S,
    Step,
    check_options,
    greedy,
    length_penalty,
    make_hypotheses,
    next_logits,
)
from writehead.errors import ConfigError, ShapeError

NEVER = float("-inf")


@dataclass(frozen=True, eq=False)
class BeamStep:
    """What one step of a beam search chose from: each sentence's best continuations, best first.

    scores: [b, 2 × beam], log-probabilities, NEVER where there is none. tokens: [b, 2 × beam, t],
    whole hypotheses. ended: [b, 2 × beam]. cut: [b], whether none may grow longer. over: [b],
    whether the sentence is done with this step, or was before. largest: [b], the largest magnitude
    of the logits.
    """

    scores: Tensor
    tokens: Tensor
    ended: Tensor
    cut: Tensor
    over: Tensor
    largest: Tensor


Observer = Callable[[BeamStep], None]


def beam_search(
    step: Step[S],
    state: S,
    config: DecodeConfig,
    *,
    eos: int,
    prefixes: Sequence[Sequence[int]] | None = None,
    max_lengths: Sequence[int] | None = None,
    observe: Observer | None = None,
) -> list[list[Hypothesis]]:
    """Returns up to n_best hypotheses per sentence, best first.

    A hypothesis that reaches its maximum length competes as it is, unfinished. Scores and lengths
    include a forced prefix. With beam=1 this is greedy search. `observe` is called at each step,
    unless beam=1.
    """
    config = check_options(config)
    if config.temperature is not None:
        raise ConfigError("beam search does not sample; omit temperature, or use sample")
    if config.width == 1:
        best = greedy(step, state, config, eos=eos, prefixes=prefixes, max_lengths=max_lengths)
        return [[hypothesis] for hypothesis in best]
    if state.beam == 1:
        state = state.expand(config.width)
    elif state.beam != config.width:
        raise ShapeError(
            f"this state has {state.beam} beams per sentence, not {config.width}; start it with "
            f"beam={config.width} or 1"
        )
    b = len(state.first) // config.width
    constraints = Constraints.make(config, eos, prefixes, max_lengths, b, state.first.device)
    state.begin(constraints.limits)
    beams = _Beams(config, constraints, b, state.first.device)
    tokens = state.first
    for t in range(constraints.longest):
        logits = next_logits(step, tokens, state).view(b, config.width, -1)
        tokens, rows = beams.advance(constraints.log_probabilities(logits, t), t)
        if observe is not None:
            observe(beams.last_step(t, logits.float().abs().amax(dim=(1, 2))))
        if beams.all_done():
            break
        state.reorder(rows)
        state.stop(beams.over())
    return beams.results()


@dataclass(frozen=True, eq=False)
class _Pool:
    """Hypotheses of each sentence, best first. Every tensor is [b, count, …]."""

    scores: Tensor  # what they are ranked by; NEVER where there is none
    log_p: Tensor
    tokens: Tensor  # [b, count, longest]
    lengths: Tensor
    ended: Tensor

    def best(self, count: int) -> "_Pool":
        """The `count` best, the earlier of equals first."""
        order = self.scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
        wide = order.unsqueeze(2).expand(-1, -1, self.tokens.shape[2])
        return _Pool(
            self.scores.gather(1, order),
            self.log_p.gather(1, order),
            self.tokens.gather(1, wide),
            self.lengths.gather(1, order),
            self.ended.gather(1, order),
        )

    def joined(self, other: "_Pool") -> "_Pool":
        """These, then those of `other`."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return _Pool(*(torch.cat(pair, dim=1) for pair in pairs))


class _Beams:
    """The live hypotheses of b sentences and those that have ended, as tensors of fixed shape."""

    def __init__(
        self, config: DecodeConfig, constraints: Constraints, b: int, device: torch.device
    ) -> None:
        self.config, self.constraints = config, constraints
        shape = (b, config.width)
        # all beams begin alike, so only the first may speak
        self.live = torch.full(shape, NEVER, device=device)
        self.live[:, 0] = 0.0
        self.tokens = torch.zeros(*shape, constraints.longest, dtype=torch.long, device=device)
        self.sentences = torch.arange(b, device=device).unsqueeze(1)
        self.considered = torch.full(shape, NEVER, device=device), self.tokens  # in the last step
        self.done = _Pool(
            torch.full(shape, NEVER, device=device),
            torch.full(shape, NEVER, device=device),
            torch.zeros_like(self.tokens),
            torch.zeros(shape, dtype=torch.long, device=device),
            torch.zeros(shape, dtype=torch.bool, device=device),
        )

    def advance(self, log_p: Tensor, t: int) -> tuple[Tensor, Tensor]:
        """Takes log_p [b, beam, vocab_size]; returns the next tokens [rows] and whence they come.

        The rows answered are those that a state is to be reordered by.
        """
        beam, vocab_size = log_p.shape[1:]
        live = self.live.unsqueeze(2)
        # where nothing lives, whatever the model says is not heard, NaN included
        totals = torch.where(live == NEVER, NEVER, live + log_p).flatten(1)  # [b, beam vocab_size]
        scores, places = totals.topk(min(2 * beam, totals.shape[1]), dim=1)
        parents, tokens = places // vocab_size, places % vocab_size  # [b, 2 beam]
        histories = self.tokens[self.sentences, parents]
        histories[:, :, t] = tokens
        self.considered = scores, histories
        ended = tokens == self.constraints.eos
        cut = (t + 1 >= self.constraints.max_lengths).unsqueeze(1)

        self._finish(scores[:, :beam], histories[:, :beam], ended[:, :beam], cut, t + 1)
        scores = scores.masked_fill(ended | cut, NEVER)
        order = scores.sort(dim=1, descending=True, stable=True).indices[:, :beam]
        self.live = scores.gather(1, order)
        self.tokens = histories[self.sentences, order]
        # a sentence that is done has nothing live, and so changes no more
        self.live = self.live.masked_fill(self._decided(t + 1).unsqueeze(1), NEVER)
        rows = self.sentences * beam + parents.gather(1, order)
        return tokens.gather(1, order).flatten(), rows.flatten()

    def last_step(self, t: int, largest: Tensor) -> BeamStep:
        """What the step that chose the t-th tokens chose from."""
        scores, histories = self.considered
        ended = histories[:, :, t] == self.constraints.eos
        cut = t + 1 >= self.constraints.max_lengths
        over = (self.live == NEVER).all(dim=1)
        return BeamStep(scores, histories[:, :, : t + 1], ended, cut, over, largest)

    def over(self) -> Tensor:
        """[rows], whether the row's sentence has no live hypothesis left."""
        return (self.live == NEVER).all(dim=1).repeat_interleave(self.live.shape[1])

    def all_done(self) -> bool:
        """Whether no sentence has a live hypothesis; waits for the device."""
        return bool((self.live == NEVER).all())

    def results(self) -> list[list[Hypothesis]]:
        """The n_best of each sentence."""
        done = self.done.best(self.config.n_best)
        # empty places come last; a sentence without any is an error, raised where it is made
        counts = (done.scores != NEVER).sum(dim=1).clamp(min=1).tolist()
        fields = (done.tokens, done.lengths, done.scores, done.log_p, done.ended)
        return [
            make_hypotheses(*(column[:count] for column in columns))
            for count, *columns in zip(counts, *(T.tolist() for T in fields), strict=True)
        ]

    def _finish(
        self, log_p: Tensor, histories: Tensor, ended: Tensor, cut: Tensor, length: int
    ) -> None:
        """Adds to the done those of the candidates [b, beam] that end here or are cut here."""
        penalty = float(length_penalty(length, self.config.alpha))
        scores = (log_p / penalty).masked_fill(~(ended | cut), NEVER)
        lengths = torch.full_like(histories[:, :, 0], length)
        found = _Pool(scores, log_p, histories, lengths, ended)
        self.done = self.done.joined(found).best(self.done.scores.shape[1])

    def _decided(self, length: int) -> Tensor:
        """[b]: whether no live hypothesis of `length` tokens can still enter the n-best.

        Its log-probability can only fall, so at best it stays, and is divided by the penalty of
        the longest possible sequence (of the shortest, where alpha is negative).
        """
        alpha = self.config.alpha
        longest = self.constraints.max_lengths
        penalty = length_penalty(longest if alpha >= 0 else length + 1, alpha).to(self.live.device)
        bound = self.live.amax(dim=1) / penalty
        return bound <= self.done.scores[:, self.config.n_best - 1]
