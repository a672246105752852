"""Where text comes from: files, compressed or not, read in chunks of lines.

A corpus has one side (a language model's text) or two (source and target). It is read twice, once
to check, count and sample it, once to encode it, and never held in memory.
"""

import bz2
import gzip
import hashlib
import lzma
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any, Protocol, cast

from writehead.errors import DataError

CHUNK_LINES = 2000
CHUNK_CHARACTERS = 1 << 20
BLOCK = 1 << 20
MAX_LINE = 1 << 20  # bytes; what is longer is no line of text, and is not held in memory

Paths = Sequence[Path]
_READ = {b"\x1f\x8b": ".gz", b"\xfd7zXZ\x00": ".xz", b"BZh": ".bz2"}
_UNREAD = {b"(\xb5/\xfd": ".zst", b"PK\x03\x04": ".zip", b"7z\xbc\xaf": ".7z", b"\x1f\x9d": ".Z"}
_UNREAD |= {b"\x04\x22\x4d\x18": ".lz4", b"PAR1": ".parquet"}


@dataclass(frozen=True)
class Chunk:
    """Some lines of a corpus, a list a side; None stands for a line too long to be text.

    first: the index of its first line in the corpus. done: how much of the corpus has been read
    when this chunk has, from 0 to 1.
    """

    first: int
    sides: tuple[list[str | None], ...]
    done: float

    def __len__(self) -> int:
        return len(self.sides[0])


class Corpus(Protocol):
    """Lines that can be read again and again, the same each time."""

    @property
    def sides(self) -> int:
        """1 for text, 2 for source and target."""

    def identity(self) -> dict[str, Any]:
        """What tells this corpus from another, as JSON; raises where it cannot be read."""

    def chunks(self) -> Iterator[Chunk]:
        """All of its lines, in order."""


@dataclass(frozen=True)
class Inputs:
    """What a dataset is made from; several corpora of a split follow one another."""

    train: tuple[Corpus, ...]
    dev: tuple[Corpus, ...] = ()
    test: tuple[Corpus, ...] = ()

    def splits(self) -> dict[str, tuple[Corpus, ...]]:
        """The corpora by split, the held-out ones first, those without any left out."""
        named = {"test": self.test, "dev": self.dev, "train": self.train}
        return {name: corpora for name, corpora in named.items() if corpora}

    @property
    def sides(self) -> int:
        """1 for a language model's text, 2 for translation."""
        counts = {corpus.sides for corpora in self.splits().values() for corpus in corpora}
        if len(counts) != 1 or not self.train:
            raise DataError("give training text, and all of it either in pairs or alone")
        return counts.pop()


@dataclass(frozen=True)
class TextFiles:
    """A text file, or two whose lines correspond; .gz, .xz and .bz2 are read as they are."""

    paths: tuple[Path, ...]

    @property
    def sides(self) -> int:
        """One a file."""
        return len(self.paths)

    def identity(self) -> dict[str, Any]:
        """The files by name and content."""
        return {"files": [file_identity(path) for path in self.paths]}

    def chunks(self) -> Iterator[Chunk]:
        """All lines; raises where the files differ in length or one is empty."""
        files = [_LineReader(path) for path in self.paths]
        size = sum(file.size for file in files)
        first, characters = 0, 0
        sides: tuple[list[str | None], ...] = tuple([] for _ in files)
        readers = [file.lines() for file in files]
        for row in zip_longest(*readers, fillvalue=_ENDED):
            if _ENDED in row:
                self._raise_for_lengths(first + len(sides[0]), row, readers)
            for side, line in zip(sides, row, strict=True):
                assert not isinstance(line, _Ended)
                side.append(line)
                characters += len(line or "")
            if len(sides[0]) == CHUNK_LINES or characters > CHUNK_CHARACTERS:
                yield Chunk(first, sides, sum(file.read for file in files) / size)
                first, characters = first + len(sides[0]), 0
                sides = tuple([] for _ in files)
        if sides[0]:
            yield Chunk(first, sides, 1.0)

    def _raise_for_lengths(
        self, common: int, row: tuple[object, ...], readers: list[Iterator[str | None]]
    ) -> None:
        counts = [
            common if line is _ENDED else common + 1 + sum(1 for _ in reader)
            for line, reader in zip(row, readers, strict=True)
        ]
        for path, count in zip(self.paths, counts, strict=True):
            if count == 0:
                raise DataError(f"{path} is empty; give a file with a sentence a line")
        longer = self.paths[counts.index(max(counts))]
        told = " and ".join(
            f"{path} has {count:,} lines" for path, count in zip(self.paths, counts, strict=True)
        )
        raise DataError(
            f"{told}; {longer} is longer: line i of one must translate line i of the other"
        )


@dataclass(frozen=True)
class Embedded:
    """English and German from our own grammar; no file and no download."""

    split: str
    pairs: int
    seed: int = 0
    max_words: int | None = None
    sides: int = 2

    def identity(self) -> dict[str, Any]:
        """The split and size: the grammar makes the same pairs each time."""
        facts = {"embedded": self.split, "pairs": self.pairs, "seed": self.seed}
        return facts if self.max_words is None else {**facts, "max_words": self.max_words}

    def chunks(self) -> Iterator[Chunk]:
        """The pairs as the grammar makes them."""
        from writehead.data.corpus import pairs

        rows = pairs(self.split, self.pairs, self.seed, self.max_words)
        return chunked(((0.0, row) for row in rows), 2, total=self.pairs)


def parallel_files(source: Paths, target: Paths, dev_source: Paths, dev_target: Paths) -> Inputs:
    """Pairs of files: the first source with the first target, and so on."""
    for name, ours, theirs in (("", source, target), ("dev-", dev_source, dev_target)):
        if len(ours) != len(theirs):
            raise DataError(
                f"{len(ours)} --{name}source for {len(theirs)} --{name}target; give them in pairs"
            )

    def pairs(ours: Paths, theirs: Paths) -> tuple[Corpus, ...]:
        return tuple(TextFiles(pair) for pair in zip(ours, theirs, strict=True))

    return Inputs(train=pairs(source, target), dev=pairs(dev_source, dev_target))


def text_files(text: Paths, dev_text: Paths) -> Inputs:
    """Text for a language model, a sentence or paragraph a line."""
    return Inputs(
        train=tuple(TextFiles((path,)) for path in text),
        dev=tuple(TextFiles((path,)) for path in dev_text),
    )


def embedded(
    pairs: int, seed: int = 0, *, max_words: int | None = None, held_out: int = 1000
) -> Inputs:
    """The embedded corpus with its held-out sets; all sentences, or those of a few words."""
    held_out = min(held_out, pairs)
    return Inputs(
        train=(Embedded("train", pairs, seed, max_words),),
        dev=(Embedded("dev", held_out, seed, max_words),),
        test=(Embedded("test", held_out, seed, max_words),),
    )


def chunked(
    rows: Iterator[tuple[float, tuple[str | None, ...]]], sides: int, total: int | None = None
) -> Iterator[Chunk]:
    """Chunks of rows that come with how much has been read, or of `total` rows in all."""
    first, characters = 0, 0
    held: tuple[list[str | None], ...] = tuple([] for _ in range(sides))
    for done, row in rows:
        for side, text in zip(held, row, strict=True):
            keep = text if text is not None and len(text) <= MAX_LINE else None
            side.append(keep)
            characters += len(keep or "")
        if len(held[0]) == CHUNK_LINES or characters > CHUNK_CHARACTERS:
            yield Chunk(first, held, (first + len(held[0])) / total if total else done)
            first, characters = first + len(held[0]), 0
            held = tuple([] for _ in range(sides))
    if held[0]:
        yield Chunk(first, held, 1.0)


def file_identity(path: Path) -> dict[str, Any]:
    """A file's name, size and SHA-256; raises where it is not there or not a file."""
    if not path.exists():
        raise DataError(f"there is no file {path}; check the path")
    if path.is_dir():
        raise DataError(f"{path} is a folder; give a file of text")
    if not path.is_file():
        raise DataError(f"{path} is not a plain file; it is read more than once, so save it first")
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; check it") from error
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": digest}


class _Ended:
    """Stands for the line after a file's last."""


_ENDED = _Ended()


class _LineReader:
    """A file's lines, decoded, and how many bytes of the file have been read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read = 0
        try:
            self.size = os.stat(path).st_size
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}; check it") from error
        if self.size == 0:
            raise DataError(f"{path} is empty; give a file with a sentence a line")

    def lines(self) -> Iterator[str | None]:
        """One string a line, None for one of more than `MAX_LINE` bytes."""
        number = 0
        for line in self._raw_lines():
            number += 1
            if len(line) > MAX_LINE:
                yield None
                continue
            try:
                yield line.decode()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{self.path} is not UTF-8 in line {number:,} (byte {line[error.start]:#04x}); "
                    f"convert it, as with iconv -t utf-8"
                ) from error
        if number == 0:
            raise DataError(f"{self.path} is empty; give a file with a sentence a line")

    def _raw_lines(self) -> Iterator[bytes]:
        """The lines as bytes; of one that is too long, only as much as shows it."""
        rest = b""
        for block in self._blocks():
            lines = (rest + block).split(b"\n")
            rest = lines.pop()
            yield from lines
            if len(rest) > MAX_LINE:
                rest = rest[: MAX_LINE + 1]
        if rest:
            yield rest

    def _blocks(self) -> Iterator[bytes]:
        try:
            with self.path.open("rb") as raw:
                stream = _decompressed(self.path, raw)
                while block := stream.read(BLOCK):
                    self.read = raw.tell()
                    yield block
        except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(
                f"{self.path} is damaged or cut short ({error}); copy or make it again"
            ) from error
        except OSError as error:
            why = error.strerror or str(error)
            raise DataError(f"{self.path} cannot be read: {why}; copy or make it again") from error


def _open_gz(raw: IO[bytes]) -> IO[bytes]:
    return cast(IO[bytes], gzip.GzipFile(fileobj=raw))


_OPENERS: dict[str, Callable[[IO[bytes]], IO[bytes]]] = {
    ".gz": _open_gz,
    ".xz": lzma.LZMAFile,
    ".bz2": bz2.BZ2File,
}


def _decompressed(path: Path, raw: IO[bytes]) -> IO[bytes]:
    """The file's content, by what it is rather than by how it is called."""
    head = raw.read(8)
    raw.seek(0)
    for magic, suffix in _READ.items():
        if head.startswith(magic):
            return _OPENERS[suffix](raw)
    known = list(_READ.values())
    for magic, suffix in _UNREAD.items():
        if head.startswith(magic):
            hint = "give its folder with --hub" if suffix == ".parquet" else "unpack it first"
            raise DataError(
                f"{path} is a {suffix} file, and text is read plain or as {', '.join(known)}; "
                f"{hint}"
            )
    if path.suffix in known or path.suffix in _UNREAD.values():
        raise DataError(f"{path} is not {path.suffix} inside; copy or make it again")
    return raw
