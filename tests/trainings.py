"""Small training runs on made-up text, and comparisons of their results."""

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from corpora import translation_dataset
from writehead.config import ModelConfig, TrainConfig
from writehead.paper.presets import preset
from writehead.training.checkpoint import list_checkpoints
from writehead.training.journal import read_log
from writehead.training.loop import Outcome, train

SIZES = {"d": 12, "f": 20, "h": 2, "k": 5, "v": 7, "decoder_layers": 1, "target_positions": 48}
SIZES |= {"dropout": 0.1}
ENCODER_SIZES = {"encoder_layers": 1, "source_positions": 48}
MODEL = replace(preset("tiny/multi-query"), **SIZES, **ENCODER_SIZES)
LANGUAGE = replace(preset("tiny-lm/multi-query"), **SIZES)
STEPS = 11
# no two intervals share a multiple before the last step, and an epoch ends before it
INTERVALS = {"log_every": 3, "evaluate_every": 5, "checkpoint_every": 4}
LENGTHS = {"source_length": 48, "target_length": 48}
CONFIG = TrainConfig(steps=STEPS, rows=4, warmup=4, **LENGTHS, **INTERVALS)
TIMES = ("tokens_per_second", "utilisation")
# the same as command-line options
SETTINGS = [f"--set=model.{name}={value}" for name, value in (SIZES | ENCODER_SIZES).items()]
SETTINGS += [f"--set=train.{name}={value}" for name, value in CONFIG.to_json().items()]


def pair_dataset(folder: Path, count: int = 90, vocab_size: int = 330, seed: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    settings = {"vocab_size": vocab_size, "dev": 9, "seed": seed}
    return translation_dataset(folder, count, longest=4, **settings).directory


def go(dataset: Path, run: Path, config=CONFIG, model: ModelConfig = MODEL) -> Outcome:
    return train(dataset, run, model, config, device="cpu")


def command(dataset: Path, run: Path, *settings: str, preset="tiny/multi-query") -> list[object]:
    """The arguments of `writehead` that train like `go`."""
    options = ("--preset", preset, "--run", run, "--device=cpu", *SETTINGS, *settings)
    return ["train", dataset, *options]


def curve(run: Path) -> list[dict[str, float]]:
    """The log without the metrics that depend on the machine's speed."""
    return [{k: v for k, v in entry.items() if k not in TIMES} for entry in read_log(run)]


def dev_curve(run: Path) -> dict[int, float]:
    """The dev ln(PPL) by step; training metrics after a resume are means over fewer steps."""
    return {e["step"]: e["dev_ln_ppl"] for e in read_log(run) if "dev_ln_ppl" in e}


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def last_checkpoint(run: Path) -> Path:
    return list_checkpoints(run)[-1][1]


def steps(run: Path) -> list[int]:
    return [step for step, _ in list_checkpoints(run)]


def assert_same_training(run: Path, other: Path) -> None:
    """The dev scores, weights and optimizer states are equal to the last bit."""
    assert dev_curve(run) == dev_curve(other)
    assert [entry["step"] for entry in read_log(run)] == [e["step"] for e in read_log(other)]
    assert steps(run) == steps(other)
    for name in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = (last_checkpoint(one) / name for one in (run, other))
        assert ours.read_bytes() == theirs.read_bytes()
    assert (run / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


def assert_alike(run: Path, other: Path) -> None:
    """Equal up to the rounding of float32 sums in another order."""
    assert dev_curve(run) == pytest.approx(dev_curve(other), rel=1e-5)
    found = weights(run)
    for name, T in weights(other).items():
        # the norm, because rounding may flip the sign of a gradient close to zero
        assert (found[name] - T).norm() <= 1e-4 * T.norm(), name
