"""Whole runs: a tiny model learns to capitalise, and to reverse, lines it has not seen."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from corpora import write_pairs
from writehead.config import DecodeConfig, PrepareConfig, TrainConfig
from writehead.data.prepare import prepare
from writehead.data.sources import parallel_files
from writehead.engine import Engine
from writehead.paper.presets import preset
from writehead.training.journal import read_log
from writehead.training.loop import train

SYLLABLES = ["ba", "co", "du", "fe", "gi", "ka", "lo", "mu"]
HELD_OUT = 100
SIZES = {"rows": 16, "source_length": 32, "target_length": 32}
RATE = {"optimizer": "adamw", "learning_rate": 5e-3, "warmup": 40, "decay": 0.5}
EVERY = {"log_every": 50, "evaluate_every": 150, "checkpoint_every": 300}
CONFIG = TrainConfig(steps=300, label_smoothing=0.0, **SIZES, **RATE, **EVERY)


def lines(count: int) -> list[str]:
    draw = random.Random(0)
    made: dict[str, None] = {}
    while len(made) < count:
        made[" ".join(draw.choices(SYLLABLES, k=draw.randint(2, 5)))] = None
    return list(made)


def dataset(folder: Path, task: str) -> tuple[Path, list[tuple[str, str]]]:
    """Prepared training pairs, and held-out pairs."""
    pairs = [
        (line, line.upper() if task == "copy" else " ".join(reversed(line.split())))
        for line in lines(2000 + HELD_OUT)
    ]
    train = write_pairs(folder, "train", pairs[HELD_OUT:])
    dev = write_pairs(folder, "dev", pairs[:HELD_OUT])
    inputs = parallel_files([train[0]], [train[1]], [dev[0]], [dev[1]])
    config = PrepareConfig(task="translation", vocab_size=295)
    prepare(folder / "data", inputs, config, threads=1)
    return folder / "data", pairs[:HELD_OUT]


@pytest.mark.parametrize(("task", "g"), [("copy", 1), ("reverse", 2)])
def test_a_tiny_model_learns(tmp_path, task, g):
    data, held_out = dataset(tmp_path, task)
    sizes = {"d": 48, "f": 96, "h": 4, "k": 12, "v": 12, "dropout": 0.0}
    layers = {"encoder_layers": 1, "decoder_layers": 1}
    places = {"source_positions": 32, "target_positions": 32}
    model = replace(preset("tiny/multi-query"), g=g, **sizes, **layers, **places)
    train(data, tmp_path / "run", model, CONFIG, device="cpu")

    log = read_log(tmp_path / "run")
    losses, dev = ([one[key] for one in log if key in one] for key in ("loss", "dev_ln_ppl"))
    assert losses[-1] < 0.1 < 1.0 < losses[0]
    assert dev[-1] < 0.1

    engine = Engine.load(tmp_path / "run", "cpu")
    sources = [source for source, _ in held_out]
    for options in (DecodeConfig(beam=1), DecodeConfig(beam=4)):
        found = [output.text for output in engine.translate(sources, options)]
        right = sum(text == wanted for text, (_, wanted) in zip(found, held_out, strict=True))
        assert right > 0.95 * HELD_OUT
