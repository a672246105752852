"""§4.2: runs Table 1 or 3 row by row: train, score, write; stop at any point and go on.

The rows differ in their attention and in nothing else: they see the same batches in the same
order, are as large, and are trained alike. What is done is not done again.
"""

import gc
import json
import signal
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from writehead import cost
from writehead.bench.record import check_writable, environment, write_result
from writehead.config import TrainConfig
from writehead.data.dataset import Dataset
from writehead.data.prepare import prepare
from writehead.data.progress import Reporter
from writehead.errors import RunError
from writehead.model.runs import read_config
from writehead.paper.experiments import Experiment
from writehead.paper.results import FORMAT, check_company, read_result, result_path, unlike
from writehead.paper.score import score
from writehead.paper.texts import Text
from writehead.training.checkpoint import list_checkpoints
from writehead.training.evaluate import load_sacrebleu
from writehead.training.journal import read_log
from writehead.training.loop import Outcome, train
from writehead.training.plan import PLAN, read_plan
from writehead.util.devices import find_device
from writehead.util.files import write_file
from writehead.util.json_files import read_json
from writehead.util.locks import locked

SESSIONS = "sessions.json"  # in a run's folder: what each sitting did, for its time
TICK = 0.01  # seconds between two reminders that the time is up
LOOK = 1.0  # seconds between two looks whether another process has prepared the dataset
AT_THE_DATASET = "the dataset, which another process is preparing"  # where the time ran out


@dataclass(frozen=True)
class Job:
    """What is to be run, from where and to where; `minutes` is how long this sitting may take."""

    experiment: Experiment
    train: TrainConfig
    rows: tuple[str, ...]
    seeds: tuple[int, ...]
    data: Path | None
    results: Path
    runs: Path
    device: str = "auto"
    minutes: float | None = None

    @property
    def pairs(self) -> list[tuple[str, int]]:
        """Row and seed, in the order in which they are run: all rows by the first seed first."""
        return [(row, seed) for seed in self.seeds for row in self.rows]

    def result(self, row: str, seed: int) -> Path:
        """Where a result is written."""
        return result_path(self.results, self.experiment.table, self.experiment.scale, row, seed)

    def run(self, row: str, seed: int) -> Path:
        """The folder that a row is trained in."""
        return self.runs / self.experiment.table / self.experiment.scale / f"{row}-seed{seed}"

    def lock(self, row: str, seed: int) -> Path:
        """What is claimed by the process that trains and scores a row.

        So several processes, a GPU each, can be given the same command and share the rows.
        """
        run = self.run(row, seed)
        return run.with_name(f".{run.name}.lock")

    @property
    def dataset(self) -> Path:
        """Where the dataset is prepared."""
        return self.runs / self.experiment.dataset


@dataclass(frozen=True)
class Ending:
    """How a sitting ended: how many results are there of how many, and what stopped it where."""

    done: int
    of: int
    stopped_by: int | None = None
    at: str | None = None


class Clock:
    """The time that a sitting has."""

    def __init__(self, minutes: float | None) -> None:
        self._end = None if minutes is None else time.monotonic() + 60 * minutes

    @property
    def is_up(self) -> bool:
        """Whether the time has passed."""
        return self._end is not None and time.monotonic() >= self._end

    @contextmanager
    def stopping_training(self) -> Iterator[None]:
        """Sends SIGTERM to this process when the time is up, whenever training listens to it.

        Outside of its loop nobody does, so it is sent again and again until the block ends.
        """
        if self._end is None or threading.current_thread() is not threading.main_thread():
            yield
            return

        outside = signal.getsignal(signal.SIGTERM)

        def remind(number: int, frame: FrameType | None) -> None:
            if signal.getsignal(signal.SIGTERM) is not outside:
                signal.raise_signal(signal.SIGTERM)

        before = signal.signal(signal.SIGALRM, remind)
        signal.siginterrupt(signal.SIGALRM, False)  # a reminder disturbs no read or write
        signal.setitimer(signal.ITIMER_REAL, max(self._end - time.monotonic(), TICK), TICK)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)


def reproduce(job: Job, report: Reporter | None = None) -> Ending:
    """Runs what is missing of a table, row by row, until all is there or the time is up."""
    report, clock, pairs = report or Reporter(), Clock(job.minutes), job.pairs
    todo = _missing(job, report)
    if not todo:
        report.say(
            f"{job.experiment.name}: all {len(pairs)} results are there, so nothing was trained; "
            f"give another folder with --results and another with --runs to train them anew"
        )
        return Ending(len(pairs), len(pairs))
    if job.experiment.prepare.task == "translation":
        load_sacrebleu()  # like the checks below, before hours of training
    for row, seed in todo:
        _check_begun(job, row, seed)
        check_writable(job.result(row, seed))
    text = job.experiment.text(job.data)
    with turn(job.dataset, clock, report) as is_ours:
        if not is_ours:
            return Ending(_count(job), len(pairs), int(signal.SIGTERM), AT_THE_DATASET)
        data = prepare(job.dataset, text.inputs, job.experiment.prepare, progress=report)
    check_company(job.results, _expected(job, *todo[0], describe(data)))
    for row, seed in todo:
        _check_dataset(job, row, seed, data)
    while True:
        passed = []
        for row, seed in todo:
            with locked(job.lock(row, seed)) as free:
                if not free:
                    report.say(f"{row}, seed {seed}: another process is at it; passed over")
                    passed.append((row, seed))
                    continue
                stopped = _run(job, row, seed, data, text, clock, report)
            if stopped is not None:
                return stopped
        if len(passed) in (0, len(todo)):
            return Ending(_count(job), len(pairs))
        todo = passed  # the other may have been stopped meanwhile


def _run(
    job: Job,
    row: str,
    seed: int,
    data: Dataset,
    text: Text,
    clock: Clock,
    report: Reporter,
) -> Ending | None:
    """Trains and scores a row that is this process's; the ending where it was stopped."""
    done, pairs = _count(job), len(job.pairs)
    if job.result(row, seed).is_file():
        report.say(f"{row}, seed {seed}: another process has it; skipped")
        return None
    report.say(
        f"{job.experiment.name}: row {done + 1} of {pairs}, {row}, seed {seed}"
        f"{_time_left(job, pairs - done)}"
    )
    _check_begun(job, row, seed)  # by now another process may have
    outcome = _train(job, row, seed, data.directory, clock)
    if outcome.stopped_by or outcome.late or clock.is_up:
        stopped_by = outcome.stopped_by or outcome.late or int(signal.SIGTERM)
        at = f"{row}, seed {seed}, after step {outcome.step} of {job.train.steps}"
        return Ending(_count(job), pairs, stopped_by, at)
    _finish(job, row, seed, text, describe(data), report)
    return None


def describe(data: Dataset) -> dict[str, Any]:
    """What a result says of its dataset; the fingerprint tells two datasets apart."""
    return {**data.facts, "fingerprint": data.fingerprint}


def _missing(job: Job, report: Reporter) -> list[tuple[str, int]]:
    """Rows and seeds without a result; raises where one that is there was made otherwise."""
    check_company(job.results, _expected(job, *job.pairs[0], None))
    todo = []
    for row, seed in job.pairs:
        path = job.result(row, seed)
        if path.is_file():
            report.say(f"{row}, seed {seed}: {path} is there; skipped")
        else:
            todo.append((row, seed))
    return todo


def _check_begun(job: Job, row: str, seed: int) -> None:
    """Raises where a row was begun with settings that would make its result say what is not so."""
    run = job.run(row, seed)
    if (run / PLAN).is_file():
        asked = replace(job.train, seed=seed).to_json()
        differences = unlike(read_plan(run)["train"], asked, "here")
        if differences:
            raise RunError(
                f"{run} was begun with other settings: {'; '.join(differences)}; use the same "
                f"settings, or give these their own --runs"
            )


def _check_dataset(job: Job, row: str, seed: int, data: Dataset) -> None:
    """Raises where a row was begun on another dataset; training would too, at that row's turn."""
    run = job.run(row, seed)
    if (run / PLAN).is_file() and read_plan(run)["dataset"] not in (None, data.fingerprint):
        raise RunError(
            f"{run} was begun on another dataset than {job.dataset}; give these rows their own "
            f"--runs, or remove that folder to begin it anew"
        )


@contextmanager
def turn(dataset: Path, clock: Clock, report: Reporter) -> Iterator[bool]:
    """Whether this process may prepare a dataset, once no other does; not if the time is up."""
    is_told = False
    while True:
        with locked(dataset.with_name(f".{dataset.name}.turn")) as free:
            if free or clock.is_up:
                yield free
                return
        if not is_told:
            report.say(f"another process is preparing {dataset}; waiting for it")
            is_told = True
        time.sleep(LOOK)


def _expected(job: Job, row: str, seed: int, data: dict[str, Any] | None) -> dict[str, Any]:
    """What a result will say of how it was made, as far as that is known before."""
    return {
        "table": job.experiment.table,
        "scale": job.experiment.scale,
        "family": job.experiment.family,
        "row": row,
        "seed": seed,
        "train": replace(job.train, seed=seed).to_json(),
        "data": data,
    }


def _count(job: Job) -> int:
    return sum(job.result(row, seed).is_file() for row, seed in job.pairs)


def _train(job: Job, row: str, seed: int, dataset: Path, clock: Clock) -> Outcome:
    """Trains a row, or goes on with it, until its last step or until it is stopped."""
    run, config = job.run(row, seed), replace(job.train, seed=seed)
    before = max((step for step, _ in list_checkpoints(run)), default=0)
    clear(find_device(job.device))
    began = time.monotonic()
    with clock.stopping_training():
        outcome = train(dataset, run, job.experiment.rows[row], config, device=job.device)
    if outcome.step > before:
        sitting = {
            "from_step": before,
            "to_step": outcome.step,
            "seconds": time.monotonic() - began,
            "device": environment(find_device(job.device))["hardware"]["device"],
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        text = json.dumps([*_sessions(run), sitting], indent=2) + "\n"
        write_file(run / SESSIONS, text.encode())
    if outcome.stopped_by is None and outcome.step != config.steps:
        raise RunError(
            f"{run} has {outcome.step} steps and {config.steps} were asked for, so it is not "
            f"scored; ask for as many, or give this its own --runs"
        )
    return outcome


def clear(device: torch.device) -> None:
    """Gives back what the last model left on a GPU, compiled code included.

    A compiler that has seen one model makes more general code for the next, and gives up after a
    few; rows are to be trained alike, whichever came before.
    """
    if device.type == "cuda":
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()


def _sessions(run: Path) -> list[dict[str, Any]]:
    """The sittings that a run was trained in; one that was killed left no trace."""
    path = run / SESSIONS
    if not path.is_file():
        return []
    return list(read_json(path, [{"seconds": float}], RunError, "delete it to resume"))


def _finish(
    job: Job, row: str, seed: int, text: Text, data: dict[str, Any], report: Reporter
) -> None:
    """Scores a trained row and writes its result."""
    run, began = job.run(row, seed), time.monotonic()
    report.say(f"{row}, seed {seed}: scoring")
    scores = score(run, text, job.device)
    log, sessions = read_log(run), _sessions(run)
    speeds = [entry["tokens_per_second"] for entry in log if "tokens_per_second" in entry]
    model = read_config(run)
    result = {
        "format": FORMAT,
        **_expected(job, row, seed, data),
        "model": model.to_json(),
        "parameters": sum(cost.parameters(model).values()),
        "scores": scores,
        "log": log,
        "timings": {
            "training_s": sum(one["seconds"] for one in sessions),
            "scoring_s": time.monotonic() - began,
            "tokens_per_second": statistics.median(speeds),
            "sessions": sessions,
        },
        "run": str(run),
        "environment": environment(find_device(job.device)),
    }
    path = job.result(row, seed)
    write_result(path, result)
    report.say(f"{row}, seed {seed}: {_in_short(scores)}; {path}")


def _in_short(scores: dict[str, Any]) -> str:
    """The scores of a row in a line."""
    words = []
    for name, found in scores.items():
        figure = f"ln(PPL) {found['ln_ppl']:.3f}"
        if "ppl_per_word" in found:
            figure = f"perplexity a word {found['ppl_per_word']:.2f}"
        bleu = [f"{one['intl']:.2f}" for one in found.get("bleu", {}).values()]
        name = f"other text, {found['name']}," if name == "other" else name
        words.append(f"{name} {figure}" + (f", BLEU {' / '.join(bleu)}" if bleu else ""))
    return "; ".join(words)


def _time_left(job: Job, rows: int) -> str:
    """How long the rows that are left will take, if some were done on such a device."""
    here = environment(find_device(job.device))["hardware"]["device"]
    done = [
        read_result(path) for row, seed in job.pairs if (path := job.result(row, seed)).is_file()
    ]
    timings = [one["timings"] for one in done if one["environment"]["hardware"]["device"] == here]
    if not timings:
        return ""
    pace = statistics.mean(one["training_s"] + one["scoring_s"] for one in timings)
    return f"; {timedelta(seconds=round(pace * rows))} left"
