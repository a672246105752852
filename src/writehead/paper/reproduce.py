"""Makes the missing results of a table, row by row; an interrupted run resumes.

Processes that are given the same table share its rows: a lock file claims the row at work.
"""

import gc
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch

from writehead.bench.record import write_result
from writehead.data.progress import Reporter
from writehead.paper.results import Result
from writehead.util.locks import locked

SIGNAL_INTERVAL = 0.01  # seconds between attempts to stop training after the deadline
POLL_INTERVAL = 1.0  # seconds between checks whether another process has prepared the dataset


@dataclass(frozen=True)
class Summary:
    """How many results exist, and which signal stopped the work and where, if one did."""

    done: int
    total: int
    stopped_by: int | None = None
    stopped_at: str | None = None


class Stopped(Exception):
    """Work on a row was stopped by a signal; the row can be resumed."""

    def __init__(self, number: int, at: str) -> None:
        super().__init__(number, at)
        self.number, self.at = number, at


class Clock:
    """The time limit of one invocation."""

    def __init__(self, minutes: float | None) -> None:
        self._deadline = None if minutes is None else time.monotonic() + 60 * minutes

    @property
    def is_up(self) -> bool:
        """Whether the deadline has passed."""
        return self._deadline is not None and time.monotonic() >= self._deadline

    @contextmanager
    def stopping_training(self) -> Iterator[None]:
        """Sends SIGTERM to this process after the deadline, as soon as training handles it."""
        if self._deadline is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        outer_handler = signal.getsignal(signal.SIGTERM)

        def stop(number: int, frame: FrameType | None) -> None:
            if signal.getsignal(signal.SIGTERM) is not outer_handler:
                signal.raise_signal(signal.SIGTERM)

        before = signal.signal(signal.SIGALRM, stop)
        signal.siginterrupt(signal.SIGALRM, False)
        first = max(self._deadline - time.monotonic(), SIGNAL_INTERVAL)
        signal.setitimer(signal.ITIMER_REAL, first, SIGNAL_INTERVAL)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)


@dataclass(frozen=True)
class Row:
    """One result to make: its row and seed, its file and the lock of the process at work on it."""

    name: str
    result: Path
    lock: Path
    seed: int = 0


def missing_rows(name: str, rows: Sequence[Row], report: Reporter) -> list[Row]:
    """Returns the rows without a result and reports the others."""
    missing = [row for row in rows if not row.result.is_file()]
    for row in rows:
        if row not in missing:
            report.say(f"{row.result.stem}: {row.result} exists; skipped")
    if not missing:
        report.say(
            f"{name}: all {len(rows)} results exist, nothing to do; to run them again, use other "
            f"folders for results and runs"
        )
    return missing


def summarize(rows: Sequence[Row], stopped: Stopped | None = None) -> Summary:
    """Counts the results that exist."""
    done = sum(row.result.is_file() for row in rows)
    if stopped is None:
        return Summary(done, len(rows))
    return Summary(done, len(rows), stopped.number, stopped.at)


def make_rows(
    name: str,
    rows: Sequence[Row],
    make: Callable[[Row], Result],
    clock: Clock,
    report: Reporter,
) -> Summary:
    """Makes the missing results, except for rows that other processes are working on."""
    todo, seconds = [row for row in rows if not row.result.is_file()], list[float]()
    while todo:
        busy = []
        for row in todo:
            with locked(row.lock) as free:
                if not free:
                    report.say(f"{row.result.stem}: another process is working on it; skipped")
                    busy.append(row)
                    continue
                if row.result.is_file():
                    continue
                done, began = summarize(rows).done, time.monotonic()
                left = _time_left(seconds, len(rows) - done)
                report.say(f"{name}: row {done + 1} of {len(rows)}, {row.result.stem}{left}")
                try:
                    write_result(row.result, make(row))
                except Stopped as stopped:
                    return summarize(rows, stopped)
                report.say(f"{row.result.stem}: {row.result}")
                seconds.append(time.monotonic() - began)
            if clock.is_up and summarize(rows).done < len(rows):
                return summarize(rows, Stopped(signal.SIGTERM, row.result.stem))
        if len(busy) == len(todo):
            break
        todo = busy  # their process may have been stopped by now
    return summarize(rows)


def _time_left(seconds: list[float], rows: int) -> str:
    if not seconds:
        return ""
    return f"; {timedelta(seconds=round(statistics.mean(seconds) * rows))} left"


@contextmanager
def preparing(dataset: Path, clock: Clock, report: Reporter) -> Iterator[None]:
    """Waits until no other process prepares the dataset; raises Stopped after the deadline."""
    waiting = False
    while True:
        with locked(dataset.with_name(f".{dataset.name}.turn")) as free:
            if free:
                yield
                return
        if clock.is_up:
            raise Stopped(signal.SIGTERM, "the dataset, which another process is preparing")
        if not waiting:
            report.say(f"another process is preparing {dataset}; waiting for it")
            waiting = True
        time.sleep(POLL_INTERVAL)


def free_memory(device: torch.device) -> None:
    """Frees GPU memory and compiled code, so that every row is compiled from scratch.

    After one model the compiler generates more general code for the next.
    """
    if device.type == "cuda":
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
