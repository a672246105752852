"""The result files that `reproduce` writes and `report` reads.

One row and seed of Table 1 or 3 is results/TABLE/SCALE/ROW-seedK.json, and one row of Table 2 is
results/table2/SCALE/ROW.json.
"""

from pathlib import Path
from typing import Any

from writehead.errors import RunError, shown
from writehead.paper.experiments import SCALES, TABLES
from writehead.training.plan import CHANGEABLE
from writehead.util.json_files import read_json

FORMAT = 1
ADVICE = "delete it and run its row again"
OURS = {"padded": "ours, padded", "true": "ours, true lengths"}  # the decoders of Table 2
# training settings that do not change the result of a step
FREE_SETTINGS = CHANGEABLE - {"steps", "learning_rate", "warmup", "clip", "average"} | {"seed"}
# the fields that a report reads; see `check_shape`
COUNT, SIZE = range(2**63), range(1, 2**63)
FIGURE = (float, None)
ENVIRONMENT = {
    "hardware": {"device": str},
    "versions": {"torch": str},
    "commit": (str, None),
    "date": str,
}
SCORED = {"ln_ppl?": FIGURE, "ppl_per_word?": FIGURE, "bleu?": {str: {"intl?": FIGURE}}}
SOURCE = {"split": str, "hub?": str, "files?": [{"name": str}]}
ROW = dict.fromkeys(("table", "scale", "family", "row"), str) | {
    "format": range(FORMAT, FORMAT + 1),
    "environment": ENVIRONMENT,
}
QUALITY = ROW | {
    "seed": COUNT,
    "train": {"steps": SIZE, "rows": SIZE, "target_length": SIZE},
    "data": {
        "fingerprint": str,
        "task": str,
        "splits": {"train": {"sequences": SIZE}},
        "sources": [SOURCE],
    },
    "parameters": COUNT,
}
TIMED = {"us_per_token": {"encoder": float, "decoder": float}}
DECODED = {
    "setting": dict.fromkeys(("batch", "source", "target", "beam"), COUNT),
    "measured": dict.fromkeys(OURS.values(), TIMED),
}
SHAPES = {
    "table1": QUALITY | {"scores": {"dev": SCORED, "test": SCORED}},
    "table2": ROW | {"dtype": str, "decode": [DECODED], "training": {"us_per_token": float}},
    "table3": QUALITY | {"scores": {"dev": SCORED}},
}

Result = dict[str, Any]


def result_path(results: Path, table: str, scale: str, row: str, seed: int | None = None) -> Path:
    """Returns the path of a row's result."""
    name = row if seed is None else f"{row}-seed{seed}"
    return results / table / scale / f"{name}.json"


def read_result(path: Path) -> Result:
    """Reads a result; raises RunError if it is damaged or its path does not match its content."""
    result: Result = read_json(path, SHAPES[path.parts[-3]], RunError, ADVICE)
    if result.get("decode") == []:
        raise RunError(f"{path} has no timings; {ADVICE}")
    own = (result["table"], result["scale"], result["row"], result.get("seed"))
    if result_path(path.parents[2], *own) != path:
        raise RunError(f"{path} is a result of {shown(own, 200)}; move it to its own path")
    return result


def read_results(results: Path) -> dict[tuple[str, str], list[Result]]:
    """Reads all results by table and scale; raises RunError if the rows are not comparable."""
    if not results.is_dir():
        raise RunError(
            f"{results} is not a folder; reproduce a table first, or choose another folder"
        )
    tables = {}
    for table, scale in ((table, scale) for table in TABLES for scale in SCALES):
        paths = sorted((results / table / scale).glob("*.json"))
        if paths:
            tables[table, scale] = [read_result(path) for path in paths]
            if table != "table2":
                check_results(results, tables[table, scale][0])
    return tables


def check_results(results: Path, expected: Result) -> None:
    """Raises RunError if existing results differ in more than their attention and seed."""
    for path in sorted((results / expected["table"] / expected["scale"]).glob("*.json")):
        result, data = read_result(path), expected["data"]
        differences = setting_differences(result["train"], expected["train"])
        family, wanted = result["family"], expected["family"]
        if family != wanted:
            differences.append(f"family is {shown(family)}, not {shown(wanted)}")
        if data is not None and result["data"]["fingerprint"] != data["fingerprint"]:
            differences.append("the dataset differs")
        if differences:
            raise RunError(
                f"{path} cannot be compared with the other rows: {'; '.join(differences)}; use the "
                f"same settings, or other folders for results and runs"
            )


def setting_differences(actual: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Describes the training settings that differ from `expected` and change the result."""
    return [
        f"train.{name} is {shown(actual.get(name))} instead of {shown(value)}"
        for name, value in expected.items()
        if name not in FREE_SETTINGS and actual.get(name) != value
    ]
