"""The bundled model: a run that comes with the package and translates English to German."""

from pathlib import Path

from writehead.errors import RunError
from writehead.model.runs import CONFIG

BUNDLED = Path(__file__).parents[1] / "bundled" / "en-de"


def has_bundled_run() -> bool:
    """Whether the package contains the bundled model."""
    return (BUNDLED / CONFIG).is_file()


def bundled_run() -> Path:
    """Returns the folder of the bundled model."""
    if not has_bundled_run():
        raise RunError(
            f"this copy of writehead does not contain the bundled model ({BUNDLED}); install "
            f"writehead from a wheel, or name the folder of a model"
        )
    return BUNDLED


def name_of(run: Path) -> str:
    """Returns the path of a run, or a name that is the same on every machine if it is bundled."""
    return "writehead/bundled/en-de" if run.resolve() == BUNDLED.resolve() else str(run)
