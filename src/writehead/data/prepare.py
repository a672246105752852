"""Makes a dataset from text: samples the text, trains the tokenizer, encodes all lines."""

import hashlib
import json
import math
import os
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from writehead import __version__
from writehead.config import ModelConfig, PrepareConfig, Task, VocabularyConfig
from writehead.data.bpe import BPETokenizer, check_vocab_size, normalise
from writehead.data.dataset import (
    FORMAT,
    INFO,
    SIDES,
    VOCABULARY,
    Dataset,
    id_count,
    read_info,
    special_ends,
)
from writehead.data.encode import (
    DUPLICATE,
    HELD_OUT,
    REASONS,
    Encoded,
    chunked,
    encode_chunk,
    line_key,
)
from writehead.data.sources import Inputs, Row
from writehead.data.tokenizer import Tokenizer
from writehead.data.vary import Variation
from writehead.errors import DataError
from writehead.util.files import atomic_directory, write_file
from writehead.util.locks import locked
from writehead.util.progress import Reporter
from writehead.util.threads import available_cores, run_alone

MAX_SAMPLE_LINE = 1000  # characters, to limit the memory of the sample


@dataclass(frozen=True)
class ModelTokenizer:
    """The tokenizer of a model, and its vocabulary and task, on which training data depends."""

    tokenizer: Tokenizer
    vocabulary: VocabularyConfig
    task: Task

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        model: ModelConfig,
        source_lang: str | None = None,
        target_lang: str | None = None,
    ) -> "ModelTokenizer":
        """Checks that the tokenizer fits the model and has the languages."""
        vocabulary = VocabularyConfig.of(model, source_lang, target_lang)
        tokenizer.check_fits(model)
        special_ends(model.task, tokenizer, vocabulary)
        return cls(tokenizer, vocabulary, model.task)


@dataclass(frozen=True)
class _Job:
    inputs: Inputs
    sources: list[dict[str, Any]]
    config: PrepareConfig
    threads: int
    report: Reporter
    fit_vocab_size: bool
    given: ModelTokenizer | None

    @property
    def facts(self) -> dict[str, Any]:
        """What the dataset depends on, besides the config and the text."""
        if self.given is None:
            return {VOCABULARY: None}
        fingerprint = self.given.tokenizer.fingerprint
        return {"tokenizer": fingerprint, VOCABULARY: self.given.vocabulary.to_json()}


def prepare(
    directory: Path | str,
    inputs: Inputs,
    config: PrepareConfig,
    *,
    threads: int | None = None,
    progress: Reporter | None = None,
    fit_vocab_size: bool = False,
    tokenizer: ModelTokenizer | None = None,
) -> Dataset:
    """Makes a complete dataset or none; the same text and config give the same bytes.

    An existing dataset of the same text and config is opened; any other is an error. After an
    interruption, the next attempt uses the same tokenizer. `threads` encode the text, by default
    one per core. With `fit_vocab_size`, a text too small for the config's vocabulary gets the
    largest possible one. With the `tokenizer` of a model, none is trained.
    """
    if inputs.sides != len(SIDES[config.task]):
        raise DataError(f"task={config.task!r} needs {len(SIDES[config.task])} text(s) per line")
    if tokenizer is not None:
        if tokenizer.task != config.task:
            raise DataError(
                f"the tokenizer belongs to a {tokenizer.task} model, but the text is for "
                f"{config.task}; choose another model or another text"
            )
        config = replace(config, vocab_size=id_count(tokenizer.tokenizer))
    else:
        check_vocab_size(config.vocab_size)  # before all the text is read
    report, threads = progress or Reporter(quiet=True), threads or available_cores()
    job = _Job(inputs, inputs.identity(), config, threads, report, fit_vocab_size, tokenizer)
    path = Path(os.path.abspath(directory))
    kept = path.with_name(f".{path.name}.{_tokenizer_key(job)}.tokenizer")
    try:
        with locked(path.with_name(f".{path.name}.lock")) as acquired:
            if not acquired:
                raise DataError(f"another process is preparing {directory}; wait for it to finish")
            if _is_prepared(path, job):
                report.say(f"{directory} is already prepared from the same text; nothing to do")
            else:
                try:
                    with atomic_directory(path) as folder:
                        _make(job, folder, kept)
                except (DataError, OSError):  # not an interruption
                    kept.unlink(missing_ok=True)
                    raise
            for tokenizer_file in _kept_tokenizers(path):
                tokenizer_file.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(
            f"{directory} could not be written: {error.strerror or error}; check the path and the "
            f"free disk space"
        ) from error
    return Dataset.open(directory)


def _is_prepared(directory: Path, job: _Job) -> bool:
    """Returns whether this dataset exists; raises DataError if `directory` has something else."""
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return False
    if not (directory / INFO).is_file():
        raise DataError(f"{directory} exists and is not a dataset; choose another path")
    info = read_info(directory)
    ours = {**job.config.to_json(), **job.facts, "text": job.sources}
    theirs = {**info["config"], "text": info["sources"]}
    theirs |= {name: info.get(name) for name in job.facts}
    if not job.fit_vocab_size:
        theirs["vocab_size"] = info["vocab_size"]
    names = dict.fromkeys((*ours, *theirs))
    if changed := [name for name in names if theirs.get(name) != ours.get(name)]:
        raise DataError(
            f"{directory} is a dataset with another {' and '.join(changed)}; choose another path, "
            f"or remove it first"
        )
    return True


def _tokenizer_key(job: _Job) -> str:
    """Identifies everything that the tokenizer depends on."""
    config = job.config
    settings = config.vocab_size, config.sample, config.seed, config.split_digits
    key = [settings, job.fit_vocab_size, job.inputs.sides, job.sources]
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]


def _kept_tokenizers(path: Path) -> list[Path]:
    """Returns the tokenizers that interrupted attempts kept, also those with other settings."""
    name = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{16}}\.tokenizer")
    return [one for one in path.parent.iterdir() if name.fullmatch(one.name)]


def _make(job: _Job, folder: Path, kept: Path) -> None:
    """Writes all files of the dataset; keeps the tokenizer in `kept` for another attempt."""
    lines, sample = _read_and_sample(job)
    tokenizer: Tokenizer
    if job.given is not None:
        tokenizer = job.given.tokenizer
    elif kept.is_file():
        job.report.say("using the tokenizer of an interrupted attempt")
        tokenizer = BPETokenizer.load(kept)
    else:
        trained = tokenizer = run_alone(lambda: _train(job, sample))
        write_file(kept, trained.model)
    for name, content in tokenizer.files.items():
        write_file(folder / name, content)
    splits: dict[str, dict[str, Any]] = {}
    held_out = _HashSet()
    for split in job.inputs.splits():  # train comes last, and drops the lines of the others
        splits |= _encode_split(job, tokenizer, folder, split, lines[split], held_out)
    dropped = sum((Counter(split["dropped"]) for split in splits.values()), Counter[str]())
    info = {
        "format": FORMAT,
        "writehead": __version__,
        "task": job.config.task,
        "vocab_size": id_count(tokenizer),
        "tokenizer": tokenizer.fingerprint,
        "config": job.config.to_json(),
        "sources": job.sources,
        "splits": {name: splits[name] for name in ("train", "dev", "test") if name in splits},
        "dropped": _in_order(dropped),
        **(job.facts if job.given else {}),
    }
    write_file(folder / INFO, json.dumps(info, indent=2, ensure_ascii=False) + "\n")


def _read_and_sample(job: _Job) -> tuple[Counter[str], list[str]]:
    """Reads and checks all text; returns the number of lines by split and a sample of `train`."""
    size = -(-job.config.sample // job.inputs.sides)
    samples = [_Reservoir(size, f"{job.config.seed}/{side}") for side in range(job.inputs.sides)]
    lines: Counter[str] = Counter()
    with job.report.stage("reading and sampling") as update:
        for split in job.inputs.splits():
            for chunk, times in _chunks(job.inputs, split):
                lines[split] += len(chunk)
                if split == "train" and not job.given:
                    for sample, side in zip(samples, zip(*chunk, strict=True), strict=True):
                        sample.add(side * times)
                update(lines.total())
    return lines, list(chain.from_iterable(sample.kept for sample in samples))


def _chunks(inputs: Inputs, split: str) -> Iterator[tuple[list[Row], int]]:
    """Yields the rows of a split in chunks, and how many times the dataset includes each."""
    for corpus, times in inputs.repeated(split):
        for chunk in chunked(corpus.rows()):
            yield chunk, times


def _train(job: _Job, sample: list[str]) -> BPETokenizer:
    vocab_size = job.config.vocab_size
    job.report.say(f"training a tokenizer with a vocabulary of {vocab_size:,} …")
    tokenizer = BPETokenizer.train(
        filter(None, map(normalise, sample)),
        vocab_size,
        seed=job.config.seed,
        fit_vocab_size=job.fit_vocab_size,
        split_digits=job.config.split_digits,
    )
    if tokenizer.vocab_size < vocab_size:
        job.report.say(
            f"the text is too small for a vocabulary of {vocab_size:,}; using the largest possible "
            f"one, {tokenizer.vocab_size:,}"
        )
    return tokenizer


class _Reservoir:
    """A uniform sample of lines by Li's Algorithm L, which draws how many lines to skip."""

    def __init__(self, size: int, seed: str) -> None:
        self.kept: list[str] = []
        self._size, self._random = size, random.Random(seed)
        self._seen, self._next, self._weight = 0, 0, 1.0

    def add(self, lines: Sequence[str]) -> None:
        start = self._seen
        self._seen += len(lines)
        while self._next < self._seen:
            line = lines[self._next - start][:MAX_SAMPLE_LINE]
            self._next += 1
            if len(self.kept) < self._size:
                self.kept.append(line)
                if len(self.kept) < self._size:
                    continue
            else:
                self.kept[self._random.randrange(self._size)] = line
            self._weight *= math.exp(math.log(1.0 - self._random.random()) / self._size)
            skip = math.log(1.0 - self._random.random()) / math.log1p(-self._weight)
            self._next += math.floor(skip)


def _encode_split(
    job: _Job, tokenizer: Tokenizer, folder: Path, split: str, lines: int, held_out: "_HashSet"
) -> dict[str, dict[str, Any]]:
    """Writes the files of a split; for `train`, also those of the lines held out as dev."""
    is_train, config = split == "train", job.config
    dev_lines: list[int] = []
    if is_train and not job.inputs.dev:
        count = min(config.dev, lines // 20)
        dev_lines = random.Random(f"{config.seed}/dev").sample(range(lines), count)
    names = [split, "dev"] if dev_lines else [split]
    excluded = _excluded_keys(job.inputs, tokenizer) if is_train else frozenset()
    variation = Variation(config) if is_train else None
    seen, dropped, normalised, read = _HashSet(), Counter[str](), 0, 0
    with ExitStack() as files, job.report.stage(f"encoding {split}", lines) as update:
        writers = {name: _SplitWriter(folder, name, SIDES[config.task], files) for name in names}
        for chunk, times in _chunks(job.inputs, split):
            encoded = encode_chunk(chunk, tokenizer, config, is_train, job.threads, excluded)
            leaked = held_out.contains(encoded.hashes) & is_train
            keep = ~leaked
            if is_train and not config.keep_duplicates:
                keep[keep] = seen.add(encoded.hashes[keep])
            if not is_train:
                held_out.add(encoded.hashes)
            dropped.update(encoded.dropped)
            dropped[HELD_OUT] += int(leaked.sum())
            dropped[DUPLICATE] += int((~keep & ~leaked).sum())
            normalised += encoded.normalised
            if dev_lines:
                is_dev = np.isin(encoded.lines + read, dev_lines)
                writers["dev"].add(encoded, keep & is_dev)
                keep &= ~is_dev
            for _ in range(times):
                same, places, changed = _vary(chunk, encoded, keep, variation)
                if changed:
                    varied = encode_chunk(changed, tokenizer, config, False, job.threads)
                    same[np.delete(places, varied.lines)] = True  # the change made them too long
                writers[split].add(encoded, same)
                if changed:
                    writers[split].add(varied, np.ones(len(varied.lines), dtype=np.bool_))
            read += encoded.total
            update(read)
    counts = {"lines": lines, "dropped": _in_order(dropped), "normalised": normalised}
    if read != lines:
        raise DataError(f"the text changed from {lines:,} to {read:,} lines while it was read")
    if not writers[split].sequences:
        reasons = ", ".join(f"{reason}: {n:,}" for reason, n in _in_order(dropped).items())
        raise DataError(f"none of the {lines:,} {split} lines can be used ({reasons})")
    sizes = {name: {**writer.sizes(), **counts} for name, writer in writers.items()}
    if dev_lines:
        sizes["dev"] |= {"lines": 0, "dropped": {}, "normalised": 0}  # counted as train's
    return sizes


def _excluded_keys(inputs: Inputs, tokenizer: Tokenizer) -> frozenset[str]:
    """Returns the keys of the lines that must not be in the training text."""
    rows = chain.from_iterable(corpus.rows() for corpus in inputs.excluded)
    keys = (line_key(tokenizer.normalise(text)) for row in rows for text in row)
    return frozenset(filter(None, keys))


def _vary(
    chunk: list[Row], encoded: Encoded, keep: NDArray[np.bool_], variation: Variation | None
) -> tuple[NDArray[np.bool_], list[int], list[Row]]:
    """Returns which of the kept lines stay as they are; and the other ones, with changed texts."""
    if not variation:
        return keep, [], []
    same, places, changed = keep.copy(), list[int](), list[Row]()
    for i in np.flatnonzero(keep).tolist():
        if varied := variation(chunk[encoded.lines[i]]):
            same[i] = False
            places.append(i)
            changed.append(varied)
    return same, places, changed


def _in_order(dropped: Counter[str]) -> dict[str, int]:
    return {reason: dropped[reason] for reason in REASONS if dropped[reason]}


class _SplitWriter:
    """Appends sequences to the `.tokens` and `.offsets` files of a split."""

    def __init__(self, folder: Path, split: str, sides: Sequence[str], files: ExitStack) -> None:
        def create(name: str) -> BinaryIO:
            return files.enter_context((folder / name).open("wb"))

        self.sequences = 0
        self._counts = dict.fromkeys(sides, 0)
        self._tokens = [create(f"{split}.{side}.tokens") for side in sides]
        self._offsets = [create(f"{split}.{side}.offsets") for side in sides]
        for offsets in self._offsets:
            offsets.write(bytes(8))  # the first offset is 0

    def add(self, encoded: Encoded, chosen: NDArray[np.bool_]) -> None:
        self.sequences += int(chosen.sum())
        for i, side in enumerate(self._counts):
            lengths = encoded.lengths[i]
            self._tokens[i].write(encoded.tokens[i][np.repeat(chosen, lengths)].tobytes())
            ends = np.cumsum(lengths[chosen]) + self._counts[side]
            self._offsets[i].write(ends.astype(np.uint64).tobytes())
            self._counts[side] += int(lengths[chosen].sum())

    def sizes(self) -> dict[str, Any]:
        tokens = {f"{side}_tokens": count for side, count in self._counts.items()}
        return {"sequences": self.sequences, **tokens}


class _HashSet:
    """A set of 64-bit hashes that takes eight bytes per hash.

    It is a list of sorted arrays. A new array is merged with the last ones unless they are larger,
    so there are few arrays, and each hash is moved a logarithmic number of times.
    """

    def __init__(self) -> None:
        self._runs: list[NDArray[np.uint64]] = []

    def contains(self, hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
        known = np.zeros(len(hashes), dtype=np.bool_)
        for run in self._runs:
            place = np.searchsorted(run, hashes)
            known |= run[np.minimum(place, len(run) - 1)] == hashes
        return known

    def add(self, hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Adds hashes; returns which are new, where only the first of equal hashes counts."""
        new = np.zeros(len(hashes), dtype=np.bool_)
        new[np.unique(hashes, return_index=True)[1]] = True
        new &= ~self.contains(hashes)
        run = np.sort(hashes[new])
        while self._runs and len(self._runs[-1]) <= len(run):
            run = np.sort(np.concatenate((self._runs.pop(), run)), kind="stable")
        if len(run):
            self._runs.append(run)
        return new
