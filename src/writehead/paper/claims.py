"""§4.2: what the paper says of its quality tables, as data, and whether a sheet shows it.

A claim is held to a margin: a weighted sum of rows' figures that is above 0 where the claim is
true, as it is in the paper's own tables. It is seen where the margin is above the noise, not seen
where it is below minus the noise, and within the noise between them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from writehead.paper.sheets import Figures, Measure, Sheet

HEAD, QUERY = "multi-head", "multi-query"
HEAD_LOCAL, QUERY_LOCAL = "multi-head-local", "multi-query-local"
FEWER = ("multi-head-1x128", "multi-head-2x64", "multi-head-4x32", "multi-head-8x16")
SEEN, NOT_SEEN, WITHIN = "seen", "not seen", "within noise"
NOT_KNOWN, NOT_RUN = "not known", "not run"

Losses = dict[str, float]  # a figure by row, turned so that less is better
Weights = dict[str, float]


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, what it is held to, the figures it is about and the rows it needs.

    `fewer` says whether it is also about the rows with fewer or smaller heads.
    """

    table: str
    section: str
    words: str
    reading: str
    measures: tuple[str, ...]
    rows: tuple[str, ...]
    fewer: bool
    weigh: Callable[[Losses], Weights]


@dataclass(frozen=True)
class Finding:
    """A margin, and the figures that it was made of."""

    margin: float
    figures: dict[str, float]


@dataclass(frozen=True)
class Verdict:
    """What became of a claim by one measure."""

    claim: Claim
    measure: Measure
    paper: Finding | None
    ours: Finding | None
    noise: float | None
    word: str


def _best_of_fewer(losses: Losses) -> str:
    return min((row for row in FEWER if row in losses), key=lambda row: losses[row])


def _worse(losses: Losses) -> Weights:
    return {QUERY: 1.0, HEAD: -1.0}


def _much_closer(losses: Losses) -> Weights:
    return {_best_of_fewer(losses): 1.0, QUERY: -2.0, HEAD: 1.0}


def _better(losses: Losses) -> Weights:
    return {_best_of_fewer(losses): 1.0, QUERY: -1.0}


def _similar(losses: Losses) -> Weights:
    return _within_the_gap(losses, {QUERY: 1.0, HEAD: -1.0})


def _highest(losses: Losses) -> Weights:
    others = [row for row in losses if row != QUERY]
    return {min(others, key=lambda row: losses[row]): 1.0, QUERY: -1.0}


def _local_costs_little(losses: Losses) -> Weights:
    costs = ({HEAD_LOCAL: 1.0, HEAD: -1.0}, {QUERY_LOCAL: 1.0, QUERY: -1.0})
    return _within_the_gap(losses, max(costs, key=lambda one: abs(_sum(one, losses))))


def _orthogonal(losses: Losses) -> Weights:
    both = {QUERY_LOCAL: 1.0, HEAD_LOCAL: -1.0, QUERY: -1.0, HEAD: 1.0}
    return _within_the_gap(losses, both)


def _within_the_gap(losses: Losses, difference: Weights) -> Weights:
    """How much less `difference` is, either way, than what the best of fewer heads costs."""
    sign = -1.0 if _sum(difference, losses) > 0.0 else 1.0
    weights = {_best_of_fewer(losses): 1.0, HEAD: -1.0}
    for row, weight in difference.items():
        weights[row] = weights.get(row, 0.0) + sign * weight
    return {row: weight for row, weight in weights.items() if weight}


def _sum(weights: Weights, losses: Losses) -> float:
    return sum(weight * losses[row] for row, weight in weights.items())


DEV, TEST = ("ln_ppl_dev", "bleu_dev"), ("bleu_test_greedy", "bleu_test_beam4")
LANGUAGE = ("ppl_dev", "ppl_other")
LOCAL = (HEAD, QUERY, HEAD_LOCAL, QUERY_LOCAL)
CLAIMS = (
    Claim(
        "table1",
        "§4.2",
        "the multi-query attention model seems to be slightly worse than the baseline",
        "worse than multi-head",
        DEV,
        (HEAD, QUERY),
        False,
        _worse,
    ),
    Claim(
        "table1",
        "§4.2",
        "but much closer than any of the alternatives involving decreasing h, d_k and d_v",
        "less than half as far from multi-head as the best of fewer or smaller heads",
        DEV,
        (HEAD, QUERY),
        True,
        _much_closer,
    ),
    Claim(
        "table1",
        "§4.2",
        "the multi-query model performed similarly to the baseline",
        "nearer to multi-head, either way, than the best of fewer or smaller heads is",
        TEST,
        (HEAD, QUERY),
        True,
        _similar,
    ),
    Claim(
        "table1",
        "§4.2",
        "and actually had the highest BLEU score with beam-4 decoding",
        "higher than the best of all other rows",
        ("bleu_test_beam4",),
        LOCAL,
        True,
        _highest,
    ),
    Claim(
        "table1",
        "§4.1",
        "we also trained ‘local’ versions of the baseline and multi-query models",
        "a window costs either kind less than the best of fewer or smaller heads costs",
        DEV,
        LOCAL,
        True,
        _local_costs_little,
    ),
    Claim(
        "table1",
        "§4.1",
        "local-attention and multi-query attention are orthogonal",
        "with a window multi-query costs as much as without, but for less than that gap",
        DEV,
        LOCAL,
        True,
        _orthogonal,
    ),
    Claim(
        "table3",
        "§4.2",
        "The multi-query attention model was slightly worse than the baseline",
        "worse than multi-head",
        LANGUAGE,
        (HEAD, QUERY),
        False,
        _worse,
    ),
    Claim(
        "table3",
        "§4.2",
        "but significantly better than any of the alternatives involving decreasing h, d_k and d_v",
        "better than the best of fewer or smaller heads",
        LANGUAGE,
        (HEAD, QUERY),
        True,
        _better,
    ),
)


def judge(sheet: Sheet) -> list[Verdict]:
    """Every claim about a sheet's table, by each of its measures."""
    measures = {measure.key: measure for measure in sheet.measures}
    return [
        _verdict(claim, measures[key], sheet)
        for claim in CLAIMS
        if claim.table == sheet.table
        for key in claim.measures
    ]


def _verdict(claim: Claim, measure: Measure, sheet: Sheet) -> Verdict:
    ours, paper = sheet.figures(measure), sheet.paper_figures(measure)
    needed = [*claim.rows]
    if claim.fewer:  # where the paper printed one of them only, that one will do
        needed += [row for row in FEWER if row in paper or not paper]
    printed = _find(claim, measure, paper)[0] if paper else None
    if any(row not in ours for row in needed):
        return Verdict(claim, measure, printed, None, None, NOT_RUN)
    finding, weights = _find(claim, measure, ours)
    noise = sheet.noise(measure)
    if noise is None:
        return Verdict(claim, measure, printed, finding, None, NOT_KNOWN)
    limit = noise.of(weights, ours)
    word = WITHIN
    if abs(finding.margin) > limit:
        word = SEEN if finding.margin > 0.0 else NOT_SEEN
    return Verdict(claim, measure, printed, finding, limit, word)


def _find(claim: Claim, measure: Measure, figures: Figures) -> tuple[Finding, Weights]:
    """The margin of a claim by figures that are all there, and how it weighs them."""
    sign = 1.0 if measure.lower_is_better else -1.0
    losses = {row: sign * figure.mean for row, figure in figures.items()}
    weights = claim.weigh(losses)
    used = {row: figures[row].mean for row in dict.fromkeys((*weights, *claim.rows))}
    return Finding(_sum(weights, losses), used), weights
