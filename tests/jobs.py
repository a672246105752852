"""Helpers for tests of bulk jobs: a fast, exact translator that may kill its own process."""

import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from writehead.bulk.job import Job, Plan, open_job
from writehead.bulk.pool import PoolSpec, WorkerPool
from writehead.bulk.worker import Worker
from writehead.data.inputs import find_inputs
from writehead.data.records import RecordFormat
from writehead.engine import Output, ScoredText

MODEL = {"weights": "upper"}


@dataclass(frozen=True)
class Upper:
    """Translates to upper case; the score is the number of the line.

    A line in `deadly` kills the process. With a `folder`, each of these lines does so only once: a
    marker file there records it.
    """

    deadly: tuple[str, ...] = ()
    folder: Path | None = None

    def load(self) -> "Upper":
        return self

    def identity(self) -> dict[str, Any]:
        return MODEL

    def translate(self, lines: Iterable[str], first: int = 0, progress=None) -> Iterator[Output]:
        for i, line in enumerate(lines, start=first):
            if line in self.deadly:
                marker = None if self.folder is None else self.folder / f"died at {line}"
                if marker is None or not marker.exists():
                    if marker is not None:
                        marker.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            if progress is not None:
                progress(1.0)
            yield Output((ScoredText(line.upper(), float(i), 0.0, True),))


def plan(shards: int | None = 3, **format: object) -> Plan:
    return Plan(MODEL, {"beam": 1}, RecordFormat(**format), shards)


def open_in(output: Path, given: Path | str, what: Plan | None = None, **options: object) -> Job:
    """Opens or plans a job that translates the files of `given` to `output`."""
    files = find_inputs(str(given), output)
    return open_job(output, files, what or plan(), lambda lines: None, **options)


def in_process(loader: Upper | None = None) -> PoolSpec:
    """Returns one worker in this process."""
    return PoolSpec([lambda: Worker((loader or Upper()).load())], on_cpu=True)


def complete(job: Job, spec: PoolSpec | None = None, shards: range | None = None) -> list[float]:
    """Translates shards, by default all, and joins finished jobs; returns the progress reports."""
    reports: list[float] = []
    with WorkerPool(in_process() if spec is None else spec) as pool:
        pool.run(job, job.shards if shards is None else shards, reports.append)
    if all(map(job.is_finished, job.shards)):
        assert job.join()
    return reports
