"""The bundled model: a run that comes with the package and translates English to German."""

from pathlib import Path

from writehead.errors import RunError
from writehead.runs.folder import CONFIG

BUNDLED = Path(__file__).parents[1] / "bundled" / "en-de"


def bundled_run() -> Path:
    """Returns the folder of the bundled model."""
    if not (BUNDLED / CONFIG).is_file():
        raise RunError(f"there is no bundled model at {BUNDLED}; install writehead from a wheel")
    return BUNDLED


def name_of(run: Path) -> str:
    """Returns the path of a run, or a name that is the same on every machine if it is bundled."""
    return "writehead/bundled/en-de" if run.resolve() == BUNDLED.resolve() else str(run)
