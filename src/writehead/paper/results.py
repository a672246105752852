"""The files that `reproduce` writes and `report` reads: where they lie, and that they fit together.

results/TABLE/SCALE/ROW-seedK.json is one row of Table 1 or 3 by one seed, and
results/table2/SCALE/ROW.json one row of Table 2. The folder `again` in it has the same of rows that
were trained once more. Other folders are not read.
"""

from pathlib import Path
from typing import Any

from writehead.bench.record import read_result_file
from writehead.errors import RunError, shown
from writehead.paper.experiments import SCALES, TABLES
from writehead.util.json_files import JsonError, check_shape

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
# the shapes of the fields that a report reads from a result; see `check_shape`
COUNT = range(2**63)
FIGURE = (float, None)
ENVIRONMENT = {
    "hardware": {"device": str},
    "versions": {"torch": str},
    "commit": (str, None),
    "date": str,
}
ROW = {
    **dict.fromkeys(("table", "scale", "family", "row"), str),
    "model": dict,
    "environment": ENVIRONMENT,
}
BLEU = {"intl?": FIGURE, "13a?": FIGURE}
SCORED = {"name": str, "ln_ppl?": FIGURE, "ppl_per_word?": FIGURE, "bleu?": {str: BLEU}}
FILES = {"split": str, "files": [{"name": str}]}
QUALITY = ROW | {
    "seed": COUNT,
    "model": {"vocab_size": range(1, 2**31)},
    "train": {
        **dict.fromkeys(("steps", "rows", "target_length"), COUNT[1:]),
        "optimizer": str,
        "learning_rate": float,
        "warmup": COUNT,
        "decay": float,
    },
    "data": {
        "fingerprint": str,
        "task": str,
        "vocab_size": COUNT,
        "splits": {"train": {"sequences": COUNT[1:], "target_tokens": COUNT[1:]}},
        "sources": [
            ({"split": str, "embedded": object}, {"split": str, "hub": str}, FILES),
        ],
    },
    "log": [{"step": COUNT, "dev_ln_ppl?": FIGURE}],
    "timings": {"training_s": float, "scoring_s": float},
    "parameters": COUNT,
}
TRANSLATED = SCORED | {"sentences": COUNT}
READ = SCORED | {"words": COUNT}
TESTED = TRANSLATED | {"bleu": {"greedy": BLEU | {"intl_signature": str}, "beam-4?": BLEU}}
TIMED = {
    "step_ms": {"median": float},
    "us_per_token": {"encoder": float, "decoder": float},
    "share_of_floor": float,
}
SPEED = ROW | {
    "decode": [
        {
            "setting": dict.fromkeys(("batch", "source", "target", "beam"), COUNT),
            "measured": {str: dict},
        }
    ],
    "training": {
        "us_per_token": float,
        "dataset": str,
        "train": {"rows": COUNT, "target_length": COUNT},
    },
    "dtype": str,
    "chip": dict,
}
SHAPES = {
    "table1": QUALITY | {"scores": {"dev": TRANSLATED, "test": TESTED}},
    "table2": SPEED,
    "table3": QUALITY | {"scores": {"dev": READ, "other?": READ}},
}

Result = dict[str, Any]


def result_path(results: Path, table: str, scale: str, row: str, seed: int | None = None) -> Path:
    """Where the result of a row lies."""
    name = row if seed is None else f"{row}-seed{seed}"
    return results / table / scale / f"{name}.json"


def read_result(path: Path) -> Result:
    """One result; raises where it is not what `reproduce` wrote, or lies in another's place."""
    advice = "delete it and run its row again"
    found = read_result_file(path, object, advice)
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise RunError(f"{path} was not written by `writehead reproduce`; move it elsewhere")
    try:
        check_shape(found, ROW)
        check_shape(found, SHAPES.get(found["table"], ROW))
        if found["table"] == "table2":
            _check_timed(found["decode"])
    except JsonError as error:
        raise RunError(f"{path} {error}; {advice}") from error
    place = result_path(
        path.parents[2], found["table"], found["scale"], found["row"], found.get("seed")
    )
    if place != path:
        raise RunError(
            f"{path} is a result of {shown(found['table'])}, scale {shown(found['scale'])}, in the "
            f"wrong folder; move it to {shown(str(place), 200)}"
        )
    return found


def _check_timed(decode: list[Result]) -> None:
    """Raises JsonError if there are no decodings, or if a timed one lacks its measurements."""
    if not decode:
        raise JsonError("is damaged: decode is empty")
    for row in decode:
        for name, one in row["measured"].items():
            if "step_ms" in one:
                check_shape(one, TIMED, shown(name))


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
        f"train.{name} is {shown(one.get(name))} in it and {shown(value)} {where}"
        for name, value in other.items()
        if name not in APART and one.get(name) != value
    ]


def check_alike(name: str, one: Result, other: Result) -> None:
    """Raises where two rows of a table differ in more than their attention and seed.

    name: what the first is called where it is told.
    """
    differences = unlike(one["train"], other["train"], "elsewhere")
    if one["family"] != other["family"]:
        differences.append(f"its family is {shown(one['family'])}, not {shown(other['family'])}")
    data = other["data"]
    if data is not None and one["data"]["fingerprint"] != data["fingerprint"]:
        differences.append("its dataset is another")
    if differences:
        raise RunError(
            f"{name} was made otherwise: {'; '.join(differences)}; rows are compared only where "
            f"all else is equal: use the same settings, or give these their own --results and "
            f"--runs"
        )
