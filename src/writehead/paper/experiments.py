"""§4.1: the experiments of Tables 1 and 3: models, text and training settings at each scale.

The rows of a table differ in their attention only.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from writehead.config import ModelConfig, PrepareConfig, TrainConfig
from writehead.errors import ConfigError, nearest
from writehead.paper import texts
from writehead.paper.presets import FAMILIES, TRAINING, rows

TABLES = ("table1", "table2", "table3")
# a rehearsal on a CPU; our text and sizes; our text and the paper's sizes; the paper's experiment
SCALES = ("tiny", "small", "paper-size", "paper")


@dataclass(frozen=True)
class Experiment:
    """A quality table at one scale."""

    table: str
    scale: str
    family: str
    text: Callable[[Path | None], texts.Text]
    train: TrainConfig
    vocab_size: int

    @property
    def name(self) -> str:
        """The name for messages."""
        return f"{self.table}, scale {self.scale}"

    @property
    def rows(self) -> dict[str, ModelConfig]:
        """The models by row, in the table's order."""
        return rows(self.family)

    def with_steps(self, steps: int | None) -> TrainConfig:
        """Returns `train` with another number of steps and a warm-up of the same proportion."""
        train = self.train
        if steps is None:
            return train
        return replace(train, steps=steps, warmup=max(1, train.warmup * steps // train.steps))

    @property
    def prepare(self) -> PrepareConfig:
        """How the text is tokenized."""
        return PrepareConfig(task=FAMILIES[self.family].task, vocab_size=self.vocab_size)

    @property
    def dataset(self) -> Path:
        """The dataset's path in the folder of runs."""
        return Path("data") / f"{self.table}-{self.scale}"


_TINY = TrainConfig(
    steps=200,
    rows=8,
    source_length=64,
    target_length=64,
    learning_rate=0.04,
    warmup=20,
    log_every=20,
    evaluate_every=50,
    checkpoint_every=50,
    keep=1,
)
_WMT, _LM = TRAINING["wmt14-small"], TRAINING["lm1b-small"]
_TINY_VOCABULARY = 600  # the grammar has few words
EXPERIMENTS = {
    (table, scale): Experiment(
        table, scale, family, text, train, vocabulary or FAMILIES[family].vocab_size
    )
    for table, scale, family, text, train, vocabulary in (
        ("table1", "tiny", "tiny", texts.grammar_pairs, _TINY, _TINY_VOCABULARY),
        ("table1", "small", "wmt14-small", texts.translation_files, _WMT, None),
        ("table1", "paper-size", "wmt14", texts.translation_files, _WMT, None),
        ("table1", "paper", "wmt14", texts.translation_hub, TRAINING["wmt14"], None),
        ("table3", "tiny", "tiny-lm", texts.grammar_text, _TINY, _TINY_VOCABULARY),
        ("table3", "small", "lm1b-small", texts.language_files, _LM, None),
        ("table3", "paper-size", "lm1b", texts.language_files, _LM, None),
        ("table3", "paper", "lm1b", texts.language_hub, TRAINING["lm1b"], None),
    )
}


def find_experiment(table: str, scale: str) -> Experiment:
    """Returns the experiment of Table 1 or 3 at a scale; errors suggest the nearest name."""
    if table not in TABLES:
        raise ConfigError(f"unknown table {table!r}; {nearest(table, TABLES)}")
    check_scale(scale)
    return EXPERIMENTS[table, scale]


def check_scale(scale: str) -> None:
    """Raises ConfigError if the scale is unknown."""
    if scale not in SCALES:
        raise ConfigError(f"unknown scale {scale!r}; {nearest(scale, SCALES)}")


def choose_rows(table: str, known: tuple[str, ...], wanted: list[str]) -> tuple[str, ...]:
    """Returns the wanted rows in the table's order; all rows if none is named."""
    for row in wanted:
        if row not in known:
            raise ConfigError(f"{table} has no row {row!r}; {nearest(row, known)}")
    return tuple(row for row in known if row in wanted or not wanted)
