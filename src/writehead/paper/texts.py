"""§4.1: the text of each experiment: what is trained on, and what is scored.

At small scale it is read from files of one folder. At the paper's it comes from the hub, and the
test sets by the names that §4.2 gives sacrebleu.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from writehead.data.hub import hub_inputs
from writehead.data.sources import Corpus, Embedded, Inputs, Row, TextFiles, embedded
from writehead.errors import DataError
from writehead.training.evaluate import named_test_set

PACKED = ("", ".xz", ".gz", ".bz2")  # how a file may be stored
PAIRS, PAIRS_DEV, PAIRS_TEST = (
    ("europarl-1", "europarl-2", "tatoeba"),
    "newstest2013",
    "newstest2014",
)
BOOKS, BOOKS_DEV, NEWS = "books.txt", "books.valid.txt", "lm1b-heldout.dev.txt"
# enough for a tiny model to take some steps on
GRAMMAR_PAIRS, GRAMMAR_WORDS, GRAMMAR_HELD_OUT = 2000, 7, 16


@dataclass(frozen=True)
class Lines:
    """Text to score, under its name: targets, and their sources where it is a translation."""

    name: str
    targets: list[str]
    sources: list[str] | None = None


@dataclass(frozen=True)
class Text:
    """What the runs of a table read; `scored` is read when it is needed.

    Of translation "dev" and "test" are scored; of a language model "dev" and, where there is one,
    "other", which is text of another kind than it was trained on.
    """

    inputs: Inputs
    scored: Mapping[str, Callable[[], Lines]]


@dataclass(frozen=True)
class OneSide:
    """One side of a corpus of pairs, as a corpus of text."""

    pairs: Corpus
    side: int
    sides: int = 1

    def identity(self) -> dict[str, Any]:
        """That of the pairs, and which side."""
        return {**self.pairs.identity(), "side": self.side}

    def rows(self) -> Iterator[Row]:
        """Yields the lines of that side."""
        return ((row[self.side],) for row in self.pairs.rows())


def translation_files(folder: Path | None) -> Text:
    """Europarl and Tatoeba with the paper's dev and test sets, from files."""
    names = [f"{stem}.{side}" for stem in (*PAIRS, PAIRS_DEV, PAIRS_TEST) for side in ("en", "de")]
    found = find_files(folder, names)

    def pair(stem: str) -> Corpus:
        return TextFiles((found[f"{stem}.en"], found[f"{stem}.de"]))

    dev, test = pair(PAIRS_DEV), pair(PAIRS_TEST)
    return Text(
        Inputs(train=tuple(pair(stem) for stem in PAIRS), dev=(dev,), test=(test,)),
        {"dev": lambda: lines_of(PAIRS_DEV, dev), "test": lambda: lines_of(PAIRS_TEST, test)},
    )


def language_files(folder: Path | None) -> Text:
    """Public-domain books with their own held-out text, and news as text of another kind."""
    found = find_files(folder, [BOOKS, BOOKS_DEV, NEWS])
    train, dev, news = (TextFiles((found[name],)) for name in (BOOKS, BOOKS_DEV, NEWS))
    return Text(
        Inputs(train=(train,), dev=(dev,)),
        {"dev": lambda: lines_of(BOOKS_DEV, dev), "other": lambda: lines_of(NEWS, news)},
    )


def translation_hub(folder: Path | None) -> Text:
    """WMT14 from the hub, or from a folder of its parquet files; scored as §4.2 says."""

    def lines(name: str) -> Lines:
        sources, targets = named_test_set(name)
        return Lines(f"sacrebleu -t {name}", targets, sources)

    return Text(
        hub_inputs(_on_hub("wmt14", folder), "en-de"),
        {"dev": lambda: lines("wmt13"), "test": lambda: lines("wmt14")},
    )


def language_hub(folder: Path | None) -> Text:
    """LM1B from the hub, or from a folder of its parquet files, with its held-out text."""
    inputs = hub_inputs(_on_hub("lm1b", folder))
    return Text(inputs, {"dev": lambda: lines_of("lm1b, held out", *inputs.dev)})


def grammar_pairs(folder: Path | None) -> Text:
    """Short sentences of the built-in grammar: a rehearsal that needs no file."""
    inputs = embedded(GRAMMAR_PAIRS, max_words=GRAMMAR_WORDS, held_out=GRAMMAR_HELD_OUT)
    (dev,), (test,) = inputs.dev, inputs.test
    return Text(
        inputs,
        {
            "dev": lambda: lines_of("the grammar's dev set", dev),
            "test": lambda: lines_of("the grammar's test set", test),
        },
    )


def grammar_text(folder: Path | None) -> Text:
    """The English side of the same, with German as text of another kind."""

    def corpus(split: str, count: int, side: int) -> Corpus:
        return OneSide(Embedded(split, count, max_words=GRAMMAR_WORDS), side)

    dev, other = (corpus("dev", GRAMMAR_HELD_OUT, side) for side in (0, 1))
    return Text(
        Inputs(train=(corpus("train", GRAMMAR_PAIRS, 0),), dev=(dev,)),
        {
            "dev": lambda: lines_of("the grammar's English", dev),
            "other": lambda: lines_of("the grammar's German", other),
        },
    )


def _on_hub(name: str, folder: Path | None) -> str:
    """The hub's name, or the folder that stands for it; raises where that is not there."""
    if folder is not None and not folder.exists():
        raise DataError(
            f"there is no folder {folder}; give one with {name}'s parquet files, or leave --data "
            f"out to fetch them"
        )
    return name if folder is None else str(folder)


def find_files(folder: Path | None, names: list[str]) -> dict[str, Path]:
    """Where each file lies, packed or not; raises with the names of all that are missing."""
    place = Path("data") if folder is None else folder
    found = {
        name: path
        for name in names
        for path in (place / f"{name}{suffix}" for suffix in reversed(PACKED))
        if path.is_file()
    }
    missing = [name for name in names if name not in found]
    if missing:
        raise DataError(
            f"{place} lacks {', '.join(missing)} (plain, .xz, .gz or .bz2); give the folder that "
            f"has them with --data, as docs/reproducing.md says"
        )
    return found


def lines_of(name: str, *corpora: Corpus) -> Lines:
    """All lines of corpora, in order; a line too long to be text is empty."""
    sides: list[list[str]] = [[] for _ in range(corpora[0].sides)]
    for row in chain.from_iterable(corpus.rows() for corpus in corpora):
        for side, line in zip(sides, row, strict=True):
            side.append(line or "")
    return Lines(name, sides[-1], sides[0] if len(sides) > 1 else None)
