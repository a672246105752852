"""Text to a dataset: check and sample it, learn the tokenizer, encode, and only then be there.

Work is done in a hidden folder beside the dataset's place, which is moved there when it is whole.
A run that was killed and is started again keeps the tokenizer, if it had one, and encodes anew.
"""

import errno
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from writehead import __version__
from writehead.config import PrepareConfig
from writehead.data.cleaning import DUPLICATE, HELD_OUT, REASONS, Seen
from writehead.data.dataset import COUNT, FORMAT, INFO, SIDES, TOKENIZER, Dataset, read_info
from writehead.data.progress import Reporter
from writehead.data.sampling import Reservoir
from writehead.data.sources import Chunk, Corpus, Inputs
from writehead.data.tokenizer import Tokenizer, check_vocab_size
from writehead.data.workers import Encoded, Encoder, encode, learn_tokenizer
from writehead.data.writing import SplitWriter
from writehead.errors import DataError, shown
from writehead.util.files import sync, write_file
from writehead.util.json_files import read_json
from writehead.util.locks import locked
from writehead.util.threads import available_cores

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FEW = 20_000  # lines that are encoded sooner than processes have started
STATE, SAMPLE = "state.json", "sample.txt"


@dataclass(frozen=True)
class _Job:
    """One preparation: what is made of what, where it is worked on, and by how many processes."""

    directory: Path
    inputs: Inputs
    config: PrepareConfig
    sources: list[dict[str, Any]]
    workers: int
    report: Reporter
    at_most: bool  # the config's vocabulary is an upper limit

    @property
    def partial(self) -> Path:
        """The hidden folder in which the work is done."""
        return self.directory.parent / f".{self.directory.name}.partial"

    @property
    def lock(self) -> Path:
        """What claims that folder; beside it, so that removing it takes nobody's claim away."""
        return self.directory.parent / f".{self.directory.name}.lock"

    @property
    def fresh(self) -> Path:
        """The dataset until it is whole."""
        return self.partial / "dataset"

    @property
    def learnt_from(self) -> dict[str, Any]:
        """All that the tokenizer and the line counts depend on."""
        config = self.config.to_json()
        fields = {name: config[name] for name in ("task", "vocab_size", "sample", "seed")}
        fields["at_most"] = self.at_most
        return {"writehead": __version__, "sources": self.sources, **fields}


def prepare(
    directory: Path | str,
    inputs: Inputs,
    config: PrepareConfig,
    *,
    workers: int | None = None,
    progress: Reporter | None = None,
    fit_vocab_size: bool = False,
) -> Dataset:
    """The dataset at `directory`, made of `inputs`; the same text and config give the same bytes.

    An existing dataset of the same text and config is opened; any other is an error. `workers` is
    the number of processes, by default one per core; 1 does all work in this process. With
    `fit_vocab_size`, a text too small for the config's vocabulary gets the largest possible one.
    """
    if inputs.sides != len(SIDES[config.task]):
        raise DataError(f"{config.task} takes {len(SIDES[config.task])} text(s) a line")
    if workers is not None and workers < 1:
        raise DataError(f"workers={workers} must be at least 1")
    check_vocab_size(config.vocab_size)  # before all the text is read
    job = _Job(
        directory=Path(os.path.abspath(directory)),
        inputs=inputs,
        config=config,
        sources=[
            {"split": split, **corpus.identity()}
            for split, corpora in inputs.splits().items()
            for corpus in corpora
        ],
        workers=workers or available_cores(),
        report=progress or Reporter(quiet=True),
        at_most=fit_vocab_size,
    )
    if _is_prepared(job):
        job.report.say(f"{directory} is already prepared from the same text; nothing to do")
        _tidy(job)
        return Dataset.open(directory)
    try:
        with _workspace(job):
            _make(job)
    except OSError as error:
        if error.errno not in FULL:
            raise DataError(f"{directory} could not be made: {error}") from error
        raise DataError(
            f"{directory} could not be written: {error.strerror}; what was written is removed: "
            f"free some space, or choose another place"
        ) from error
    return Dataset.open(directory)


def _is_prepared(job: _Job) -> bool:
    """Whether the dataset is there; raises where something else is in its place."""
    directory = job.directory
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return False
    if not (directory / INFO).is_file():
        raise DataError(f"{directory} exists and is no dataset; choose another place")
    info = read_info(directory)
    theirs, ours = info["config"], job.config.to_json()
    changed = [
        f"{name} {shown(theirs.get(name))}, not {shown(ours[name])}"
        for name in ours
        if theirs.get(name) != ours[name]
    ]
    if not job.at_most and info["vocab_size"] != job.config.vocab_size and not changed:
        changed.append(f"vocab_size {info['vocab_size']}, not {job.config.vocab_size}")
    if info["sources"] != job.sources:
        changed.append("other text")
    if changed:
        raise DataError(
            f"{directory} exists and was prepared otherwise ({'; '.join(changed)}); choose "
            f"another place, or remove it first"
        )
    return True


@contextmanager
def _workspace(job: _Job) -> Iterator[None]:
    """The hidden folder, for this process alone; after an error, what a next run can use stays."""
    with locked(job.lock) as free:
        if not free:
            raise DataError(
                f"another process is preparing {job.directory}; wait for it, or end it first"
            )
        try:
            _remove(job.fresh)
            job.partial.mkdir(exist_ok=True)
            yield
        except OSError as error:
            if error.errno in FULL:
                _remove(job.partial)
            raise
        finally:
            whole = job.directory.exists() and not job.fresh.exists()
            _remove(job.fresh)
            if whole or not (job.partial / STATE).is_file():
                _remove(job.partial)


def _tidy(job: _Job) -> None:
    """Removes what a run that was killed after its last step left."""
    if job.partial.exists() or job.lock.exists():
        with suppress(OSError), locked(job.lock) as free:  # where nothing can be written, it stays
            if free:
                _remove(job.partial)


def _make(job: _Job) -> None:
    """All stages, the dataset's place being free."""
    state = _learnt_before(job)
    if state is None:
        state = {"learnt_from": job.learnt_from, "lines": _scan(job)}
        job.report.say(f"learning a vocabulary of {job.config.vocab_size:,} …")
        sample = job.partial / SAMPLE
        tokenizer = learn_tokenizer(sample, job.config, job.workers, at_most=job.at_most)
        if tokenizer.vocab_size < job.config.vocab_size:
            job.report.say(
                f"the text is too small for a vocabulary of {job.config.vocab_size:,}; using the "
                f"largest possible one, {tokenizer.vocab_size:,}"
            )
        sample.unlink()
        write_file(job.partial / TOKENIZER, tokenizer.model)
        write_file(job.partial / STATE, json.dumps(state).encode())  # last: marks both as complete
    else:
        job.report.say("the tokenizer of the interrupted run is kept")
    tokenizer = Tokenizer.load(job.partial / TOKENIZER)
    job.fresh.mkdir()
    info = _encode_splits(job, tokenizer, state["lines"])
    write_file(job.fresh / TOKENIZER, tokenizer.model)
    text = json.dumps(info, indent=2, ensure_ascii=False) + "\n"
    write_file(job.fresh / INFO, text.encode())
    sync(job.fresh)
    job.fresh.rename(job.directory)
    sync(job.directory.parent)


def _learnt_before(job: _Job) -> dict[str, Any] | None:
    """The state that an interrupted run left, if it was learning from the same."""
    path = job.partial / STATE
    if not path.is_file():
        return None
    shape = {"learnt_from": dict, "lines": {str: COUNT}}
    state = read_json(path, shape, DataError, f"delete {job.partial}")
    if state["learnt_from"] == job.learnt_from:
        return dict(state)
    (job.partial / STATE).unlink()
    return None


def _scan(job: _Job) -> dict[str, int]:
    """Lines by split, once all text has been read and found sound; leaves a sample of `train`."""
    reservoirs = [
        Reservoir(-(-job.config.sample // job.inputs.sides), f"{job.config.seed}/{side}")
        for side in range(job.inputs.sides)
    ]
    splits = [
        (split, corpus) for split, corpora in job.inputs.splits().items() for corpus in corpora
    ]
    weights = np.array([_weight(source) for source in job.sources], dtype=np.float64)
    starts = np.concatenate(([0.0], np.cumsum(weights / weights.sum())))
    lines: Counter[str] = Counter()
    with job.report.stage("reading and sampling") as stage:
        for (split, corpus), start, end in zip(splits, starts[:-1], starts[1:], strict=True):
            for chunk in corpus.chunks():
                lines[split] += len(chunk)
                if split == "train":
                    for reservoir, side in zip(reservoirs, chunk.sides, strict=True):
                        reservoir.add(side)
                stage.update(start + (end - start) * chunk.done, lines.total())
    with (job.partial / SAMPLE).open("w", encoding="utf-8", newline="\n") as file:
        for reservoir in reservoirs:
            file.writelines(f"{line}\n" for line in reservoir.lines())
    return dict(lines)


def _weight(source: dict[str, Any]) -> int:
    """How much there is to read of a source: bytes, or pairs where there is no file."""
    return sum(file["bytes"] for file in source.get("files", ())) or int(source.get("pairs", 1))


def _encode_splits(job: _Job, tokenizer: Tokenizer, lines: dict[str, int]) -> dict[str, Any]:
    """What `dataset.json` says, once all splits are in their files.

    The held-out ones come first, so that `train` can do without their lines.
    """
    encoder = Encoder(job.config, tokenizer)
    known = _Known(Seen(), Seen())
    splits: dict[str, dict[str, Any]] = {}
    for split in job.inputs.splits():
        splits |= _encode_split(job, encoder, split, lines[split], known)
    dropped: Counter[str] = Counter()
    for counts in splits.values():
        dropped.update(counts["dropped"])
    return {
        "format": FORMAT,
        "writehead": __version__,
        "task": job.config.task,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.fingerprint,
        "config": job.config.to_json(),
        "sources": job.sources,
        "splits": {name: splits[name] for name in ("train", "dev", "test") if name in splits},
        "dropped": _ordered(dropped),
    }


@dataclass(frozen=True)
class _Known:
    """Lines met so far: those of held-out text, and those of `train`."""

    held_out: Seen
    train: Seen


def _encode_split(
    job: _Job, encoder: Encoder, split: str, lines: int, known: _Known
) -> dict[str, dict[str, Any]]:
    """The sizes of a split, now in its files; of `train`, also of the lines held out as `dev`."""
    train, corpora = split == "train", job.inputs.splits()[split]
    aside = np.empty(0, dtype=np.int64)
    if train and not job.inputs.dev:
        aside = _held_out_lines(job.config, lines)
        if len(aside) < job.config.dev:
            job.report.say(
                f"{len(aside):,} lines are held out as dev, a twentieth of the text, which is less "
                f"than {job.config.dev:,}"
            )
    names = [split, "dev"] if len(aside) else [split]
    writers = {name: SplitWriter(job.fresh, name, SIDES[job.config.task]) for name in names}
    dropped: Counter[str] = Counter()
    normalised = read = 0
    with ExitStack() as stack, job.report.stage(f"encoding {split}") as stage:
        for writer in writers.values():
            stack.enter_context(writer)
        workers = 1 if lines < FEW else job.workers
        for part in encode(_stream(corpora, lines), encoder, train, workers):
            dropped += part.dropped
            normalised += part.normalised
            read += part.read
            keep = np.ones(len(part.lines), dtype=np.bool_)
            if train:
                keep = _fresh_lines(part, known, dropped, job.config)
            else:
                known.held_out.add(part.fingerprints)
            is_aside = np.isin(part.lines, aside)
            for name, writer in writers.items():
                writer.add(part, keep & (is_aside if name != split else ~is_aside))
            stage.update(part.done, read)
        sizes: dict[str, dict[str, Any]] = {name: w.finish() for name, w in writers.items()}
    nothing = {"lines": 0, "dropped": {}, "normalised": 0}
    mine: dict[str, Any] = {"lines": lines, "dropped": _ordered(dropped), "normalised": normalised}
    if not sizes[split]["sequences"]:
        why = ", ".join(f"{reason}: {count:,}" for reason, count in mine["dropped"].items())
        raise DataError(f"none of the {lines:,} {split} lines can be used ({why})")
    return {name: {**size, **(mine if name == split else nothing)} for name, size in sizes.items()}


def _stream(corpora: tuple[Corpus, ...], lines: int) -> Iterator[Chunk]:
    """The chunks of several corpora as if they were one of `lines` lines."""
    first = 0
    for corpus in corpora:
        count = 0
        for chunk in corpus.chunks():
            count = chunk.first + len(chunk)
            yield replace(chunk, first=first + chunk.first, done=(first + count) / lines)
        first += count
    if first != lines:
        raise DataError(f"the text changed while it was read, from {lines:,} lines to {first:,}")


def _held_out_lines(config: PrepareConfig, lines: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Which training lines become the dev split, where no dev text is given."""
    count = min(config.dev, lines // 20)
    chosen = random.Random(f"{config.seed}/dev").sample(range(lines), count)
    return np.array(sorted(chosen), dtype=np.int64)


def _fresh_lines(
    part: Encoded, known: _Known, dropped: Counter[str], config: PrepareConfig
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which lines were neither held out nor seen before; counts the others."""
    leaked = known.held_out.contains(part.fingerprints)
    keep = ~leaked
    if not config.keep_duplicates:
        new = np.zeros(len(keep), dtype=np.bool_)
        new[keep] = known.train.add(part.fingerprints[keep])
        dropped[DUPLICATE] += int((keep & ~new).sum())
        keep = new
    dropped[HELD_OUT] += int(leaked.sum())
    return keep


def _ordered(dropped: Counter[str]) -> dict[str, int]:
    return {reason: dropped[reason] for reason in REASONS if dropped[reason]}


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
