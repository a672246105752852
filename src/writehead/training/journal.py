"""Prints training metrics and writes them to `log.jsonl` and, if installed, to TensorBoard."""

import json
import time
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import torch
from rich.console import Console
from torch import Tensor

from writehead.config import MAX_STEPS
from writehead.errors import RunError, one_line
from writehead.training.distributed import World
from writehead.util.files import write_file
from writehead.util.json_files import check_shape, parse_json

LOG, TENSORBOARD = "log.jsonl", "tensorboard"
FORMATS = {"tokens_per_second": "tokens/s={:,.0f}", "utilisation": "utilisation={:.0%}"}


class Meter:
    """Sums metrics over the steps since the last log entry, on the device until they are read."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._values = torch.zeros(3, dtype=torch.float64, device=world.device)
        self._steps = self._tokens = self._operations = 0
        self._seconds, self._started = 0.0, time.perf_counter()

    def add(self, values: Tensor, tokens: int, operations: int) -> None:
        """Adds a step: the result of `Stepper.update`, and the work of this process."""
        self._values += values
        self._steps += 1
        self._tokens += tokens
        self._operations += operations

    def start_clock(self) -> None:
        """Restarts the clock after work that does not count as training."""
        self._started = time.perf_counter()

    def stop_clock(self) -> dict[str, float]:
        """Stops the clock and returns the sums over all processes, and the mean gradient norm."""
        objective, nll, norm = self._values.tolist()  # waits for the device
        self._seconds += time.perf_counter() - self._started
        sums = self._world.sum(objective, nll, self._tokens, self._operations)
        totals = dict(zip(("objective", "nll", "tokens", "operations"), sums, strict=True))
        return totals | {"norm": norm / self._steps, "seconds": self._seconds}


class Journal:
    """The log of a run; drops old entries after step `start`. With `quiet`, writes nothing."""

    def __init__(self, run: Path, start: int, steps: int, *, quiet: bool = False) -> None:
        self._start, self._steps, self._quiet = start, steps, quiet
        self._console = Console(stderr=True, quiet=quiet)
        self._started = time.monotonic()
        if not quiet:
            entries = [entry for entry in read_log(run) if entry["step"] <= start]
            write_file(run / LOG, "".join(json.dumps(entry) + "\n" for entry in entries))
            self._file = (run / LOG).open("a", encoding="utf-8")
            self._board: Any = None
            if find_spec("tensorboard") is not None:
                from torch.utils.tensorboard import SummaryWriter

                self._board = SummaryWriter(str(run / TENSORBOARD), purge_step=start + 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._quiet:
            self._file.close()
            if self._board is not None:
                self._board.close()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Writes and prints the metrics of a step."""
        if self._quiet or not metrics:
            return
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()
        words = [f"step {step}/{self._steps}"]
        for name, value in metrics.items():
            if self._board is not None:
                self._board.add_scalar(name, value, step)
            words.append(FORMATS.get(name, f"{name}={{:.4g}}").format(value))
        seconds = (time.monotonic() - self._started) / max(1, step - self._start)
        words.append(f"eta={timedelta(seconds=round(seconds * (self._steps - step)))}")
        self.print(" ".join(words))

    def print(self, message: str) -> None:
        """Prints a message on standard error."""
        self._console.print(message, soft_wrap=True, highlight=False, markup=False)


def read_log(run: Path) -> list[dict[str, float]]:
    """Reads the entries of a run's log, without a last line that a crash cut short."""
    path = run / LOG
    if not path.is_file():
        return []
    try:
        *lines, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")
        entries: list[dict[str, float]] = [parse_json(line, allow_nan=True) for line in lines]
        for entry in entries:
            check_shape(entry, {"step": range(MAX_STEPS + 1)})
            check_shape(entry, {str: float})
    except (OSError, ValueError) as error:
        raise RunError(
            f"{path} cannot be read: {one_line(str(error), 200)}; move it elsewhere to train "
            f"without its old entries"
        ) from error
    return entries
