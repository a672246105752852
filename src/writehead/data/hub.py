"""Hugging Face datasets as corpora: parquet files in a folder, or downloaded from the hub.

The extra `hub` installs the packages for this. `wmt14` and `lm1b` are the paper's datasets.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from writehead.data.sources import MAX_LINE, Corpus, Inputs, Row, file_identity
from writehead.errors import DataError
from writehead.util.extras import requires

# short name -> repository and pair; the paper translates English into German
NAMED: dict[str, tuple[str, str | None]] = {
    "wmt14": ("wmt/wmt14", "en-de"),
    "lm1b": ("billion-word-benchmark/lm1b", None),
}
# the hub converts datasets whose own files have another format to parquet in this revision
CONVERTED = "refs/convert/parquet"
SPLIT_NAMES = {"train": "train", "dev": "validation|valid|dev", "test": "test"}
ROWS_PER_READ = 1000
TIMEOUT = 20.0  # seconds to wait for the hub

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
        """Yields the rows of all files."""
        with requires("hub"):
            import pyarrow.parquet as parquet  # type: ignore[import-untyped]
        column = "translation" if self.pair else "text"
        for path in self.files:
            try:
                with parquet.ParquetFile(path) as file:
                    self._check_schema(path, file.schema_arrow)
                    for batch in file.iter_batches(batch_size=ROWS_PER_READ, columns=[column]):
                        yield from map(self._texts, batch.column(0).to_pylist())
            except DataError:
                raise
            except (OSError, ValueError) as error:  # the base classes of pyarrow's errors
                reason = str(error).splitlines()[0].rstrip(". ")
                raise DataError(f"{path} is not parquet ({reason}); copy it again") from error

    def _texts(self, value: Any) -> Row:
        """The texts of a row; a missing one is empty."""
        texts = [(value or {}).get(language) for language in self.pair] if self.pair else [value]
        return tuple((text or "") if len(text or "") <= MAX_LINE else None for text in texts)

    def _check_schema(self, path: Path, schema: Any) -> None:
        names = schema.names
        if self.pair and "translation" in names:
            kind = schema.field("translation").type
            names = [kind.field(i).name for i in range(kind.num_fields)]
        if missing := sorted(set(self.pair or ["text"]) - set(names)):
            raise DataError(
                f"{path} has {' and '.join(names)}, but not {' and '.join(missing)}; choose a "
                f"dataset of text, or a pair of languages that it has"
            )


def hub_inputs(name: str, pair: str | None = None) -> Inputs:
    """The splits of a dataset: a folder, a parquet file, a short name, or a name on the hub.

    pair: source and target language, such as `en-de` for English into German. The dataset's own
    folder may have either order.
    """
    path, (repository, default_pair) = Path(name), NAMED.get(name, (name, None))
    languages = _languages(pair if pair or path.exists() else default_pair)
    if path.is_file():
        return Inputs(train=(ParquetRows(path.name, (path,), languages),))
    if path.exists():
        repository, folder = path.name, path
        files = _choose([file.relative_to(path).as_posix() for file in path.rglob("*")], languages)
    else:
        folder, files = _download(repository, languages)

    def corpora(split: str) -> tuple[Corpus, ...]:
        # train-00000-of-00003.parquet or train/0000.parquet
        pattern = re.compile(rf"(^|/)({SPLIT_NAMES[split]})([-._/][^/]*)?$")
        found = [file for file in files if pattern.search(file.removesuffix(".parquet"))]
        paths = tuple(folder / file for file in found)
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
        raise DataError(f"the pair {pair!r} must be two languages, source-target, such as en-de")
    return source, target


def _choose(files: list[str], languages: Pair | None) -> list[str]:
    """The parquet files, sorted; only those of the pair's own folder if there is one."""
    found = sorted(file for file in files if file.endswith(".parquet"))
    folders = {"-".join(languages), "-".join(reversed(languages))} if languages else set()
    return [file for file in found if folders.intersection(file.split("/")[:-1])] or found


def _download(repository: str, languages: Pair | None) -> tuple[Path, list[str]]:
    """Downloads a dataset into the hub's own cache; returns the folder and the names of files."""
    with requires("hub"):
        import huggingface_hub as hub
        from huggingface_hub.errors import HfHubHTTPError
    client_errors: Any = HfHubHTTPError.__bases__  # the HTTP client's, which are not all wrapped
    try:
        for revision in ("main", CONVERTED):
            info = hub.HfApi().dataset_info(repository, revision=revision, timeout=TIMEOUT)
            files = _choose([file.rfilename for file in info.siblings or ()], languages)
            paths = [
                hub.hf_hub_download(repository, file, repo_type="dataset", revision=revision)
                for file in files
            ]
            if paths:
                return Path(paths[0].removesuffix(files[0])), files
    except (OSError, ValueError, *client_errors) as error:
        reason = (str(error).strip().splitlines() or ["no answer"])[0].rstrip(".")
        raise DataError(
            f"{repository} could not be downloaded ({type(error).__name__}: {reason}); check the "
            f"name and the network, or pass a folder of its parquet files"
        ) from error
    raise DataError(f"{repository} has no parquet files on the hub; download and unpack it first")
