"""Shows the progress of long work: a bar on a terminal, a line every ten seconds elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 10.0


class Reporter:
    """Prints messages and progress to standard error, or nothing with `quiet`."""

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        self.console = console or Console(stderr=True, quiet=quiet, soft_wrap=True, highlight=False)

    def say(self, text: str) -> None:
        """Prints one line."""
        self.console.print(text, markup=False)

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        """Yields a function to call with the number of lines processed so far, out of `total`."""
        has_bar = self.console.is_terminal and not self.console.quiet
        columns = (
            TextColumn("{task.description:<24}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f} lines, {task.fields[rate]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
        )
        if not has_bar:
            self.say(f"{name} …")
        with Progress(*columns, console=self.console, disable=not has_bar) as progress:
            task = progress.add_task(name, total=total, rate="")
            start = last_line = time.monotonic()

            def update(lines: int) -> None:
                nonlocal last_line
                now = time.monotonic()
                rate = f"{lines / max(now - start, 1e-9):,.0f} lines/s"
                progress.update(task, completed=lines, rate=rate)
                if not has_bar and now - last_line >= SECONDS_BETWEEN_LINES:
                    last_line = now
                    share = f" ({lines / total:.0%})" if total else ""
                    self.say(f"{name}: {lines:,} lines{share}, {rate}")

            yield update
