"""Reports training metrics: a progress bar, `log.jsonl` and, if installed, TensorBoard files."""

import json
import time
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from torch import Tensor

from writehead.config import MAX_STEPS
from writehead.errors import RunError
from writehead.training.checkpoint import METER_SUMS
from writehead.training.distributed import World
from writehead.util.files import write_file
from writehead.util.json_files import JsonError, check_shape, parse_json

MAX_LINE = 1 << 16  # characters per entry
BAR_METRICS = ("loss", "tokens_per_second", "utilisation")  # fit beside a bar in 80 columns
FORMATS = {"tokens_per_second": "tokens/s={:,.0f}", "utilisation": "utilisation={:.0%}"}
LOG, TENSORBOARD = "log.jsonl", "tensorboard"
DEVICE_SUMS = ("objective", "nll", "norm")
PER_PROCESS = ("objective", "nll", "tokens", "operations")  # summed over processes when read


class Meter:
    """Sums over the steps since the last log entry; the device's stay there until read.

    `totals` continues from the sums in a checkpoint. The clock runs from `start_clock` to `totals`.
    """

    def __init__(self, world: World, totals: dict[str, float] | None = None) -> None:
        self._world = world
        own = dict(totals) if totals else dict.fromkeys(METER_SUMS, 0.0)
        if not world.is_first:
            own |= dict.fromkeys(PER_PROCESS, 0.0)
        sums = torch.tensor([own.pop(name) for name in DEVICE_SUMS], dtype=torch.float64)
        self._sums, self._counts = sums.to(world.device), own
        self._started: float | None = None

    def start_clock(self) -> None:
        """Starts the clock, after work that does not count as training."""
        self._started = time.perf_counter()

    def add(self, values: Tensor, tokens: int, operations: int) -> None:
        """Adds a step: the result of `Stepper.update`, and the work of this process."""
        self._sums += values
        for name, value in (("tokens", tokens), ("operations", operations), ("steps", 1)):
            self._counts[name] += value

    def totals(self) -> dict[str, float]:
        """Stops the clock and returns the sums over all processes."""
        sums = dict(zip(DEVICE_SUMS, self._sums.tolist(), strict=True))  # waits for the device
        if self._started is not None:
            self._counts["seconds"] += time.perf_counter() - self._started
            self._started = None
        own = sums | self._counts
        total = self._world.sum(*(own[name] for name in PER_PROCESS))
        return own | dict(zip(PER_PROCESS, total, strict=True))


class Journal:
    """The metrics of a run, on disk and on screen; drops entries after step `start`.

    A `quiet` journal prints and writes nothing: of several processes, only the first reports.
    """

    def __init__(self, run: Path, start: int, steps: int, *, quiet: bool = False) -> None:
        self._start, self._steps, self._quiet = start, steps, quiet
        self._console = Console(stderr=True, quiet=quiet)
        self._bar = Progress(
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            TextColumn("{task.fields[line]}"),
            console=self._console,
            disable=quiet or not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=steps, completed=start, line="")
        self._started = time.monotonic()
        if not quiet:
            entries = [entry for entry in read_log(run) if entry["step"] <= start]
            write_file(run / LOG, "".join(json.dumps(entry) + "\n" for entry in entries))
            self._file = (run / LOG).open("a", encoding="utf-8")
            self._board = _open_tensorboard(run, start) if has_tensorboard() else None

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        if not self._quiet:
            self._file.close()
            if self._board is not None:
                self._board.close()

    def advance(self, step: int) -> None:
        """Moves the progress bar; does not synchronize with the device."""
        self._bar.update(self._task, completed=step)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Writes and prints the metrics of a step."""
        if self._quiet or not metrics:
            return
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in metrics.items():
                self._board.add_scalar(name, value, step)
        seconds = (time.monotonic() - self._started) / max(1, step - self._start)
        eta = f"eta={timedelta(seconds=round(seconds * (self._steps - step)))}"
        short = [_format(name, metrics[name]) for name in BAR_METRICS if name in metrics]
        self._bar.update(self._task, completed=step, line=" ".join([*short, eta]))
        if not self._console.is_terminal:
            texts = [_format(name, value) for name, value in metrics.items()]
            self.print(" ".join([f"step {step}/{self._steps}", *texts, eta]))

    def print(self, message: str) -> None:
        """Prints a message above the progress bar."""
        self._console.print(message, soft_wrap=True, highlight=False, markup=False)


def _format(name: str, value: float) -> str:
    return FORMATS.get(name, f"{name}={{:.4g}}").format(value)


def has_tensorboard() -> bool:
    """Whether the package tensorboard is installed."""
    return find_spec("tensorboard") is not None


def _open_tensorboard(run: Path, start: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(run / TENSORBOARD), purge_step=start + 1)


def read_log(run: Path) -> list[dict[str, float]]:
    """Reads the entries of a run's log, without a last one that a crash cut short."""
    path = run / LOG
    entries: list[dict[str, float]] = []
    if not path.is_file():
        return entries
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            while line := file.readline(MAX_LINE):
                try:
                    entry = parse_json(line, allow_nan=True)
                except json.JSONDecodeError:
                    if file.read(1):
                        raise JsonError("in the middle is not JSON") from None
                    break
                check_shape(entry, {"step": range(MAX_STEPS + 1)})
                check_shape(entry, {str: float})
                entries.append(entry)
    except (OSError, JsonError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"an entry {error}"
        raise RunError(
            f"{path} cannot be read: {reason}; move it elsewhere to train without its old entries"
        ) from error
    return entries
