"""The settings of a run, in `train.json`: a run resumes only with the same ones."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from writehead import __version__
from writehead.config import ModelConfig, TrainConfig, VocabularyConfig
from writehead.data.dataset import Dataset
from writehead.errors import ConfigError, RunError, shown
from writehead.runs.folder import CONFIG, PLAN
from writehead.training.checkpoint import list_checkpoints
from writehead.training.distributed import World
from writehead.training.origin import Origin
from writehead.util.files import write_file
from writehead.util.json_files import read_json

PLAN_SHAPE = {
    **dict.fromkeys(("tokenizer", "dataset"), str),
    **dict.fromkeys(("init?", "teacher?"), (str, None)),  # fingerprints of weights
    **dict.fromkeys(("model", "train"), dict),
}
# may change on resume: they do not affect a step, or they rescue a run whose loss diverges
CHANGEABLE = {
    *("steps", "learning_rate", "warmup", "clip", "accumulate", "compile", "parallel"),
    *("log_every", "evaluate_every", "evaluate_sequences", "checkpoint_every", "keep", "average"),
}


def fit_to_data(data: Dataset, model: ModelConfig, config: TrainConfig) -> ModelConfig:
    """Returns the model config with the dataset's vocabulary; raises if they do not fit."""
    if data.task != model.task:
        raise ConfigError(
            f"the dataset is for a {data.task} model, but the model to train is a {model.task} "
            f"model; choose another dataset or preset"
        )
    vocabulary = data.vocabulary
    for name in ("pad", "bos", "eos"):
        value, needed = getattr(model, name), getattr(vocabulary, name)
        if value not in (needed, getattr(VocabularyConfig, name)):  # a preset has our defaults
            raise ConfigError(f"the dataset needs model.{name}={needed}, not {value}")
    lengths = {"target": (config.target_length, model.target_positions)}
    if model.encoder_layers:
        lengths["source"] = (config.source_length, model.source_positions)
    for side, (length, positions) in lengths.items():
        if length > positions:
            raise ConfigError(
                f"train.{side}_length={length} exceeds the model's {positions} positions; lower it"
            )
    names = ("vocab_size", "pad", "bos", "eos")
    sizes = {name: getattr(vocabulary, name) for name in names}
    source = vocabulary.source_vocab_size or model.source_vocab_size
    return replace(model, **sizes, source_vocab_size=source)


def check_folder(run: Path) -> None:
    """Raises RunError unless `run` is empty, does not exist, or is a training run."""
    if not (run / PLAN).is_file() and run.exists() and (not run.is_dir() or any(run.glob("[!.]*"))):
        raise RunError(f"{run} exists and is not a training run; choose another folder")


def read_plan(run: Path) -> dict[str, Any]:
    """Reads the settings of a run, and the fingerprints of what it was started with."""
    plan: dict[str, Any] = read_json(run / PLAN, PLAN_SHAPE, RunError, "start in another folder")
    return plan


def agree_on_plan(
    run: Path,
    data: Dataset,
    model: ModelConfig,
    config: TrainConfig,
    world: World,
    origin: Origin | None = None,
) -> list[str]:
    """Writes the plan of a run, unless all steps are done; returns the settings that changed.

    A run without a checkpoint accepts any settings.
    """
    plan = {
        "format": 1,
        "writehead": __version__,
        "tokenizer": data.tokenizer.fingerprint,
        "dataset": data.fingerprint,
        **(origin or Origin()).fingerprints(),
        "model": model.to_json(),
        "train": config.to_json(),
    }
    last_step = max((step for step, _ in list_checkpoints(run)), default=0)
    if not last_step and (run / CONFIG).is_file():
        raise RunError(f"{run} is finished and has no checkpoint; choose another folder")
    has_plan = last_step and (run / PLAN).is_file()
    changes = _compare(run, read_plan(run), plan) if has_plan else []
    world.barrier()
    if world.is_first and config.steps > last_step:
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
        forbidden.append("the dataset has another fingerprint")
    for name, words in (("init", "initial weights"), ("teacher", "teacher")):
        if old.get(name) != new[name]:
            forbidden.append(f"the {words} had fingerprint {old.get(name)}, not {new[name]}")
    for section in ("model", "train"):
        for name, value in new[section].items():
            before = old[section].get(name)
            if before != value:
                changed = allowed if section == "train" and name in CHANGEABLE else forbidden
                changed.append(f"{section}.{name} was {shown(before)} and is {value!r}")
    if forbidden:
        raise ConfigError(
            f"{run} was started with other settings: {'; '.join(forbidden)}. Use the "
            f"same settings and dataset to resume, or another folder to start over"
        )
    return allowed
