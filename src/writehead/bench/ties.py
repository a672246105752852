"""Where what two searches found parts, and whether rounding alone explains it: a near-tie, defined.

Both found something for the same sentence by the same weights, the reference in float32 on a CPU.
A *tolerance* is epsilon × FACTOR × the largest magnitude of the reference's logits at a step.

Greedy search parts at the first token that differs. It is a near-tie if the reference's
log-probabilities of the two tokens, behind what both have in common, differ by no more than the
tolerance.

Beam search parts at the first step at which what ours found, as far as it had come, is no longer
among what the reference kept: the `beam` best that live on, or where it ends, the `beam` best of
all. It is a near-tie
- ("beam") if its log-probability by the reference is within the tolerance of the last that was
  kept; or where it was never dropped,
- ("final") if its penalised score is within the tolerance of the reference's best.
It is *unproved* ("earlier") if neither holds, but at that step or before, or at any where it was
never dropped, the last that the reference kept was within the tolerance of the first that it did
not, so that the beams may have parted there and led elsewhere; and if ours gave what it found the
log-probability that the reference gives it, within the tolerance of all its tokens. Many beams
come that close, so that this would pass for many an error of the search: results count it apart.

A score is a sum of rounded numbers, whose errors have either sign: the tolerance of n tokens is √n
times that of one. With two hypotheses, n counts from where they parted, since what they have in
common was rounded once for both.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from writehead.data.tokenizer import EOS
from writehead.decoding.beam import NEVER, BeamStep
from writehead.decoding.search import Hypothesis, length_penalty

# by what share of itself a result is rounded. Products of 16-bit numbers are summed in float32 and
# rounded once; in float32 sums are rounded as well, in an order of their own, so it counts double
EPSILON = {
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float32: 2.0**-23,
    torch.float64: 2.0**-23,  # the reference has no more
}
# a logit is rounded itself, and before it the sum of residuals about three times in each of six
# layers; errors of either sign add up like the root of their number, and that of 18 is about 4.
# In bfloat16 on a CPU, the demo's models part from float32 at 0.37 of it at most (300 lines)
FACTOR = 4.0


@dataclass(frozen=True)
class Parting:
    """Where two hypotheses part: the step, from 1, the tokens there, and by how much they differ.

    `kind` is "token" of greedy search, and of beams as the module says. A token that there is not,
    where one of the two has stopped short, is -1.
    """

    kind: str
    step: int
    reference: int
    ours: int
    difference: float
    tolerance: float

    @property
    def is_within(self) -> bool:
        """Whether the difference is one that rounding can make."""
        return self.difference <= self.tolerance

    @property
    def is_near(self) -> bool:
        """Whether rounding explains it."""
        return self.is_within and self.kind != "earlier"

    @property
    def is_unproved(self) -> bool:
        """Whether rounding may have led there, by a way that was not followed."""
        return self.kind == "earlier"


@dataclass(frozen=True)
class Moment:
    """A step of the reference's beam search for one sentence: what it chose from, best first."""

    scores: list[float]
    tokens: list[tuple[int, ...]]
    ended: list[bool]
    cut: bool
    largest: float

    def living(self, beam: int) -> list[int]:
        """Which of them were kept to grow."""
        return [] if self.cut else self._growing()[:beam]

    def edges(self, beam: int) -> list[tuple[int, int]]:
        """Pairs of the last that was kept and the first that was not: of those that grow, of all.

        The second matters only where one of the two is at its end.
        """
        growing, pairs = self._growing(), []
        if not self.cut and len(growing) > beam:
            pairs.append((growing[beam - 1], growing[beam]))
        if len(self.scores) > beam and (self.cut or any(self.ended[beam - 1 : beam + 1])):
            pairs.append((beam - 1, beam))
        return pairs

    def _growing(self) -> list[int]:
        return [i for i, ended in enumerate(self.ended) if not ended]


def moments(steps: Sequence[BeamStep], row: int) -> list[Moment]:
    """The steps that a beam search took for the sentence at `row` of its batch."""
    made = []
    for step in steps:
        scores = [score for score in step.scores[row].tolist() if score != NEVER]
        tokens = [tuple(some) for some in step.tokens[row, : len(scores)].tolist()]
        ended = step.ended[row, : len(scores)].tolist()
        made.append(Moment(scores, tokens, ended, bool(step.cut[row]), float(step.largest[row])))
        if bool(step.over[row]):
            break
    return made


def said(found: Hypothesis) -> tuple[int, ...]:
    """All tokens that were chosen, with the end token where it was."""
    return (*found.tokens, EOS) if found.finished else found.tokens


def judge_greedy(
    reference: Hypothesis, ours: Hypothesis, logits: Tensor, epsilon: float
) -> Parting:
    """Where greedy searches part; logits [n, vocab_size] are the reference's, along its tokens."""
    right, mine = said(reference), said(ours)
    t = shared(right, mine)
    here = logits[min(t, len(logits) - 1)].double()
    tolerance = epsilon * FACTOR * float(here.abs().max())
    if t in (
        len(right),
        len(mine),
    ):  # one goes on where the other has not ended: no rounding does that
        difference = float(here.max() - here.min())
    else:
        difference = abs(float(here[right[t]] - here[mine[t]]))  # that of the log-probabilities too
    return Parting("token", t + 1, _token(right, t), _token(mine, t), difference, tolerance)


@dataclass(frozen=True)
class BeamJudge:
    """Judges what was found for one sentence against what the reference did at every step."""

    reference: Hypothesis
    moments: list[Moment]
    beam: int
    alpha: float
    epsilon: float

    def judge(self, ours: Hypothesis, totals: list[float]) -> Parting:
        """Where the searches part; totals[t] is the reference's log P of ours' first t + 1 tokens.

        Of several reasons it is the first that holds; else the one that fails.
        """
        direct = self._dropped(ours, totals)
        until = len(self.moments) if direct is None else direct.step
        direct = direct or self._final(ours, totals)
        if direct.is_near:
            return direct
        mine = said(ours)
        error = abs(ours.log_probability - totals[-1])
        if error > self._tolerance(len(mine), max(one.largest for one in self.moments)):
            return direct
        return self._earlier(until) or direct

    def _dropped(self, ours: Hypothesis, totals: list[float]) -> Parting | None:
        """The first step at which ours is not among what was kept; None where there is none."""
        mine = said(ours)
        for t, moment in enumerate(self.moments[: len(mine)]):
            whole = t + 1 == len(mine)
            kept = list(range(len(moment.scores)))[: self.beam]
            kept = kept if whole else moment.living(self.beam)
            if not kept:
                return None
            if mine[: t + 1] not in [moment.tokens[i] for i in kept]:
                last = moment.tokens[kept[-1]]
                difference = abs(moment.scores[kept[-1]] - totals[t])
                tolerance = self._tolerance(t + 1 - shared(last, mine), moment.largest)
                return Parting("beam", t + 1, last[-1], mine[t], difference, tolerance)
        return None

    def _final(self, ours: Hypothesis, totals: list[float]) -> Parting:
        """The two as they are at their ends."""
        right, mine = said(self.reference), said(ours)
        t = shared(right, mine)
        penalties = [float(length_penalty(len(one), self.alpha)) for one in (right, mine)]
        difference = abs(self.reference.score - totals[-1] / penalties[1])
        largest = max(one.largest for one in self.moments)
        tolerance = max(
            self._tolerance(len(one) - t, largest) / penalty
            for one, penalty in zip((right, mine), penalties, strict=True)
        )
        return Parting("final", t + 1, _token(right, t), _token(mine, t), difference, tolerance)

    def _earlier(self, until: int) -> Parting | None:
        """The first of some steps at which the beams could as well have been others."""
        for t, moment in enumerate(self.moments[:until]):
            for last, first in moment.edges(self.beam):
                kept, not_kept = moment.tokens[last], moment.tokens[first]
                parting = Parting(
                    "earlier",
                    t + 1,
                    kept[-1],
                    not_kept[-1],
                    moment.scores[last] - moment.scores[first],
                    self._tolerance(t + 1 - shared(kept, not_kept), moment.largest),
                )
                if parting.is_within:
                    return parting
        return None

    def _tolerance(self, tokens: int, largest: float) -> float:
        """Of a sum over so many tokens."""
        return math.sqrt(tokens) * self.epsilon * FACTOR * largest


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two hypotheses have in common before they part."""
    pairs = zip(one, other, strict=False)
    return next((t for t, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _token(tokens: Sequence[int], t: int) -> int:
    return tokens[t] if t < len(tokens) else -1
