"""§4.1: the experiments of Tables 1 and 3 at each scale, as data; the row and the seed are open.

Everything that the rows of a table share is here: the family of presets, the text and how it is
trained on, with the reasons for what is not the paper's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from writehead.config import ModelConfig, PrepareConfig, TrainConfig
from writehead.errors import ConfigError, nearest
from writehead.paper import texts
from writehead.paper.presets import FAMILIES, rows

TABLES = ("table1", "table2", "table3")
# from the smallest: a rehearsal; our text and our sizes; our text and the paper's sizes; the paper
SCALES = ("tiny", "small", "paper-size", "paper")
REHEARSAL = SCALES[0]


@dataclass(frozen=True)
class Because:
    """A setting, and why it is what it is."""

    value: Any
    why: str


Settings = Mapping[str, Because]


@dataclass(frozen=True)
class Experiment:
    """A table at a scale. `settings` are those that differ from `TrainConfig`'s own defaults."""

    table: str
    scale: str
    family: str
    text: Callable[[Path | None], texts.Text]
    settings: Settings = field(default_factory=dict)
    vocab_size: int | None = None  # the family's by default

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"{self.table}, scale {self.scale}"

    @property
    def rows(self) -> dict[str, ModelConfig]:
        """The models by row, in the table's order."""
        return rows(self.family)

    @property
    def train(self) -> TrainConfig:
        """How every row is trained."""
        return TrainConfig(**{name: chosen.value for name, chosen in self.settings.items()})

    def with_steps(self, steps: int | None) -> TrainConfig:
        """`train` with another number of steps, and as large a share of them to warm up in."""
        train = self.train
        if steps is None:
            return train
        return replace(train, steps=steps, warmup=max(1, train.warmup * steps // train.steps))

    @property
    def prepare(self) -> PrepareConfig:
        """What to make of the text."""
        baseline = FAMILIES[self.family]
        vocab_size = self.vocab_size or baseline.vocab_size
        return PrepareConfig(task=baseline.task, vocab_size=vocab_size)

    @property
    def dataset(self) -> Path:
        """The dataset's place in the folder of runs."""
        return Path("data") / f"{self.table}-{self.scale}"

    def choose_rows(self, wanted: list[str]) -> tuple[str, ...]:
        """The rows that were asked for, in the table's order; all where none was."""
        for row in wanted:
            if row not in self.rows:
                raise ConfigError(f"{self.name} has no row {row!r}; {nearest(row, self.rows)}")
        return tuple(row for row in self.rows if row in wanted or not wanted)


_LOOKS: Settings = {
    "log_every": Because(100, "a curve of some dozens of points"),
    "evaluate_every": Because(1000, "a dev curve of some points"),
    "checkpoint_every": Because(1000, "a machine that goes away costs a minute or two"),
    "keep": Because(1, "going on needs the last one; the best on dev stays too"),
}
_RATE: Settings = {
    "learning_rate": Because(0.02, "held by a first run of 8,000 steps with 1,000 to warm up in"),
    "warmup": Because(1000, "with 300 the rate falls too soon: 3,000 steps were too few so"),
    "decay": Because(0.2, "the last steps, in which the rate falls to 0, gain the most"),
}
_TRANSLATION: Settings = {
    "steps": Because(6000, "two to three epochs of 1.3M pairs: some minutes on one H200"),
    "rows": Because(64, "for as many tokens, twice the steps: so few steps are what is scarce"),
    **_RATE,
    **_LOOKS,
}
_LANGUAGE: Settings = {
    "rows": Because(256, "64K tokens, as in §4.1"),
    "label_smoothing": Because(0.0, "perplexity is what is measured; the library's default was 0"),
}
_SMALL_LANGUAGE: Settings = {
    **_LANGUAGE,
    "steps": Because(4000, "about five epochs of 19M words of books; the paper's had ten"),
    "rows": Because(128, "half of §4.1's tokens, as for translation"),
    **_RATE,
    **_LOOKS,
}
_REHEARSAL: Settings = {
    "steps": Because(200, "a minute or two on one core"),
    "rows": Because(8, "short sentences fill few rows"),
    "source_length": Because(64, "short sentences"),
    "target_length": Because(64, "short sentences"),
    "learning_rate": Because(0.04, "the demo's"),
    "warmup": Because(20, "a tenth of the steps"),
    "log_every": Because(20, "ten points"),
    "evaluate_every": Because(50, "four points"),
    "checkpoint_every": Because(50, "so that going on is rehearsed too"),
    "keep": Because(1, "going on needs the last one"),
}
_PAPER_LANGUAGE: Settings = {**_LANGUAGE, "steps": Because(136_000, "§4.1")}
_GRAMMAR_VOCABULARY = 600  # what so little text can fill

EXPERIMENTS = {
    (one.table, one.scale): one
    for one in (
        Experiment(
            "table1",
            "tiny",
            "tiny",
            texts.grammar_pairs,
            _REHEARSAL,
            vocab_size=_GRAMMAR_VOCABULARY,
        ),
        Experiment("table1", "small", "wmt14-small", texts.translation_files, _TRANSLATION),
        Experiment("table1", "paper-size", "wmt14", texts.translation_files, _TRANSLATION),
        Experiment("table1", "paper", "wmt14", texts.translation_hub),
        Experiment(
            "table3",
            "tiny",
            "tiny-lm",
            texts.grammar_text,
            _REHEARSAL,
            vocab_size=_GRAMMAR_VOCABULARY,
        ),
        Experiment("table3", "small", "lm1b-small", texts.language_files, _SMALL_LANGUAGE),
        Experiment("table3", "paper-size", "lm1b", texts.language_files, _SMALL_LANGUAGE),
        Experiment("table3", "paper", "lm1b", texts.language_hub, _PAPER_LANGUAGE),
    )
}


def find_experiment(table: str, scale: str) -> Experiment:
    """The experiment of a quality table at a scale; raises with the nearest name."""
    if table not in TABLES:
        raise ConfigError(f"there is no {table!r} to reproduce; {nearest(table, TABLES)}")
    if scale not in SCALES:
        raise ConfigError(f"there is no scale {scale!r}; {nearest(scale, SCALES)}")
    return EXPERIMENTS[table, scale]


def read_seeds(text: str) -> tuple[int, ...]:
    """The seeds of "3", which is 0, 1 and 2, or of a list with commas: "0,2", or "2," alone."""
    try:
        listed = [int(part) for part in text.split(",") if part.strip()]
        seeds = tuple(dict.fromkeys(listed)) if "," in text else tuple(range(int(text)))
    except ValueError as error:
        raise ConfigError(f"--seeds {text} is no number, as 3, and no list, as 0,1,2") from error
    if not seeds or min(seeds) < 0:
        raise ConfigError(f"--seeds {text} names no seed; give how many, as 3, or which, as 0,1,2")
    return seeds
