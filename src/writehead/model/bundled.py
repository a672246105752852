"""The bundled model: a run that comes with the package and translates English to German."""

from pathlib import Path

from writehead.errors import RunError
from writehead.model.runs import CONFIG

BUNDLED = Path(__file__).parents[1] / "bundled" / "en-de"


def has_bundled_run() -> bool:
    """Whether the model is there; a copy of the code alone may lack it."""
    return (BUNDLED / CONFIG).is_file()


def bundled_run() -> Path:
    """The folder of the model that comes with the package."""
    if not has_bundled_run():
        raise RunError(
            f"this writehead came without its model, which would be in {BUNDLED}; give a RUN, the "
            f"folder of a model that you have"
        )
    return BUNDLED


def name_of(run: Path) -> str:
    """What results call a run: its path, or the package's where it is the bundled model.

    Where a package is installed says nothing about what was measured.
    """
    return "writehead/bundled/en-de" if run.resolve() == BUNDLED.resolve() else str(run)
