"""Beam search over a step function, with the length penalty ((5 + length) / 6)^alpha.

Each sentence has `beam` live hypotheses and a pool of its best ended ones. A step considers the
2 × beam best continuations. Those that end are added to the pool if they are among the first
`beam`; the best of the others become the live hypotheses. A sentence is done when no live
hypothesis can still enter its n-best list. Other sentences have no influence.
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

NEVER = float("-inf")  # the score of an empty slot


@dataclass(frozen=True, eq=False)
class BeamStep:
    """The continuations that one step of a beam search considers in each sentence, best first.

    scores: [b, 2 × beam], log probabilities, or NEVER in an empty slot. tokens: [b, 2 × beam, t],
    whole hypotheses. ended: [b, 2 × beam]. cut: [b], whether the maximum length is reached. over:
    [b], whether the sentence is done after this step. largest: [b], the largest magnitude of the
    logits.
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

    A hypothesis that reaches its maximum length is ranked as it is, unfinished. Scores and lengths
    include a forced prefix. With beam=1, this is greedy search, and `observe` is not called; else
    it is called after each step.
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
    """`count` hypotheses per sentence. Every tensor is [b, count], unless noted."""

    scores: Tensor  # with length penalty, for ranking; NEVER in an empty slot
    log_p: Tensor
    tokens: Tensor  # [b, count, longest]
    lengths: Tensor
    ended: Tensor

    def best(self, count: int) -> "_Pool":
        """Returns the `count` best, best first; of equal ones, the earlier comes first."""
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
        """Returns the hypotheses of both pools, those of `other` last."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return _Pool(*(torch.cat(pair, dim=1) for pair in pairs))


class _Beams:
    """The live and the ended hypotheses of b sentences, in tensors of fixed shape."""

    def __init__(
        self, config: DecodeConfig, constraints: Constraints, b: int, device: torch.device
    ) -> None:
        self.config, self.constraints = config, constraints
        shape = (b, config.width)
        # all beams start equal, so only the first is live
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
        """Takes log_p [b, beam, vocab_size]; returns next tokens and their parents, both [rows].

        The parents are the rows to pass to `SearchState.reorder`.
        """
        beam, vocab_size = log_p.shape[1:]
        live = self.live.unsqueeze(2)
        # the logits of an empty slot are ignored, even if they are NaN
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
        # a sentence that is done has no live hypothesis and does not change any more
        self.live = self.live.masked_fill(self._decided(t + 1).unsqueeze(1), NEVER)
        rows = self.sentences * beam + parents.gather(1, order)
        return tokens.gather(1, order).flatten(), rows.flatten()

    def last_step(self, t: int, largest: Tensor) -> BeamStep:
        """Returns the continuations that step t, the last one, considered."""
        scores, histories = self.considered
        ended = histories[:, :, t] == self.constraints.eos
        cut = t + 1 >= self.constraints.max_lengths
        over = (self.live == NEVER).all(dim=1)
        return BeamStep(scores, histories[:, :, : t + 1], ended, cut, over, largest)

    def over(self) -> Tensor:
        """Returns [rows]: whether the row's sentence has no live hypothesis left."""
        return (self.live == NEVER).all(dim=1).repeat_interleave(self.live.shape[1])

    def all_done(self) -> bool:
        """Whether no sentence has a live hypothesis; waits for the device."""
        return bool((self.live == NEVER).all())

    def results(self) -> list[list[Hypothesis]]:
        """Returns the n-best list of each sentence."""
        done = self.done.best(self.config.n_best)
        # empty slots come last; make_hypotheses raises an error for a sentence with nothing else
        counts = (done.scores != NEVER).sum(dim=1).clamp(min=1).tolist()
        fields = (done.tokens, done.lengths, done.scores, done.log_p, done.ended)
        return [
            make_hypotheses(*(column[:count] for column in columns))
            for count, *columns in zip(counts, *(T.tolist() for T in fields), strict=True)
        ]

    def _finish(
        self, log_p: Tensor, histories: Tensor, ended: Tensor, cut: Tensor, length: int
    ) -> None:
        """Adds the candidates [b, beam] that end or are cut at `length` to the pool."""
        penalty = float(length_penalty(length, self.config.alpha))
        scores = (log_p / penalty).masked_fill(~(ended | cut), NEVER)
        lengths = torch.full_like(histories[:, :, 0], length)
        candidates = _Pool(scores, log_p, histories, lengths, ended)
        self.done = self.done.joined(candidates).best(self.done.scores.shape[1])

    def _decided(self, length: int) -> Tensor:
        """Returns [b]: whether no live hypothesis of `length` tokens can still enter the n-best.

        A log probability can only fall, so the bound divides the current one by the penalty of the
        longest possible sequence, or of the shortest if alpha is negative.
        """
        alpha = self.config.alpha
        longest = self.constraints.max_lengths
        penalty = length_penalty(longest if alpha >= 0 else length + 1, alpha).to(self.live.device)
        bound = self.live.amax(dim=1) / penalty
        return bound <= self.done.scores[:, self.config.n_best - 1]
