"""§4.1-4.2: the paper's claims about Tables 1 and 3, and whether our results support them.

A claim has a margin, a weighted sum of row means that is positive if the claim holds. It is
supported if the margin exceeds its noise and contradicted if the margin is below minus the noise.
"""

import math
import statistics
from dataclasses import dataclass
from typing import Any

from writehead.paper.experiments import find_experiment
from writehead.paper.results import Result
from writehead.paper.tables import TABLE_1, TABLE_3

# two-sided 95% quantiles of Student's t by degrees of freedom; nearly constant from 10 on
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
NOT_DECIDED, NOT_RUN = "not decided", "not run yet"

Values = dict[str, list[float]]  # by the paper's row: one value per seed
Weights = dict[str, float]  # by the paper's row


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
        self.scale, self.results = scale, results
        # rows with small heads are named by their sizes, which depend on the scale
        names = zip(PAPER[table], find_experiment(table, scale).rows, strict=True)
        self._names = {row.row: name for row, name in names}

    def values(self, measure: Measure) -> Values:
        """Returns the measured figures by row."""
        figures = [(result["row"], measure.of(result)) for result in self.results]
        values = {
            row: [value for own, value in figures if own == name and value is not None]
            for row, name in self._names.items()
        }
        return {row: own for row, own in values.items() if own}

    def noise(self, measure: Measure, weights: Weights) -> float | None:
        """Returns the 95% interval of a weighted sum of row means; None without repeated seeds.

        The variance of one run is pooled over the rows with several seeds.
        """
        values = self.values(measure)
        freedom = sum(len(own) - 1 for own in values.values())
        if not freedom:
            return None
        repeated = [own for own in values.values() if len(own) > 1]
        squares = sum((len(own) - 1) * statistics.variance(own) for own in repeated)
        variance = sum(weight**2 / len(values[row]) for row, weight in weights.items())
        return T_95[min(freedom, len(T_95)) - 1] * math.sqrt(squares / freedom * variance)


HEAD, QUERY = "multi-head", "multi-query"
HEAD_LOCAL, QUERY_LOCAL = "multi-head-local", "multi-query-local"
SMALL_HEADS = ("multi-head-1x128", "multi-head-2x64", "multi-head-4x32", "multi-head-8x16")
BEST_SMALL, BEST_OTHER = "best of SMALL_HEADS", "best row but multi-query"


@dataclass(frozen=True, eq=False)
class Claim:
    """A claim by several measures; its margin is `gain` minus the largest of |costs|.

    Weights apply to losses: measures whose higher values are better are negated.
    """

    table: str
    text: str
    measures: tuple[str, ...]
    gain: Weights
    costs: tuple[Weights, ...] = ()

    def weights(self, losses: dict[str, float]) -> Weights:
        """Returns the weights of the margin by row."""
        best = {
            BEST_SMALL: min(set(SMALL_HEADS) & set(losses), key=losses.__getitem__, default=""),
            BEST_OTHER: min(set(losses) - {QUERY}, key=losses.__getitem__),
        }
        weights = {best.get(row, row): weight for row, weight in self.gain.items()}
        if self.costs:
            largest = max(self.costs, key=lambda cost: abs(weighted_sum(cost, losses)))
            sign = -1.0 if weighted_sum(largest, losses) > 0.0 else 1.0
            for row, weight in largest.items():
                weights[row] = weights.get(row, 0.0) + sign * weight
        return weights


def weighted_sum(weights: Weights, losses: dict[str, float]) -> float:
    """Returns the sum of losses, each times its weight."""
    return sum(weight * losses[row] for row, weight in weights.items())


DEV, TEST = ("loss", "bleu_dev"), ("bleu_test_greedy", "bleu_test_beam4")
WORSE = {QUERY: 1.0, HEAD: -1.0}
REDUCED = {BEST_SMALL: 1.0, HEAD: -1.0}
WINDOWS = ({HEAD_LOCAL: 1.0, HEAD: -1.0}, {QUERY_LOCAL: 1.0, QUERY: -1.0})
ADDED = ({QUERY_LOCAL: 1.0, HEAD_LOCAL: -1.0, QUERY: -1.0, HEAD: 1.0},)
HALF = {BEST_SMALL: 1.0, QUERY: -2.0, HEAD: 1.0}
BETTER, HIGHEST = {BEST_SMALL: 1.0, QUERY: -1.0}, {BEST_OTHER: 1.0, QUERY: -1.0}
CLAIMS = (
    Claim("table1", "Multi-query is slightly worse than multi-head", DEV, WORSE),
    Claim("table1", "Its gap to multi-head is under half that of reduced heads", DEV, HALF),
    Claim(
        "table1",
        "On the test set, its gap is smaller than that of reduced heads",
        TEST,
        REDUCED,
        (WORSE,),
    ),
    Claim("table1", "Multi-query has the highest BLEU with beam 4", TEST[1:], HIGHEST),
    Claim("table1", "Local attention costs less than reduced heads", DEV, REDUCED, WINDOWS),
    Claim(
        "table1",
        "Local and multi-query attention are orthogonal: their costs add up",
        DEV,
        REDUCED,
        ADDED,
    ),
    Claim("table3", "Multi-query is slightly worse than multi-head", DEV[:1], WORSE),
    Claim("table3", "Multi-query is better than reduced heads", DEV[:1], BETTER),
)


@dataclass(frozen=True)
class Finding:
    """The margin of a claim by one measure; `noise` is None if no row has several seeds."""

    measure: Measure
    margin: float
    noise: float | None

    @property
    def verdict(self) -> str:
        """Whether the claim is supported by this measure."""
        if self.noise is None or abs(self.margin) <= self.noise:
            return NOT_DECIDED
        return "supported" if self.margin > 0.0 else "contradicted"


def judge(claim: Claim, scores: Scores | None) -> list[Finding]:
    """Returns one finding per measure, of our results or, without them, of the paper's figures.

    The list is empty if a row that the claim needs was not run.
    """
    findings = []
    for measure in (each for each in MEASURES[claim.table] if each.key in claim.measures):
        paper = paper_values(claim.table, measure)
        values: Values = paper if scores is None else scores.values(measure)
        if not values.keys() >= (claim.gain.keys() if claim.gain is WORSE else paper.keys()):
            return []
        sign = 1.0 if measure.lower_is_better else -1.0
        losses = {row: sign * statistics.mean(own) for row, own in values.items()}
        weights = claim.weights(losses)
        noise = None if scores is None else scores.noise(measure, weights)
        findings.append(Finding(measure, weighted_sum(weights, losses), noise))
    return findings


def verdict(findings: list[Finding]) -> str:
    """Returns the verdict of all measures together: not decided unless they agree."""
    words = {finding.verdict for finding in findings}
    return words.pop() if len(words) == 1 else NOT_DECIDED if words else NOT_RUN
