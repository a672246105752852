"""The settings of a run: training resumes with the same settings and rejects others.

A run without a finished step accepts any settings.
"""

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
PLAN_SHAPE = {
    "tokenizer": str,
    "dataset?": (str, None),
    "model": dict,
    "train": {"average?": range(1, 2**31)},
}
# what may change when a run goes on: it does not enter what a step computes, or it is what one
# changes to save a run from a loss that explodes
FREE = {
    "steps",
    "learning_rate",
    "warmup",
    "clip",
    "accumulate",
    "compile",
    "parallel",
    "log_every",
    "evaluate_every",
    "evaluate_sequences",
    "checkpoint_every",
    "keep",
    "average",
}


def fit_to_data(data: Dataset, model: ModelConfig, config: TrainConfig) -> ModelConfig:
    """The model to train, which is the preset's with the dataset's vocabulary."""
    if data.task != model.task:
        raise ConfigError(
            f"the dataset is for a {data.task} model and the preset is a {model.task} model; "
            f"choose a preset for {data.task}"
        )
    for name, value in (("pad", PAD), ("bos", BOS), ("eos", EOS)):
        if getattr(model, name) != value:
            raise ConfigError(
                f"model.{name} is {getattr(model, name)}, and in the dataset's tokens it is "
                f"{value}; leave model.{name}={value}"
            )
    lengths = (config.source_length, model.source_positions) if model.encoder_layers else (0, 0)
    longest = (lengths, (config.target_length, model.target_positions))
    for length, positions in longest:
        if length > positions:
            raise ConfigError(
                f"rows of {length} tokens are longer than the {positions} learned positions; set "
                f"train.source_length and train.target_length to {positions} or less"
            )
    return replace(model, vocab_size=data.vocab_size)


def check_folder(run: Path) -> None:
    """Raises where `run` is neither free nor the folder of a run in training."""
    if not (run / PLAN).is_file() and run.exists() and (not run.is_dir() or any(run.glob("[!.]*"))):
        raise RunError(f"{run} holds something else than a run in training; choose another folder")


def read_plan(run: Path) -> dict[str, Any]:
    """What the steps of a run were trained by: "tokenizer", "dataset", "model" and "train".

    The first two are fingerprints. Older runs did not note their dataset's: it is None there.
    """
    plan = read_json(run / PLAN, PLAN_SHAPE, RunError, "start in another folder")
    return {name: plan.get(name) for name in ("tokenizer", "dataset", "model", "train")}


def agree_on_plan(
    run: Path, data: Dataset, model: ModelConfig, config: TrainConfig, world: World
) -> list[str]:
    """Writes the plan of a run; returns the settings that changed since its last step.

    Raises ConfigError if a setting that must not change differs from that of earlier steps. If no
    step is left to train, the old plan is kept, because it describes how the weights were trained.
    """
    plan = {
        "format": 1,
        "writehead": __version__,
        "tokenizer": data.tokenizer.fingerprint,
        "dataset": data.fingerprint,
        "model": model.to_json(),
        "train": config.to_json(),
    }
    path, changes = run / PLAN, []
    reached = max((step for step, _ in list_checkpoints(run)), default=0)
    if not reached and (run / CONFIG).is_file():
        raise RunError(f"{run} is finished and has no checkpoint to go on from; choose another")
    old = read_plan(run) if reached and path.is_file() else None
    if old is not None:
        changes = _compare(run, old, plan)
        if old["dataset"] is None:
            plan["dataset"] = None  # it is unknown whether earlier steps used this dataset
    world.barrier()
    if world.is_first and config.steps > reached:
        write_file(path, (json.dumps(plan, indent=2) + "\n").encode())
    world.barrier()
    return changes


def _compare(run: Path, old: dict[str, Any], plan: dict[str, Any]) -> list[str]:
    """The settings that were changed, and may be; raises where others were too."""
    changed = [
        (room, name, f"{room}.{name} was {shown(old[room].get(name))} and is {value!r}")
        for room in ("model", "train")
        for name, value in plan[room].items()
        if old[room].get(name) != value
    ]
    free = [text for room, name, text in changed if room == "train" and name in FREE]
    differences = _compare_data(old, plan)
    differences += [text for _, _, text in changed if text not in free]
    if differences:
        more = f"; and {len(differences) - 5} more" if len(differences) > 5 else ""
        raise ConfigError(
            f"{run} was started differently: {'; '.join(differences[:5])}{more}. Use the same "
            f"settings and dataset to resume, or another folder to start over"
        )
    return free


def _compare_data(old: dict[str, Any], plan: dict[str, Any]) -> list[str]:
    """What is other about the dataset, as far as the old plan tells."""
    if old["tokenizer"] != plan["tokenizer"]:
        return ["the dataset has another vocabulary"]
    was, now = old["dataset"], plan["dataset"]
    if was in (None, now):
        return []
    return [f"the dataset has the same vocabulary, but its fingerprint was {was:.16} and is {now}"]
