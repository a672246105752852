"""§4.1-4.2: the paper's claims about Tables 1 and 3, and whether results support them.

A claim has a margin, a weighted sum of row means that is positive if the claim holds. It is
supported if the margin exceeds its noise and contradicted if the margin is below minus the noise.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from writehead.paper.scores import MEASURES, Measure, Scores, Values, paper_values

HEAD, QUERY = "multi-head", "multi-query"
HEAD_LOCAL, QUERY_LOCAL = "multi-head-local", "multi-query-local"
SMALL_HEADS = ("multi-head-1x128", "multi-head-2x64", "multi-head-4x32", "multi-head-8x16")
SUPPORTED, CONTRADICTED, NOT_DECIDED = "supported", "contradicted", "not decided"
NOT_RUN = "not run yet"

Losses = dict[str, float]  # row means, negated if higher is better
Weights = dict[str, float]


@dataclass(frozen=True)
class Claim:
    """A claim, the measures and rows it needs, and the weights of its margin."""

    table: str
    text: str
    measures: tuple[str, ...]
    rows: tuple[str, ...]
    weigh: Callable[[Losses], Weights]


@dataclass(frozen=True)
class Finding:
    """The margin of a claim by one measure; `noise` is None if no row has several seeds."""

    measure: Measure
    margin: float
    noise: float | None = None

    @property
    def verdict(self) -> str:
        """Whether the claim is supported by this measure."""
        if self.noise is None or abs(self.margin) <= self.noise:
            return NOT_DECIDED
        return SUPPORTED if self.margin > 0.0 else CONTRADICTED


def _best_small(losses: Losses) -> str:
    return min((row for row in SMALL_HEADS if row in losses), key=lambda row: losses[row])


def _worse(losses: Losses) -> Weights:
    return {QUERY: 1.0, HEAD: -1.0}


def _half_as_far(losses: Losses) -> Weights:
    return {_best_small(losses): 1.0, QUERY: -2.0, HEAD: 1.0}


def _better(losses: Losses) -> Weights:
    return {_best_small(losses): 1.0, QUERY: -1.0}


def _nearer(losses: Losses) -> Weights:
    return _below_small(losses, {QUERY: 1.0, HEAD: -1.0})


def _highest(losses: Losses) -> Weights:
    others = [row for row in losses if row != QUERY]
    return {min(others, key=lambda row: losses[row]): 1.0, QUERY: -1.0}


def _window(losses: Losses) -> Weights:
    costs = ({HEAD_LOCAL: 1.0, HEAD: -1.0}, {QUERY_LOCAL: 1.0, QUERY: -1.0})
    return _below_small(losses, max(costs, key=lambda one: abs(_sum(one, losses))))


def _additive(losses: Losses) -> Weights:
    interaction = {QUERY_LOCAL: 1.0, HEAD_LOCAL: -1.0, QUERY: -1.0, HEAD: 1.0}
    return _below_small(losses, interaction)


def _below_small(losses: Losses, difference: Weights) -> Weights:
    """Weights of the best small-head row's loss over multi-head, minus the absolute difference."""
    sign = -1.0 if _sum(difference, losses) > 0.0 else 1.0
    weights = {_best_small(losses): 1.0, HEAD: -1.0}
    for row, weight in difference.items():
        weights[row] = weights.get(row, 0.0) + sign * weight
    return weights


def _sum(weights: Weights, losses: Losses) -> float:
    return sum(weight * losses[row] for row, weight in weights.items())


DEV, TEST = ("loss", "bleu_dev"), ("bleu_test_greedy", "bleu_test_beam4")
LM = ("loss",)
BASIC = (HEAD, QUERY)
REDUCED = (*BASIC, *SMALL_HEADS)
ALL = (*REDUCED, HEAD_LOCAL, QUERY_LOCAL)
CLAIMS = (
    Claim("table1", "Multi-query is slightly worse than multi-head", DEV, BASIC, _worse),
    Claim("table1", "… but under half as far from it as reduced heads", DEV, REDUCED, _half_as_far),
    Claim("table1", "On the test set it is nearer than reduced heads", TEST, REDUCED, _nearer),
    Claim("table1", "It has the highest BLEU with beam 4", TEST[1:], ALL, _highest),
    Claim("table1", "A local window costs less than reduced heads", DEV, ALL, _window),
    Claim("table1", "Window and multi-query are orthogonal: costs add up", DEV, ALL, _additive),
    Claim("table3", "Multi-query is slightly worse than multi-head", LM, BASIC, _worse),
    Claim("table3", "… but better than reduced heads", LM, REDUCED, _better),
)


def judge(claim: Claim, scores: Scores | None) -> list[Finding]:
    """Returns one finding per measure, of our results or, without them, of the paper's figures.

    The list is empty if a row that the claim needs was not run.
    """
    findings = []
    for measure in (one for one in MEASURES[claim.table] if one.key in claim.measures):
        paper = paper_values(claim.table, measure)
        values: Values = paper if scores is None else scores.values(measure)
        # the paper prints the test BLEU of one row with small heads only
        if any(row not in values for row in claim.rows if row in paper or row not in SMALL_HEADS):
            return []
        sign = 1.0 if measure.lower_is_better else -1.0
        losses = {row: sign * statistics.mean(own) for row, own in values.items()}
        weights = claim.weigh(losses)
        noise = None if scores is None else scores.noise(measure, weights)
        findings.append(Finding(measure, _sum(weights, losses), noise))
    return findings


def verdict(findings: list[Finding]) -> str:
    """Returns the verdict of all measures together: not decided unless they agree."""
    words = {finding.verdict for finding in findings}
    return words.pop() if len(words) == 1 else NOT_DECIDED if words else NOT_RUN
