"""A bulk job: plans shards, tracks which are finished, and joins them into the output files.

The output folder contains a hidden folder `.writehead`. Its `manifest.json` lists everything the
translations depend on, and the start of each shard. A finished shard is a compressed file with one
line of output per line of input. A shard appears only when it is complete. The process that
translates a shard locks it. When all shards are finished, they are joined into one file per input
file. The file `joined` records this, and the shards are removed; the manifest stays.
"""

import gzip
import hashlib
import json
import os
import shutil
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from writehead import __version__
from writehead.data.inputs import InputFile
from writehead.data.records import RecordFormat, Records, Text, lines_of, open_records
from writehead.data.sources import file_identity
from writehead.errors import DataError, shown
from writehead.util.checksums import sha256
from writehead.util.files import (
    TEMPORARY,
    abandoned,
    atomic_file,
    publish,
    remove_directory,
    sync,
    write_file,
)
from writehead.util.json_files import read_json
from writehead.util.locks import locked

HOME, MANIFEST, JOINED = ".writehead", "manifest.json", "joined"
JOIN_LOCK, SHARD_LOCKS = "join.lock", "locks"
FORMAT = 1
# maximum; a killed process loses a shard, but a GPU is not fully used at the end of each shard
SHARD_LINES = {"cpu": 10_000, "gpu": 100_000}
SHARDS_PER_WORKER, MIN_SHARD_LINES = 4, 1000
MAX_SHARDS = 99_999  # file names have five digits
MAX_BOUNDARIES = 1 << 16  # candidates that a BoundarySampler keeps in memory
MAX_MANIFEST = 1 << 28  # bytes
SHAPE = {
    **{"format": int, "writehead": str, "model": dict, "options": dict},
    **{"shards": (range(1, MAX_SHARDS + 1), None), "starts": [[range(1 << 62)]]},
    "inputs": [
        {"name": str, "bytes": int, "sha256": str, "records": int, "lines": int, "invalid": int}
    ],
}
START_OVER = "choose another folder, or start over"  # ends error messages

Progress = Callable[[float], None]  # takes the number of finished lines


class JobMismatch(DataError):
    """The folder contains a job that cannot be resumed, which is left unchanged."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}; {START_OVER}")


class Boundary(NamedTuple):
    """Where a shard begins: a record, its position in its file, and its first line in the job."""

    file: int
    position: int
    record: int
    line: int


@dataclass(frozen=True)
class Plan:
    """Everything a job depends on except its inputs, and what determines the number of shards."""

    model: dict[str, Any]
    options: dict[str, Any]
    format: RecordFormat
    shards: int | None = None  # None: see `default_shards`
    workers: int = 1
    on_cpu: bool = True

    def default_shards(self, lines: int) -> int:
        """Returns the default number of shards: several per worker, unless there are few lines."""
        most = SHARD_LINES["cpu" if self.on_cpu else "gpu"]
        enough = min(SHARDS_PER_WORKER * self.workers, -(-lines // MIN_SHARD_LINES))
        return max(1, enough, -(-lines // most))

    def settings(self) -> dict[str, Any]:
        """Returns everything that must not change before the job is finished."""
        return {
            "format": FORMAT,
            "writehead": __version__,
            "model": self.model,
            "options": self.options | asdict(self.format),
        }


@dataclass(frozen=True)
class Job:
    """A job with its manifest."""

    output: Path
    files: tuple[InputFile, ...]
    format: RecordFormat
    manifest: dict[str, Any]

    @property
    def home(self) -> Path:
        """The hidden folder of the job."""
        return self.output / HOME

    @cached_property
    def folder(self) -> Path:
        """The folder of finished shards, which depends on the manifest."""
        return self.home / f"shards-{_digest(self.manifest)}"

    @cached_property
    def boundaries(self) -> list[Boundary]:
        """The start of each shard, and the end of the last one."""
        total = sum(entry["lines"] for entry in self.manifest["inputs"])
        starts = [Boundary(*entry) for entry in self.manifest["starts"]]
        return [*starts, Boundary(len(self.files), 0, 0, total)]

    @property
    def shards(self) -> range:
        """The numbers of all shards."""
        return range(len(self.manifest["starts"]))

    def lines(self, shards: Sequence[int] | None = None) -> int:
        """Returns the number of lines in the given shards, by default in all."""
        if shards is None:
            return self.boundaries[-1].line
        return sum(self.boundaries[i + 1].line - self.boundaries[i].line for i in shards)

    def path(self, shard: int) -> Path:
        """Returns the file of a finished shard."""
        return self.folder / f"{shard:05}-of-{len(self.shards):05}.gz"

    def lock(self, shard: int) -> Path:
        """Returns the file to lock while translating a shard."""
        return self.home / SHARD_LOCKS / f"{shard:05}"

    def is_finished(self, shard: int) -> bool:
        """Returns whether a shard is finished."""
        return self.path(shard).exists() or self.is_joined

    @property
    def is_joined(self) -> bool:
        """Whether all output files are written."""
        with suppress(FileNotFoundError, NotADirectoryError):
            return (self.home / JOINED).read_bytes() == _digest(self.manifest).encode()
        return False

    def texts(self, shard: int, reader: "Reader") -> Iterator[Text]:
        """Yields the texts of a shard."""
        start, end = self.boundaries[shard : shard + 2]
        for i in range(start.file, min(end.file + 1, len(self.files))):
            first = start.record if i == start.file else 0
            last = end.record if i == end.file else self.manifest["inputs"][i]["records"]
            if last > first:
                position = start.position if i == start.file else 0
                yield from reader.texts(i, position, last - first)

    def join(self, *, replace: bool = False) -> bool:
        """Writes the output files and removes the shards; returns False if another process does so.

        An existing file is an error unless `replace` is true. After an interruption, files that
        this job has already written are kept.
        """
        with locked(self.home / JOIN_LOCK) as acquired:
            if acquired:
                self._check_manifest()
                if not self.is_joined:
                    self.check_shards()
                    self._write_files(replace)
                if self.missing():
                    raise DataError(f"another process has removed the job in {self.output}")
                if not self.is_joined:
                    write_file(self.home / JOINED, _digest(self.manifest))
                self._clean_up()
            return acquired

    def missing(self) -> list[str]:
        """Returns the names of output files that do not exist."""
        return [name for _, name in self.files if not (self.output / name).exists()]

    def check_shards(self) -> None:
        """Raises JobMismatch if the shards have been removed, but not by `join`."""
        if not self.folder.exists() and not self.is_joined:  # in this order, as `join` may run
            raise JobMismatch(f"the shards of the job in {self.output} have been removed")

    def _check_manifest(self) -> None:
        """Raises DataError if the folder no longer contains this job."""
        path = self.home / MANIFEST
        if not path.exists():
            raise DataError(f"another process has removed the job in {self.output}")
        if read_json(path, dict, DataError, START_OVER, max_bytes=MAX_MANIFEST) != self.manifest:
            raise DataError(f"another process has replaced the job in {self.output}")

    def _clean_up(self) -> None:
        """Removes the shards, and what killed processes have left of this job."""
        with suppress(FileNotFoundError):
            remove_directory(self.folder)
        shutil.rmtree(self.home / SHARD_LOCKS, ignore_errors=True)
        for path, descriptor in abandoned(self.home / MANIFEST, TEMPORARY):
            path.unlink(missing_ok=True)
            os.close(descriptor)

    def _write_files(self, replace: bool) -> None:
        lines = self._output_lines()
        reader = Reader(self)
        for i, (file, entry) in enumerate(zip(self.files, self.manifest["inputs"], strict=True)):
            fresh, target = self.folder / f"file-{i:05}", self.output / file.name
            done = self.folder / f"done-{i:05}"  # the hash of a file that is being published
            if target.is_file() and done.exists() and done.read_text() == sha256(target):
                next(islice(lines, entry["lines"], entry["lines"]), None)
                continue
            with atomic_file(fresh) as written, closing(reader.open(i)) as records:
                count = _write_records(records, written, islice(lines, entry["lines"]))
                if count != entry["records"]:
                    raise DataError(_changed(file.path))
            target.parent.mkdir(parents=True, exist_ok=True)
            # without hard links, `publish` first reserves the name with an empty file
            reserved = done.exists() and target.is_file() and not target.stat().st_size
            write_file(done, sha256(fresh))
            try:
                publish(fresh, target, replace=replace or reserved)
            except FileExistsError as error:
                done.unlink()
                raise DataError(
                    f"{target} has been created by another process; move it away"
                ) from error
            sync(target.parent)

    def _output_lines(self) -> Iterator[str]:
        """Yields all lines of output; raises DataError before the lines of a damaged shard."""
        for i, (start, end) in enumerate(pairwise(self.boundaries)):
            count = sum(1 for _ in self._shard_lines(i))  # also compares the checksum
            if count != end.line - start.line:
                raise DataError(_damaged(self.path(i), f"it has {count:,} lines"))
            yield from self._shard_lines(i)

    def _shard_lines(self, shard: int) -> Iterator[str]:
        path = self.path(shard)
        try:
            with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
                yield from (line.removesuffix("\n") for line in file)
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise DataError(_damaged(path, str(error))) from error


class Reader:
    """Reads the inputs of a job; keeps the current file open for the shards that follow."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._open: tuple[int, Records] | None = None

    def open(self, i: int) -> Records:
        """Opens input file `i`; raises DataError if its size has changed."""
        if self._open is None or self._open[0] != i:
            self.close()
            path, _ = self._job.files[i]
            entry = self._job.manifest["inputs"][i]
            with suppress(OSError):  # reading the file raises a clearer error
                if path.stat().st_size != entry["bytes"]:
                    raise DataError(_changed(path))
            self._open = i, open_records(path, self._job.format)
        return self._open[1]

    def texts(self, i: int, position: int, count: int) -> Iterator[Text]:
        """Yields `count` texts of input file `i`, starting at a position."""
        records = self.open(i)
        found = 0
        for _, text in islice(records.texts(position), count):
            found += 1
            yield text
        if found < count:
            raise DataError(_changed(records.path))

    def close(self) -> None:
        """Closes the open file."""
        if self._open is not None:
            self._open[1].close()
            self._open = None


def open_job(
    output: Path, files: Sequence[InputFile], plan: Plan, progress: Progress, *, force: bool = False
) -> Job:
    """Returns the job in a folder; if there is none, reads all input to plan one.

    The input files are hashed, which takes about a second per gigabyte. If they or the settings
    have changed, raises JobMismatch or, with `force`, starts over.
    """
    home = output / HOME
    path = home / MANIFEST
    if not path.exists():
        check_output(output, files, force=force)
        is_new = not output.exists()
        home.mkdir(parents=True, exist_ok=True)
        try:
            _write_manifest(path, _make_manifest(files, plan, progress))
        except BaseException:
            with suppress(OSError):  # if they are not empty
                home.rmdir()
                if is_new:
                    output.rmdir()
            raise
    try:
        job = Job(output, tuple(files), plan.format, _read_manifest(path))
        _check_job(job, plan)
    except JobMismatch:
        if not force:
            raise
    else:
        if not (force and job.is_joined):
            return job
    remove_directory(home)
    return open_job(output, files, plan, progress, force=True)


def _read_manifest(path: Path) -> dict[str, Any]:
    """Reads a manifest; raises JobMismatch if it is damaged."""
    manifest: dict[str, Any] = read_json(path, SHAPE, JobMismatch, max_bytes=MAX_MANIFEST)
    width = len(Boundary._fields)
    starts = [Boundary(*entry) for entry in manifest["starts"] if len(entry) == width]
    if starts != sorted(starts) or len(starts) < len(manifest["starts"]):
        raise JobMismatch(f"{path} is damaged")
    return manifest


def _check_job(job: Job, plan: Plan) -> None:
    """Raises JobMismatch if a job cannot be resumed with the current settings and inputs."""
    if problem := _difference(job, plan):
        raise JobMismatch(problem)
    if not job.is_joined:
        job.check_shards()
    elif missing := job.missing():
        raise JobMismatch(f"the job in {job.output} is finished, but {missing[0]} has been removed")


def _write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Writes the manifest and creates the folder of shards, unless another process has."""
    folder = path.parent / f"shards-{_digest(manifest)}"
    if path.exists():
        return
    folder.mkdir(exist_ok=True)
    try:
        write_file(path, _dump(manifest), replace=False)
    except FileExistsError:
        with suppress(OSError):  # if the manifests are equal, the other process uses the folder
            if read_json(path, dict, DataError, max_bytes=MAX_MANIFEST) != manifest:
                folder.rmdir()


def check_output(output: Path, files: Sequence[InputFile], *, force: bool) -> None:
    """Raises DataError if a new job would overwrite files."""
    if (output / HOME / MANIFEST).exists():
        return
    for file in files:
        target = output / file.name
        if target.exists() and not (force and target.is_file()):
            raise DataError(f"{target} exists; choose another folder")


def _make_manifest(files: Sequence[InputFile], plan: Plan, progress: Progress) -> dict[str, Any]:
    """Reads and hashes all files, and chooses where shards begin."""
    inputs, sampler = [], BoundarySampler()
    for i, (path, name) in enumerate(files):
        before = sampler.line
        with closing(open_records(path, plan.format)) as records:
            position = count = 0
            for count, (after, text) in enumerate(records.texts(), start=1):
                sampler.add(i, position, count - 1, len(lines_of(text)))
                position = after
                if count % 1024 == 0:
                    progress(sampler.line)
        sizes = {"records": count, "lines": sampler.line - before, "invalid": records.invalid}
        inputs.append({**file_identity(path), "name": name, **sizes})
    shards = plan.default_shards(sampler.line) if plan.shards is None else plan.shards
    if shards > MAX_SHARDS:
        raise DataError(f"{shards:,} shards are too many; use at most {MAX_SHARDS:,}")
    starts = [list(start) for start in sampler.choose(shards)]
    return {**plan.settings(), "inputs": inputs, "shards": plan.shards, "starts": starts}


class BoundarySampler:
    """Candidates for the starts of shards: all records or, of many, every 2nd, 4th and so on."""

    def __init__(self) -> None:
        self.line = 0  # lines so far
        self._count, self._stride = 0, 1
        self._candidates: list[Boundary] = []

    def add(self, file: int, position: int, record: int, lines: int) -> None:
        """Adds the next record, which has this number of lines."""
        if self._count % self._stride == 0:
            self._candidates.append(Boundary(file, position, record, self.line))
            if len(self._candidates) > MAX_BOUNDARIES:
                del self._candidates[1::2]
                self._stride *= 2
        self._count += 1
        self.line += lines

    def choose(self, shards: int) -> list[Boundary]:
        """Returns the starts of shards with about the same number of lines."""
        lines = [boundary.line for boundary in self._candidates]
        places = {bisect_left(lines, self.line * i // shards) for i in range(shards)}
        return [self._candidates[place] for place in sorted(places) if place < len(lines)]


def _difference(job: Job, plan: Plan) -> str | None:
    """Returns the first difference between a job and the current settings and inputs, or None."""
    old, new = job.manifest, plan.settings()
    started = f"the job in {job.output} was started with"
    if (old["format"], old["writehead"]) != (FORMAT, __version__):
        return f"{started} another version of writehead, {shown(old['writehead'])}"
    if old["model"] != new["model"]:
        before, now = old["model"].get("dtype"), new["model"].get("dtype")
        if old["model"] | {"dtype": now} != new["model"]:
            return f"{started} another model"
        return f"{started} {before} weights, not {now}"
    for name, value in new["options"].items():
        if old["options"].get(name) != value:
            return f"{started} {name}={shown(old['options'].get(name))}, not {shown(value)}"
    if plan.shards not in (None, old["shards"], len(job.shards)):
        return f"{started} {len(job.shards)} shards, not {plan.shards}"
    return _changed_input(job)


def _changed_input(job: Job) -> str | None:
    old = {entry["name"]: entry for entry in job.manifest["inputs"]}
    names = [file.name for file in job.files]
    for name in sorted(old.keys() ^ set(names)):
        verb = "removed from" if name in old else "added to"
        return f"{shown(name)} was {verb} the input since the job in {job.output} was started"
    for path, name in job.files:
        found = file_identity(path)
        if any(found[key] != old[name][key] for key in ("bytes", "sha256")):
            return f"{path} has changed since the job in {job.output} was started"
    return None


def _write_records(records: Records, file: BinaryIO, lines: Iterator[str]) -> int:
    """Writes records with all lines of output; returns their number."""
    count = 0

    def translate(text: Text) -> list[str]:
        nonlocal count
        count += 1
        needed = len(lines_of(text))
        found = [*islice(lines, needed)]
        if len(found) < needed:
            raise DataError(_changed(records.path))
        return found

    records.write(file, translate)
    if next(lines, None) is not None:
        raise DataError(_changed(records.path))
    return count


def _changed(path: Path) -> str:
    return f"{path} has changed since the job was started; {START_OVER}"


def _damaged(path: Path, reason: str) -> str:
    return f"{path} is damaged ({reason}); delete it and run the job again"


def _dump(manifest: dict[str, Any]) -> str:
    return json.dumps(manifest, indent=1, sort_keys=True) + "\n"


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(_dump(manifest).encode()).hexdigest()[:8]
