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
    "engines": {"ours": {"searches": {name: {"sentences_per_second": float} for name in SEARCHES}}},
}
SHAPES = {"float32": EVALUATED, "quantized": EVALUATED, "speed": SPEED}


def bundled_table(results: Path) -> tuple[list[list[str]], str] | None:
    """Returns the table of the bundled model and its caption; None if a file is missing."""
    paths = {name: results / "bundled" / f"{name}.json" for name in SHAPES}
    if not all(path.is_file() for path in paths.values()):
        return None
    files: dict[str, Result] = {
        name: read_json(paths[name], shape, RunError, "measure it again")
        for name, shape in SHAPES.items()
    }
    before, after, speed = files.values()
    for name in ("quantized", "speed"):
        if files[name]["fingerprint"] != RunFacts.read(BUNDLED).fingerprint:
            raise RunError(
                f"{paths[name]} was not measured with the bundled weights; measure it again"
            )
    if after["quantization"] is None or before["sentences"] != after["sentences"]:
        raise RunError(f"{paths['float32']} and quantized.json do not match; measure both again")
    size, bits = RunFacts.read(BUNDLED).bytes, after["quantization"]["bits"]
    searches, hardware = speed["engines"]["ours"]["searches"], speed["environment"]["hardware"]
    rates = " / ".join(f"{searches[name]['sentences_per_second']:.3g}" for name in SEARCHES)
    rows = [
        ["weights", "MB", "ln(PPL)", "BLEU, greedy / beam 4", "sentences/s, greedy / beam 4"],
        ["float32, as trained", *_quality(before, before["bytes"]), "–"],
        [f"{bits} bits, as bundled", *_quality(after, size), rates],
    ]
    caption = (
        f"English to German, {after['parameters'] / 1e6:.0f}M parameters. Quality: "
        f"{Path(after['on']).name}, {after['sentences']:,} sentences, sacrebleu with `-tok intl`. "
        f"Speed: {Path(speed['input']).name}, {hardware['device']}, {hardware['threads']} threads."
    )
    return rows, caption


def _quality(one: Result, size: int) -> list[str]:
    scores = " / ".join(f"{one['bleu'][name]['intl']:.2f}" for name in SEARCHES)
    return [f"{size / 1e6:.1f}", f"{one['ln_ppl']:.3f}", scores]
