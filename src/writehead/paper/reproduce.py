"""Makes the missing results of a table, row by row; trains and scores those of Tables 1 and 3.

An interrupted run resumes. Several processes can work on the same table: each locks the row that it
works on. All rows see the same batches in the same order.
"""

import gc
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from writehead import cost
from writehead.bench.record import check_writable, write_result
from writehead.config import ModelConfig, TrainConfig
from writehead.data.dataset import Dataset
from writehead.data.prepare import prepare
from writehead.engine import Engine
from writehead.errors import RunError
from writehead.model import LanguageModel
from writehead.paper.experiments import Experiment, Text, read_lines
from writehead.paper.results import FORMAT, Result, check_results, result_path, setting_differences
from writehead.runs.folder import PLAN, read_config
from writehead.training import evaluate
from writehead.training.journal import read_log
from writehead.training.loop import train
from writehead.training.plan import read_plan
from writehead.util.devices import find_device
from writehead.util.environment import environment
from writehead.util.locks import locked
from writehead.util.progress import Reporter

POLL_INTERVAL = 1.0  # seconds between checks whether another process has released a lock
SEARCHED = {"dev": ("greedy",), "test": ("greedy", "beam-4")}  # §4.2


@dataclass(frozen=True)
class Row:
    """A result to make: its row, its file, its lock file and its seed."""

    name: str
    result: Path
    lock: Path
    seed: int = 0


def missing_rows(rows: Sequence[Row], report: Reporter) -> list[Row]:
    """Returns the rows without a result and reports the others."""
    for row in rows:
        if row.result.is_file():
            report.say(f"{row.result} exists; skipped")
    return [row for row in rows if not row.result.is_file()]


def make_rows(rows: Sequence[Row], make: Callable[[Row], Result], report: Reporter) -> None:
    """Makes the missing results, except for rows that other processes are working on."""
    for row in rows:
        with locked(row.lock) as free:
            if not free:
                report.say(f"{row.result.stem}: another process is working on it; skipped")
            elif not row.result.is_file():
                report.say(f"{row.result.stem}: started")
                write_result(row.result, make(row))
                report.say(f"{row.result.stem}: written to {row.result}")


def free_memory(device: torch.device) -> None:
    """Frees GPU memory, and compiled code that would make the next model's shapes dynamic."""
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

    def run(self, row: Row) -> Path:
        """Returns the folder in which a row is trained."""
        return self.runs / self.experiment.table / self.experiment.scale / row.result.stem

    def row(self, name: str, seed: int) -> Row:
        """Returns a row with a seed and its files."""
        table, scale = self.experiment.table, self.experiment.scale
        result = result_path(self.results, table, scale, name, seed)
        return Row(name, result, self.runs / table / scale / f".{result.stem}.lock", seed)

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


def reproduce_quality(job: Job, report: Reporter | None = None) -> list[Path]:
    """Trains and scores the missing rows; returns the files of all wanted results."""
    report, experiment = report or Reporter(), job.experiment
    rows = [job.row(name, seed) for seed in job.seeds for name in job.rows]
    check_results(job.results, job.settings(rows[0], None))
    missing = missing_rows(rows, report)
    if missing:
        if experiment.prepare.task == "translation":
            evaluate.load_sacrebleu()  # raises before hours of training if it is missing
        for row in missing:
            check_started(job, row)
            check_writable(row.result)
        text, data = prepare_text(job, report)
        check_results(job.results, job.settings(rows[0], data))
        make_rows(missing, lambda row: _make(job, row, data, text), report)
    return [row.result for row in rows]


def prepare_text(job: Job, report: Reporter) -> tuple[Text, Dataset]:
    """Returns the text of an experiment, and the dataset made of it."""
    experiment = job.experiment
    text = experiment.text(job.data)
    dataset = job.runs / "data" / f"{experiment.table}-{experiment.scale}"
    with waiting(dataset.with_name(f".{dataset.name}.turn")):
        return text, prepare(dataset, text.inputs, experiment.prepare, progress=report)


@contextmanager
def waiting(lock: Path) -> Iterator[None]:
    """Waits until no other process holds a lock, and locks it."""
    while True:
        with locked(lock) as free:
            if free:
                yield
                return
        time.sleep(POLL_INTERVAL)


def check_started(job: Job, row: Row) -> None:
    """Raises RunError if a row was started with other settings."""
    run = job.run(row)
    if (run / PLAN).is_file():
        settings = job.settings(row, None)["train"]
        differences = setting_differences(read_plan(run)["train"], settings)
        if differences:
            raise RunError(
                f"{run} was started with other settings: {'; '.join(differences)}; use the same "
                f"settings, or another folder for runs"
            )


def train_or_stop(
    data: Dataset, run: Path, model: ModelConfig, config: TrainConfig, **options: Any
) -> None:
    """Trains a model; a signal that stopped the training then acts as usual."""
    outcome = train(data.directory, run, model, config, **options)
    if outcome.stopped_by is not None:
        signal.raise_signal(outcome.stopped_by)


def _make(job: Job, row: Row, data: Dataset, text: Text) -> Result:
    """Trains and scores one row; returns its result."""
    run, device, began = job.run(row), find_device(job.device), time.monotonic()
    free_memory(device)
    config, model = replace(job.train, seed=row.seed), job.experiment.rows[row.name]
    train_or_stop(data, run, model, config, device=job.device)
    trained = time.monotonic()
    scores, log, model = score(run, text, job.device), read_log(run), read_config(run)
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
        "environment": environment(device),
    }


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
