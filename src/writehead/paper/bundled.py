"""The bundled model: the files that its figures are made of, and its table.

results/bundled/ holds float32.json and quantized.json, by `writehead evaluate` before and after
quantizing, speed.json, by `writehead bench translate`, and train.json, of the training itself.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from writehead.bench.record import read_result_file
from writehead.config import ModelConfig, QuantizationConfig, TrainConfig
from writehead.errors import ConfigError, RunError
from writehead.paper.captions import made, millions
from writehead.paper.layout import NONE, Grid
from writehead.paper.results import COUNT, ENVIRONMENT, Result
from writehead.training.evaluate import SEARCHES

FOLDER = "bundled"
TITLE = "The bundled model"
_BLEU = {"intl": float, "13a": float}
_SPEED = {"sentences_per_second": float}
_EVALUATED = {
    **dict.fromkeys(("fingerprint", "dtype", "on"), str),
    **dict.fromkeys(("parameters", "bytes", "sentences"), COUNT[1:]),
    "model": dict,
    "quantization": ({"bits": COUNT}, None),
    "ln_ppl": float,
    "bleu": dict.fromkeys(SEARCHES, _BLEU) | {"greedy": _BLEU | {"intl_signature": str}},
    **ENVIRONMENT,
}
_TIMED = {
    **dict.fromkeys(("fingerprint", "input", "dtype"), str),
    "engines": {
        "ours": {
            "load_s": float,
            "searches": dict.fromkeys(SEARCHES, _SPEED)
            | {"greedy": _SPEED | {"seconds": {"repeats": list}}},
        }
    },
    "environment": ENVIRONMENT | {"hardware": {"device": str, "cores": COUNT, "threads": COUNT}},
}
# for each file: how to make it again, and its shape
FILES = {
    "float32": ("run `writehead evaluate` again, on the run as it was trained", _EVALUATED),
    "quantized": ("run `writehead evaluate` again, on the quantized run", _EVALUATED),
    "speed": ("run `writehead bench translate` again, on the quantized run", _TIMED),
    "train": ("copy it again from the folder of the training", {"model": dict, "train": dict}),
}
# by name of the file: what reads the parts of it that are not plain figures
PARTS: dict[str, Callable[[Result], object]] = {
    "float32": lambda one: ModelConfig.from_json(one["model"]),
    "quantized": lambda one: QuantizationConfig.from_json(one["quantization"] or {}),
    "train": lambda one: TrainConfig.from_json(one["train"]),
}
# settings of a training that change nothing of its weights
UNSEEN = {"log_every", "evaluate_every", "evaluate_sequences", "checkpoint_every", "keep"}
# what the scores before and after quantizing must have in common
ALIKE: dict[str, Callable[[Result], Any]] = {
    "model": lambda one: one["model"],
    "text": lambda one: (Path(one["on"]).name, one["sentences"]),
    "dtype": lambda one: one["dtype"],
    "way to score": lambda one: one["bleu"]["greedy"]["intl_signature"],
}

Bundled = dict[str, Result]  # by name of the file


def what_is_not_run(results: Path) -> str:
    """What to call the bundled model where its figures are not there, or not all of them."""
    missing = _missing(results)
    title = TITLE[0].lower() + TITLE[1:]
    if len(missing) == len(FILES):
        return title
    return f"{title}, which lacks {', '.join(f'{FOLDER}/{name}.json' for name in missing)}"


def read_bundled(results: Path) -> Bundled | None:
    """All files on the bundled model; None where some are missing.

    Raises where one is damaged, or where they are not of one model, scored alike.
    """
    if _missing(results):
        return None
    found = {
        name: read_result_file(_place(results, name), shape, again)
        for name, (again, shape) in FILES.items()
    }
    for name, read in PARTS.items():
        try:
            read(found[name])
        except ConfigError as error:
            raise RunError(f"{_place(results, name)}: {error}; {FILES[name][0]}") from error
    _check_alike(results / FOLDER, found)
    return found


def _place(results: Path, name: str) -> Path:
    return results / FOLDER / f"{name}.json"


def _missing(results: Path) -> list[str]:
    return [name for name in FILES if not _place(results, name).is_file()]


def _check_alike(folder: Path, found: Bundled) -> None:
    """Raises unless the files are of one model, which differs in its bits and nothing else."""
    before, after = found["float32"], found["quantized"]
    if before["quantization"] is not None:
        raise RunError(f"{folder / 'float32.json'} is of a quantized run; {FILES['float32'][0]}")
    if after["quantization"] is None:
        raise RunError(
            f"{folder / 'quantized.json'} is of a run that is not quantized; "
            f"{FILES['quantized'][0]}"
        )
    for what, of in ALIKE.items():
        if of(before) != of(after):
            raise RunError(
                f"{folder / 'float32.json'} and quantized.json differ in their {what}; score both "
                f"runs alike"
            )
    if found["speed"]["fingerprint"] != after["fingerprint"]:
        raise RunError(
            f"{folder / 'speed.json'} and quantized.json are of different weights; "
            f"{FILES['speed'][0]}"
        )
    if found["train"]["model"] != after["model"]:
        raise RunError(f"{folder / 'train.json'} is of another model; {FILES['train'][0]}")


def bundled_grid(found: Bundled) -> Grid:
    """The model as it was trained and as it is in the box: bytes, quality, speed, and the cost."""
    before, after = found["float32"], found["quantized"]
    head = ["weights", "bytes", "ln(PPL)", "BLEU, greedy / beam 4", "BLEU, 13a"]
    change = [
        f"{_signed(after['bytes'] / before['bytes'] * 100 - 100, 0)}%",
        _signed(after["ln_ppl"] - before["ln_ppl"], 3),
        *(
            " / ".join(_signed(b - a, 2) for a, b in zip(*scores, strict=True))
            for scores in zip(_bleu(before), _bleu(after), strict=True)
        ),
    ]
    rows = [
        ["as trained", *_figures(before), NONE],
        [f"{after['quantization']['bits']} bits", *_figures(after), _speeds(found["speed"])],
        ["change", *change, NONE],
    ]
    return Grid(TITLE, [*head, "sentences a second, greedy / beam 4"], rows, _notes(found))


def _figures(one: Result) -> list[str]:
    scores = [" / ".join(f"{score:.2f}" for score in pair) for pair in _bleu(one)]
    return [f"{one['bytes']:,}", f"{one['ln_ppl']:.3f}", *scores]


def _bleu(one: Result) -> list[list[float]]:
    """BLEU of both searches, by the paper's tokenization and by sacrebleu's own."""
    return [[one["bleu"][search][name] for search in SEARCHES] for name in ("intl", "13a")]


def _speeds(speed: Result) -> str:
    searches = speed["engines"]["ours"]["searches"]
    return " / ".join(f"{searches[name]['sentences_per_second']:.3g}" for name in SEARCHES)


def _signed(value: float, digits: int) -> str:
    return f"{'−' if value < 0 else '+'}{abs(value):.{digits}f}"


def _notes(found: Bundled) -> list[str]:
    before, after, speed = found["float32"], found["quantized"], found["speed"]
    config = ModelConfig.from_json(after["model"])
    bits = QuantizationConfig.from_json(after["quantization"])
    hardware, ours = speed["environment"]["hardware"], speed["engines"]["ours"]
    passes = len(ours["searches"]["greedy"]["seconds"]["repeats"])
    return [
        f"English to German by {config.kind} attention: {millions(after['parameters'])} "
        f"parameters, {config.encoder_layers} + {config.decoder_layers} layers, a vocabulary of "
        f"{config.vocab_size:,}; in the box in {bits.words}, {after['bytes']:,} bytes with its "
        f"tokenizer.",
        f"Quality: {Path(after['on']).name}, {after['sentences']:,} sentences, {after['dtype']} "
        f"on {after['hardware']['device']}; BLEU {after['bleu']['greedy']['intl_signature']}, and "
        f"13a beside it.",
        f"Speed: {Path(speed['input']).name} in {speed['dtype']} on {hardware['device']}, "
        f"{hardware['threads']} threads of {hardware['cores']} cores, text to text, the median "
        f"of {passes} passes; loading took {ours['load_s']:.2g} s.",
        f"Training: {_settings(found['train']['train'])}; what is not named is the default.",
        made([{"environment": before}, {"environment": after}, speed]),
    ]


def _settings(train: dict[str, Any]) -> str:
    """How long a training was and what was not the default in it, as `--set` takes them."""
    usual = TrainConfig().to_json()
    other = [
        f"train.{name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in train.items()
        if name == "steps" or (name not in UNSEEN and usual.get(name) != value)
    ]
    return ", ".join(other)
