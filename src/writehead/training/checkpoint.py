"""Checkpoints: each is a run directory with the optimizer's state and the place in the data.

One format whatever the number of processes: tensors are whole, under the parameters' names, so a
run can resume with another world size. They are written beside their place and moved there.
"""

import json
import math
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from writehead.config import MAX_STEPS, ModelConfig
from writehead.errors import ConfigError, DamagedRun, RunError, TrainingError
from writehead.model.checksum import check_checksum
from writehead.model.runs import (
    CONFIG,
    TOKENIZER,
    WEIGHTS,
    check_place,
    copy_tokenizer,
    make_bare_model,
    read_config,
    read_weights,
    run_directory,
    write_model,
)
from writehead.model.transformer import Transformer
from writehead.training.distributed import World
from writehead.util.files import remove_directory
from writehead.util.json_files import read_json

CHECKPOINTS = "checkpoints"
OPTIMIZER, PROGRESS = "optimizer.safetensors", "training.json"
PROGRESS_SHAPE = {
    "step": range(MAX_STEPS + 1),
    "data": dict,
    "dev": {str: float},
    "meter?": {str: float},
    "interim?": bool,
}
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)  # for the first process alone


@dataclass(frozen=True)
class Progress:
    """How far training has come: steps done, the place in the data, and the dev losses so far.

    `meter` is what the steps since the last log entry add up to. An `interim` checkpoint was saved
    because training was told to stop, and goes when the next one is there.
    """

    step: int
    data: dict[str, Any]
    dev: dict[str, float]  # ln(PPL) by step
    meter: dict[str, float] = field(default_factory=dict)
    interim: bool = False


def checkpoint_path(run: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run / CHECKPOINTS / f"step-{step:08d}"


def list_checkpoints(run: Path) -> list[tuple[int, Path]]:
    """The complete checkpoints of a run with their steps, oldest first."""
    found = []
    for path in (run / CHECKPOINTS).glob("step-*"):
        match = re.fullmatch(r"step-(\d{8})", path.name)
        if match:
            found.append((int(match[1]), path))
    return sorted(found)


def way_back(run: Path) -> str:
    """The end of a sentence on a training that broke down: where it goes on, and what to change."""
    advice = "Lower train.learning_rate or raise train.warmup, and"
    if list_checkpoints(run):
        return f"the last checkpoint is from before. {advice} go on"
    return f"there is no checkpoint yet, so the run begins anew. {advice} run the command again"


def save_checkpoint(
    run: Path,
    model: nn.Module,
    config: ModelConfig,
    optimizer: Optimizer,
    tokenizer: bytes,
    progress: Progress,
    world: World,
) -> None:
    """Writes the checkpoint of `progress.step`; every process takes part, the first one writes."""
    weights = get_model_state_dict(model, options=_WHOLE)
    if world.any(not all(T.isfinite().all() for T in weights.values())):  # type: ignore[union-attr]
        raise TrainingError(
            f"a weight is no longer a number at step {progress.step}, which is not saved; "
            f"{way_back(run)}"
        )
    moments = get_optimizer_state_dict(model, optimizer, options=_WHOLE)
    if world.is_first:
        with run_directory(checkpoint_path(run, progress.step), overwrite=True) as fresh:
            write_model(fresh, config, weights)  # type: ignore[arg-type]
            (fresh / TOKENIZER).write_bytes(tokenizer)
            save_file(_flatten(moments["state"]), fresh / OPTIMIZER)
            (fresh / OPTIMIZER).chmod(0o644)  # safetensors makes it private
            (fresh / PROGRESS).write_text(json.dumps(vars(progress)), encoding="utf-8")
    world.barrier()


def load_checkpoint(
    path: Path, model: nn.Module, config: ModelConfig, optimizer: Optimizer
) -> Progress:
    """Puts a checkpoint into model and optimizer; returns how far it had come."""
    weights = _read_weights(path, make_bare_model(config))
    try:
        progress = _read_progress(path)
        flat = load_file(path / OPTIMIZER)
        for name in (OPTIMIZER, PROGRESS):
            check_checksum(path / name)
        whole = StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, weights, options=whole)  # type: ignore[arg-type]
        state = get_optimizer_state_dict(model, optimizer, options=whole)
        fresh = _flatten(state["state"])
        if {name: T.shape for name, T in flat.items()} != {n: T.shape for n, T in fresh.items()}:
            raise ValueError("the moments are not those of this optimizer and model")
        state["state"] = _unflatten(flat)  # type: ignore[assignment]
        set_optimizer_state_dict(model, optimizer, state, options=whole)
    except (RunError, OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
        raise damaged(path, error) from error
    return progress


def _read_progress(path: Path) -> Progress:
    """Reads the training progress of the checkpoint at `path`."""
    data = read_json(path / PROGRESS, PROGRESS_SHAPE, RunError, allow_nan=True)
    known = {name.removesuffix("?") for name in PROGRESS_SHAPE}
    progress = Progress(**{name: value for name, value in data.items() if name in known})
    if checkpoint_path(path.parents[1], progress.step) != path:
        raise ValueError(f"{PROGRESS} belongs to step {progress.step}")
    if not all(0 <= value < math.inf for value in progress.meter.values()):
        raise ValueError(f"{PROGRESS} has a sum that is negative or not finite")
    return progress


def _read_weights(path: Path, model: Transformer) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint."""
    try:
        return read_weights(path, model)
    except DamagedRun as error:
        raise damaged(path, error) from error


def damaged(path: Path, error: Exception) -> RunError:
    """What to say of a checkpoint that cannot be read."""
    # a run's advice would let training go on from weights that nobody changed on purpose
    fault = error.fault if isinstance(error, DamagedRun) else error
    return RunError(
        f"checkpoint {path} is damaged or cut short: {fault}; delete that folder, and training "
        f"goes on from the one before"
    )


def best_checkpoint(run: Path, dev: dict[str, float]) -> tuple[int, Path] | None:
    """The checkpoint with the lowest dev loss, with its step."""
    scored = [one for one in list_checkpoints(run) if str(one[0]) in dev]
    return min(scored, key=lambda one: dev[str(one[0])], default=None)


def prune_checkpoints(run: Path, keep: int, best: Path | None) -> None:
    """Deletes all checkpoints but the last `keep` and the best."""
    for _, path in list_checkpoints(run)[:-keep]:
        if path != best:
            delete_checkpoint(path)


def delete_checkpoint(path: Path) -> None:
    """Deletes a checkpoint so that at no moment half of one stands in its place."""
    remove_directory(path)


def remove_leftovers(run: Path) -> None:
    """Deletes what a crash left half written or half deleted.

    A checkpoint that was being replaced, and not yet by another, is put back first.
    """
    for path in (run / CHECKPOINTS).glob(".step-*.old"):
        place = path.with_name(path.name.split(".")[1])
        if not place.exists():
            path.rename(place)
    for path in (
        *(run / CHECKPOINTS).glob(".step-*"),
        *run.glob(".finished"),
        *run.glob("..finished.*"),
    ):
        shutil.rmtree(path)


def unfinished(run: Path) -> str | None:
    """What is wrong with the finished model in a run's folder, or None where it is whole."""
    for name in (WEIGHTS, CONFIG, TOKENIZER):
        if not (run / name).is_file():
            return f"{name} is missing"
        try:
            check_checksum(run / name)
        except DamagedRun:
            return f"{name} does not match its checksum"
    return None


def average_weights(paths: list[Path], config: ModelConfig) -> dict[str, torch.Tensor]:
    """The mean of the weights of several checkpoints, in float32."""
    expected = make_bare_model(config)
    total: dict[str, torch.Tensor] = {}
    for path in paths:
        for name, T in _read_weights(path, expected).items():
            total[name] = total[name] + T.double() if name in total else T.double()
    return {name: (T / len(paths)).float() for name, T in total.items()}


def average_run(run: Path, output: Path, last: int, *, overwrite: bool = False) -> list[Path]:
    """Writes a run of the mean weights of a training's last checkpoints; returns which.

    A run that is there is replaced if `overwrite`, unless its folder holds more than a run.
    """
    if last < 1:
        raise ConfigError(f"last={last} checkpoints cannot be averaged; ask for 1 or more")
    if not run.is_dir():
        raise RunError(f"there is no run at {run}; check the path")
    paths = [path for _, path in list_checkpoints(run)][-last:]
    if not paths:
        raise RunError(f"{run} has no checkpoints; give the folder that `writehead train` made")
    if len(paths) < last:
        raise RunError(
            f"{run} has {len(paths)} checkpoints and {last} are to be averaged; train with a "
            f"larger train.keep, or ask for fewer"
        )
    check_place(output, overwrite)
    config = read_config(paths[-1])
    weights = average_weights(paths, config)
    with run_directory(output, overwrite=overwrite) as fresh:
        write_model(fresh, config, weights)
        copy_tokenizer(paths[-1] / TOKENIZER, fresh)
    return paths


def _flatten(state: Any) -> dict[str, torch.Tensor]:
    """The optimizer's tensors, each under "parameter|moment"."""
    return {
        f"{name}|{moment}": value.detach().cpu().contiguous()
        for name, moments in state.items()
        for moment, value in moments.items()
    }


def _unflatten(flat: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    state: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in flat.items():
        name, moment = key.split("|")
        state.setdefault(name, {})[moment] = value
    return state
