"""`bench train`: microseconds per token of a training step, and its share of the matrix rate."""

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from writehead import cost
from writehead.config import ModelConfig, PrepareConfig, TrainConfig
from writehead.data.batches import PackedBatches
from writehead.data.corpus import pairs
from writehead.data.dataset import Dataset
from writehead.data.prepare import prepare
from writehead.data.sources import embedded, text_files
from writehead.errors import ConfigError
from writehead.training.distributed import World
from writehead.training.step import WARMUP_STEPS, Stepper
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

    def __post_init__(self) -> None:
        if self.steps < 1 or self.warmup < 0:
            raise ConfigError(
                f"steps={self.steps} must be at least 1, and warmup={self.warmup} at least 0"
            )
        if self.device.type == "cuda" and self.warmup < WARMUP_STEPS + 2:
            raise ConfigError(
                f"warmup={self.warmup} must be at least {WARMUP_STEPS + 2} on a GPU, where the "
                f"first steps compile and are captured"
            )


def bench_train(
    job: TrainJob, dataset: Path | None, report: Callable[[str], None]
) -> dict[str, Any]:
    """Times training steps on packed batches of a dataset, or of the built-in grammar.

    Utilisation is the operations of the batches, padding included and attention over visible pairs
    only, over the rate of one large matrix product. As in the paper, the time per token is the time
    of a step over its target positions.
    """
    with ExitStack() as stack:
        if dataset is None:
            report("text")
            folder = Path(stack.enter_context(TemporaryDirectory()))
            dataset = _prepare_grammar(job.model, folder)
        batches = _batches(job, Dataset.open(dataset), dataset)
        return _time(job, batches, report)


def _prepare_grammar(model: ModelConfig, folder: Path) -> Path:
    inputs = embedded(GRAMMAR_PAIRS)
    if model.task == "language":
        text = folder / "grammar.txt"
        lines = (f"{source}\n" for source, _ in pairs("train", GRAMMAR_PAIRS))
        text.write_text("".join(lines), encoding="utf-8")
        inputs = text_files([text], [])
    vocab_size = min(GRAMMAR_VOCAB_SIZE, model.vocab_size)
    prepare(folder / "grammar", inputs, PrepareConfig(task=model.task, vocab_size=vocab_size))
    return folder / "grammar"


def _batches(job: TrainJob, data: Dataset, path: Path) -> PackedBatches:
    model, config = job.model, job.config
    if data.task != model.task or data.vocab_size > model.vocab_size:
        raise ConfigError(
            f"{path} is a {data.task} dataset with vocab_size={data.vocab_size}, and {job.name} is "
            f"a {model.task} model with vocab_size={model.vocab_size}; choose another dataset"
        )
    lengths = {"source_length": config.source_length, "target_length": config.target_length}
    split = data.split("train")
    return PackedBatches(split, rows=config.rows, seed=config.seed, **lengths)


def _time(job: TrainJob, batches: PackedBatches, report: Callable[[str], None]) -> dict[str, Any]:
    model, config, device = job.model, job.config, job.device
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)  # the capture uses the current device
    stepper = Stepper(model, config, World(0, 1, device))
    dtype = stepper.dtype
    rates = [matrix_rate(device, dtype)]
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
        began = time.perf_counter()
        for i in block:
            batch = next(batches)
            stepper.update(batch, job.warmup + i)
            visible = batch.visible_pairs(model.window)
            operations.append(cost.training_step(model, setting, visible).operations)
            labels.append(batch.tokens)
        wait_for(device)
        times.append((time.perf_counter() - began) / len(block))
    rates.append(matrix_rate(device, dtype))
    rate = max(rates)  # a chip under load lowers its clock: the higher rate is the stricter one
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
