"""Checkpoints: runs that also contain the optimizer state and the training progress.

Tensors are saved whole, so a run may resume with another number of processes.
"""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import state_dict

from writehead.config import MAX_STEPS, ModelConfig
from writehead.data.batches import PackedBatches
from writehead.data.tokenizer import Files
from writehead.errors import ConfigError, DamagedRun, RunError, TrainingError
from writehead.runs.folder import (
    check_place,
    kept_files,
    read_config,
    read_model,
    run_directory,
    write_model,
)
from writehead.training.step import Stepper
from writehead.util.checksums import check_checksum
from writehead.util.files import remove_directory
from writehead.util.json_files import read_json

CHECKPOINTS = "checkpoints"  # a folder of runs
OPTIMIZER, PROGRESS = "optimizer.safetensors", "training.json"
DIVERGED = "lower train.learning_rate or raise train.warmup, and run the same command again"
PROGRESS_SHAPE = {"step": range(MAX_STEPS + 1), "data": dict, "dev": {str: float}, "interim": bool}


@dataclass(frozen=True)
class Progress:
    """The training progress at a checkpoint."""

    step: int
    data: dict[str, Any]  # the position in the dataset
    dev: dict[str, float]  # ln(PPL) by step
    interim: bool  # saved because of a signal; the next checkpoint replaces it


def checkpoint_path(run: Path, step: int) -> Path:
    """Returns the path of a step's checkpoint."""
    return run / CHECKPOINTS / f"step-{step:08d}"


def list_checkpoints(run: Path) -> list[tuple[int, Path]]:
    """Returns the steps and paths of a run's checkpoints, oldest first."""
    paths = (run / CHECKPOINTS).glob("step-*")
    matches = [(re.fullmatch(r"step-(\d{8})", path.name), path) for path in paths]
    return sorted((int(match[1]), path) for match, path in matches if match)


def save_checkpoint(run: Path, stepper: Stepper, files: Files, progress: Progress) -> None:
    """Writes a checkpoint; all processes must call it, and the first one writes."""
    model, world = stepper.model, stepper.world
    options = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights: dict[str, Any] = state_dict.get_model_state_dict(model, options=options)
    if world.any(not all(T.isfinite().all() for T in weights.values())):
        raise TrainingError(
            f"a weight is infinite or NaN at step {progress.step}; not saved; {DIVERGED}"
        )
    state = state_dict.get_optimizer_state_dict(model, stepper.optimizer, options=options)
    if world.is_first:
        with run_directory(checkpoint_path(run, progress.step), overwrite=False) as folder:
            write_model(folder, stepper.model_config, weights, files)
            save_file(_flatten(state), folder / OPTIMIZER)
            (folder / OPTIMIZER).chmod(0o644)  # safetensors makes it private
            (folder / PROGRESS).write_text(json.dumps(vars(progress)), encoding="utf-8")
    world.barrier()


def load_checkpoint(path: Path, stepper: Stepper, batches: PackedBatches) -> Progress:
    """Restores the model, the optimizer and the position in the data; returns the progress."""
    model, optimizer = stepper.model, stepper.optimizer
    try:
        weights: Any = read_model(path, stepper.model_config).state_dict()
        data = read_json(path / PROGRESS, PROGRESS_SHAPE, RunError, allow_nan=True)
        progress = Progress(**{name: data[name] for name in PROGRESS_SHAPE})
        if checkpoint_path(path.parents[1], progress.step) != path:
            raise ValueError(f"{PROGRESS} belongs to step {progress.step}")
        batches.restore(progress.data)
        tensors = load_file(path / OPTIMIZER)
        check_checksum(path / OPTIMIZER)
        check_checksum(path / PROGRESS)
        options = state_dict.StateDictOptions(full_state_dict=True)
        state_dict.set_model_state_dict(model, weights, options=options)
        state = state_dict.get_optimizer_state_dict(model, optimizer, options=options)
        expected = {name: T.shape for name, T in _flatten(state).items()}
        if {name: T.shape for name, T in tensors.items()} != expected:
            raise ValueError(f"{OPTIMIZER} does not match this optimizer and model")
        moments: Any = {}
        for name, T in tensors.items():
            parameter, moment = name.split("|")
            moments.setdefault(parameter, {})[moment] = T
        state["state"] = moments
        state_dict.set_optimizer_state_dict(model, optimizer, state, options=options)
    except (RunError, OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
        raise _damaged(path, error) from error
    return progress


def _flatten(state: Any) -> dict[str, torch.Tensor]:
    """Returns the optimizer state as tensors named "parameter|moment"."""
    return {
        f"{name}|{moment}": value.detach().cpu().contiguous()
        for name, moments in state["state"].items()
        for moment, value in moments.items()
    }


def _damaged(path: Path, error: Exception) -> RunError:
    reason = error.fault if isinstance(error, DamagedRun) else error
    return RunError(
        f"checkpoint {path} is damaged: {reason}; delete that folder to resume from the checkpoint "
        f"before it"
    )


def prune_checkpoints(run: Path, keep: int, dev: dict[str, float]) -> None:
    """Deletes all checkpoints except the last `keep` and the one with the lowest dev loss."""
    checkpoints = list_checkpoints(run)
    scored = [(dev[str(step)], path) for step, path in checkpoints if str(step) in dev]
    best = min(scored)[1] if scored else None
    for _, path in checkpoints[:-keep]:
        if path != best:
            remove_directory(path)


def remove_leftovers(run: Path) -> None:
    """Deletes the unfinished files of a killed process."""
    for path in (*(run / CHECKPOINTS).glob(".step-*"), *run.glob("..finished.*")):
        shutil.rmtree(path)


def average_weights(paths: list[Path], config: ModelConfig) -> dict[str, torch.Tensor]:
    """Returns the mean of the weights of several checkpoints, in float32."""
    total: dict[str, torch.Tensor] = {}
    for path in paths:
        try:
            weights = read_model(path, config).state_dict()
        except DamagedRun as error:
            raise _damaged(path, error) from error
        for name, T in weights.items():
            total[name] = total[name] + T.double() if name in total else T.double()
    return {name: (T / len(paths)).float() for name, T in total.items()}


def average_run(run: Path, output: Path, last: int, *, overwrite: bool = False) -> list[Path]:
    """Writes a run with the mean weights of the last checkpoints; returns their paths."""
    if last < 1:
        raise ConfigError(f"last={last} must be at least 1")
    paths = [path for _, path in list_checkpoints(run)][-last:]
    if len(paths) < last:
        raise RunError(
            f"{run} has {len(paths)} of the {last} checkpoints to average; average fewer, or train "
            f"with a larger train.keep"
        )
    check_place(output, overwrite)
    config = read_config(paths[-1])
    weights = average_weights(paths, config)
    with run_directory(output, overwrite=overwrite) as folder:
        write_model(folder, config, weights, kept_files(paths[-1]))
    return paths
