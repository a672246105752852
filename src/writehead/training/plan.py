"""The settings of a run, in `train.json`: a run resumes only with the same ones."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from writehead import __version__
from writehead.config import ModelConfig, TrainConfig
from writehead.data.dataset import Dataset
from writehead.data.tokenizer import BOS, EOS, PAD
from writehead.errors import ConfigError, RunError, shown
from writehead.model.runs import CONFIG
from writehead.training.checkpoint import list_checkpoints
from writehead.training.distributed import World
from writehead.util.files import write_file
from writehead.util.json_files import read_json

PLAN = "train.json"
PLAN_SHAPE: dict[str, Any] = {"tokenizer": str, "dataset": str, "model": dict}
PLAN_SHAPE |= {"train": {"average": range(1, 2**31)}}
# settings that may change on resume: they do not affect what a step computes, or they are what a
# user changes to rescue a run whose loss diverges
CHANGEABLE = {
    *("steps", "learning_rate", "warmup", "clip", "accumulate", "compile", "parallel"),
    *("log_every", "evaluate_every", "evaluate_sequences", "checkpoint_every", "keep", "average"),
}
MAX_DIFFERENCES = 5  # in one message


def fit_to_data(data: Dataset, model: ModelConfig, config: TrainConfig) -> ModelConfig:
    """Returns the model config with the dataset's vocabulary; raises if they do not fit."""
    if data.task != model.task:
        raise ConfigError(
            f"the dataset is for a {data.task} model, but the preset is a {model.task} model; "
            f"choose a preset for {data.task}"
        )
    for name, value in (("pad", PAD), ("bos", BOS), ("eos", EOS)):
        if getattr(model, name) != value:
            raise ConfigError(
                f"model.{name} is {getattr(model, name)}, but the dataset uses {value}; leave "
                f"model.{name}={value}"
            )
    for side in ("source", "target") if model.encoder_layers else ("target",):
        length, positions = getattr(config, f"{side}_length"), getattr(model, f"{side}_positions")
        if length > positions:
            raise ConfigError(
                f"rows of {length} tokens are longer than the model's {positions} positions; set "
                f"train.{side}_length to {positions} or less"
            )
    return replace(model, vocab_size=data.vocab_size)


def check_folder(run: Path) -> None:
    """Raises unless `run` is empty, does not exist, or was made by training."""
    if not (run / PLAN).is_file() and run.exists() and (not run.is_dir() or any(run.glob("[!.]*"))):
        raise RunError(f"{run} exists and is not a training run; choose another folder")


def read_plan(run: Path) -> dict[str, Any]:
    """Reads "model" and "train", and the fingerprints "tokenizer" and "dataset", of a run."""
    plan = read_json(run / PLAN, PLAN_SHAPE, RunError, "start in another folder")
    return {name: plan[name] for name in PLAN_SHAPE}


def agree_on_plan(
    run: Path, data: Dataset, model: ModelConfig, config: TrainConfig, world: World
) -> list[str]:
    """Writes the plan of a run; returns the settings that changed since its last checkpoint.

    A run without a checkpoint accepts any settings. With no step left to train, the old plan
    stays, because it describes how the weights were trained.
    """
    plan = {
        "format": 1,
        "writehead": __version__,
        "tokenizer": data.tokenizer.fingerprint,
        "dataset": data.fingerprint,
        "model": model.to_json(),
        "train": config.to_json(),
    }
    changes: list[str] = []
    reached = max((step for step, _ in list_checkpoints(run)), default=0)
    if not reached and (run / CONFIG).is_file():
        raise RunError(
            f"{run} is finished and has no checkpoint to resume from; choose another folder"
        )
    if reached and (run / PLAN).is_file():
        changes = _compare(run, read_plan(run), plan)
    world.barrier()
    if world.is_first and config.steps > reached:
        write_file(run / PLAN, json.dumps(plan, indent=2) + "\n")
    world.barrier()
    return changes


def _compare(run: Path, old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Describes the changed settings; raises if any of them must not change."""
    allowed: list[str] = []
    forbidden: list[str] = []
    if old["tokenizer"] != new["tokenizer"]:
        forbidden.append("the dataset has another vocabulary")
    elif old["dataset"] != new["dataset"]:
        forbidden.append(
            f"the dataset's fingerprint was {shown(old['dataset'])} and is {new['dataset']}"
        )
    for section in ("model", "train"):
        for name, value in new[section].items():
            before = old[section].get(name)
            if before != value:
                may_change = section == "train" and name in CHANGEABLE
                text = f"{section}.{name} was {shown(before)} and is {value!r}"
                (allowed if may_change else forbidden).append(text)
    if forbidden:
        raise ConfigError(
            f"{run} was started differently: {'; '.join(forbidden[:MAX_DIFFERENCES])}. Use the "
            f"same settings and dataset to resume, or another folder to start over"
        )
    return allowed
