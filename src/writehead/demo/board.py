"""How far trainings have come, read from their logs: bars on a terminal, elsewhere lines."""

import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from writehead.training.journal import read_log

EVERY = 10.0  # seconds between lines where there is no terminal


class Board:
    """One display for several runs in training, by name; all of them have `steps` steps to go."""

    def __init__(self, runs: Mapping[str, Path], steps: int, console: Console) -> None:
        self._console = console
        self._courses = {name: Course(run, steps) for name, run in runs.items()}
        self._told = time.monotonic()
        width = max(map(len, runs))
        self._bars = Progress(
            TextColumn(f"{{task.description:<{width}}}"),
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            TextColumn("{task.fields[line]}"),
            console=console,
            refresh_per_second=2,  # the trainings need the cores
            disable=not console.is_terminal,
        )
        self._tasks = {
            name: self._bars.add_task(name, total=steps, completed=course.step, line="")
            for name, course in self._courses.items()
        }

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.look(last=True)
        self._bars.stop()

    def look(self, *, last: bool = False) -> None:
        """Shows what the logs say now; where there is no terminal, now and then and at the end."""
        now = time.monotonic()
        speak = not self._console.is_terminal and (last or now - self._told >= EVERY)
        for name, course in self._courses.items():
            course.look(now)
            self._bars.update(self._tasks[name], completed=course.step, line=course.line(now))
            if speak:
                step = f"step {course.step}/{course.steps}"
                text = f"{name}: {step} {course.line(now)}"
                self._console.print(text, soft_wrap=True, highlight=False, markup=False)
        if speak:
            self._told = now


class Course:
    """One run's way to its last step: where it is, its loss and speed, and when it will be done.

    The pace is counted from the first entry that is seen to come, so that loading takes no part.
    """

    def __init__(self, run: Path, steps: int) -> None:
        self._run, self.steps = run, steps
        self._entry: dict[str, float] = {}
        self._first: tuple[float, int] | None = None
        self._end: float | None = None
        self.step = self._read()

    def look(self, now: float) -> None:
        """Reads the log again."""
        before, self.step = self.step, self._read()
        if self.step == before:
            return
        if self._first is None or self.step < before:  # what a crash left behind is gone
            self._first, self._end = (now, self.step), None
            return
        began, first = self._first
        self._end = now + (now - began) / (self.step - first) * (self.steps - self.step)

    def line(self, now: float) -> str:
        """Loss, speed and time left, as far as they are known."""
        if not self._entry:
            return "starting"
        words = [f"loss={self._entry['loss']:.4g}"]
        words += [f"tokens/s={self._entry['tokens_per_second']:,.0f}"]
        if self._end is not None:
            words += [f"left={timedelta(seconds=max(0, round(self._end - now)))}"]
        return " ".join(words)

    def _read(self) -> int:
        entries = read_log(self._run)
        self._entry = next((one for one in reversed(entries) if "loss" in one), {})
        return int(entries[-1]["step"]) if entries else 0
