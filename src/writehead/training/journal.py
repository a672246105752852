"""Reports the progress of training: a progress line, `log.jsonl` and TensorBoard files.

TensorBoard is optional; `log.jsonl` has the same metrics.
"""

import json
import time
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

from writehead.config import MAX_STEPS
from writehead.errors import RunError
from writehead.util.files import write_file
from writehead.util.json_files import JsonError, check_shape, parse_json

MAX_LINE = 1 << 16  # maximum characters per entry
SHOWN = ("loss", "tokens_per_second", "utilisation")  # what fits beside a bar in 80 columns
LOG, BOARD = "log.jsonl", "tensorboard"


class Journal:
    """A run's log, on disk and on the screen. Entries after `start`, which a crash left, go.

    A `quiet` one says and writes nothing: of many processes one speaks.
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
        self._began = time.monotonic()
        if not quiet:
            kept = [entry for entry in read_log(run) if entry["step"] <= start]
            write_file(run / LOG, "".join(json.dumps(entry) + "\n" for entry in kept))
            self._file = (run / LOG).open("a", encoding="utf-8")
            self._board = _open_board(run, start) if has_tensorboard() else None

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()
        if not self._quiet:
            self._file.close()
            if self._board is not None:
                self._board.close()

    def count(self, step: int) -> None:
        """Moves the bar to a step that was begun; nothing is written, and no device waited for."""
        self._bar.update(self._task, completed=step)

    def log(self, step: int, entry: dict[str, float]) -> None:
        """Adds an entry of the step, and shows it."""
        if self._quiet or not entry:
            return
        self._file.write(json.dumps({"step": step, **entry}) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in entry.items():
                self._board.add_scalar(name, value, step)
        pace = (time.monotonic() - self._began) / max(1, step - self._start)
        left = timedelta(seconds=round(pace * (self._steps - step)))
        line = " ".join([*(_show(name, value) for name, value in entry.items()), f"left={left}"])
        short = [_show(name, entry[name]) for name in SHOWN if name in entry]
        self._bar.update(self._task, completed=step, line=" ".join([*short, f"left={left}"]))
        if not self._console.is_terminal:
            self.say(f"step {step}/{self._steps} {line}")

    def say(self, sentence: str) -> None:
        """Prints a sentence above the progress line."""
        self._console.print(sentence, soft_wrap=True, highlight=False, markup=False)


def has_tensorboard() -> bool:
    """Whether the package tensorboard is installed."""
    return find_spec("tensorboard") is not None


def _open_board(run: Path, start: int) -> "SummaryWriter":
    """Opens a TensorBoard writer that discards earlier entries after step `start`."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(run / BOARD), purge_step=start + 1)


def read_log(run: Path) -> list[dict[str, float]]:
    """The entries of a run's log, without a last one that a crash cut short."""
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
                    return entries
                check_shape(entry, {"step": range(MAX_STEPS + 1)})
                check_shape(entry, {str: float})
                entries.append(entry)
    except (OSError, JsonError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"an entry {error}"
        raise RunError(
            f"{path} cannot be read: {reason}; move it elsewhere to train without its old entries"
        ) from error
    return entries


def _show(name: str, value: float) -> str:
    if name == "tokens_per_second":
        return f"tokens/s={value:,.0f}"
    if name == "utilisation":
        return f"utilisation={value:.0%}"
    return f"{name}={value:.4g}"
