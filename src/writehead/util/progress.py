"""Reports the progress of long work on standard error, with a bar on a terminal."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

LOG_SECONDS = 30.0  # between printed lines of progress, if there is no terminal


class Reporter:
    """Prints messages and progress to standard error, or nothing with `quiet`."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.console = Console(stderr=True, quiet=quiet, soft_wrap=True, highlight=False)

    def say(self, text: str) -> None:
        """Prints one line."""
        self.console.print(text, markup=False)

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Callable[[float], None]]:
        """Yields a function to call with the number of lines processed so far, out of `total`."""
        has_bar = self.console.is_terminal and not self.console.quiet
        if not has_bar:
            self.say(f"{name} …")
        with Progress(console=self.console, disable=not has_bar) as progress:
            task = progress.add_task(name, total=total)
            yield lambda lines: progress.update(task, completed=lines)

    @contextmanager
    def lines(self, total: int) -> Iterator[Callable[[float], None]]:
        """Yields a function to call with the number of lines finished so far, out of `total`.

        A bar shows the speed and the time left; without a terminal, they are printed every
        LOG_SECONDS. The first call sets the number of lines that were finished at the start.
        """
        if not self.console.is_terminal or self.console.quiet:
            yield _Log(self, total)
            return
        count = TextColumn("{task.completed:,.0f} of {task.total:,} lines")
        columns = (BarColumn(), count, _Speed(), TimeRemainingColumn(), TextColumn("left"))
        tasks: list[TaskID] = []
        with Progress(*columns, console=self.console, transient=True) as progress:

            def update(lines: float) -> None:
                if not tasks:
                    tasks.append(progress.add_task("", total=total, completed=int(lines)))
                progress.update(tasks[0], completed=lines)

            yield update


class _Speed(ProgressColumn):
    """Shows lines per second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.4g} lines/s")


class _Log:
    """Prints progress every LOG_SECONDS."""

    def __init__(self, report: Reporter, total: int) -> None:
        self._report, self._total = report, total
        self._start: tuple[float, float] | None = None  # seconds and lines
        self._printed = time.monotonic()

    def __call__(self, lines: float) -> None:
        now = time.monotonic()
        if self._start is None:
            self._start = now, lines
        seconds, done = now - self._start[0], lines - self._start[1]
        if now - self._printed < LOG_SECONDS or done <= 0:
            return
        self._printed = now
        left = timedelta(seconds=round((self._total - lines) * seconds / done))
        self._report.say(
            f"{lines:,.0f} of {self._total:,} lines, {done / seconds:,.4g} lines/s, {left} left"
        )
