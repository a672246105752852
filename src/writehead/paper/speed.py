"""§4.3: times the rows of Table 2: a training step, and greedy and beam-4 decoding."""

import platform
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from writehead.bench.decode import ON_CPU, Place, decode_row
from writehead.bench.floor import measure_chip
from writehead.bench.train import TrainJob, bench_train
from writehead.config import TrainConfig
from writehead.cost import Setting
from writehead.paper.presets import rows
from writehead.paper.reproduce import (
    Clock,
    Row,
    Summary,
    free_memory,
    make_rows,
    missing_rows,
    summarize,
)
from writehead.paper.results import FORMAT, Result, result_path
from writehead.paper.tables import TABLE_2, TABLE_2_SETTING
from writehead.util.devices import find_device, find_dtype
from writehead.util.environment import environment
from writehead.util.progress import Reporter

WARMUP = 8  # training steps before the timed ones, for compilation and graph capture
ROWS = tuple(row.row for row in TABLE_2)


@dataclass(frozen=True)
class Workload:
    """What is timed at one scale, and how often."""

    family: str
    setting: Setting
    train: TrainConfig
    repeats: int
    steps: int


_PAPER = Workload("wmt14", TABLE_2_SETTING, TrainConfig(), repeats=5, steps=20)
_TINY_TRAIN = TrainConfig(rows=8, source_length=64, target_length=64)
WORKLOADS = {
    "tiny": Workload("tiny", ON_CPU, _TINY_TRAIN, repeats=3, steps=10),
    "small": replace(_PAPER, family="wmt14-small"),
    "paper-size": _PAPER,  # the text does not affect the time
    "paper": _PAPER,
}


@dataclass(frozen=True)
class SpeedJob:
    """The rows to time, and the folders to use."""

    scale: str
    rows: tuple[str, ...]
    results: Path
    runs: Path
    device: str = "auto"
    minutes: float | None = None


def default_scale(device: str) -> str:
    """Returns "tiny" on a CPU and "paper" on a GPU."""
    return "tiny" if find_device(device).type == "cpu" else "paper"


def reproduce_speed(job: SpeedJob, report: Reporter | None = None) -> Summary:
    """Times the missing rows until all are done or the time is up."""
    report, name = report or Reporter(), f"table2, scale {job.scale}"
    # one lock for all rows: two processes on one machine would slow each other down
    lock = job.runs / "table2" / f".{job.scale}-{platform.node()}.lock"
    wanted = [
        Row(row, result_path(job.results, "table2", job.scale, row), lock) for row in job.rows
    ]
    if not missing_rows(name, wanted, report):
        return summarize(wanted)
    device = find_device(job.device)
    if device.type == "cpu" and job.scale != "tiny":
        report.say("on a CPU this may take hours; scale tiny takes a minute")
    report.say("measuring memory bandwidth and matrix rate")
    dtype, load = find_dtype(None, device), WORKLOADS[job.scale]
    place = Place(measure_chip(device, dtype), device, dtype, load.repeats, (), report.say)
    make = partial(_time, job.scale, load, place)
    return make_rows(name, wanted, make, Clock(job.minutes), report)


def _time(scale: str, load: Workload, place: Place, row: Row) -> Result:
    """Times one row; returns its result."""
    name, config = f"{load.family}/{row.name}", rows(load.family)[row.name]
    settings = [replace(load.setting, beam=beam, element=place.dtype.itemsize) for beam in (1, 4)]
    decode = [decode_row((name, config, setting), place) for setting in settings]
    free_memory(place.device)
    job = TrainJob(name, config, load.train, place.device, load.steps, WARMUP)
    training = bench_train(job, None, place.report)
    place.free()
    return {
        "format": FORMAT,
        "table": "table2",
        "scale": scale,
        "family": load.family,
        "row": row.name,
        "model": config.to_json(),
        "dtype": str(place.dtype).removeprefix("torch."),
        "chip": asdict(place.chip),
        "decode": decode,
        "training": training,
        "environment": environment(place.device),
    }
