"""§4.3: runs Table 2: a training step, and decoding by greedy and beam-4 search, row by row."""

import dataclasses
import platform
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from writehead.bench.decode import ON_CPU, OURS, Place, quickest, translation_row
from writehead.bench.floor import measure_chip
from writehead.bench.record import environment, write_result
from writehead.bench.train import GRAMMAR_PAIRS, bench_preset
from writehead.config import PrepareConfig, TrainConfig
from writehead.cost import Setting
from writehead.data.dataset import INFO
from writehead.data.prepare import prepare
from writehead.data.progress import Reporter
from writehead.data.sources import embedded
from writehead.errors import ConfigError, nearest
from writehead.paper.experiments import EXPERIMENTS, SCALES
from writehead.paper.presets import rows
from writehead.paper.reproduce import AT_THE_DATASET, Clock, Ending, clear, turn
from writehead.paper.results import FORMAT, read_result, result_path
from writehead.paper.tables import TABLE_2, TABLE_2_TIMING
from writehead.util.devices import find_device, find_dtype
from writehead.util.locks import locked

BEAMS = (1, 4)
WARMUP = 8  # training steps before those that are timed: compiling and capturing
ROWS = tuple(row.row for row in TABLE_2)


@dataclass(frozen=True)
class Speed:
    """What is timed at a scale: which models on how much; how often is `repeats` and `steps`."""

    family: str
    batch: int
    source: int
    target: int
    train: TrainConfig
    repeats: int
    steps: int
    pairs: int = GRAMMAR_PAIRS

    @property
    def words(self) -> str:
        """The sizes, as they are said before anything is timed."""
        train = self.train
        return (
            f"{self.batch:,} sentences of {self.source} tokens into {self.target} by {self.family} "
            f"models, training steps of {train.rows} × ({train.source_length} + "
            f"{train.target_length}) tokens"
        )


_PAPER = TABLE_2_TIMING
_AS_IN_THE_PAPER = Speed(
    "wmt14", _PAPER.batch, _PAPER.source, _PAPER.target, TrainConfig(), repeats=5, steps=20
)
_FOR_A_CPU = Speed(
    "tiny",
    *(ON_CPU.batch, ON_CPU.source, ON_CPU.target),
    TrainConfig(rows=8, source_length=64, target_length=64),
    repeats=3,
    steps=10,
    pairs=200,
)
SPEEDS = {
    "tiny": _FOR_A_CPU,
    "small": dataclasses.replace(_AS_IN_THE_PAPER, family="wmt14-small"),
    "paper-size": _AS_IN_THE_PAPER,  # no text is read, so this is the paper's own
    "paper": _AS_IN_THE_PAPER,
}


@dataclass(frozen=True)
class SpeedJob:
    """What is to be timed and where results go; `minutes` is how long this sitting may take."""

    scale: str
    rows: tuple[str, ...]
    results: Path
    runs: Path
    device: str = "auto"
    minutes: float | None = None

    def lock(self, row: str) -> Path:
        """What is claimed by the process that times a row, so that several share the rows.

        A chip is claimed alike: two at once would slow each other.
        """
        return self.runs / "table2" / self.scale / f".{row}.lock"


def choose_scale(device: str) -> str:
    """The scale of a device that none was asked for: the paper's sizes, or those of a CPU."""
    return "tiny" if find_device(device).type == "cpu" else "paper"


def choose_rows(scale: str, wanted: list[str]) -> tuple[str, ...]:
    """The rows of Table 2 that were asked for, in its order; all where none was."""
    if scale not in SPEEDS:
        raise ConfigError(f"there is no scale {scale!r}; {nearest(scale, SCALES)}")
    for row in wanted:
        if row not in ROWS:
            raise ConfigError(f"table2 has no row {row!r}; {nearest(row, ROWS)}")
    return tuple(row for row in ROWS if row in wanted or not wanted)


def reproduce_speed(job: SpeedJob, report: Reporter | None = None) -> Ending:
    """Times what is missing of Table 2, row by row, until all is there or the time is up."""
    report, clock, speed = report or Reporter(), Clock(job.minutes), SPEEDS[job.scale]
    paths = {row: result_path(job.results, "table2", job.scale, row) for row in job.rows}
    todo = {row: path for row, path in paths.items() if not path.is_file()}
    for row, path in paths.items():
        if row not in todo:
            read_result(path)
            report.say(f"{row}: {path} is there; skipped")
    if not todo:
        report.say(
            f"table2, scale {job.scale}: all {len(paths)} results are there, so nothing was timed; "
            f"give another folder with --results to time them anew"
        )
        return Ending(len(paths), len(paths))
    report.say(f"table2, scale {job.scale}: {speed.words}")
    device = find_device(job.device)
    if device.type == "cpu" and job.scale != "tiny":
        report.say("on a CPU that may take hours; the sizes of --scale tiny are for one")
    with locked(job.lock(chip_name(device))) as alone:
        if alone:
            return _time_rows(job, paths, todo, clock, report)
    report.say(f"another process is timing on {device} here; the rows are left to it")
    return Ending(_count(paths), len(paths))


def _time_rows(
    job: SpeedJob, paths: dict[str, Path], todo: dict[str, Path], clock: Clock, report: Reporter
) -> Ending:
    """Times the rows to do on a chip that is this process's, but for those that others are at."""
    speed = SPEEDS[job.scale]
    dataset = _sentences(job, speed, clock, report)
    if dataset is None:
        return Ending(_count(paths), len(paths), int(signal.SIGTERM), AT_THE_DATASET)
    place = _place(job, speed, report.say)
    while True:
        passed = {}
        for row, path in todo.items():
            with locked(job.lock(row)) as free:
                if not free:
                    report.say(f"{row}: another process is at it; passed over")
                    passed[row] = path
                    continue
                if path.is_file():
                    report.say(f"{row}: another process has it; skipped")
                    continue
                number = _count(paths) + 1
                report.say(f"table2, scale {job.scale}: row {number} of {len(paths)}, {row}")
                result = _time(job, speed, row, place, dataset)
                write_result(path, result)
                report.say(f"{row}: {_in_short(result)}; {path}")
            if clock.is_up and _count(paths) < len(paths):
                return Ending(_count(paths), len(paths), int(signal.SIGTERM))
        if len(passed) in (0, len(todo)):
            return Ending(_count(paths), len(paths))
        todo = passed  # the other may have been stopped meanwhile


def _in_short(result: dict[str, Any]) -> str:
    """The figures of a row, as Table 2 has them."""
    words = [f"µs a token: training {result['training']['us_per_token']:.3g}"]
    for row in result["decode"]:
        found, beam = quickest(row, OURS["true"]), row["setting"]["beam"]
        if found is not None:
            search, each = "greedy" if beam == 1 else f"beam {beam}", found["us_per_token"]
            words.append(f"{search} {each['encoder']:.3g} + {each['decoder']:.3g}")
    return ", ".join(words)


def chip_name(device: torch.device) -> str:
    """What a machine and a chip of it are called: who times there must be alone."""
    if device.type != "cuda":
        return f"{platform.node()}-{device.type}"
    return f"{platform.node()}-{torch.cuda.get_device_properties(device).uuid}"


def _count(paths: dict[str, Path]) -> int:
    return sum(path.is_file() for path in paths.values())


def _place(job: SpeedJob, speed: Speed, tell: Callable[[str], None]) -> Place:
    """The device with its bandwidth and rate; peers are `writehead bench decode`'s."""
    device = find_device(job.device)
    dtype = find_dtype(None, device)
    tell("bandwidth and matrix rate")
    chip = measure_chip(device, dtype)
    return Place(chip, device, dtype, speed.repeats, False, tell)


def _sentences(job: SpeedJob, speed: Speed, clock: Clock, report: Reporter) -> Path | None:
    """Text to train on: that of Table 1 at the same scale where it is there, else the grammar's.

    None where another process is making it and the time is up.
    """
    own = job.runs / EXPERIMENTS["table1", job.scale].dataset
    if (own / INFO).is_file():
        return own
    grammar = job.runs / "data" / f"grammar-{speed.pairs}"
    config = PrepareConfig(task="translation", vocab_size=min(2000, 300 + speed.pairs))
    with turn(grammar, clock, report) as is_ours:
        if not is_ours:
            return None
        prepare(grammar, embedded(speed.pairs), config, progress=report)
    return grammar


def _time(job: SpeedJob, speed: Speed, row: str, place: Place, dataset: Path) -> dict[str, Any]:
    """One row's result: decoding by each search, and a training step."""
    name, config = f"{speed.family}/{row}", rows(speed.family)[row]
    element = place.dtype.itemsize
    decode = [
        translation_row(
            name, config, Setting(speed.batch, speed.source, speed.target, beam, element), place
        )
        for beam in BEAMS
    ]
    clear(place.device)
    training = bench_preset(
        name,
        config,
        speed.train,
        dataset,
        device=place.device,
        steps=speed.steps,
        warmup=WARMUP,
        tell=lambda text: place.tell(f"a training step: {text}"),
    )
    place.free()
    return {
        "format": FORMAT,
        "table": "table2",
        "scale": job.scale,
        "family": speed.family,
        "row": row,
        "model": config.to_json(),
        "dtype": str(place.dtype).removeprefix("torch."),
        "chip": dataclasses.asdict(place.chip),
        "decode": decode,
        "training": {**training, "dataset": dataset.name},
        "environment": environment(place.device),
    }
