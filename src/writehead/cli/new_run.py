"""What the verbs that make a run share: its place, and whether one that is there is replaced."""

from pathlib import Path
from typing import Annotated

import typer

from writehead.errors import RunError

NewRun = Annotated[Path, typer.Argument(help="The folder of the new run.")]
ForceRun = Annotated[bool, typer.Option("--force", help="Replace the output run if there is one.")]


def check_free(output: Path, force: bool) -> None:
    """Raises where something is at a new run's place and is not to be replaced."""
    if output.exists() and not force:
        how = ", or pass --force to replace it" if (output / "config.json").is_file() else ""
        raise RunError(f"{output} exists; choose another place{how}")
