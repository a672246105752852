"""Reads Hugging Face datasets: parquet files in a folder, or downloaded from the hub.

The extra `hub` installs the packages that this needs. `wmt14` and `lm1b` are the paper's datasets.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from writehead.data.parquet import load_pyarrow, parquet_file
from writehead.data.sources import Corpus, Inputs, Row, file_identity
from writehead.errors import DataError
from writehead.util.extras import requires

# short name: repository and pair of languages; the paper translates English into German
NAMED: dict[str, tuple[str, str | None]] = {
    "wmt14": ("wmt/wmt14", "en-de"),
    "lm1b": ("billion-word-benchmark/lm1b", None),
}
# the second revision has the hub's conversions of datasets in other formats to parquet
REVISIONS = ("main", "refs/convert/parquet")
SPLIT_NAMES = {"train": "train", "dev": "validation|valid|dev", "test": "test"}

Pair = tuple[str, str]  # source and target language


@dataclass(frozen=True)
class ParquetRows:
    """The rows of parquet files: column `translation` of two languages, or column `text`."""

    name: str
    files: tuple[Path, ...]
    pair: Pair | None

    @property
    def sides(self) -> int:
        """2 with a pair of languages, else 1."""
        return 2 if self.pair else 1

    def identity(self) -> dict[str, Any]:
        """The dataset's name, the direction, and the files by content."""
        files = [file_identity(path) for path in self.files]
        return {"hub": self.name, "pair": list(self.pair or ()), "files": files}

    def rows(self) -> Iterator[Row]:
        """Yields the rows of all files; a missing text is empty."""
        columns = [f"translation.{language}" for language in self.pair] if self.pair else ["text"]
        for path in self.files:
            with parquet_file(path) as file:
                names = [column.path for column in file.schema]
                if missing := sorted(set(columns) - set(names)):
                    raise DataError(
                        f"{path} has {' and '.join(names)}, but lacks {' and '.join(missing)}; "
                        f"choose a dataset of text, or a pair of languages that it has"
                    )
                for batch in file.iter_batches(columns=columns):
                    for value in batch.column(0).to_pylist():
                        texts = map((value or {}).get, self.pair) if self.pair else [value]
                        yield tuple(text or "" for text in texts)


def hub_inputs(name: str, pair: str | None = None) -> Inputs:
    """Returns the splits of a folder of parquet files, a short name, or a name on the hub.

    pair: source and target language, such as `en-de` for English into German. The name of the
    dataset's own folder may have either order.
    """
    load_pyarrow()  # raises if it is missing, before a download
    folder, (repository, default_pair) = Path(name), NAMED.get(name, (name, None))
    if folder.exists():
        repository, languages = folder.name, _languages(pair)
    else:
        languages = _languages(pair or default_pair)
        folder = _download(repository, languages)

    def corpora(split: str) -> tuple[Corpus, ...]:
        # train-00000-of-00003.parquet or train/0000.parquet
        pattern = re.compile(rf"(^|/)({SPLIT_NAMES[split]})([-._/][^/]*)?\.parquet$")
        files = _parquet_files(folder, languages)
        paths = tuple(path for path in files if pattern.search(str(path.relative_to(folder))))
        return (ParquetRows(repository, paths, languages),) if paths else ()

    train, dev, test = (corpora(split) for split in SPLIT_NAMES)
    if not train:
        raise DataError(f"{name} has no parquet files named train*.parquet; check the folder")
    if not dev:  # lm1b has only one held-out split, which it calls test
        dev, test = test, ()
    return Inputs(train=train, dev=dev, test=test)


def _languages(pair: str | None) -> Pair | None:
    if pair is None:
        return None
    source, _, target = pair.partition("-")
    if not source or not target or "-" in target or source == target:
        raise DataError(f"pair={pair!r} must be a source and a target language, such as en-de")
    return source, target


def _parquet_files(folder: Path, languages: Pair | None) -> list[Path]:
    """Returns the parquet files, sorted; only those of the pair's own folder if it has one."""
    files = sorted(folder.rglob("*.parquet"))
    own = {"-".join(languages), "-".join(reversed(languages))} if languages else set()
    return [path for path in files if own.intersection(path.relative_to(folder).parts)] or files


def _download(repository: str, languages: Pair | None) -> Path:
    """Downloads the parquet files, or those of the pair's own folder, into the hub's cache."""
    with requires("hub"):
        from huggingface_hub import snapshot_download
    choices = [["*.parquet"]]
    if languages:
        choices.insert(0, [f"*{a}-{b}/*.parquet" for a, b in (languages, languages[::-1])])
    try:
        for revision, patterns in product(REVISIONS, choices):
            path = snapshot_download(
                repository, repo_type="dataset", revision=revision, allow_patterns=patterns
            )
            if _parquet_files(Path(path), languages):
                return Path(path)
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or ["no answer"])[0].rstrip(".")
        raise DataError(
            f"{repository} could not be downloaded ({type(error).__name__}: {reason}); check the "
            f"name and the network, or pass a folder of its parquet files"
        ) from error
    raise DataError(f"{repository} has no parquet files on the hub; download and unpack it first")
