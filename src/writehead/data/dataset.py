"""A prepared dataset on disk: `dataset.json`, a tokenizer, and memory-mapped files of tokens."""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from writehead.config import PrepareConfig, Task, VocabularyConfig
from writehead.data.tokenizer import Tokenizer, load_tokenizer
from writehead.errors import ConfigError, DataError, shown
from writehead.util.json_files import JsonError, check_shape, read_json

FORMAT = 2
INFO = "dataset.json"
COUNT = range(2**48)  # of lines, sequences or tokens
# the fields of `dataset.json` that describe the data; the version is not one of them
FACTS = ("task", "vocab_size", "tokenizer", "config", "sources", "splits", "dropped")
VOCABULARY = "vocabulary"  # recorded only if the tokenizer belongs to a model
SIDES: dict[str, tuple[str, ...]] = {"translation": ("source", "target"), "language": ("target",)}

Tokens = NDArray[np.unsignedinteger]
Ints = NDArray[np.int64]


class Ends(NamedTuple):
    """The special tokens around each text of a side."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


def special_ends(task: Task, tokenizer: Tokenizer, vocabulary: VocabularyConfig) -> dict[str, Ends]:
    """Returns the special tokens of each side; a model predicts all but the first of a target."""
    eos = (vocabulary.eos,)
    languages = vocabulary.source_lang, vocabulary.target_lang
    if task == "language" and languages == (None, None):
        return {"target": Ends(tokenizer.prompt_start, eos)}
    frame = tokenizer.frame(*languages)
    source = Ends(tuple(frame.before), tuple(frame.after))
    return {"source": source, "target": Ends((vocabulary.bos, *frame.forced), eos)}


@dataclass(frozen=True, eq=False)
class Side:
    """One side of a split: the text of sequence i is tokens[offsets[i] : offsets[i + 1]].

    The special tokens `before` and `after` each text are not stored.
    """

    tokens: Tokens
    offsets: NDArray[np.uint64]
    ends: Ends

    def __getitem__(self, index: int) -> Tokens:
        return self.tokens[int(self.offsets[index]) : int(self.offsets[index + 1])]

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        """The number of tokens of each text."""
        return np.diff(self.offsets).astype(np.int32)

    @property
    def whole_lengths(self) -> NDArray[np.int64]:
        """The number of tokens of each sequence, with the special tokens."""
        return self.lengths.astype(np.int64) + (len(self.ends.before) + len(self.ends.after))

    def read(self, indices: Ints, begins: Ints, lengths: Ints) -> Ints:
        """Returns the tokens of parts of sequences, one part after another."""
        starts, (before, after) = np.cumsum(lengths) - lengths, self.ends
        files = self.offsets[indices].astype(np.int64) - len(before) + begins - starts
        at = np.repeat(files, lengths) + np.arange(int(lengths.sum()))
        # special tokens are not stored: overwrite the tokens read in their place
        found = self.tokens[np.clip(at, 0, len(self.tokens) - 1)].astype(np.int64)
        end = len(before) + self.lengths[indices]
        places = [np.full_like(end, i) for i in range(len(before))]
        places += [end + i for i in range(len(after))]
        for place, token in zip(places, (*before, *after), strict=True):
            inside = (begins <= place) & (place < begins + lengths)
            found[(starts - begins + place)[inside]] = token
        return found


@dataclass(frozen=True, eq=False)
class Split:
    """The sequences of train, dev or test, in the order of the text."""

    name: str
    sides: dict[str, Side]

    def __len__(self) -> int:
        return len(self.target.offsets) - 1

    @property
    def source(self) -> Side:
        """The sources of a translation dataset."""
        return self.sides["source"]

    @property
    def target(self) -> Side:
        """The targets, or the text of a language model's dataset."""
        return self.sides["target"]


class Dataset:
    """A prepared dataset; use `Dataset.open`, which checks it."""

    def __init__(self, directory: Path, info: dict[str, Any], config: PrepareConfig) -> None:
        self.directory, self.info, self.config = directory, info, config
        self.task: Task = config.task
        self.vocab_size: int = info["vocab_size"]  # all token ids are smaller
        self.splits = list(info["splits"])  # train and, if they exist, dev and test

    @classmethod
    def open(cls, directory: Path | str) -> "Dataset":
        """Opens a prepared dataset, and checks the size of its files."""
        directory = Path(directory)
        info = read_info(directory)
        try:
            config = PrepareConfig.from_json(info["config"])
            dataset = cls(directory, info, config)
            tokenizer, _ = dataset.tokenizer, dataset.ends
        except ConfigError as error:
            raise DataError(f"{directory / INFO}: {error}") from error
        described = (info["task"], info["tokenizer"], info["vocab_size"])
        if described != (config.task, tokenizer.fingerprint, id_count(tokenizer)):
            raise DataError(
                f"{directory / INFO} does not describe {tokenizer.origin}; prepare it again"
            )
        for name in info["splits"]:
            dataset.split(name)
        return dataset

    @property
    def facts(self) -> dict[str, Any]:
        """The data's sources, settings and sizes, but neither the path nor the version."""
        return {name: self.info[name] for name in (*FACTS, VOCABULARY) if name in self.info}

    @property
    def fingerprint(self) -> str:
        """A hash of `facts`."""
        facts = json.dumps(self.facts, sort_keys=True)
        return hashlib.sha256(facts.encode()).hexdigest()[:16]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the dataset."""
        return load_tokenizer(self.directory)

    @cached_property
    def vocabulary(self) -> VocabularyConfig:
        """The sizes and special tokens of the models that fit the dataset."""
        given = self.info.get(VOCABULARY, {"vocab_size": self.vocab_size})
        return VocabularyConfig.from_json(given)

    @cached_property
    def ends(self) -> dict[str, Ends]:
        """The special tokens of each side."""
        return special_ends(self.task, self.tokenizer, self.vocabulary)

    def split(self, name: str) -> Split:
        """Maps a split into memory."""
        if name not in self.info["splits"]:
            raise DataError(
                f"{self.directory} has no split {name!r}; choose {' or '.join(self.splits)}"
            )
        return Split(name, {side: self._side(name, side) for side in SIDES[self.task]})

    def _side(self, split: str, name: str) -> Side:
        sizes = self.info["splits"][split]
        tokens, path = sizes[f"{name}_tokens"], self.directory / f"{split}.{name}.offsets"
        ids = _map_file(path.with_suffix(".tokens"), token_dtype(self.vocab_size), tokens)
        offsets = _map_file(path, np.dtype(np.uint64), sizes["sequences"] + 1)
        if int(offsets[0]) != 0 or int(offsets[-1]) != tokens or np.any(offsets[1:] < offsets[:-1]):
            raise DataError(f"{path} is damaged; prepare the dataset again")
        return Side(ids, offsets, self.ends[name])


def id_count(tokenizer: Tokenizer) -> int:
    """Returns one more than the highest token id of both sides."""
    return max(tokenizer.vocab_size, tokenizer.target.vocab_size)


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """Returns the smallest dtype that fits every token id."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def read_info(directory: Path) -> dict[str, Any]:
    """Reads and checks `dataset.json`."""
    path = directory / INFO
    if not path.is_file():
        raise DataError(f"{path} does not exist; prepare a dataset there, or choose another folder")
    info = read_json(path, {"format": int}, DataError, "prepare the dataset again")
    if info["format"] != FORMAT:
        raise DataError(
            f"{path} has format {shown(info['format'])}, not {FORMAT}; prepare the text again with "
            f"this version of writehead"
        )
    tokens = [f"{side}_tokens" for side in SIDES.get(str(info.get("task")), ())]
    split = dict.fromkeys(("lines", "sequences", "normalised", *tokens), COUNT)
    shape = {
        "task": str,
        "vocab_size": COUNT,
        "tokenizer": str,
        "config": dict,
        "sources": [dict],
        "splits": {"train": {**split, "lines": COUNT[1:]}, "dev?": split, "test?": split},
        "dropped": {str: COUNT},
        f"{VOCABULARY}?": dict,
    }
    try:
        check_shape(info, shape)
        if unknown := info["splits"].keys() - {"train", "dev", "test"}:
            raise JsonError(f"has an unknown split {shown(min(unknown))}")
    except JsonError as error:
        raise DataError(f"{path} {error}; prepare the dataset again") from error
    return dict(info)


def _map_file(path: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    """Maps a file of `count` values into memory; raises DataError if it has another size."""
    try:
        if path.stat().st_size != count * dtype.itemsize:
            raise DataError(f"{path} is damaged: its size is wrong; prepare the dataset again")
        if count == 0:  # an empty file cannot be mapped
            return np.empty(0, dtype=dtype)
        return np.memmap(path, dtype=dtype, mode="r")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; prepare it again") from error
