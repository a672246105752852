"""§4.1: the experiments of Tables 1 and 3: models, text and training settings at each scale.

The rows of a table differ in their attention only.
"""

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from writehead.config import ModelConfig, PrepareConfig, TrainConfig
from writehead.data.hub import hub_inputs
from writehead.data.sources import Corpus, Inputs, TextFiles, embedded
from writehead.errors import ConfigError, DataError, nearest
from writehead.paper.presets import FAMILIES, TRAINING, rows
from writehead.training.evaluate import named_test_set

TABLES = ("table1", "table2", "table3")
# a CPU rehearsal; smaller text and models; smaller text, full models; the paper's experiment
SCALES = ("tiny", "small", "paper-size", "paper")
SUFFIXES = ("", ".xz", ".gz", ".bz2")
PAIRS = ("europarl-1", "europarl-2", "tatoeba")
PAIRS_DEV, PAIRS_TEST = "newstest2013", "newstest2014"
BOOKS, BOOKS_DEV = "books.txt", "books.valid.txt"


@dataclass(frozen=True)
class Text:
    """The text of one experiment; `scored` has corpora, or names of sacrebleu's test sets."""

    inputs: Inputs
    scored: Mapping[str, Corpus | str]


def translation_files(folder: Path | None) -> Text:
    """Europarl and Tatoeba with newstest2013 and newstest2014, from files."""
    stems = (*PAIRS, PAIRS_DEV, PAIRS_TEST)
    paths = find_files(folder, [f"{stem}.{side}" for stem in stems for side in ("en", "de")])
    *train, dev, test = (TextFiles((paths[f"{stem}.en"], paths[f"{stem}.de"])) for stem in stems)
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
    inputs = embedded(2000, max_words=7, held_out=16)
    return Text(inputs, {"dev": inputs.dev[0], "test": inputs.test[0]})


def _hub_name(name: str, folder: Path | None) -> str:
    if folder is not None and not folder.exists():
        raise DataError(f"there is no folder {folder}; pass one with {name}'s parquet files")
    return name if folder is None else str(folder)


def find_files(folder: Path | None, names: list[str]) -> dict[str, Path]:
    """Returns the path of each file, compressed or not; raises DataError if any are missing."""
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
    rows = list(source.rows())
    return [row[0] for row in rows], [row[-1] for row in rows]


@dataclass(frozen=True)
class Experiment:
    """A quality table at one scale."""

    table: str
    scale: str
    family: str
    text: Callable[[Path | None], Text]
    train: TrainConfig

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
        """How the text is tokenized; the grammar has few words."""
        model = FAMILIES[self.family]
        vocab_size = 600 if self.scale == "tiny" else model.vocab_size
        return PrepareConfig(task=model.task, vocab_size=vocab_size)


_TINY = replace(TRAINING["tiny"], steps=200, warmup=20)
_WMT, _LM = TRAINING["wmt14-small"], TRAINING["lm1b-small"]
EXPERIMENTS = {
    (table, scale): Experiment(table, scale, family, text, train)
    for table, scale, family, text, train in (
        ("table1", "tiny", "tiny", grammar_pairs, _TINY),
        ("table1", "small", "wmt14-small", translation_files, _WMT),
        ("table1", "paper-size", "wmt14", translation_files, _WMT),
        ("table1", "paper", "wmt14", translation_hub, TRAINING["wmt14"]),
        ("table3", "small", "lm1b-small", language_files, _LM),
        ("table3", "paper-size", "lm1b", language_files, _LM),
        ("table3", "paper", "lm1b", language_hub, TRAINING["lm1b"]),
    )
}


def find_experiment(table: str, scale: str) -> Experiment:
    """Returns the experiment of Table 1 or 3 at a scale; errors suggest the nearest name."""
    if table not in TABLES:
        raise ConfigError(f"unknown table {table!r}; {nearest(table, TABLES)}")
    scales = [known for name, known in EXPERIMENTS if name == table]
    if scale not in scales:
        raise ConfigError(f"{table} has no scale {scale!r}; {nearest(scale, scales)}")
    return EXPERIMENTS[table, scale]


def choose_rows(table: str, known: tuple[str, ...], wanted: list[str]) -> tuple[str, ...]:
    """Returns the rows that match wanted names or patterns; all rows if none is given."""
    for pattern in wanted:
        if not fnmatch.filter(known, pattern):
            raise ConfigError(f"{table} has no row {pattern!r}; {nearest(pattern, known)}")
    patterns = wanted or ["*"]
    return tuple(row for row in known if any(fnmatch.fnmatch(row, one) for one in patterns))
