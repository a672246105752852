"""Small trainings on made-up pairs, and what is compared of them."""

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from corpora import pair_inputs, pairs, sentences, write
from writehead.config import ModelConfig, PrepareConfig, TrainConfig
from writehead.data.prepare import prepare
from writehead.data.sources import text_files
from writehead.paper.presets import preset
from writehead.training.checkpoint import list_checkpoints
from writehead.training.journal import read_log
from writehead.training.loop import Outcome, train

SIZES = {"d": 12, "f": 20, "h": 2, "k": 5, "v": 7, "decoder_layers": 1, "target_positions": 48}
SIZES |= {"dropout": 0.1}
MODEL = replace(preset("tiny/multi-query"), **SIZES, encoder_layers=1, source_positions=48)
LANGUAGE = replace(preset("tiny-lm/multi-query"), **SIZES)
STEPS = 11
# no two periods share a multiple before the end; an epoch ends on the way
CONFIG = TrainConfig(
    steps=STEPS,
    rows=4,
    source_length=48,
    target_length=48,
    warmup=4,
    log_every=3,
    evaluate_every=5,
    checkpoint_every=4,
)
TIMES = ("tokens_per_second", "utilisation")
# what the command line needs to train the same
SETTINGS = [
    *(f"--set=model.{name}={getattr(MODEL, name)}" for name in (*SIZES, "encoder_layers")),
    "--set=model.source_positions=48",
    *(f"--set=train.{name}={value}" for name, value in CONFIG.to_json().items()),
]


def pair_dataset(folder: Path, count: int = 90, vocabulary: int = 330, seed: int = 0) -> Path:
    config = PrepareConfig(task="translation", vocabulary=vocabulary, dev=9, seed=seed)
    prepare(folder / "pairs", pair_inputs(folder, pairs(count, longest=4)), config, workers=1)
    return folder / "pairs"


def text_dataset(folder: Path) -> Path:
    config = PrepareConfig(task="language", vocabulary=330, dev=9)
    text = write(folder / "text", sentences(90, seed=2, longest=6))
    prepare(folder / "language", text_files([text], []), config, workers=1)
    return folder / "language"


def go(
    dataset: Path, run: Path, config: TrainConfig = CONFIG, model: ModelConfig = MODEL
) -> Outcome:
    return train(dataset, run, model, config, device="cpu")


def curve(run: Path) -> list[dict[str, float]]:
    """The log, but for what depends on the machine."""
    return [
        {name: value for name, value in entry.items() if name not in TIMES}
        for entry in read_log(run)
    ]


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def last_checkpoint(run: Path) -> Path:
    return list_checkpoints(run)[-1][1]


def steps(run: Path) -> list[int]:
    return [step for step, _ in list_checkpoints(run)]


def assert_same_training(run: Path, other: Path) -> None:
    """To the bit: what was logged, the weights, and the optimizer's state."""
    assert curve(run) == curve(other)
    assert steps(run) == steps(other)
    for ours, theirs in ((run, other), (last_checkpoint(run), last_checkpoint(other))):
        for name, T in weights(theirs).items():
            assert torch.equal(weights(ours)[name], T), name
    moments, expected = (
        load_file(last_checkpoint(one) / "optimizer.safetensors") for one in (run, other)
    )
    assert moments.keys() == expected.keys()
    assert all(torch.equal(moments[name], expected[name]) for name in expected)
