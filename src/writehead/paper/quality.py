"""§4.2: trains and scores the rows of Tables 1 and 3.

All rows see the same batches in the same order and have the same number of parameters.
"""

import signal
import statistics
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from writehead import cost
from writehead.bench.record import check_writable, environment
from writehead.config import TrainConfig
from writehead.data.dataset import Dataset
from writehead.data.prepare import prepare
from writehead.data.progress import Reporter
from writehead.decoding import Engine
from writehead.decoding.devices import find_device
from writehead.errors import RunError
from writehead.model import LanguageModel
from writehead.model.runs import read_config
from writehead.paper import reproduce
from writehead.paper.experiments import Experiment
from writehead.paper.reproduce import Row
from writehead.paper.results import (
    FORMAT,
    Result,
    check_results,
    result_path,
    setting_differences,
)
from writehead.paper.texts import Text, read_lines
from writehead.training import evaluate
from writehead.training.journal import read_log
from writehead.training.loop import train
from writehead.training.plan import PLAN, read_plan

SEARCHED = {"dev": ("greedy",), "test": ("greedy", "beam-4")}  # §4.2


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


def reproduce_quality(job: Job, report: Reporter | None = None) -> reproduce.Summary:
    """Trains and scores the missing rows until all are done or the time is up."""
    report, clock = report or Reporter(), reproduce.Clock(job.minutes)
    rows = [job.row(name, seed) for seed in job.seeds for name in job.rows]
    check_results(job.results, job.settings(rows[0], None))
    todo = reproduce.missing_rows(job.experiment.name, rows, report)
    if not todo:
        return reproduce.summarize(rows)
    if job.experiment.prepare.task == "translation":
        evaluate.load_sacrebleu()  # raises before hours of training if it is missing
    for row in todo:
        _check_started(job, row)
        check_writable(row.result)
    text, dataset = job.experiment.text(job.data), job.runs / job.experiment.dataset
    try:
        with reproduce.preparing(dataset, clock, report):
            data = prepare(dataset, text.inputs, job.experiment.prepare, progress=report)
    except reproduce.Stopped as stopped:
        return reproduce.summarize(rows, stopped)
    check_results(job.results, job.settings(rows[0], data))
    make = partial(_make, job, data, text, clock, report)
    return reproduce.make_rows(job.experiment.name, rows, make, clock, report)


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
    clock: reproduce.Clock,
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


def _train(job: Job, row: Row, dataset: Path, clock: reproduce.Clock) -> None:
    """Trains a row to its last step; raises Stopped if a signal or the deadline stops it."""
    run, model = job.run(row), job.experiment.rows[row.name]
    config = replace(job.train, seed=row.seed)
    reproduce.free_memory(find_device(job.device))
    with clock.stopping_training():
        outcome = train(dataset, run, model, config, device=job.device)
    if outcome.stopped_by is None and outcome.step != config.steps:
        raise RunError(
            f"{run} has {outcome.step} steps instead of {config.steps}, so it is not scored; "
            f"ask for that many steps, or use another folder for runs"
        )
    if outcome.stopped_by or outcome.late or clock.is_up:
        at = f"{row.result.stem}, after step {outcome.step} of {config.steps}"
        raise reproduce.Stopped(outcome.stopped_by or outcome.late or signal.SIGTERM, at)


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
