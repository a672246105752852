"""The text that a dataset is made from: files, compressed or not, or the built-in corpus.

A corpus has one side (text for a language model) or two (source and target). It is read twice, once
to count and sample its lines and once to encode them, but never loaded into memory.
"""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from writehead.errors import DataError
from writehead.util.checksums import sha256

MAX_LINE = 1 << 22  # bytes
OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}

Paths = Sequence[Path]
Row = tuple[str, ...]  # one line per side


class Corpus(Protocol):
    """Lines of text, the same each time they are read."""

    @property
    def sides(self) -> int:
        """1 for text, 2 for source and target."""

    def identity(self) -> dict[str, Any]:
        """Describes the corpus as JSON; equal descriptions mean equal lines."""

    def rows(self) -> Iterator[Row]:
        """Yields all lines, in order."""


@dataclass(frozen=True)
class Inputs:
    """The corpora of each split of a dataset, which are concatenated.

    `repeat` is how many times the dataset includes each corpus of `train`; by default, once each.
    Lines of `excluded` are dropped from the training text, ignoring case and punctuation.
    """

    train: tuple[Corpus, ...]
    dev: tuple[Corpus, ...] = ()
    test: tuple[Corpus, ...] = ()
    repeat: tuple[int, ...] = ()
    excluded: tuple[Corpus, ...] = ()

    def __post_init__(self) -> None:
        if self.repeat and len(self.repeat) != len(self.train):
            raise DataError(
                f"{len(self.repeat)} repeat counts do not match {len(self.train)} training texts; "
                f"pass one per text"
            )
        if any(type(times) is not int or times < 1 for times in self.repeat):
            raise DataError(f"repeat={self.repeat!r} must be integers of at least 1")

    def repeated(self, split: str) -> Iterator[tuple[Corpus, int]]:
        """Yields each corpus of a split, and how many times the dataset includes it."""
        corpora = self.splits()[split]
        ones = (1,) * len(corpora)
        return zip(corpora, (split == "train" and self.repeat) or ones, strict=True)

    def identity(self) -> list[dict[str, Any]]:
        """Describes all corpora as JSON; equal descriptions mean equal lines."""
        described = []
        for split in self.splits():
            for corpus, times in self.repeated(split):
                repeat = {} if times == 1 else {"repeat": times}
                described.append({"split": split, **corpus.identity(), **repeat})
        excluded = ({"split": "excluded", **corpus.identity()} for corpus in self.excluded)
        return [*described, *excluded]

    def splits(self) -> dict[str, tuple[Corpus, ...]]:
        """The corpora by split, without empty splits; the held-out splits come first."""
        named = {"test": self.test, "dev": self.dev, "train": self.train}
        return {name: corpora for name, corpora in named.items() if corpora}

    @property
    def sides(self) -> int:
        """1 for a language model's text, 2 for translation."""
        counts = {corpus.sides for corpora in self.splits().values() for corpus in corpora}
        if len(counts) != 1 or not self.train:
            raise DataError("pass training text, and either pairs or plain text for all splits")
        return counts.pop()


@dataclass(frozen=True)
class TextFiles:
    """A text file, or two whose lines correspond; plain, .gz, .xz or .bz2."""

    paths: tuple[Path, ...]

    @property
    def sides(self) -> int:
        """One per file."""
        return len(self.paths)

    def identity(self) -> dict[str, Any]:
        """The files by name and content."""
        return {"files": [file_identity(path) for path in self.paths]}

    def rows(self) -> Iterator[Row]:
        """Yields all lines; raises DataError if the files differ in length or one is empty."""
        try:
            yield from zip(*map(read_lines, self.paths), strict=True)
        except DataError:
            raise
        except ValueError as error:
            raise DataError(
                f"{self.paths[0]} and {self.paths[1]} have different numbers of lines; line i of "
                f"one must translate line i of the other"
            ) from error


@dataclass(frozen=True)
class Embedded:
    """English and German pairs of the built-in grammar, which needs no file."""

    split: str
    pairs: int
    seed: int = 0
    max_words: int | None = None
    sides: int = 2

    def identity(self) -> dict[str, Any]:
        """The arguments of the grammar, which determine the pairs."""
        words = {} if self.max_words is None else {"max_words": self.max_words}
        return {"embedded": self.split, "pairs": self.pairs, "seed": self.seed, **words}

    def rows(self) -> Iterator[Row]:
        """Yields the pairs that the grammar generates."""
        from writehead.data.corpus import pairs

        return pairs(self.split, self.pairs, self.seed, self.max_words)


def parallel_files(source: Paths, target: Paths, dev_source: Paths, dev_target: Paths) -> Inputs:
    """Pairs the first source file with the first target file, and so on."""
    for sources, targets in ((source, target), (dev_source, dev_target)):
        if len(sources) != len(targets):
            raise DataError(
                f"{len(sources)} source files do not match {len(targets)} target files; pass the "
                f"same number of each"
            )
    train, dev = zip(source, target, strict=True), zip(dev_source, dev_target, strict=True)
    return Inputs(train=tuple(map(TextFiles, train)), dev=tuple(map(TextFiles, dev)))


def text_files(text: Paths, dev_text: Paths) -> Inputs:
    """Text for a language model, with one sentence or paragraph per line."""
    train, dev = (tuple(TextFiles((path,)) for path in paths) for paths in (text, dev_text))
    return Inputs(train, dev)


def embedded(pairs: int, *, max_words: int | None = None, held_out: int = 1000) -> Inputs:
    """The built-in corpus with its held-out sets; `max_words` limits the English sentences."""
    if pairs < 1:
        raise DataError(f"pairs={pairs} must be at least 1")
    few = min(held_out, pairs)
    counts = {"train": pairs, "dev": few, "test": few}
    train, dev, test = ((Embedded(*one, max_words=max_words),) for one in counts.items())
    return Inputs(train, dev, test)


def file_identity(path: Path) -> dict[str, Any]:
    """The name, size and SHA-256 of a file."""
    if path.exists() and not path.is_file():
        raise DataError(f"{path} is not a regular file and cannot be read twice; save it as one")
    try:
        return {"name": path.name, "bytes": path.stat().st_size, "sha256": sha256(path)}
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; check the path") from error


class LineFile:
    """Reads the lines of a file, which may be compressed, as bytes.

    The file stays open after some of its lines have been read. Reading a later part of a compressed
    file therefore does not decompress the beginning again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: io.BufferedReader | None = None

    def lines(self, start: int = 0) -> Iterator[bytes]:
        """Yields lines with their line ends, starting at a byte of the uncompressed content."""
        number = 0
        try:
            if self._file is None:
                self._file = io.BufferedReader(OPENERS.get(self.path.suffix, open)(self.path, "rb"))
            if self._file.tell() != start:
                self._file.seek(start)
            while line := self._file.readline(MAX_LINE):
                number += 1
                if len(line) == MAX_LINE:
                    place = f"line {number:,} of {self.path}"
                    raise DataError(f"{place} is too long; split the text")
                yield line
            self.close()
        except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or error
            raise DataError(
                f"{self.path} cannot be read: {reason}; copy or create it again"
            ) from error

    def close(self) -> None:
        """Closes the file; `lines` opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_lines(path: Path) -> Iterator[str]:
    """Yields the lines of a UTF-8 file, which may be compressed."""
    number = 0
    with closing(LineFile(path)) as file:
        for number, line in enumerate(file.lines(), start=1):
            try:
                yield line.decode().removesuffix("\n")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path} is not UTF-8 in line {number:,} (byte {line[error.start]:#04x}); "
                    f"convert it: text must be UTF-8, plain or as .gz, .xz or .bz2"
                ) from error
    if number == 0:
        raise DataError(f"{path} is empty; use a file with one sentence per line")
