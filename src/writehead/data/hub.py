"""Hugging Face datasets as corpora: parquet files of a folder here, or fetched from the hub.

The extra `hub` brings what this needs. On a connected machine `wmt14` and `lm1b` fetch what the
paper used; a folder of the same layout is read as it is.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from writehead.data.sources import Chunk, Corpus, Inputs, chunked, file_identity
from writehead.errors import DataError
from writehead.util.extras import requires

# name -> repository and pair; the paper translates English into German
NAMED: dict[str, tuple[str, str | None]] = {
    "wmt14": ("wmt/wmt14", "en-de"),
    "lm1b": ("billion-word-benchmark/lm1b", None),
}
# the hub keeps every dataset as parquet here, also those whose own files are something else
CONVERTED = "refs/convert/parquet"
_SPLITS = {"train": ("train",), "dev": ("validation", "valid", "dev"), "test": ("test",)}
_ROWS = 1000
TIMEOUT = 20.0  # seconds in which the hub has to say whether it has a dataset


@dataclass(frozen=True)
class ParquetRows:
    """The rows of parquet files: a `translation` of two languages, or `text`.

    pair: source and target language, as in ("en", "de"); None for text.
    """

    name: str
    files: tuple[Path, ...]
    pair: tuple[str, str] | None

    @property
    def sides(self) -> int:
        """2 with a pair of languages, else 1."""
        return 2 if self.pair else 1

    def identity(self) -> dict[str, Any]:
        """The dataset's name, the direction, and the files by content."""
        files = [file_identity(path) for path in self.files]
        return {"hub": self.name, "pair": list(self.pair or ()), "files": files}

    def chunks(self) -> Iterator[Chunk]:
        """The rows of all files, in the order of their names."""
        return chunked(self._rows(), self.sides)

    def _rows(self) -> Iterator[tuple[float, tuple[str | None, ...]]]:
        with requires("hub"):
            import pyarrow.parquet as parquet  # type: ignore[import-untyped]
        column = "translation" if self.pair else "text"
        for number, path in enumerate(self.files):
            try:
                with parquet.ParquetFile(path) as file:
                    self._check_schema(path, file.schema_arrow, column)
                    total = max(file.metadata.num_rows, 1)
                    read = 0
                    for batch in file.iter_batches(batch_size=_ROWS, columns=[column]):
                        read += batch.num_rows
                        done = (number + read / total) / len(self.files)
                        for value in batch.column(0).to_pylist():
                            yield done, self._texts(value)
            except (OSError, ValueError) as error:  # pyarrow's errors are both of these
                if isinstance(error, DataError):
                    raise
                why = str(error).splitlines()[0].rstrip(". ")
                raise DataError(f"{path} is not readable parquet ({why}); copy it again") from error

    def _texts(self, value: Any) -> tuple[str | None, ...]:
        """A row's texts; a missing one is empty, and so is left out as that."""
        if not self.pair:
            return (value or "",)
        return tuple((value or {}).get(language) or "" for language in self.pair)

    def _check_schema(self, path: Path, schema: Any, column: str) -> None:
        if column not in schema.names:
            hint = "" if self.pair else "; for pairs say which, as in --pair en-de"
            raise DataError(
                f"{path} has columns {', '.join(schema.names)} and none called {column}{hint}"
            )
        if not self.pair:
            return
        kind = schema.field(column).type
        languages = [kind.field(i).name for i in range(kind.num_fields)]
        for language in self.pair:
            if language not in languages:
                raise DataError(
                    f"{path} has {' and '.join(languages)}, not {language!r}; choose --pair from "
                    f"those"
                )


def hub_inputs(name: str, pair: str | None = None) -> Inputs:
    """The splits of a dataset: a folder or parquet file here, a short name, or one on the hub.

    pair: source and target language joined by a hyphen; `en-de` translates English into German,
    whichever way round the dataset's own folder is called.
    """
    if name in NAMED and pair is None and not Path(name).exists():
        pair = NAMED[name][1]
    languages = _languages(pair)
    if Path(name).exists():
        dataset, files = Path(name).name, _local(Path(name), languages)
    else:
        dataset = NAMED[name][0] if name in NAMED else name
        files = _fetch(dataset, languages)

    def corpora(split: str) -> tuple[Corpus, ...]:
        found = tuple(file for file, where in files if _is_split(where, _SPLITS[split]))
        return (ParquetRows(dataset, found, languages),) if found else ()

    if Path(name).is_file():
        return Inputs(train=(ParquetRows(dataset, (Path(name),), languages),))
    train, dev, test = (corpora(split) for split in _SPLITS)
    if not train:
        raise DataError(f"{name} has no parquet files called train*.parquet; look inside it")
    if not dev:  # lm1b has a held-out set only, which it calls test
        dev, test = test, ()
    return Inputs(train=train, dev=dev, test=test)


def _languages(pair: str | None) -> tuple[str, str] | None:
    if pair is None:
        return None
    languages = pair.split("-")
    if len(languages) != 2 or not all(languages) or languages[0] == languages[1]:
        raise DataError(f"--pair {pair} is not source-target; write it as in en-de")
    return languages[0], languages[1]


def _is_split(where: str, names: tuple[str, ...]) -> bool:
    """Whether a file belongs to a split: train-00000-of-00003.parquet, or train/0000.parquet."""
    pattern = rf"(^|/)({'|'.join(names)})([-._/][^/]*)?$"
    return re.search(pattern, where.removesuffix(".parquet")) is not None


def _chosen(files: list[str], languages: tuple[str, str] | None) -> list[str]:
    """The parquet files, of the pair's folder where there is one; sorted."""
    found = sorted(file for file in files if file.endswith(".parquet"))
    if languages:
        either = {"-".join(languages), "-".join(reversed(languages))}
        own = [file for file in found if either & set(file.split("/")[:-1])]
        return own or found
    return found


def _local(path: Path, languages: tuple[str, str] | None) -> list[tuple[Path, str]]:
    if path.is_file():
        return [(path, path.name)]
    files = [file.relative_to(path).as_posix() for file in path.rglob("*.parquet")]
    if not files:
        raise DataError(f"{path} has no parquet files; give the folder that has them")
    return [(path / file, file) for file in _chosen(files, languages)]


def _fetch(repository: str, languages: tuple[str, str] | None) -> list[tuple[Path, str]]:
    """The files of a dataset on the hub, downloaded once and kept in its own cache."""
    with requires("hub"):
        import huggingface_hub as hub
    try:
        for revision in ("main", CONVERTED):
            # one request, and not tried again and again as the listing of a folder is
            found = hub.HfApi().dataset_info(repository, revision=revision, timeout=TIMEOUT)
            files = _chosen([file.rfilename for file in found.siblings or ()], languages)
            if files:
                return [
                    (
                        Path(
                            hub.hf_hub_download(
                                repository, file, repo_type="dataset", revision=revision
                            )
                        ),
                        file,
                    )
                    for file in files
                ]
    except DataError:
        raise
    except Exception as error:  # whatever the network and its client raise
        why = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else "no answer"
        raise DataError(
            f"{repository} could not be fetched from the hub ({type(error).__name__}: {why}); "
            f"check the name and the network, or give a folder of its parquet files"
        ) from error
    raise DataError(f"{repository} has no parquet files on the hub; download and unpack it first")
