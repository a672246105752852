"""Translates shards of a job, in this process; other processes have a `Worker` each."""

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
        """Describes the model."""

    def translate(
        self, lines: Iterable[str], first: int = 0, progress: Progress | None = None
    ) -> Iterator[Output]:
        """Yields the outputs of lines."""


class Loader(Protocol):
    """What a worker is made from in its process; see `Translation`."""

    def load(self) -> LineTranslator:
        """Loads the model."""


class Answer(NamedTuple):
    """What a worker in another process answers: a result, or the message of an error."""

    result: Any = None
    error: str | None = None

    def value(self) -> Any:
        """Returns the result; raises the error, if any."""
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
        """Describes the model as JSON."""
        return self._identity

    def start(self, job: Job) -> None:
        """Takes shards of this job from now on."""
        if not (job.home / MANIFEST).is_file():
            raise RunError(
                f"a worker cannot see {job.output}; use a folder that all machines share"
            )
        if self._identity != job.manifest["model"]:
            raise RunError(
                "the workers have different models or dtypes; copy the same model to all machines, "
                "and set the dtype if their devices differ"
            )
        self._job, self._reader = job, Reader(job)
        # a job may have thousands of long lines; `translate` counts them instead
        logging.getLogger("writehead.data.lines").setLevel(logging.ERROR)

    def translate(self, shard: int, report: Progress) -> int | None:
        """Translates a shard unless it is finished; returns None if another process has it locked.

        Otherwise, returns the number of lines that were too long and were translated in pieces.
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
        """Translates a shard to a file, which appears once it is complete."""
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

        outputs = self._translator.translate(lines, job.marks[shard].line, progress)
        in_pieces = 0
        with (
            suppress(FileExistsError),  # without locks, another process may have been faster
            atomic_file(job.path(shard), replace=False) as file,
            closing(gzip.GzipFile("", "wb", 1, file, mtime=0)) as packed,
        ):
            for output in outputs:
                packed.write(f"{output_line(output, job.format.scores)}\n".encode())
                in_pieces += output.pieces > 1
        return in_pieces


def write_error(job: Job, error: OSError) -> str:
    """Returns the message for an error while the output is written."""
    return f"{error.filename or job.output} could not be written: {error.strerror or error}"


def answer(call: Callable[..., Any], *arguments: Any) -> Answer:
    """Calls a worker's method; returns its result or the message of its error."""
    try:
        return Answer(call(*arguments))
    except WriteheadError as error:
        return Answer(error=str(error))
