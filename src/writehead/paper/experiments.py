"""§4.1: the experiments of Tables 1 and 3: models, text and training settings at each scale.

The rows of a table differ in their attention only.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from writehead.config import ModelConfig, PrepareConfig, TrainConfig
from writehead.data.hub import hub_inputs
from writehead.data.sources import Corpus, Embedded, Inputs, Row, TextFiles, embedded
from writehead.errors import ConfigError, DataError, nearest
from writehead.paper.presets import FAMILIES, TRAINING, rows
from writehead.training.evaluate import named_test_set

TABLES = ("table1", "table2", "table3")
# a rehearsal on a CPU; our text and sizes; our text and the paper's sizes; the paper's experiment
SCALES = ("tiny", "small", "paper-size", "paper")
SUFFIXES = ("", ".xz", ".gz", ".bz2")
PAIRS, PAIRS_DEV, PAIRS_TEST = (
    ("europarl-1", "europarl-2", "tatoeba"),
    "newstest2013",
    "newstest2014",
)
BOOKS, BOOKS_DEV = "books.txt", "books.valid.txt"
GRAMMAR_PAIRS, GRAMMAR_WORDS, GRAMMAR_HELD_OUT = 2000, 7, 16


@dataclass(frozen=True)
class Text:
    """The text of one experiment; `scored` has corpora, or names of sacrebleu's test sets."""

    inputs: Inputs
    scored: Mapping[str, Corpus | str]


@dataclass(frozen=True)
class OneSide:
    """The first language of a parallel corpus."""

    pairs: Corpus
    sides: int = 1

    def identity(self) -> dict[str, Any]:
        """Identifies the parallel corpus and the side."""
        return {**self.pairs.identity(), "side": 0}

    def rows(self) -> Iterator[Row]:
        """Yields the lines of that side."""
        return (row[:1] for row in self.pairs.rows())


def translation_files(folder: Path | None) -> Text:
    """Europarl and Tatoeba with newstest2013 and newstest2014, from files."""
    stems = (*PAIRS, PAIRS_DEV, PAIRS_TEST)
    paths = find_files(folder, [f"{stem}.{side}" for stem in stems for side in ("en", "de")])
    *train, dev, test = (TextFiles((paths[f"{one}.en"], paths[f"{one}.de"])) for one in stems)
    return Text(Inputs(train=tuple(train), dev=(dev,), test=(test,)), {"dev": dev, "test": test})


def language_files(folder: Path | None) -> Text:
    """Books, with held-out books as the dev set, from files."""
    paths = find_files(folder, [BOOKS, BOOKS_DEV])
    train, dev = (TextFiles((paths[name],)) for name in (BOOKS, BOOKS_DEV))
    return Text(Inputs(train=(train,), dev=(dev,)), {"dev": dev})


def translation_hub(folder: Path | None) -> Text:
    """WMT14 from the Hugging Face Hub or a folder of its parquet files, with §4.2's test sets."""
    return Text(hub_inputs(_hub_name("wmt14", folder), "en-de"), {"dev": "wmt13", "test": "wmt14"})


def language_hub(folder: Path | None) -> Text:
    """LM1B from the Hugging Face Hub or a folder of its parquet files."""
    inputs = hub_inputs(_hub_name("lm1b", folder))
    return Text(inputs, {"dev": inputs.dev[0]})


def grammar_pairs(folder: Path | None) -> Text:
    """Sentence pairs of the built-in grammar, which needs no files."""
    inputs = embedded(GRAMMAR_PAIRS, max_words=GRAMMAR_WORDS, held_out=GRAMMAR_HELD_OUT)
    return Text(inputs, {"dev": inputs.dev[0], "test": inputs.test[0]})


def grammar_text(folder: Path | None) -> Text:
    """English sentences of the built-in grammar."""
    train, dev = (
        OneSide(Embedded(split, count, max_words=GRAMMAR_WORDS))
        for split, count in (("train", GRAMMAR_PAIRS), ("dev", GRAMMAR_HELD_OUT))
    )
    return Text(Inputs(train=(train,), dev=(dev,)), {"dev": dev})


def _hub_name(name: str, folder: Path | None) -> str:
    if folder is not None and not folder.exists():
        raise DataError(f"there is no folder {folder}; pass one with {name}'s parquet files")
    return name if folder is None else str(folder)


def find_files(folder: Path | None, names: list[str]) -> dict[str, Path]:
    """Returns the path of each file, compressed or not; raises DataError naming all missing."""
    place = Path("data") if folder is None else folder
    paths = {
        name: path
        for name in names
        for path in (place / f"{name}{suffix}" for suffix in reversed(SUFFIXES))
        if path.is_file()
    }
    missing = [name for name in names if name not in paths]
    if missing:
        raise DataError(
            f"{place} lacks {', '.join(missing)} (plain, .xz, .gz or .bz2); docs/results.md says "
            f"where to get them"
        )
    return paths


def read_lines(source: Corpus | str) -> tuple[list[str], list[str]]:
    """Returns sources and targets of a text to score; for a language model they are the same."""
    if isinstance(source, str):
        return named_test_set(source)
    sides: list[list[str]] = [[] for _ in range(source.sides)]
    for row in source.rows():
        for side, line in zip(sides, row, strict=True):
            side.append(line or "")  # a line that is too long is None
    return sides[0], sides[-1]


@dataclass(frozen=True)
class Experiment:
    """A quality table at one scale."""

    table: str
    scale: str
    family: str
    text: Callable[[Path | None], Text]
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
        ("table1", "tiny", "tiny", grammar_pairs, _TINY, _TINY_VOCABULARY),
        ("table1", "small", "wmt14-small", translation_files, _WMT, None),
        ("table1", "paper-size", "wmt14", translation_files, _WMT, None),
        ("table1", "paper", "wmt14", translation_hub, TRAINING["wmt14"], None),
        ("table3", "tiny", "tiny-lm", grammar_text, _TINY, _TINY_VOCABULARY),
        ("table3", "small", "lm1b-small", language_files, _LM, None),
        ("table3", "paper-size", "lm1b", language_files, _LM, None),
        ("table3", "paper", "lm1b", language_hub, TRAINING["lm1b"], None),
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
