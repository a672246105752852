"""A prepared dataset on disk: tokens in memory-mapped files, told by `dataset.json`."""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from writehead import __version__
from writehead.config import PrepareConfig, Task
from writehead.data.tokenizer import Tokenizer
from writehead.errors import ConfigError, DataError, shown
from writehead.util.json_files import JsonError, Shape, check_shape, read_json

FORMAT = 1
INFO, TOKENIZER = "dataset.json", "tokenizer.model"
SPLITS = ("train", "dev", "test")
COUNT = range(2**48)  # of lines, sequences or tokens
# what `dataset.json` says of the dataset itself
FACTS = ("task", "vocab_size", "tokenizer", "config", "sources", "splits", "dropped")
SIDES: dict[Task, tuple[str, ...]] = {
    "translation": ("source", "target"),
    "language": ("target",),
}

Tokens = NDArray[np.unsignedinteger]


@dataclass(frozen=True, eq=False)
class Side:
    """One side of a split: sequence i is tokens[offsets[i] : offsets[i + 1]], without an end."""

    tokens: Tokens
    offsets: NDArray[np.uint64]

    def __getitem__(self, index: int) -> Tokens:
        return self.tokens[int(self.offsets[index]) : int(self.offsets[index + 1])]

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of each sequence, the end not counted."""
        return np.diff(self.offsets).astype(np.int32)


class Split:
    """The sequences of train, dev or test, in the order of the text."""

    def __init__(self, name: str, sides: dict[str, Side]) -> None:
        self.name = name
        self.sides = sides

    def __len__(self) -> int:
        return len(self.sides["target"].offsets) - 1

    def source(self, index: int) -> Tokens:
        """The source ids of a pair, without an end."""
        return self._source[index]

    def target(self, index: int) -> Tokens:
        """The target ids, or a language model's text, without an end."""
        return self.sides["target"][index]

    @property
    def source_lengths(self) -> NDArray[np.int32]:
        """Tokens of each source, without the end."""
        return self._source.lengths

    @property
    def target_lengths(self) -> NDArray[np.int32]:
        """Tokens of each target, without the end."""
        return self.sides["target"].lengths

    @property
    def _source(self) -> Side:
        if "source" not in self.sides:
            raise DataError(
                f"the {self.name} split is text for a language model and has no source; prepare "
                f"pairs with --source and --target"
            )
        return self.sides["source"]


class Dataset:
    """A complete dataset; `Dataset.open` checks that it is one."""

    def __init__(self, directory: Path, info: dict[str, Any], config: PrepareConfig) -> None:
        self.directory = directory
        self.info = info
        self.config = config

    @classmethod
    def open(cls, directory: Path | str) -> "Dataset":
        """The dataset in a folder that `writehead prepare` made; its files are checked by size."""
        directory = Path(directory)
        info = read_info(directory)
        try:
            config = PrepareConfig.from_json(info["config"])
        except ConfigError as error:
            raise DataError(f"{directory / INFO}: {error}") from error
        dataset = cls(directory, info, config)
        tokenizer = dataset.tokenizer
        if tokenizer.fingerprint != info["tokenizer"]:
            raise DataError(
                f"{directory / TOKENIZER} has fingerprint {tokenizer.fingerprint}, but the tokens "
                f"were made with {shown(info['tokenizer'])}; prepare the dataset again"
            )
        if (config.task, tokenizer.vocab_size) != (info["task"], info["vocab_size"]):
            raise DataError(
                f"{directory / INFO} has an inconsistent task, or a vocabulary that differs from "
                f"its tokenizer's; prepare the dataset again"
            )
        for name in info["splits"]:
            dataset.split(name)
        return dataset

    @property
    def facts(self) -> dict[str, Any]:
        """What it was made of and how, and what came of it; not by which version nor where."""
        return {name: self.info[name] for name in FACTS}

    @property
    def fingerprint(self) -> str:
        """What tells two datasets apart."""
        facts = json.dumps(self.facts, sort_keys=True)
        return hashlib.sha256(facts.encode()).hexdigest()[:16]

    @property
    def task(self) -> Task:
        """translation or language."""
        return self.config.task

    @property
    def vocab_size(self) -> int:
        """How many ids there are."""
        return int(self.info["vocab_size"])

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens."""
        return Tokenizer.load(self.directory / TOKENIZER)

    @property
    def splits(self) -> list[str]:
        """train, and dev and test where there are any."""
        return list(self.info["splits"])

    def split(self, name: str) -> Split:
        """A split by name, mapped into memory."""
        if name not in self.info["splits"]:
            raise DataError(
                f"{self.directory} has no split {name!r}, only {' and '.join(self.splits)}; ask "
                f"for one of these, or give files"
            )
        counts = self.info["splits"][name]
        sides = {
            side: self._side(name, side, counts["sequences"], counts[f"{side}_tokens"])
            for side in SIDES[self.task]
        }
        return Split(name, sides)

    def _side(self, split: str, side: str, sequences: int, tokens: int) -> Side:
        stem = self.directory / f"{split}.{side}"
        ids: Tokens = _mapped(
            stem.with_suffix(f".{side}.tokens"), token_dtype(self.vocab_size), tokens
        )
        offsets: NDArray[np.uint64] = _mapped(
            stem.with_suffix(f".{side}.offsets"), np.dtype(np.uint64), sequences + 1
        )
        if int(offsets[0]) != 0 or int(offsets[-1]) != tokens or np.any(offsets[1:] < offsets[:-1]):
            raise DataError(
                f"{stem}.offsets do not fit the {tokens:,} tokens; the dataset is damaged: "
                f"prepare it again"
            )
        return Side(ids, offsets)


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """The smallest type of a dataset's files that holds every id."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def read_info(directory: Path) -> dict[str, Any]:
    """What `dataset.json` says, once it is sure that we wrote it."""
    path = directory / INFO
    if not directory.is_dir():
        raise DataError(f"there is no dataset at {directory}; make one with `writehead prepare`")
    if not path.is_file():
        raise DataError(
            f"{directory} has no {INFO}, so it is no dataset; make one with `writehead prepare`"
        )
    info = read_json(path, object, DataError, "prepare the dataset again")
    if not isinstance(info, dict) or type(info.get("format")) is not int:
        raise DataError(f"{path} was not written by `writehead prepare`; check the path")
    if info["format"] > FORMAT:
        raise DataError(
            f"{path} has format {shown(info['format'])} (written by writehead "
            f"{shown(info.get('writehead'))}), but this is writehead {__version__}, which reads "
            f"up to format {FORMAT}; install a newer version"
        )
    try:
        check_shape(info, _info_shape(str(info.get("task"))))
    except JsonError as error:
        raise DataError(f"{path} {error}; prepare the dataset again") from error
    for name in info["splits"]:
        if name not in SPLITS:
            raise DataError(f"{path} has an unknown split {shown(name)}; prepare the dataset again")
    return info


def _info_shape(task: str) -> Shape:
    """Returns the shape of the fields that are read from a dataset.json, for a task."""
    sides = [f"{side}_tokens" for name, sides in SIDES.items() if name == task for side in sides]
    split = dict.fromkeys(("lines", "sequences", "normalised", *sides), COUNT)
    return {
        "task": str,
        "vocab_size": COUNT,
        "tokenizer": str,
        "config": dict,
        "sources": [dict],
        "splits": {"train": {**split, "lines": COUNT[1:]}, "dev?": split, "test?": split},
        "dropped": {str: COUNT},
    }


def _mapped(path: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    """A file's `count` values, read as they are looked at; raises where the size is another."""
    try:
        size = path.stat().st_size
        if size != count * dtype.itemsize:
            raise DataError(
                f"{path} has {size:,} bytes, and {INFO} asks for {count * dtype.itemsize:,}; the "
                f"dataset is damaged: prepare it again"
            )
        if count == 0:  # an empty file cannot be mapped
            return np.empty(0, dtype=dtype)
        return np.memmap(path, dtype=dtype, mode="r")
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}; prepare the dataset again"
        ) from error
