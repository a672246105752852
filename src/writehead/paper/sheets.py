"""A table's figures, the paper's and ours, by row: means and spread over seeds, and the noise."""

import math
import statistics
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from writehead import cost
from writehead.config import ModelConfig
from writehead.cost import Setting
from writehead.paper.experiments import find_experiment
from writehead.paper.results import Result
from writehead.paper.tables import (
    TABLE_1,
    TABLE_1_TRAINING,
    TABLE_3,
    TABLE_3_TRAINING,
    Table1Row,
    Table3Row,
    Training,
)

# Student's t by degrees of freedom, two-sided 95%; from ten on it hardly changes
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
LENGTHS = Setting(batch=1, source=128, target=128)  # §4.3: of which K and V are counted


@dataclass(frozen=True)
class Measure:
    """One figure of a row: where it is in a result, and under which name in the paper's table."""

    key: str
    label: str
    path: tuple[str, ...]
    digits: int
    lower_is_better: bool
    in_paper: bool = True
    printed_digits: int = 1  # the paper's

    def of(self, result: Result) -> float | None:
        """The figure in a result; None where it was not measured, or was no finite number."""
        value: Any = result["scores"]
        for name in self.path:
            if name not in value:
                return None
            value = value[name]
        return None if value is None else float(value)

    def show(self, value: float) -> str:
        """A figure of ours."""
        return f"{value:.{self.digits}f}"

    def show_printed(self, value: float) -> str:
        """A figure of the paper's, as it printed it."""
        return f"{value:.{self.printed_digits}f}"


MEASURES = {
    "table1": (
        Measure("ln_ppl_dev", "ln(PPL) dev", ("dev", "ln_ppl"), 3, True, printed_digits=3),
        Measure("bleu_dev", "BLEU dev", ("dev", "bleu", "greedy", "intl"), 2, False),
        Measure("bleu_test_greedy", "BLEU test", ("test", "bleu", "greedy", "intl"), 2, False),
        Measure(
            "bleu_test_beam4", "BLEU test, beam 4", ("test", "bleu", "beam-4", "intl"), 2, False
        ),
        Measure("13a_greedy", "BLEU test, 13a", ("test", "bleu", "greedy", "13a"), 2, False, False),
        Measure(
            "13a_beam4", "the same, beam 4", ("test", "bleu", "beam-4", "13a"), 2, False, False
        ),
    ),
    "table3": (
        Measure("ppl_dev", "perplexity dev", ("dev", "ppl_per_word"), 2, True),
        Measure("ppl_other", "perplexity, other text", ("other", "ppl_per_word"), 2, True, False),
    ),
}
PAPER: dict[str, tuple[Table1Row, ...] | tuple[Table3Row, ...]] = {
    "table1": TABLE_1,
    "table3": TABLE_3,
}
PAPER_TRAINING: dict[str, Training] = {"table1": TABLE_1_TRAINING, "table3": TABLE_3_TRAINING}


@dataclass(frozen=True)
class Figure:
    """A figure of one row, by every seed there is."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.mean(self.values)

    @property
    def spread(self) -> float | None:
        """The standard deviation over the seeds; None with one."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


Figures = dict[str, Figure]  # by the paper's name of the row


@dataclass(frozen=True)
class Noise:
    """How far a figure moves from seed to seed: the deviation, pooled over rows with several."""

    deviation: float
    freedom: int

    def of(self, weights: dict[str, float], figures: Figures) -> float:
        """How far from 0 chance alone takes a weighted sum of rows' means, 19 times in 20."""
        variance = sum(w**2 / len(figures[row].values) for row, w in weights.items())
        return self._reach(variance)

    @property
    def between_two(self) -> float:
        """How far apart chance alone brings two runs of a row, 19 times in 20."""
        return self._reach(2.0)

    def _reach(self, variance: float) -> float:
        return T_95[min(self.freedom, len(T_95)) - 1] * self.deviation * math.sqrt(variance)


class Sheet:
    """Table 1 or 3 at one scale: the paper's rows in order, and what results there are of each."""

    def __init__(self, table: str, scale: str, results: list[Result]) -> None:
        self.table, self.scale, self.results = table, scale, results
        self.experiment = find_experiment(table, scale)
        self.measures = MEASURES[table]
        self.training = PAPER_TRAINING[table]
        # our rows stand in the paper's order, whatever their sizes are called
        self.names = dict(zip((row.row for row in PAPER[table]), self.experiment.rows, strict=True))

    @property
    def has_other_sizes(self) -> bool:
        """Whether any row of ours has other heads or another width than the paper's."""
        for row in PAPER[self.table]:
            ours = self.models[row.row]
            if (ours.h, ours.k, ours.f) != (row.h, row.k, row.f):
                return True
        return False

    def of_row(self, paper_row: str) -> list[Result]:
        """The results of a row, by seed."""
        own = [one for one in self.results if one["row"] == self.names[paper_row]]
        return sorted(own, key=lambda one: int(one["seed"]))

    def figures(self, measure: Measure) -> Figures:
        """Our figures of the rows that were run."""
        found = {}
        for row in self.names:
            values = [measure.of(one) for one in self.of_row(row)]
            known = tuple(value for value in values if value is not None)
            if known:
                found[row] = Figure(known)
        return found

    def curves(self, paper_row: str) -> dict[int, dict[int, float]]:
        """ln(PPL) of the dev set by step while a row was trained, by seed."""
        return {
            int(one["seed"]): {
                int(entry["step"]): float(entry["dev_ln_ppl"])
                for entry in one["log"]
                if entry.get("dev_ln_ppl") is not None
            }
            for one in self.of_row(paper_row)
        }

    def behind(self, paper_row: str) -> tuple[dict[int, float], int]:
        """By step, how far a row's curve is above multi-head's; the mean of how many seeds."""
        head, own = self.curves("multi-head"), self.curves(paper_row)
        pairs = [(head[seed], own[seed]) for seed in head if seed in own]
        steps = set.intersection(*(set(one) for two in pairs for one in two)) if pairs else set()
        means = {
            step: statistics.mean(two[step] - one[step] for one, two in pairs)
            for step in sorted(steps)
        }
        return means, len(pairs)

    def noise(self, measure: Measure) -> Noise | None:
        """The noise of a figure; None where no row was run by several seeds."""
        several = [one for one in self.figures(measure).values() if one.spread is not None]
        freedom = sum(len(one.values) - 1 for one in several)
        if not freedom:
            return None
        squares = sum((len(one.values) - 1) * (one.spread or 0.0) ** 2 for one in several)
        return Noise(math.sqrt(squares / freedom), freedom)

    def paper_figures(self, measure: Measure) -> Figures:
        """The paper's figures, where it printed them."""
        if not measure.in_paper:
            return {}
        values = {row.row: getattr(row, measure.key) for row in PAPER[self.table]}
        return {row: Figure((value,)) for row, value in values.items() if value is not None}

    @cached_property
    def models(self) -> dict[str, ModelConfig]:
        """The model of each row, by the paper's name: as it was trained, or as it would be."""
        vocab_size = self.results[0]["model"]["vocab_size"]
        return {
            row: ModelConfig.from_json(
                {**self.experiment.rows[ours].to_json(), "vocab_size": vocab_size}
            )
            for row, ours in self.names.items()
        }


def kv_bytes(config: ModelConfig) -> float:
    """Bytes of K and V a token in 16 bits, of a sentence of 128 tokens and its translation of 128.

    A language model has no source; a local row keeps its window and no more.
    """
    setting = LENGTHS if config.encoder_layers else Setting(1, 0, LENGTHS.target)
    return cost.kv_bytes(config, setting)["total"] / (setting.source + setting.target)
