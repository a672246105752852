"""The files that `reproduce` writes and `report` reads: where they lie, and that they fit together.

results/TABLE/SCALE/ROW-seedK.json is one row of Table 1 or 3 by one seed, and
results/table2/SCALE/ROW.json one row of Table 2. The folder `again` in it has the same of rows that
were trained once more. Other folders are not read.
"""

import json
from pathlib import Path
from typing import Any

from writehead.errors import RunError
from writehead.paper.experiments import SCALES, TABLES

FORMAT = 1
AGAIN = "again"
# what does not enter what a step computes, nor when the learning rate changes
APART = {
    "seed",
    "accumulate",
    "compile",
    "parallel",
    "log_every",
    "evaluate_every",
    "evaluate_sequences",
    "checkpoint_every",
    "keep",
}
KEYS = ("table", "scale", "family", "row", "model", "environment")
QUALITY_KEYS = ("seed", "train", "data", "scores", "log", "timings", "parameters")
SPEED_KEYS = ("decode", "training", "dtype", "chip")

Result = dict[str, Any]


def result_path(results: Path, table: str, scale: str, row: str, seed: int | None = None) -> Path:
    """Where the result of a row lies."""
    name = row if seed is None else f"{row}-seed{seed}"
    return results / table / scale / f"{name}.json"


def read_result(path: Path) -> Result:
    """One result; raises where it is not what `reproduce` wrote, or lies in another's place."""
    found = read_json(path, "run its row again")
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise RunError(f"{path} was not written by `writehead reproduce`; move it elsewhere")
    wanted = (*KEYS, *(SPEED_KEYS if found.get("table") == "table2" else QUALITY_KEYS))
    missing = [name for name in wanted if name not in found]
    if missing:
        raise RunError(f"{path} lacks {', '.join(missing)}; delete it and run its row again")
    place = result_path(
        path.parents[2], found["table"], found["scale"], found["row"], found.get("seed")
    )
    if place != path:
        raise RunError(
            f"{path} is of {found['table']}, scale {found['scale']}, so results are mixed; move it "
            f"to {place}"
        )
    return found


def read_json(path: Path, again: str) -> Any:
    """What a file of JSON holds; `again` says how to get one that cannot be read once more."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise RunError(f"{path} is not JSON ({error}); delete it and {again}") from error


def read_results(results: Path) -> dict[tuple[str, str], list[Result]]:
    """All results by table and scale; raises where those of a table were not made alike."""
    if not results.is_dir():
        raise RunError(f"there is no folder {results}; `writehead reproduce` makes one")
    found = {}
    for table in TABLES:
        for scale in reversed(SCALES):
            paths = sorted((results / table / scale).glob("*.json"))
            if paths:
                read = [read_result(path) for path in paths]
                if table != "table2":
                    for path, one in zip(paths[1:], read[1:], strict=True):
                        check_alike(str(path), one, read[0])
                found[table, scale] = read
    return found


def check_company(results: Path, expected: Result) -> None:
    """Raises where results that are there already were made otherwise than `expected` will be."""
    folder = results / expected["table"] / expected["scale"]
    for path in sorted(folder.glob("*.json")):
        check_alike(str(path), read_result(path), expected)


def unlike(one: dict[str, Any], other: dict[str, Any], where: str) -> list[str]:
    """In which settings of training that matter to a result `one` is not as `other`, in words.

    where: the place of the other, seen from the one.
    """
    return [
        f"train.{name} is {one.get(name)} in it and {value} {where}"
        for name, value in other.items()
        if name not in APART and one.get(name) != value
    ]


def check_alike(name: str, one: Result, other: Result) -> None:
    """Raises where two rows of a table differ in more than their attention and seed.

    name: what the first is called where it is told.
    """
    differences = unlike(one["train"], other["train"], "elsewhere")
    if one["family"] != other["family"]:
        differences.append(f"it is of {one['family']} and not of {other['family']}")
    data = other["data"]
    if data is not None and one["data"]["fingerprint"] != data["fingerprint"]:
        differences.append("its dataset is another")
    if differences:
        raise RunError(
            f"{name} was made otherwise: {'; '.join(differences)}; rows are compared only where "
            f"all else is equal: use the same settings, or give these their own --results and "
            f"--runs"
        )
