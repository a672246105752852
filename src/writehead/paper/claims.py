"""§4.1-4.2: the paper's claims about Tables 1 and 3, and whether our results support them.

A claim has a margin, a weighted sum of row means that is positive if the claim holds. It is
supported if the margin exceeds its noise and contradicted if the margin is below minus the noise.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from writehead.paper.experiments import find_experiment
from writehead.paper.results import Result
from writehead.paper.tables import TABLE_1, TABLE_3

# two-sided 95% quantiles of Student's t by degrees of freedom; nearly constant from 10 on
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)

Values = dict[str, list[float]]  # by the paper's row: one value per seed


@dataclass(frozen=True)
class Measure:
    """A figure of a row: its field in the paper's table and its path in a result."""

    key: str
    label: str
    path: tuple[str, ...]
    digits: int
    lower_is_better: bool

    def of(self, result: Result) -> float | None:
        """Returns the figure of a result; None if it was not measured or not finite."""
        value: Any = result["scores"]
        for name in self.path:
            value = value.get(name) if isinstance(value, dict) else None
        return None if value is None else float(value)


PAPER = {"table1": TABLE_1, "table3": TABLE_3}
GREEDY, BEAM = ("bleu", "greedy", "intl"), ("bleu", "beam-4", "intl")
MEASURES = {
    "table1": (
        Measure("loss", "ln(PPL) dev", ("dev", "ln_ppl"), 3, True),
        Measure("bleu_dev", "BLEU dev", ("dev", *GREEDY), 1, False),
        Measure("bleu_test_greedy", "BLEU test, greedy", ("test", *GREEDY), 1, False),
        Measure("bleu_test_beam4", "BLEU test, beam 4", ("test", *BEAM), 1, False),
    ),
    "table3": (Measure("loss", "perplexity dev", ("dev", "ppl_per_word"), 1, True),),
}


def paper_values(table: str, measure: Measure) -> Values:
    """Returns the paper's figures by row, where it prints them."""
    values = {row.row: getattr(row, measure.key) for row in PAPER[table]}
    return {row: [value] for row, value in values.items() if value is not None}


class Scores:
    """The results of Table 1 or 3 at one scale, by the paper's rows."""

    def __init__(self, table: str, scale: str, results: list[Result]) -> None:
        self.table, self.scale, self.results = table, scale, results
        # rows with small heads are named by their sizes, which depend on the scale
        names = zip(PAPER[table], find_experiment(table, scale).rows, strict=True)
        self.by_row = {
            row.row: sorted((r for r in results if r["row"] == name), key=lambda r: int(r["seed"]))
            for row, name in names
        }

    @property
    def missing(self) -> list[str]:
        """The rows without a result."""
        return [row for row, results in self.by_row.items() if not results]

    def values(self, measure: Measure) -> Values:
        """Returns the measured figures by row."""
        values = {
            row: [value for one in own if (value := measure.of(one)) is not None]
            for row, own in self.by_row.items()
        }
        return {row: own for row, own in values.items() if own}

    def noise(self, measure: Measure, weights: dict[str, float]) -> float | None:
        """Returns the 95% interval of a weighted sum of row means; None without repeated seeds.

        The variance of one run is pooled over the rows with several seeds.
        """
        values = self.values(measure)
        freedom = sum(len(own) - 1 for own in values.values())
        if not freedom:
            return None
        squares = sum(
            (len(own) - 1) * statistics.variance(own) for own in values.values() if own[1:]
        )
        variance = sum(weight**2 / len(values[row]) for row, weight in weights.items())
        return T_95[min(freedom, len(T_95)) - 1] * math.sqrt(squares / freedom * variance)

    def gap(self) -> dict[int, float]:
        """Returns multi-query's dev ln(PPL) minus multi-head's by step, with their first seeds."""
        head, query = (self._curve(row) for row in ("multi-head", "multi-query"))
        return {step: query[step] - head[step] for step in head if step in query}

    def _curve(self, row: str) -> dict[int, float]:
        log = self.by_row[row][0]["log"] if self.by_row[row] else []
        values = {int(entry["step"]): entry.get("dev_ln_ppl") for entry in log}
        return {step: float(value) for step, value in values.items() if value is not None}


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
