"""Translates shards of a job in one process."""

import gzip
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from typing import Any, NamedTuple, Protocol

from writehead.bulk.job import MANIFEST, Job, Progress, Reader
from writehead.bulk.translator import output_line
from writehead.data.records import lines_of
from writehead.engine import Output
from writehead.errors import DataError, RunError, WriteheadError
from writehead.util.files import atomic_file
from writehead.util.locks import locked

REPORT_SECONDS = 0.2  # between reports of progress


class LineTranslator(Protocol):
    """A loaded model; see `Translator`."""

    def identity(self) -> dict[str, Any]:
        """Returns a description of the model."""

    def translate(
        self, lines: Iterable[str], first: int = 0, progress: Progress | None = None
    ) -> Iterator[Output]:
        """Yields the outputs of lines."""


class Loader(Protocol):
    """Loads a model in the process of a worker; see `Translation`."""

    def load(self) -> LineTranslator:
        """Loads the model."""


class Outcome(NamedTuple):
    """The outcome of a call in another process: a result, or the message of an error."""

    result: Any = None
    error: str | None = None

    def unwrap(self) -> Any:
        """Returns the result, or raises the error as a RunError."""
        if self.error is not None:
            raise RunError(self.error)
        return self.result


class Worker:
    """Translates one shard at a time."""

    def __init__(self, translator: LineTranslator) -> None:
        self._translator, self._identity = translator, translator.identity()
        self._job: Job | None = None
        self._reader: Reader | None = None

    def identity(self) -> dict[str, Any]:
        """Returns a description of the model, as JSON values."""
        return self._identity

    def start(self, job: Job) -> None:
        """Prepares to translate shards of this job; raises RunError if this worker cannot."""
        if not (job.home / MANIFEST).is_file():
            raise RunError(
                f"a worker cannot find the job in {job.output}; use a folder that all machines "
                f"share, at the same path"
            )
        if self._identity != job.manifest["model"]:
            raise RunError(
                "the workers have different models or dtypes; copy the same model to all machines, "
                "and choose a dtype if their devices differ"
            )
        self._job, self._reader = job, Reader(job)
        # hides one warning per long line; `translate` counts these lines instead
        logging.getLogger("writehead.data.lines").setLevel(logging.ERROR)

    def translate(self, shard: int, report: Progress) -> int | None:
        """Translates a shard, unless it is finished; returns the number of lines split into pieces.

        Returns None if another process has locked the shard.
        """
        assert self._job is not None
        try:
            with locked(self._job.lock(shard)) as acquired:
                if self._job.is_finished(shard):
                    return 0
                return self._write(self._job, shard, report) if acquired else None
        except OSError as error:
            raise DataError(write_error(self._job, error)) from error

    def close(self) -> None:
        """Closes the input files."""
        if self._reader is not None:
            self._reader.close()

    def _write(self, job: Job, shard: int, report: Progress) -> int:
        """Translates a shard to a file, which appears when it is complete."""
        assert self._reader is not None
        texts = job.texts(shard, self._reader)
        lines = (line for text in texts for line in lines_of(text))
        done, reported = 0.0, time.monotonic()

        def progress(count: float) -> None:
            nonlocal done, reported
            done += count
            if (now := time.monotonic()) - reported >= REPORT_SECONDS:
                report(done)
                reported = now

        outputs = self._translator.translate(lines, job.boundaries[shard].line, progress)
        in_pieces = 0
        with (
            suppress(FileExistsError),  # where locks do not work, another process may be faster
            atomic_file(job.path(shard), replace=False) as file,
            closing(gzip.GzipFile("", "wb", 1, file, mtime=0)) as packed,
        ):
            for output in outputs:
                packed.write(f"{output_line(output, job.format.scores)}\n".encode())
                in_pieces += output.pieces > 1
        return in_pieces


def write_error(job: Job, error: OSError) -> str:
    """Returns the message for an error while writing the output."""
    return f"{error.filename or job.output} could not be written: {error.strerror or error}"


def capture(call: Callable[..., Any], *arguments: Any) -> Outcome:
    """Calls a function; returns its result or the message of its WriteheadError."""
    try:
        return Outcome(call(*arguments))
    except WriteheadError as error:
        return Outcome(error=str(error))
