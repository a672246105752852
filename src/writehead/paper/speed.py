"""§4.3: times the rows of Table 2, a training step and greedy and beam-4 decoding."""

import platform
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from writehead.bench.decode import ON_CPU, Job, Place, decode_row
from writehead.bench.floor import measure_chip
from writehead.bench.peers import Subject
from writehead.bench.train import TrainJob, bench_train
from writehead.config import TrainConfig
from writehead.cost import Setting
from writehead.paper.presets import rows
from writehead.paper.reproduce import Row, free_memory, make_rows, missing_rows
from writehead.paper.results import FORMAT, Result, result_path
from writehead.paper.tables import TABLE_2, TABLE_2_SETTING
from writehead.util.devices import find_device, find_dtype
from writehead.util.environment import environment
from writehead.util.progress import Reporter

WARMUP = 8  # training steps before the timed ones, for compilation and graph capture
ROWS = tuple(row.row for row in TABLE_2)


@dataclass(frozen=True)
class Workload:
    """The models and sizes that are timed at one scale, and the number of repeats."""

    family: str
    setting: Setting
    train: TrainConfig
    repeats: int
    steps: int


_PAPER = Workload("wmt14", TABLE_2_SETTING, TrainConfig(), repeats=5, steps=20)
_TINY_TRAIN = TrainConfig(rows=8, source_length=64, target_length=64)
_TINY = Workload("tiny", ON_CPU, _TINY_TRAIN, repeats=3, steps=10)
WORKLOADS = {"tiny": _TINY, "small": replace(_PAPER, family="wmt14-small"), "paper": _PAPER}


def default_scale(device: str) -> str:
    """Returns "tiny" on a CPU and "paper" on a GPU."""
    return "tiny" if find_device(device).type == "cpu" else "paper"


def reproduce_speed(
    scale: str, names: tuple[str, ...], results: Path, runs: Path, device_name: str
) -> list[Path]:
    """Times the missing rows; returns the files of all wanted results."""
    report = Reporter()
    # one lock for all rows: two processes on one machine would slow each other down
    lock = runs / "table2" / f".{scale}-{platform.node()}.lock"
    wanted = [Row(name, result_path(results, "table2", scale, name), lock) for name in names]
    missing = missing_rows(wanted, report)
    if missing:
        device, load = find_device(device_name), WORKLOADS[scale]
        report.say("measuring memory bandwidth and matrix rate")
        dtype = find_dtype(None, device)
        place = Place(measure_chip(device, dtype), device, dtype, load.repeats, (), report.say)
        make_rows(missing, lambda row: _time(scale, load, place, row), report)
    return [row.result for row in wanted]


def _time(scale: str, load: Workload, place: Place, row: Row) -> Result:
    """Times one row; returns its result."""
    name, config = f"{load.family}/{row.name}", rows(load.family)[row.name]
    settings = [replace(load.setting, beam=beam, element=place.dtype.itemsize) for beam in (1, 4)]
    decode = [decode_row(Job(name, Subject(config), setting), place) for setting in settings]
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
