"""Reports the progress of long work on standard error, with a bar on a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress


class Reporter:
    """Prints messages and progress to standard error, or nothing with `quiet`."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.console = Console(stderr=True, quiet=quiet, soft_wrap=True, highlight=False)

    def say(self, text: str) -> None:
        """Prints one line."""
        self.console.print(text, markup=False)

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        """Yields a function to call with the number of lines processed so far, out of `total`."""
        has_bar = self.console.is_terminal and not self.console.quiet
        if not has_bar:
            self.say(f"{name} …")
        with Progress(console=self.console, disable=not has_bar) as progress:
            task = progress.add_task(name, total=total)
            yield lambda lines: progress.update(task, completed=lines)
