"""Tables 1 and 3 as figures by row: the paper's, and ours as the mean and spread over seeds."""

import math
import statistics
from dataclasses import dataclass
from typing import Any

from writehead.config import ModelConfig
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
        experiment = find_experiment(table, scale)
        # rows with small heads are named by their sizes, which depend on the scale
        names = dict(zip((row.row for row in PAPER[table]), experiment.rows, strict=True))
        self.configs: dict[str, ModelConfig] = {
            row: experiment.rows[name] for row, name in names.items()
        }
        self.by_row = {
            row: sorted((r for r in results if r["row"] == name), key=lambda r: int(r["seed"]))
            for row, name in names.items()
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
