"""`bench train`: microseconds a token of a training step, and how much of the chip that uses."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from writehead import cost
from writehead.bench.record import environment
from writehead.config import ModelConfig, PrepareConfig, Task, TrainConfig
from writehead.data.batches import Batch, PackedBatches
from writehead.data.dataset import Dataset
from writehead.data.grammar import pairs
from writehead.data.prepare import prepare
from writehead.data.sources import Inputs, embedded, text_files
from writehead.errors import ConfigError
from writehead.training.distributed import World
from writehead.training.replay import WARM
from writehead.training.step import Stepper
from writehead.training.throughput import matrix_rate
from writehead.util.devices import wait_for

GRAMMAR_PAIRS = 20_000
VOCABULARY = 2_000  # of them, at most
BLOCK = 10  # steps between two looks at the clock, which wait for a GPU


@dataclass(frozen=True)
class Sizes:
    """How much is timed unless it is asked for."""

    rows: int
    steps: int
    warmup: int


ON_GPU = Sizes(rows=TrainConfig.rows, steps=20, warmup=8)
ON_CPU = Sizes(rows=8, steps=5, warmup=2)


def bench_preset(
    name: str,
    model: ModelConfig,
    config: TrainConfig,
    dataset: Path | None,
    *,
    device: torch.device,
    steps: int,
    warmup: int,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """`bench_train` on a dataset's text, or on the built-in grammar's, with the preset's sizes.

    The model keeps its own vocabulary, of which the text uses a part: the time is the same.
    """
    _check(steps, warmup, device)
    tell("text")
    with ExitStack() as stack:
        if dataset is None:
            folder = stack.enter_context(TemporaryDirectory())
            dataset = Path(folder) / "grammar"
            vocab_size = min(VOCABULARY, model.vocab_size)
            config_of_text = PrepareConfig(task=model.task, vocab_size=vocab_size)
            prepare(dataset, _grammar(model.task, Path(folder)), config_of_text)
        data = Dataset.open(dataset)
        if data.task != model.task or data.vocab_size > model.vocab_size:
            raise ConfigError(
                f"{dataset} is a {data.task} dataset of {data.vocab_size} ids, and {name} is a "
                f"{model.task} model of {model.vocab_size}; choose one that fits"
            )
        batches = PackedBatches(
            data.split("train"),
            data.task,
            rows=config.rows,
            source_length=config.source_length,
            target_length=config.target_length,
            seed=config.seed,
        )
        if device.type == "cuda":
            torch.cuda.set_device(device.index or 0)  # where a step is captured
        return bench_train(
            name, model, config, batches, device, steps=steps, warmup=warmup, tell=tell
        )


def _check(steps: int, warmup: int, device: torch.device) -> None:
    if steps < 1:
        raise ConfigError(f"{steps} steps cannot be timed; ask for 1 or more")
    if warmup < 0:
        raise ConfigError(f"a warm-up of {warmup} steps cannot be; ask for 0 or more")
    if device.type == "cuda" and warmup < WARM + 2:
        raise ConfigError(
            f"a warm-up of {warmup} steps would leave the capture of the step's graph in the time "
            f"on a GPU; ask for {WARM + 2} or more"
        )


def _grammar(task: Task, folder: Path) -> Inputs:
    """The built-in grammar's pairs, or its English as a file in `folder`."""
    if task == "translation":
        return embedded(GRAMMAR_PAIRS)
    text = folder / "grammar.txt"
    english = (f"{source}\n" for source, _ in pairs("train", GRAMMAR_PAIRS))
    text.write_text("".join(english), encoding="utf-8")
    return text_files([text], [])


def bench_train(
    name: str,
    model: ModelConfig,
    config: TrainConfig,
    batches: Iterator[Batch],
    device: torch.device,
    *,
    steps: int,
    warmup: int,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Times `steps` training steps on packed batches, after `warmup`, in blocks of a few.

    As in training, the host makes the next batches while the device works.
    Utilisation is the operations that the batches need, padding included and attention over
    visible pairs only, over the rate of one large matrix product, measured before and after. As in
    the paper, microseconds a token are the time of a step over its target positions.
    """
    _check(steps, warmup, device)
    stepper = Stepper(model, config, World(0, 1, device))
    dtype = torch.bfloat16 if stepper.half else torch.float32
    tell("matrix rate")
    rates = [matrix_rate(device, dtype)]
    for i in range(warmup):
        tell(f"{name}: step {i + 1} of {warmup} to warm up")
        stepper.update(next(batches), i)
    wait_for(device)
    times, operations, labels = [], [], []
    size = BLOCK if device.type == "cuda" else 1
    for first in range(0, steps, size):
        block = range(first, min(first + size, steps))
        tell(f"{name}: up to step {block[-1] + 1} of {steps}")
        began = time.perf_counter()
        for i in block:
            batch = next(batches)
            stepper.update(batch, warmup + i)
            operations.append(_operations(model, config, batch))
            labels.append(batch.tokens)
        wait_for(device)
        times.append((time.perf_counter() - began) / len(block))
    rates.append(matrix_rate(device, dtype))
    rate = max(rates)  # a chip under load slows its clock: the higher one is the stricter measure
    seconds, positions = statistics.median(times), config.rows * config.target_length
    return {
        "name": name,
        "environment": environment(device),
        "model": model.to_json(),
        "train": config.to_json(),
        "steps": steps,
        "warmup": warmup,
        "steps_a_block": size,
        "step_ms": seconds * 1e3,
        "step_ms_spread": [min(times) * 1e3, max(times) * 1e3],
        "us_per_token": seconds / positions * 1e6,
        "us_per_label": seconds / statistics.mean(labels) * 1e6,
        "fill": statistics.mean(labels) / positions,
        "operations": statistics.mean(operations),
        "matrix_rate": rate,
        "matrix_rates": {"before": rates[0], "after": rates[1]},
        "floor_us_per_token": statistics.mean(operations) / rate / positions * 1e6,
        "utilisation": statistics.mean(operations) / seconds / rate,
        "peak_memory_bytes": torch.cuda.max_memory_allocated(device)
        if device.type == "cuda"
        else None,
    }


def _operations(model: ModelConfig, config: TrainConfig, batch: Batch) -> int:
    source = config.source_length if model.encoder_layers else 0
    setting = cost.Setting(config.rows, source, config.target_length)
    return cost.training_step(model, setting, batch.visible_pairs(model.window)).operations
