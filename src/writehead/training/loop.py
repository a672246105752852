"""The training loop: read a batch, step, log, evaluate, save; stop and go on at any point.

What a step does follows from the config, the seed and the step's number alone (dropout is seeded
anew each step), so a run that was stopped, or killed, goes on as if it had not been.
"""

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

from writehead import cost
from writehead.config import ModelConfig, TrainConfig
from writehead.data.batches import PackedBatches
from writehead.data.dataset import Dataset
from writehead.errors import RunError, TrainingError
from writehead.model.runs import CONFIG, finish_run
from writehead.training.checkpoint import (
    Progress,
    average_weights,
    best_checkpoint,
    checkpoint_path,
    damaged,
    delete_checkpoint,
    list_checkpoints,
    load_checkpoint,
    prune_checkpoints,
    remove_leftovers,
    save_checkpoint,
    unfinished,
    way_back,
)
from writehead.training.distributed import World, join_world
from writehead.training.evaluate import likelihood
from writehead.training.journal import Journal, has_tensorboard
from writehead.training.optimizer import learning_rate
from writehead.training.plan import agree_on_plan, check_folder, fit_to_data, read_plan
from writehead.training.step import Stepper
from writehead.training.throughput import matrix_rate
from writehead.util.json_files import JsonError
from writehead.util.locks import locked

LOCK = ".lock"  # in a run's folder while it is in training
LONG = 1.0  # hours on a CPU; longer trainings start with a warning


@dataclass(frozen=True)
class Outcome:
    """How training ended: after which step, and by which signal if it was told to stop.

    `late` is a signal that came when no step was left to stop at.
    """

    step: int
    stopped_by: int | None = None
    late: int | None = None


def train(
    dataset: Path, run: Path, model: ModelConfig, config: TrainConfig, *, device: str = "auto"
) -> Outcome:
    """Trains a model on a dataset into the folder `run`, or goes on where that run stopped.

    The model takes the dataset's vocabulary. Under `torchrun` all processes train one model.
    """
    data = Dataset.open(dataset)
    model = fit_to_data(data, model, config)
    with join_world(device) as world, _writing(run), _alone(run, world):
        changes = agree_on_plan(run, data, model, config, world)
        trainer = Trainer(data, run, model, config, world)
        steps = (trainer.step, config.steps)
        with noted_signals() as told, Journal(run, *steps, quiet=not world.is_first) as journal:
            for sentence in trainer.opening(changes):
                journal.say(sentence)
            outcome = trainer.run_to_end(journal, told)
    if told and outcome.stopped_by is None:
        return replace(outcome, late=told[0])
    return outcome


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
            rows=config.rows,
            source_length=config.source_length,
            target_length=config.target_length,
            seed=config.seed,
            rank=world.rank,
            world=world.size,
        )
        self.step = 0
        self.dev: dict[str, float] = {}
        self.meter = Meter(world)
        self.interim: Path | None = None  # a checkpoint that the next one replaces
        if world.is_first:
            remove_leftovers(run)
        checkpoints = list_checkpoints(run)
        if checkpoints:
            self._restore(checkpoints[-1][1])
        self.lack: str | None = None  # why the finished model is made though no step is left
        if world.is_first and self.step >= config.steps:
            self.lack = unfinished(run)
        dtype = torch.bfloat16 if self.stepper.half else torch.float32
        self.rate = matrix_rate(world.device, dtype)

    def opening(self, changes: list[str]) -> Iterator[str]:
        """Yields messages to print before the first step: the model, the device and notes."""
        config = self.config
        if self.step >= config.steps:
            rest = "there is nothing to do"
            if self.lack is not None:
                rest = f"the finished model is made again from its checkpoints, as {self.lack}"
            unused = [f"not used: {', '.join(changes)}"] if changes else []
            yield "; ".join([f"{self.run} has its {self.step} steps already", rest, *unused])
            return
        yield self._describe()
        if self.batches.skipped:
            total = self.data.info["splits"]["train"]["sequences"]
            yield (
                f"note: training leaves out {self.batches.skipped:,} of {total:,} pairs, which are "
                f"longer than a row of {self._row()} tokens"
            )
        if self.step:
            yield "; ".join([f"going on after step {self.step}", *changes])
        hours = self._least_seconds() / 3600
        if self.world.device.type == "cpu" and hours > LONG:
            yield (
                f"note: training takes at least {hours:,.1f} hours on this CPU; lower train.steps, "
                f"choose a smaller preset, or use a GPU"
            )
        if config.warmup > config.steps:
            yield (
                f"note: the learning rate is still rising when training ends, because "
                f"train.warmup={config.warmup} is more than train.steps={config.steps}"
            )
        if not has_tensorboard():
            yield (
                "note: tensorboard is not installed, so metrics go to log.jsonl only; for "
                "TensorBoard files, run pip install 'writehead[tensorboard]'"
            )

    def _describe(self) -> str:
        config, device = self.config, self.world.device
        count = sum(cost.parameters(self.model_config).values())
        many = f"{self.world.size} × " if self.world.size > 1 else ""
        chip = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
        return (
            f"{count:,} parameters on {many}{device.type}{chip}; {config.steps:,} steps of "
            f"{config.rows} × {self._row()} tokens"
        )

    def _row(self) -> str:
        """The tokens of a row, as they are written: 256, or (256 + 256) with a source."""
        if self.model_config.encoder_layers:
            return f"({self.config.source_length} + {self.config.target_length})"
        return str(self.config.target_length)

    def _least_seconds(self) -> float:
        """What the steps that are left take at the full matrix rate, attention's part left out."""
        rows, none = self.config.rows // self.world.size, cost.Pairs(0, 0, 0)
        return (self.config.steps - self.step) * self._operations(rows, none) / self.rate

    def _restore(self, path: Path) -> None:
        model, optimizer = self.stepper.model, self.stepper.optimizer
        progress = load_checkpoint(path, model, self.model_config, optimizer)
        self.step, self.dev = progress.step, progress.dev
        try:
            self.batches.restore(progress.data)
            if progress.meter:
                self.meter.restore(progress.meter)
        except (KeyError, JsonError) as error:
            raise damaged(path, error) from error
        self.interim = path if progress.interim else None

    def run_to_end(self, journal: Journal, told: list[int]) -> Outcome:
        """Steps until the config's last one or a signal, with all that is due along the way."""
        config = self.config
        is_due = self.step < config.steps or self.lack is not None
        self.meter.start_clock()
        while self.step < config.steps:
            batch = next(self.batches)
            values = self.stepper.update(batch, self.step)
            pairs = batch.visible_pairs(self.model_config.window)
            operations = self._operations(len(batch.inputs), pairs)
            self.meter.add(values, batch.tokens, operations)
            self.step += 1
            journal.count(self.step)
            stop = self.world.any(bool(told))
            last = self.step == config.steps
            log, evaluate, save = (
                last or self.step % every == 0
                for every in (config.log_every, config.evaluate_every, config.checkpoint_every)
            )
            if log or evaluate or save or stop:
                totals = self._totals()
                if log:
                    journal.log(self.step, self._entry(totals))
                    self.meter = Meter(self.world)
                if evaluate:
                    journal.log(self.step, self._evaluate())
                if save or stop:
                    self._save(interim=not save)
                self.meter.start_clock()
            if stop and not last:
                return Outcome(self.step, told[0] if told else int(signal.SIGTERM))
        if is_due and self.world.is_first:
            self._finish(journal)
        self.world.barrier()
        return Outcome(self.step)

    def _totals(self) -> dict[str, float]:
        """What the meter shows; raises where the loss or the gradient is no number."""
        totals = self.meter.totals()
        for name, what in (("objective", "the loss"), ("norm", "the gradient")):
            if not math.isfinite(totals[name]):
                raise TrainingError(
                    f"{what} became {totals[name]} by step {self.step}; {way_back(self.run)}"
                )
        return totals

    def _entry(self, totals: dict[str, float]) -> dict[str, float]:
        """What is logged of the steps since the last entry."""
        tokens, seconds = totals["tokens"], totals["seconds"]
        return {
            "loss": totals["objective"] / tokens,
            "ln_ppl": totals["nll"] / tokens,
            "gradient_norm": totals["norm"] / totals["steps"],
            "learning_rate": learning_rate(self.config, self.step - 1),
            "tokens_per_second": tokens / seconds,
            "utilisation": totals["operations"] / seconds / self.rate / self.world.size,
        }

    def _operations(self, rows: int, pairs: cost.Pairs) -> int:
        """What a step needs of this process, by its rows and by what attends to what in them."""
        source = self.config.source_length if self.model_config.encoder_layers else 0
        setting = cost.Setting(rows, source, self.config.target_length)
        return cost.training_step(self.model_config, setting, pairs).operations

    def _evaluate(self) -> dict[str, float]:
        """The dev set's ln(PPL) a token, where the dataset has one with anything to score."""
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
        if not found.tokens:  # `prepare` may have left out every line, or none fits the positions
            return {}
        self.dev[str(self.step)] = found.ln_ppl
        return {"dev_ln_ppl": found.ln_ppl}

    def _save(self, *, interim: bool) -> None:
        if self.world.is_first:  # a finished model is that of the last checkpoint, or there is none
            (self.run / CONFIG).unlink(missing_ok=True)
        data, meter = self.batches.state(), self.meter.totals()
        progress = Progress(self.step, data, self.dev, meter, interim)
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
            if self.interim is not None:  # a run that was not stopped has none of it
                delete_checkpoint(self.interim)
            best = best_checkpoint(self.run, self.dev)
            prune_checkpoints(self.run, self.config.keep, best[1] if best else None)
        self.interim = checkpoint_path(self.run, self.step) if interim else None

    def _finish(self, journal: Journal) -> None:
        """Makes the run's folder a run itself, of the last checkpoint or an average of several."""
        average = read_plan(self.run)["train"].get("average", 1)  # whatever was asked for since
        paths = [path for _, path in list_checkpoints(self.run)][-average:]
        weights = average_weights(paths, self.model_config)
        (self.run / CONFIG).unlink(missing_ok=True)  # until all of it is there anew
        finish_run(self.run, self.model_config, weights, self.data.tokenizer.model)
        mean = f"the mean of the last {len(paths)} checkpoints" if len(paths) > 1 else "trained"
        best = best_checkpoint(self.run, self.dev)
        dev = f"; the best on dev is {best[1].name}" if best else ""
        journal.say(f"{self.run} is ready: {mean}, {self.step} steps{dev}")


class Meter:
    """What the steps since the last log entry add up to, on the device until it is asked for.

    Its clock runs from `start_clock` to `totals`.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._sums = torch.zeros(3, dtype=torch.float64, device=world.device)
        self._tokens = self._operations = self._steps = 0
        self._seconds = 0.0
        self._began: float | None = None

    def start_clock(self) -> None:
        """From here on time counts."""
        self._began = time.perf_counter()

    def add(self, values: Tensor, tokens: int, operations: int) -> None:
        """One more step: what `update` returned, this process's labels and operations."""
        self._sums += values
        self._tokens += tokens
        self._operations += operations
        self._steps += 1

    def totals(self) -> dict[str, float]:
        """The sums over all processes; steps, seconds and gradient norms are the same for all."""
        objective, nll, norm = self._sums.tolist()
        if self._began is not None:  # after the line above, which waits for the device
            self._seconds += time.perf_counter() - self._began
            self._began = None
        own = {"objective": objective, "nll": nll}
        own |= {"tokens": self._tokens, "operations": self._operations}
        shared = {"norm": norm, "steps": self._steps, "seconds": self._seconds}
        return dict(zip(own, self._world.sum(*own.values()), strict=True)) | shared

    def restore(self, totals: dict[str, float]) -> None:
        """Goes on from `totals`, by a world of any size: the first process takes the sums."""
        share = float(self._world.is_first)
        values = [share * totals["objective"], share * totals["nll"], totals["norm"]]
        self._sums += torch.tensor(values, dtype=torch.float64).to(self._sums.device)
        self._tokens = int(share * totals["tokens"])
        self._operations = int(share * totals["operations"])
        self._steps, self._seconds = int(totals["steps"]), totals["seconds"]


@contextmanager
def noted_signals() -> Iterator[list[int]]:
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


@contextmanager
def _alone(run: Path, world: World) -> Iterator[None]:
    """Keeps other trainings out of a run's folder; raises in all processes where one is in it."""
    check_folder(run)
    with locked(run / LOCK) if world.is_first else nullcontext(True) as free:
        if world.any(not free):
            raise RunError(
                f"another process is training into {run}; wait for it or end it, or choose another "
                f"folder"
            )
        yield


@contextmanager
def _writing(run: Path) -> Iterator[None]:
    """Says in a sentence of ours that a run's folder cannot be written, as on a full disk."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{run} could not be written: {error.strerror or error}; earlier checkpoints are kept: "
            f"free some space and run the same command again"
        ) from error
