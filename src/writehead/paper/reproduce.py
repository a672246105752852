"""Makes the missing results of a table row by row; trains and scores those of Tables 1 and 3.

An interrupted run resumes. Processes that are given the same table share its rows: a lock file
claims the row at work. All rows see the same batches in the same order.
"""

import gc
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from writehead import cost
from writehead.bench.record import check_writable, write_result
from writehead.config import TrainConfig
from writehead.data.dataset import Dataset
from writehead.data.prepare import prepare
from writehead.decoding import Engine
from writehead.errors import RunError
from writehead.model import LanguageModel
from writehead.model.runs import read_config
from writehead.paper.experiments import Experiment, Text, read_lines
from writehead.paper.results import (
    FORMAT,
    Result,
    check_results,
    result_path,
    setting_differences,
)
from writehead.training import evaluate
from writehead.training.journal import read_log
from writehead.training.loop import train
from writehead.training.plan import PLAN, read_plan
from writehead.util.devices import find_device
from writehead.util.environment import environment
from writehead.util.locks import locked
from writehead.util.progress import Reporter

SIGNAL_INTERVAL = 0.01  # seconds between attempts to stop training after the deadline
POLL_INTERVAL = 1.0  # seconds between checks whether another process has prepared the dataset
SEARCHED = {"dev": ("greedy",), "test": ("greedy", "beam-4")}  # §4.2


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


@dataclass(frozen=True)
class Job:
    """The rows and seeds of an experiment to run, and the folders to use."""

    experiment: Experiment
    train: TrainConfig
    rows: tuple[str, ...]
    seeds: tuple[int, ...]
    data: Path | None
    results: Path
    runs: Path
    device: str = "auto"
    minutes: float | None = None

    def run(self, row: Row) -> Path:
        """Returns the folder in which a row is trained."""
        return self.runs / self.experiment.table / self.experiment.scale / row.result.stem

    def row(self, name: str, seed: int) -> Row:
        """Returns a row with a seed and its files."""
        table, scale = self.experiment.table, self.experiment.scale
        result = result_path(self.results, table, scale, name, seed)
        lock = self.runs / table / scale / f".{result.stem}.lock"
        return Row(name, result, lock, seed)

    def settings(self, row: Row, data: Dataset | None) -> Result:
        """Returns the part of a row's result that is known before training."""
        return {
            "table": self.experiment.table,
            "scale": self.experiment.scale,
            "family": self.experiment.family,
            "row": row.name,
            "seed": row.seed,
            "train": replace(self.train, seed=row.seed).to_json(),
            "data": data and {**data.facts, "fingerprint": data.fingerprint},
        }


def reproduce_quality(job: Job, report: Reporter | None = None) -> Summary:
    """Trains and scores the missing rows until all are done or the time is up."""
    report, clock = report or Reporter(), Clock(job.minutes)
    rows = [job.row(name, seed) for seed in job.seeds for name in job.rows]
    check_results(job.results, job.settings(rows[0], None))
    todo = missing_rows(job.experiment.name, rows, report)
    if not todo:
        return summarize(rows)
    if job.experiment.prepare.task == "translation":
        evaluate.load_sacrebleu()  # raises before hours of training if it is missing
    for row in todo:
        _check_started(job, row)
        check_writable(row.result)
    text, dataset = job.experiment.text(job.data), job.runs / job.experiment.dataset
    try:
        with preparing(dataset, clock, report):
            data = prepare(dataset, text.inputs, job.experiment.prepare, progress=report)
    except Stopped as stopped:
        return summarize(rows, stopped)
    check_results(job.results, job.settings(rows[0], data))
    make = partial(_make, job, data, text, clock, report)
    return make_rows(job.experiment.name, rows, make, clock, report)


def _check_started(job: Job, row: Row) -> None:
    """Raises RunError if a row was started with other settings."""
    run = job.run(row)
    if not (run / PLAN).is_file():
        return
    settings = job.settings(row, None)["train"]
    differences = setting_differences(read_plan(run)["train"], settings)
    if differences:
        raise RunError(
            f"{run} was started with other settings: {'; '.join(differences)}; use the same "
            f"settings, or another folder for runs"
        )


def _make(
    job: Job,
    data: Dataset,
    text: Text,
    clock: Clock,
    report: Reporter,
    row: Row,
) -> Result:
    """Trains and scores one row; returns its result."""
    run, began = job.run(row), time.monotonic()
    _train(job, row, data.directory, clock)
    trained = time.monotonic()
    report.say(f"{row.result.stem}: scoring")
    scores = score(run, text, job.device)
    report.say(f"{row.result.stem}: dev ln(PPL) {scores['dev']['ln_ppl']:.3f}")
    log, model = read_log(run), read_config(run)
    speeds = [entry["tokens_per_second"] for entry in log if "tokens_per_second" in entry]
    return {
        "format": FORMAT,
        **job.settings(row, data),
        "model": model.to_json(),
        "parameters": sum(cost.parameters(model).values()),
        "scores": scores,
        "log": log,
        "timings": {
            "training_s": trained - began,  # since the last resumption
            "scoring_s": time.monotonic() - trained,
            "tokens_per_second": statistics.median(speeds),
        },
        "run": str(run),
        "environment": environment(find_device(job.device)),
    }


def _train(job: Job, row: Row, dataset: Path, clock: Clock) -> None:
    """Trains a row to its last step; raises Stopped if a signal or the deadline stops it."""
    run, model = job.run(row), job.experiment.rows[row.name]
    config = replace(job.train, seed=row.seed)
    free_memory(find_device(job.device))
    with clock.stopping_training():
        outcome = train(dataset, run, model, config, device=job.device)
    if outcome.stopped_by is None and outcome.step != config.steps:
        raise RunError(
            f"{run} has {outcome.step} steps instead of {config.steps}, so it is not scored; "
            f"ask for that many steps, or use another folder for runs"
        )
    if outcome.stopped_by or outcome.late or clock.is_up:
        at = f"{row.result.stem}, after step {outcome.step} of {config.steps}"
        raise Stopped(outcome.stopped_by or outcome.late or signal.SIGTERM, at)


def score(run: Path, text: Text, device: str) -> dict[str, Any]:
    """Scores a run on each text: likelihoods in float32, translations in the engine's dtype."""
    exact = Engine.load(run, device, "float32")
    lines = {name: read_lines(source) for name, source in text.scored.items()}
    if isinstance(exact.model, LanguageModel):
        return {name: evaluate.evaluate_text(exact, own) for name, (_, own) in lines.items()}
    fast, scores = Engine.load(run, device), {}
    for name, (sources, targets) in lines.items():
        scores[name] = evaluate.evaluate_translation(fast, sources, targets, SEARCHED[name])
        scores[name]["ln_ppl"] = evaluate.text_likelihood(exact, targets, sources).ln_ppl
        scores[name]["dtype"] = str(fast.model.dtype).removeprefix("torch.")
    return scores
