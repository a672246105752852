"""The training loop: read a batch, step, log, evaluate, save; stop and go on at any point.

What a step does follows from the config, the seed and the step's number alone (dropout is seeded
anew each step), so a run that was stopped, or killed, goes on as if it had not been.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

from writehead import cost
from writehead.config import ModelConfig, TrainConfig
from writehead.data.batches import Batch, PackedBatches
from writehead.data.dataset import Dataset
from writehead.errors import TrainingError
from writehead.model.runs import finish_run
from writehead.training.checkpoint import (
    Progress,
    average_weights,
    list_checkpoints,
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from writehead.training.distributed import World, join_world
from writehead.training.evaluate import likelihood
from writehead.training.journal import Journal
from writehead.training.optimizer import learning_rate
from writehead.training.plan import agree_on_plan
from writehead.training.step import Stepper
from writehead.training.throughput import matrix_rate


@dataclass(frozen=True)
class Outcome:
    """How training ended: after which step, and by which signal if it was told to stop."""

    step: int
    stopped_by: int | None = None


def train(
    dataset: Path, run: Path, model: ModelConfig, config: TrainConfig, *, device: str = "auto"
) -> Outcome:
    """Trains a model on a dataset into the folder `run`, or goes on where that run stopped.

    The model takes the dataset's vocabulary. Under `torchrun` all processes train one model.
    """
    data = Dataset.open(dataset)
    with join_world(device) as world:
        model = agree_on_plan(run, data, model, config, world)
        trainer = Trainer(data, run, model, config, world)
        if trainer.step >= config.steps:
            return Outcome(trainer.step)
        steps = (trainer.step, config.steps)
        with _signals() as told, Journal(run, *steps, quiet=not world.is_first) as journal:
            return trainer.run_to_end(journal, told)


class Trainer:
    """A model in training: everything that a step needs, and how far it has come."""

    def __init__(
        self, data: Dataset, run: Path, model: ModelConfig, config: TrainConfig, world: World
    ) -> None:
        self.data, self.run, self.model_config = data, run, model
        self.config, self.world = config, world
        self.stepper = Stepper(model, config, world)
        self.batches = PackedBatches(
            data.split("train"),
            data.task,
            rows=config.rows,
            source_length=config.source_length,
            target_length=config.target_length,
            seed=config.seed,
            rank=world.rank,
            world=world.size,
        )
        self.step = 0
        self.dev: dict[str, float] = {}
        checkpoints = list_checkpoints(run)
        if checkpoints:
            stepper = self.stepper
            path = checkpoints[-1][1]
            progress = load_checkpoint(path, stepper.model, model, stepper.optimizer)
            self.step, self.dev = progress.step, progress.dev
            self.batches.restore(progress.data)
        dtype = torch.bfloat16 if self.stepper.half else torch.float32
        self.rate = matrix_rate(world.device, dtype)

    def run_to_end(self, journal: Journal, told: list[int]) -> Outcome:
        """Steps until the config's last one or a signal, with all that is due along the way."""
        config, meter = self.config, _Meter(self.world)
        while self.step < config.steps:
            batch = next(self.batches)
            meter.add(self.stepper.update(batch, self.step), self._operations(batch))
            self.step += 1
            stop = self.world.any(bool(told))
            last = self.step == config.steps
            if self.step % config.log_every == 0 or last or stop:
                journal.log(self.step, self._entry(meter))
                meter = _Meter(self.world)
            if self.step % config.evaluate_every == 0 or last:
                journal.log(self.step, self._evaluate())
                meter = _Meter(self.world)  # its clock must not count this
            if self.step % config.checkpoint_every == 0 or last or stop:
                self._save()
                meter.restart_clock()
            if stop and not last:
                return Outcome(self.step, told[0] if told else int(signal.SIGTERM))
        self._finish(journal)
        return Outcome(self.step)

    def _entry(self, meter: "_Meter") -> dict[str, float]:
        """What is logged of the steps since the last entry; raises where the loss is no number."""
        objective, nll, tokens, norm = meter.totals()
        if not objective == objective or abs(objective) == float("inf"):
            raise TrainingError(
                f"the loss became {objective} by step {self.step}; the last checkpoint is from "
                f"before. Lower train.learning_rate or raise train.warmup, and go on"
            )
        seconds = meter.seconds()
        return {
            "loss": objective / tokens,
            "ln_ppl": nll / tokens,
            "gradient_norm": norm / meter.steps,
            "learning_rate": learning_rate(self.config, self.step - 1),
            "tokens_per_second": tokens / seconds,
            "utilisation": meter.operations / seconds / self.rate,
        }

    def _operations(self, batch: Batch) -> int:
        """What this process's rows of a batch need."""
        source = self.config.source_length if self.model_config.encoder_layers else 0
        setting = cost.Setting(len(batch.inputs), source, self.config.target_length)
        pairs = batch.visible_pairs(self.model_config.window)
        return cost.training_step(self.model_config, setting, pairs).operations

    def _evaluate(self) -> dict[str, float]:
        """The dev set's ln(PPL) a token, where the dataset has one."""
        if "dev" not in self.data.splits:
            return {}
        with self.stepper.autocast():
            found = likelihood(
                self.stepper.model,
                self.data.split("dev"),
                self.world.device,
                source_length=self.model_config.source_positions or None,
                target_length=self.model_config.target_positions,
                limit=self.config.evaluate_sequences,
            )
        self.dev[str(self.step)] = found.ln_ppl
        return {"dev_ln_ppl": found.ln_ppl}

    def _save(self) -> None:
        progress = Progress(self.step, self.batches.state(), self.dev)
        save_checkpoint(
            self.run,
            self.stepper.model,
            self.model_config,
            self.stepper.optimizer,
            self.data.tokenizer.model,
            progress,
            self.world,
        )
        if self.world.is_first:
            prune_checkpoints(self.run, self.config.keep, best_step(self.dev))

    def _finish(self, journal: Journal) -> None:
        """Makes the run's folder a run itself, of the last checkpoint or an average of several."""
        if self.world.is_first:
            paths = [path for _, path in list_checkpoints(self.run)][-self.config.average :]
            weights = average_weights(paths, self.model_config)
            finish_run(self.run, self.model_config, weights, self.data.tokenizer.model)
            mean = f"the mean of the last {len(paths)} checkpoints" if len(paths) > 1 else "trained"
            journal.say(f"{self.run} is ready: {mean}, {self.step} steps")
        self.world.barrier()


class _Meter:
    """Sums of what `update` returns, kept on the device until they are asked for."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sums = torch.zeros(4, device=world.device)
        self.steps = 0
        self.operations = 0  # this process's
        self.restart_clock()

    def restart_clock(self) -> None:
        self._began = time.perf_counter()

    def add(self, values: Tensor, operations: int) -> None:
        self._sums += values
        self.steps += 1
        self.operations += operations

    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def totals(self) -> tuple[float, float, float, float]:
        """Loss, negative log-likelihood and labels of all processes, and the gradient norms."""
        objective, nll, tokens = self._world.sum(*self._sums[:3]).tolist()
        return objective, nll, tokens, float(self._sums[3])


def best_step(dev: dict[str, float]) -> int | None:
    """The step with the lowest dev loss so far."""
    return min(map(int, dev), key=lambda step: dev[str(step)]) if dev else None


@contextmanager
def _signals() -> Iterator[list[int]]:
    """A list that SIGINT and SIGTERM write themselves into, so that a step can be finished."""
    told: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        told.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
