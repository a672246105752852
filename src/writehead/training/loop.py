"""The training loop: step, log, evaluate, save checkpoints; a killed run resumes exactly."""

import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from writehead import cost
from writehead.config import ModelConfig, TrainConfig
from writehead.data.batches import Batch, PackedBatches
from writehead.data.dataset import Dataset
from writehead.errors import RunError, TrainingError
from writehead.runs.folder import CONFIG, finish_run
from writehead.training import checkpoint
from writehead.training.checkpoint import average_weights, list_checkpoints
from writehead.training.distributed import World, join_world
from writehead.training.evaluate import likelihood
from writehead.training.journal import Journal, Meter
from writehead.training.optimizer import learning_rate
from writehead.training.origin import Origin
from writehead.training.plan import agree_on_plan, check_folder, fit_to_data
from writehead.training.step import Stepper
from writehead.training.throughput import matrix_rate
from writehead.util.files import remove_directory
from writehead.util.locks import locked


@dataclass(frozen=True)
class Outcome:
    """The last step, and the signal that arrived during training, if any."""

    step: int
    stopped_by: int | None = None


def train(
    dataset: Path,
    run: Path,
    model: ModelConfig,
    config: TrainConfig,
    *,
    origin: Origin | None = None,
    device: str = "auto",
) -> Outcome:
    """Trains a model into the folder `run`, or resumes; under `torchrun`, in all processes."""
    data, origin = Dataset.open(dataset), origin or Origin()
    origin.check_tokenizers(data)
    model = fit_to_data(data, model, config)
    origin.check(model)
    check_folder(run)
    with join_world(device) as world:
        return _train(data, run, model, config, world, origin)


def _train(
    data: Dataset, run: Path, model: ModelConfig, config: TrainConfig, world: World, origin: Origin
) -> Outcome:
    # raises before the folder is created
    trainer = Trainer(data, run, model, config, world, origin)
    with _locked_folder(run, world):
        if world.is_first:
            checkpoint.remove_leftovers(run)
        world.barrier()
        changes = agree_on_plan(run, data, model, config, world, origin)
        trainer.restore()
        journal = Journal(run, trainer.step, config.steps, quiet=not world.is_first)
        with deferred_signals() as signals, journal:
            trainer.print_start(journal, changes)
            return trainer.train(journal, signals)


class Trainer:
    """A model in training: its data, its optimizer step, and its progress."""

    def __init__(
        self,
        data: Dataset,
        run: Path,
        model: ModelConfig,
        config: TrainConfig,
        world: World,
        origin: Origin,
    ) -> None:
        self.data, self.run, self.model_config = data, run, model
        self.config, self.world = config, world
        self.batches = PackedBatches(
            data.split("train"),
            rows=config.rows,
            source_length=config.source_length,
            target_length=config.target_length,
            seed=config.seed,
            rank=world.rank,
            world=world.size,
        )
        self.stepper = Stepper(model, config, world, origin)
        self.files = {**origin.files(), **data.tokenizer.files}  # of the run, besides the model
        self.meter = Meter(world)
        self.step = 0
        self.dev: dict[str, float] = {}  # ln(PPL) by step
        self.interim: Path | None = None  # the checkpoint that the next one replaces
        self.rate = matrix_rate(world.device, self.stepper.dtype)

    def restore(self) -> None:
        """Loads the last checkpoint, if there is one."""
        for _, path in list_checkpoints(self.run)[-1:]:
            progress = checkpoint.load_checkpoint(path, self.stepper, self.batches)
            self.step, self.dev = progress.step, progress.dev
            self.interim = path if progress.interim else None

    def train(self, journal: Journal, signals: list[int]) -> Outcome:
        """Trains until the last step or a signal."""
        config = self.config
        finished = self.step >= config.steps and (self.run / CONFIG).is_file()
        self.meter.start_clock()
        for step in range(self.step, config.steps):
            batch = next(self.batches)
            values = self.stepper.update(batch, step)
            self.meter.add(values, batch.tokens, self._operations(batch))
            self.step = step + 1
            stop = self.world.any(bool(signals))
            log, evaluate, save = (
                self.step == config.steps or self.step % every == 0
                for every in (config.log_every, config.evaluate_every, config.checkpoint_every)
            )
            if log or evaluate or save or stop:
                metrics = self._metrics()
                if log:
                    journal.log(self.step, metrics)
                    self.meter = Meter(self.world)
                if evaluate:
                    journal.log(self.step, self._evaluate())
                if save or stop:
                    self._save(interim=not save)
                self.meter.start_clock()
            if stop and self.step < config.steps:
                return Outcome(self.step, signals[0] if signals else int(signal.SIGTERM))
        if not finished and self.world.is_first:
            self._finish(journal)
        self.world.barrier()
        return Outcome(self.step, signals[0] if signals else None)

    def _metrics(self) -> dict[str, float]:
        """Returns the metrics since the last log entry; raises if they are not finite."""
        totals = self.meter.stop_clock()
        if not math.isfinite(totals["objective"] + totals["norm"]):
            reason = f"the loss or gradient became NaN or infinite by step {self.step}"
            raise TrainingError(f"{reason}; {checkpoint.DIVERGED}")
        tokens, seconds = totals["tokens"], totals["seconds"]
        return {
            "loss": totals["objective"] / tokens,
            "ln_ppl": totals["nll"] / tokens,
            "gradient_norm": totals["norm"],
            "learning_rate": learning_rate(self.config, self.step - 1),
            "tokens_per_second": tokens / seconds,
            "utilisation": totals["operations"] / seconds / self.rate / self.world.size,
        }

    def _operations(self, batch: Batch) -> int:
        """Returns the operations of this process in a step, including the teacher's."""
        model, config, teacher = self.model_config, self.config, self.stepper.teacher
        source = config.source_length if model.encoder_layers else 0
        setting = cost.Setting(config.rows // self.world.size, source, config.target_length)
        pairs = batch.visible_pairs(model.window)
        operations = cost.training_step(model, setting, pairs).operations
        if teacher is not None:  # only the forward pass, a third of a step
            operations += cost.training_step(teacher.config, setting, pairs).operations // 3
        return operations

    def _evaluate(self) -> dict[str, float]:
        """Returns the ln(PPL) per token of the dev split, if the dataset has a usable one."""
        if "dev" not in self.data.splits:
            return {}
        model, split = self.stepper.model, self.data.split("dev")
        limit = self.config.evaluate_sequences
        with self.stepper.autocast():
            result = likelihood(model, self.model_config, split, self.world.device, limit)
        if not result.tokens:  # all lines are empty or too long
            return {}
        self.dev[str(self.step)] = result.ln_ppl
        return {"dev_ln_ppl": result.ln_ppl}

    def _save(self, *, interim: bool) -> None:
        if self.world.is_first:  # the finished model must not be older than the last checkpoint
            (self.run / CONFIG).unlink(missing_ok=True)
        progress = checkpoint.Progress(self.step, self.batches.state(), self.dev, interim)
        checkpoint.save_checkpoint(self.run, self.stepper, self.files, progress)
        if self.world.is_first:
            if self.interim is not None:
                remove_directory(self.interim)
            checkpoint.prune_checkpoints(self.run, self.config.keep, self.dev)
        self.interim = checkpoint.checkpoint_path(self.run, self.step) if interim else None

    def _finish(self, journal: Journal) -> None:
        """Writes the finished model: the last checkpoint or the mean of several."""
        paths = [path for _, path in list_checkpoints(self.run)][-self.config.average :]
        weights = average_weights(paths, self.model_config)
        finish_run(self.run, self.model_config, weights, self.files)
        journal.print(f"{self.run} is ready: {self.step} steps")

    def print_start(self, journal: Journal, changes: list[str]) -> None:
        """Prints the sizes of the training, the device and the step that it resumes after."""
        config = self.config
        if self.step >= config.steps:
            journal.print(f"{self.run} already has {self.step} steps; nothing to do")
            return
        row, count = str(config.target_length), sum(cost.parameters(self.model_config).values())
        if self.model_config.encoder_layers:
            row = f"({config.source_length} + {row})"
        device = f"{self.world.size} × " * (self.world.size > 1) + self.world.device.type
        steps = f"{config.steps:,} steps of {config.rows} × {row} tokens"
        journal.print(f"{count:,} parameters on {device}; {steps}")
        if config.warmup >= config.steps > 1:
            journal.print(
                f"note: train.warmup={config.warmup:,} is not less than train.steps="
                f"{config.steps:,}, so the learning rate does not reach its peak before the "
                f"end; set a smaller train.warmup, such as {max(1, config.steps // 10):,}"
            )
        if self.step:
            journal.print("; ".join([f"resuming after step {self.step}", *changes]))
        if self.batches.skipped:
            journal.print(f"note: skipping {self.batches.skipped:,} pairs longer than a row")


@contextmanager
def deferred_signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM in a list instead of interrupting the current step."""
    signals: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.signal(number, lambda n, _: signals.append(n)) for number in numbers}
    try:
        yield signals
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _locked_folder(run: Path, world: World) -> Iterator[None]:
    """Locks the run's folder; converts file system errors to RunError."""
    try:
        with locked(run / ".lock") if world.is_first else nullcontext(True) as free:
            if world.any(not free):  # raises in all processes
                raise RunError(f"another process is training into {run}; choose another folder")
            yield
    except OSError as error:
        raise RunError(
            f"{run} could not be written: {error.strerror or error}; earlier checkpoints are kept: "
            f"fix that and run the same command again"
        ) from error
