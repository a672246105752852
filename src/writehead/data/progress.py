"""How far long work has come: a bar on a terminal, a line now and then elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

EVERY = 10.0  # seconds between lines where there is no terminal


class Stage:
    """One stage under way: `update` says how much is done, from 0 to 1, and how many lines."""

    def __init__(self, console: Console, name: str, bar: tuple[Progress, TaskID] | None) -> None:
        self._console, self._name, self._bar = console, name, bar
        self._began = self._told = time.monotonic()

    def update(self, done: float, lines: int) -> None:
        """Shows the share done, the speed and, from both, the time left."""
        now = time.monotonic()
        speed = f"{lines / max(now - self._began, 1e-9):,.0f} lines/s"
        if self._bar:
            progress, task = self._bar
            progress.update(task, completed=done, speed=speed)
        elif now - self._told >= EVERY and done > 0.0:
            left = (now - self._began) * (1.0 - done) / done
            self._told = now
            self._console.print(f"{self._name}: {done:.0%}, {speed}, {left:,.0f} s left")


class Reporter:
    """Says what is going on, on standard error by default; `quiet` says nothing."""

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        self.console = console or Console(stderr=True, quiet=quiet, soft_wrap=True, highlight=False)

    def say(self, text: str) -> None:
        """One line."""
        self.console.print(text, markup=False)

    @contextmanager
    def stage(self, name: str) -> Iterator[Stage]:
        """A stage with its bar, or its first line."""
        if not self.console.is_terminal or self.console.quiet:
            self.say(f"{name} …")
            yield Stage(self.console, name, None)
            return
        columns = (
            TextColumn("{task.description:<24}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
        )
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task(name, total=1.0, speed="")
            yield Stage(self.console, name, (progress, task))
            progress.update(task, completed=1.0)
