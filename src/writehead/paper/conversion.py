"""Converts a multi-head translation model to fewer write-heads, and trains the results briefly.

The model is that of Table 1. Rows differ in the number of write-heads, the method of conversion,
the steps of training after it, and whether the multi-head model is the teacher. An interrupted run
resumes, and several processes can divide the rows, as for Table 1.
"""

import platform
import shutil
import time
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from writehead import cost
from writehead.bench.decode import Job as DecodeJob
from writehead.bench.decode import Place, decode_row
from writehead.bench.floor import measure_chip
from writehead.bench.peers import Subject
from writehead.bench.record import check_writable
from writehead.config import ModelConfig, TrainConfig
from writehead.data.dataset import Dataset
from writehead.errors import RunError
from writehead.interop.convert import METHODS, Method, convert, converted_config
from writehead.interop.pretrained import RunFacts
from writehead.paper.experiments import Text
from writehead.paper.reproduce import (
    Job,
    Row,
    check_started,
    free_memory,
    make_rows,
    missing_rows,
    prepare_text,
    score,
    train_or_stop,
    waiting,
)
from writehead.paper.results import ENVIRONMENT, FORMAT, SCORED, SIZE, Result, result_path
from writehead.paper.speed import WORKLOADS
from writehead.runs.folder import CONFIG, read_config
from writehead.schema import with_settings
from writehead.training.checkpoint import list_checkpoints
from writehead.training.evaluate import load_sacrebleu
from writehead.training.journal import read_log
from writehead.training.origin import Origin
from writehead.training.plan import read_plan
from writehead.util.devices import find_device, find_dtype
from writehead.util.environment import environment
from writehead.util.json_files import read_json
from writehead.util.progress import Reporter

TABLE, BASE, SPEED, SCRATCH = "conversion", "multi-head", "speed", "multi-query"
WRITE_HEADS = (1, 2, 4)
PERCENTS = (5, 10, 2, 1)  # of the steps of the multi-head model, in the order in which to run them
FIELDS = dict.fromkeys(("table", "scale", "family", "row"), str) | {
    "format": range(FORMAT, FORMAT + 1),
    "environment": ENVIRONMENT,
}
QUALITY = FIELDS | {
    "base": str,
    "seed": range(2**63),
    "steps": range(2**31),
    "base_steps": SIZE,
    "data": {"fingerprint": str},
    "model": dict,
    "scores": {"dev": SCORED, "test": SCORED},
}
DECODED = {
    "preset": str,
    "model": dict,
    "setting": dict.fromkeys(("batch", "source", "target", "beam"), SIZE),
    "floor": {"step_ms": {"true": float}},
    "measured": {"ours, true lengths": {"step_ms": {"median": float}}},
}
SPEEDS = FIELDS | {"dtype": str, "decode": [DECODED]}
ADVICE = "delete it and run its row again"


@dataclass(frozen=True)
class Variant:
    """A converted model: its write-heads, the method, and the training after the conversion."""

    g: int
    method: Method
    percent: int = 0
    teacher: bool = False

    @property
    def name(self) -> str:
        """The name of the row, such as "g1-aligned-5-teacher"."""
        trained = f"-{self.percent}{'-teacher' * self.teacher}" if self.percent else ""
        return f"g{self.g}-{self.method}{trained}"


VARIANTS = {
    variant.name: variant
    for variant in (
        *(Variant(g, method) for g, method in product(WRITE_HEADS, METHODS)),
        *(
            Variant(g, method, percent, teacher)
            for percent, g, method, teacher in product(
                PERCENTS, WRITE_HEADS, METHODS, (True, False)
            )
        ),
    )
}
ROWS = (SPEED, BASE, *VARIANTS)


@dataclass(frozen=True)
class Conversion:
    """The experiment of Table 1 whose multi-head model is converted, and the rows to make.

    The steps of the multi-head model are those of `job`; `settings` change the training after the
    conversion.
    """

    job: Job
    settings: dict[str, str]

    def uptraining(self, percent: int, seed: int) -> TrainConfig:
        """Returns how a converted model is trained: the learning rate falls linearly."""
        steps = max(1, round(self.job.train.steps * percent / 100))
        config = replace(
            self.job.train,
            steps=steps,
            seed=seed,
            learning_rate=self.job.train.learning_rate / 2,
            schedule="constant",
            warmup=max(1, steps // 10),
            decay=0.9,
            evaluate_every=steps,
            checkpoint_every=max(100, steps),
            keep=1,
            average=1,
        )
        return with_settings(config, self.settings)

    @property
    def scale(self) -> str:
        """The scale of the experiment."""
        return self.job.experiment.scale

    @property
    def base(self) -> Row:
        """The row of Table 1 whose model is converted."""
        return self.job.row(BASE, 0)

    def row(self, name: str, seed: int) -> Row:
        """Returns a row with a seed and its files; all timings share one lock per machine."""
        result = result_path(self.job.results, TABLE, self.scale, name, seed)
        lock = self.job.runs / TABLE / self.scale / f".{result.stem}.lock"
        if name == SPEED:
            result = result_path(self.job.results, TABLE, self.scale, name)
            lock = self.job.runs / "table2" / f".{self.scale}-{platform.node()}.lock"
        return Row(name, result, lock, seed)

    @property
    def rows(self) -> list[Row]:
        """The wanted rows; seeds matter to rows with training only."""
        wanted = product(self.job.seeds, self.job.rows)
        once = [(seed, name) for seed, name in wanted if seed == 0 or _percent(name)]
        return [self.row(name, seed) for seed, name in once]


def _percent(row: str) -> int:
    """Returns the training of a row in percent of the steps of the multi-head model."""
    return VARIANTS[row].percent if row in VARIANTS else 0


def reproduce_conversion(conversion: Conversion, report: Reporter | None = None) -> list[Path]:
    """Makes the missing rows; returns the files of all wanted results."""
    report, job, rows = report or Reporter(), conversion.job, conversion.rows
    check_base(job.results, conversion.scale)
    missing = missing_rows(rows, report)
    for row in missing:
        check_writable(row.result)
    timed = [row for row in missing if row.name == SPEED]
    make_rows(timed, lambda row: _time(conversion, report), report)
    scored = [row for row in missing if row.name != SPEED]
    if scored:
        load_sacrebleu()  # fails now, not after minutes of training
        check_started(job, conversion.base)
        _check_copied(conversion)
        text, data = prepare_text(job, report)
        base = _train_base(conversion, data)
        check_base(job.results, conversion.scale, RunFacts.read(base).fingerprint)
        make_rows(scored, lambda row: _make(conversion, row, data, text, base), report)
    return [row.result for row in rows]


def check_base(results: Path, scale: str, base: str | None = None) -> None:
    """Raises RunError if the rows were not converted from one model, or not from `base`."""
    for path in sorted((results / TABLE / scale).glob("*-seed*.json")):
        own = read_row(path)["base"]
        if own != (base := base or own):
            raise RunError(
                f"{path} was converted from another multi-head model than the other rows; use "
                f"another folder for results"
            )


def _check_copied(conversion: Conversion) -> None:
    """Raises RunError if there are rows, but not the model that they were converted from."""
    job, run = conversion.job, conversion.job.run(conversion.base)
    if (run / CONFIG).is_file():
        check_base(job.results, conversion.scale, RunFacts.read(run).fingerprint)
        return
    for path in sorted((job.results / TABLE / conversion.scale).glob("*-seed*.json")):
        raise RunError(
            f"{path} was converted from a multi-head model that is not at {run}; copy the model "
            f"there, or use another folder for results"
        )


def read_row(path: Path) -> Result:
    """Reads the result of a row."""
    shape = SPEEDS if path.stem == SPEED else QUALITY
    result: Result = read_json(path, shape, RunError, ADVICE)
    return result


def _train_base(conversion: Conversion, data: Dataset) -> Path:
    """Returns the finished run of the multi-head model, which Table 1 shares.

    A finished run without checkpoints, such as a copy from another machine, is used as it is.
    """
    job, row = conversion.job, conversion.base
    run, config = job.run(row), replace(job.train, seed=row.seed)
    with waiting(row.lock):
        if (run / CONFIG).is_file() and not list_checkpoints(run):
            if read_plan(run)["dataset"] != data.fingerprint:
                raise RunError(f"{run} was trained on another dataset; use another folder for runs")
            return run
        train_or_stop(data, run, job.experiment.rows[BASE], config, device=job.device)
    return run


def _make(conversion: Conversion, row: Row, data: Dataset, text: Text, base: Path) -> Result:
    """Converts, trains and scores one row; returns its result, and deletes its runs."""
    job, began, fingerprint = conversion.job, time.monotonic(), RunFacts.read(base).fingerprint
    device, train = find_device(job.device), None
    free_memory(device)
    # runs converted from another base are never resumed
    folder = job.runs / TABLE / f"{conversion.scale}-{fingerprint}" / row.result.stem
    run, variant = base, VARIANTS.get(row.name)
    if variant is not None:
        run = folder / "converted"
        if not run.exists():
            convert(base, run, write_heads=variant.g, method=variant.method)
    if variant is not None and variant.percent:
        origin, start = Origin(run, base if variant.teacher else None), read_config(run)
        train, run = conversion.uptraining(variant.percent, row.seed), folder / "trained"
        train_or_stop(data, run, start, train, origin=origin, device=job.device)
    trained, scores, model = time.monotonic(), score(run, text, job.device), read_config(run)
    result: dict[str, Any] = {
        "format": FORMAT,
        "table": TABLE,
        "scale": conversion.scale,
        "family": job.experiment.family,
        "row": row.name,
        "seed": row.seed,
        "base": fingerprint,
        "base_steps": job.train.steps,
        "steps": train.steps if train else 0,
        "train": train and train.to_json(),
        "data": {**data.facts, "fingerprint": data.fingerprint},
        "model": model.to_json(),
        "parameters": sum(cost.parameters(model).values()),
        "scores": scores,
        "log": read_log(run) if train else [],
        "timings": {"training_s": trained - began, "scoring_s": time.monotonic() - trained},
        "environment": environment(device),
    }
    shutil.rmtree(folder, ignore_errors=True)  # all rows would take tens of gigabytes
    return result


def timed_models(conversion: Conversion) -> dict[str, ModelConfig]:
    """Returns the models to time: the multi-head one, its conversions, and one from scratch."""
    rows = conversion.job.experiment.rows
    converted = {f"g{g}": converted_config(rows[BASE], g) for g in reversed(WRITE_HEADS)}
    return {BASE: rows[BASE], **converted, SCRATCH: rows[SCRATCH]}


def _time(conversion: Conversion, report: Reporter) -> Result:
    """Times decoding steps, whose time does not depend on the weights."""
    device, family = find_device(conversion.job.device), conversion.job.experiment.family
    dtype = find_dtype(None, device)
    load = WORKLOADS.get(conversion.scale, WORKLOADS["paper"])
    report.say("measuring memory bandwidth and matrix rate")
    place = Place(measure_chip(device, dtype), device, dtype, load.repeats, (), report.say)
    settings = [replace(load.setting, beam=beam, element=dtype.itemsize) for beam in (1, 4)]
    jobs = product(timed_models(conversion).items(), settings)
    return {
        "format": FORMAT,
        "table": TABLE,
        "scale": conversion.scale,
        "family": family,
        "row": SPEED,
        "dtype": str(dtype).removeprefix("torch."),
        "chip": asdict(place.chip),
        "decode": [
            decode_row(DecodeJob(name, Subject(one), setting), place, ("true",))
            for (name, one), setting in jobs
        ],
        "environment": environment(device),
    }
