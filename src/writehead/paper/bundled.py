"""The quality and speed of the bundled model, from the files in results/bundled/."""

from pathlib import Path

from writehead.errors import RunError
from writehead.interop.pretrained import RunFacts
from writehead.paper.results import ENVIRONMENT, SIZE, Result
from writehead.runs.bundled import BUNDLED
from writehead.training.evaluate import SEARCHES
from writehead.util.json_files import read_json

EVALUATED = ENVIRONMENT | {
    "bytes": SIZE,
    "fingerprint": str,
    "on": str,
    "sentences": SIZE,
    "parameters": SIZE,
    "ln_ppl": float,
    "bleu": {name: {"intl": float} for name in SEARCHES},
    "quantization": ({"bits": SIZE}, None),
}
SPEED = {
    "fingerprint": str,
    "input": str,
    "environment": {"hardware": {"device": str, "threads": SIZE}},
    "engines": {
        name: {"searches": {search: {"sentences_per_second": float} for search in SEARCHES}}
        for name in ("ours", "ours, int8")
    },
}
FIRST_LINES = {
    "fingerprint": str,
    "first_lines": {name: {"chrf": float, "kept": int, "to_keep": SIZE} for name in SEARCHES},
}
SHAPES = {
    "float32": EVALUATED,
    "quantized": EVALUATED,
    "int8": EVALUATED,
    "speed": SPEED,
    "first-lines": FIRST_LINES,
}


def bundled_table(results: Path) -> tuple[list[list[str]], str] | None:
    """Returns the table of the bundled model and its caption; None if a file is missing."""
    paths = {name: results / "bundled" / f"{name}.json" for name in SHAPES}
    if not all(path.is_file() for path in paths.values()):
        return None
    files: dict[str, Result] = {
        name: read_json(paths[name], shape, RunError, "measure it again")
        for name, shape in SHAPES.items()
    }
    before, after, int8, speed, lines = files.values()
    for name in ("quantized", "int8", "speed", "first-lines"):
        if files[name]["fingerprint"] != RunFacts.read(BUNDLED).fingerprint:
            raise RunError(
                f"{paths[name]} was not measured with the bundled weights; measure it again"
            )
    if (
        after["quantization"] is None
        or len({one["sentences"] for one in (before, after, int8)}) > 1
    ):
        raise RunError(
            f"{paths['float32']}, quantized.json and int8.json do not match; measure them again"
        )
    size, bits = RunFacts.read(BUNDLED).bytes, after["quantization"]["bits"]
    engines, hardware = speed["engines"], speed["environment"]["hardware"]
    found = [lines["first_lines"][name] for name in SEARCHES]
    chrf = " / ".join(f"{one['chrf']:.1f}" for one in found)
    kept = " / ".join(str(one["kept"]) for one in found)
    searched = ("BLEU, greedy / beam 4", "sentences/s, greedy / beam 4")
    rows = [
        ["weights", "MB", "ln(PPL)", *searched, "first lines, chrF", "first lines, kept"],
        ["float32, as trained", *_quality(before, before["bytes"]), "–", "–", "–"],
        [f"{bits} bits, in float32", *_quality(after, size), _speed(engines["ours"]), "–", "–"],
        [f"{bits} bits, in int8", *_quality(int8, size), _speed(engines["ours, int8"]), chrf, kept],
    ]
    caption = (
        f"English to German, {after['parameters'] / 1e6:.0f}M parameters. Quality: "
        f"{Path(after['on']).name}, {after['sentences']:,} sentences, sacrebleu with `-tok intl`. "
        f"Speed: {Path(speed['input']).name}, {hardware['device']}, {hardware['threads']} threads. "
        f"First lines: `writehead evaluate --test-set first-lines`, greedy / beam 4. *Kept* is how "
        f"many of its {found[0]['to_keep']} numbers and names the translations keep."
    )
    return rows, caption


def _speed(engine: Result) -> str:
    rates = (engine["searches"][name]["sentences_per_second"] for name in SEARCHES)
    return " / ".join(f"{rate:.3g}" for rate in rates)


def _quality(one: Result, size: int) -> list[str]:
    scores = " / ".join(f"{one['bleu'][name]['intl']:.2f}" for name in SEARCHES)
    return [f"{size / 1e6:.1f}", f"{one['ln_ppl']:.3f}", scores]
