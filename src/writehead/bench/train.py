"""`bench train`: times a training step, per token and relative to the matrix rate."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from writehead import cost
from writehead.config import ModelConfig, PrepareConfig, TrainConfig
from writehead.data.batches import PackedBatches
from writehead.data.dataset import Dataset
from writehead.data.prepare import prepare
from writehead.data.sources import embedded
from writehead.errors import ConfigError
from writehead.training.distributed import World
from writehead.training.step import Stepper
from writehead.training.throughput import matrix_rate
from writehead.util.devices import wait_for

GRAMMAR_PAIRS = 20_000
GRAMMAR_VOCAB_SIZE = 2_000
STEPS_PER_BLOCK = 10  # between two synchronisations with a GPU


@dataclass(frozen=True)
class TrainJob:
    """A model, how it is trained, and how many steps are timed."""

    name: str
    model: ModelConfig
    config: TrainConfig
    device: torch.device
    steps: int
    warmup: int


def bench_train(
    job: TrainJob, dataset: Path | None, report: Callable[[str], None]
) -> dict[str, Any]:
    """Times training steps on packed batches of a dataset, or of the built-in grammar.

    Utilisation is operations per second over the rate of one large matrix product; operations
    include padding, but attention only over visible pairs. As in the paper, the time per token is
    the time of a step over its target positions.
    """
    if dataset is None:
        if job.model.task == "language":
            raise ConfigError(f"{job.name} is a language model and needs a dataset; pass one")
        report("preparing text")
        vocab_size = min(GRAMMAR_VOCAB_SIZE, job.model.vocab_size)
        with TemporaryDirectory() as folder:
            path = Path(folder) / "grammar"
            prepare(
                path,
                embedded(GRAMMAR_PAIRS),
                PrepareConfig(task="translation", vocab_size=vocab_size),
            )
            return bench_train(job, path, report)
    return _time(job, Dataset.open(dataset), report)


def _time(job: TrainJob, data: Dataset, report: Callable[[str], None]) -> dict[str, Any]:
    model, config, device = job.model, job.config, job.device
    if data.task != model.task or data.vocab_size > model.vocab_size:
        raise ConfigError(f"the dataset does not fit {job.name}; choose another dataset")
    lengths = {"source_length": config.source_length, "target_length": config.target_length}
    batches = PackedBatches(data.split("train"), config.rows, seed=config.seed, **lengths)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)  # the capture uses the current device
    stepper = Stepper(model, config, World(0, 1, device))
    rate = matrix_rate(device, stepper.dtype)
    report(f"{job.name}: {job.warmup} steps of warm-up")
    for i in range(job.warmup):
        stepper.update(next(batches), i)
    wait_for(device)
    times, operations, labels = [], [], []
    source = config.source_length if model.encoder_layers else 0
    setting = cost.Setting(config.rows, source, config.target_length)
    size = STEPS_PER_BLOCK if device.type == "cuda" else 1
    for first in range(0, job.steps, size):
        block = range(first, min(first + size, job.steps))
        report(f"{job.name}: up to step {block[-1] + 1} of {job.steps}")
        start = time.perf_counter()
        for i in block:
            batch = next(batches)
            stepper.update(batch, job.warmup + i)
            visible = batch.visible_pairs(model.window)
            operations.append(cost.training_step(model, setting, visible).operations)
            labels.append(batch.tokens)
        wait_for(device)
        times.append((time.perf_counter() - start) / len(block))
    # a chip lowers its clock under load; the higher rate gives the lower utilisation
    rate = max(rate, matrix_rate(device, stepper.dtype))
    seconds, positions = statistics.median(times), config.rows * config.target_length
    return {
        "name": job.name,
        "model": model.to_json(),
        "train": config.to_json(),
        "steps": job.steps,
        "warmup": job.warmup,
        "step_ms": seconds * 1e3,
        "step_ms_spread": [min(times) * 1e3, max(times) * 1e3],
        "us_per_token": seconds / positions * 1e6,
        "fill": statistics.mean(labels) / positions,
        "operations": statistics.mean(operations),
        "matrix_rate": rate,
        "floor_us_per_token": statistics.mean(operations) / rate / positions * 1e6,
        "utilisation": statistics.mean(operations) / seconds / rate,
    }
