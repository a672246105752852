"""The model in the box: a run that comes with the package and translates English to German."""

from pathlib import Path

from writehead.errors import RunError
from writehead.model.runs import CONFIG

BOXED = Path(__file__).parents[1] / "boxed" / "en-de"


def has_boxed_run() -> bool:
    """Whether the model is there; a copy of the code alone may lack it."""
    return (BOXED / CONFIG).is_file()


def boxed_run() -> Path:
    """The folder of the model that comes with the package."""
    if not has_boxed_run():
        raise RunError(
            f"this writehead came without its model, which would be in {BOXED}; give a RUN, the "
            f"folder of a model that you have"
        )
    return BOXED


def name_of(run: Path) -> str:
    """What results call a run: its path, or the package's where it is the model in the box.

    Where a package is installed says nothing about what was measured.
    """
    return "writehead/boxed/en-de" if run.resolve() == BOXED.resolve() else str(run)
