"""Several models trained at the same time, each in a process of its own, on one display.

A small model's step gains little from a second core, so models side by side take less time than
one after another. The processes leave Ctrl-C to the one that started them. When that tells them to
stop, or is gone, each finishes its step and saves it.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
from rich.console import Console

from writehead.config import ModelConfig, TrainConfig
from writehead.demo.board import Board
from writehead.errors import TrainingError, WriteheadError
from writehead.training.loop import Outcome, deferred_signals, train

LOOK = 0.5  # seconds between looks at the logs


@dataclass(frozen=True)
class Training:
    """What `train` is asked for; in a process of its own it speaks to a file beside its run."""

    dataset: Path
    run: Path
    model: ModelConfig
    config: TrainConfig
    device: str

    @property
    def speech(self) -> Path:
        """Where to read what it said."""
        return self.run.with_name(f"{self.run.name}.log")

    def go(self) -> Outcome:
        """Trains, or goes on."""
        return train(self.dataset, self.run, self.model, self.config, device=self.device)


def train_together(trainings: Mapping[str, Training], threads: int, console: Console) -> bool:
    """Whether all of them came to their end, trained at once with `threads` threads each.

    They have not if a signal said so. Where one fails, the others are stopped too.
    """
    steps = max(training.config.steps for training in trainings.values())
    runs = {name: training.run for name, training in trainings.items()}
    helpers: list[_Helper] = []
    with deferred_signals() as told:
        # Python's own helper of new processes lifts the mask when it begins, so it comes first
        resource_tracker.ensure_running()
        # a new process inherits the mask, and so does not hear Ctrl-C
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            helpers += [_Helper(name, one, threads) for name, one in trainings.items()]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            with Board(runs, steps, console) as board:
                while not told and all(helper.is_well for helper in helpers):
                    busy = [helper for helper in helpers if helper.answer is None]
                    if not busy:
                        break
                    ready = wait([helper.answers for helper in busy], timeout=LOOK)
                    for helper in busy:
                        if helper.answers in ready:
                            helper.listen()
                    board.look()
        finally:
            for helper in helpers:
                helper.stop()
    for helper in helpers:
        if isinstance(helper.answer, str):
            raise TrainingError(f"{helper.name}: {helper.answer}")
    return all(helper.is_well for helper in helpers)


class _Helper:
    """A process that trains one model; `answer` is how that ended, in a sentence if badly."""

    def __init__(self, name: str, training: Training, threads: int) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would copy threads half-way
        self.name = name
        self.answer: Outcome | str | None = None
        self.answers, theirs = context.Pipe(duplex=False)
        self._speech = training.speech
        self._process = context.Process(target=_work, args=(training, threads, theirs), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def is_well(self) -> bool:
        """Whether it trains, or has come to its end."""
        return self.answer is None or (
            isinstance(self.answer, Outcome) and self.answer.stopped_by is None
        )

    def listen(self) -> None:
        """Waits for the answer, or for the end of a process that has none."""
        try:
            self.answer = self.answers.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode or 0
            if code == -signal.SIGTERM:  # told to stop before it had begun
                self.answer = Outcome(0, signal.SIGTERM)
            elif code == -signal.SIGKILL:
                self.answer = (
                    "its process was killed, perhaps for want of memory; run the same command "
                    "again to go on"
                )
            else:
                self.answer = f"its process ended without a word; {self._speech} may say why"

    def stop(self) -> None:
        """Tells it to stop if it has not ended, and waits until it has."""
        if self.answer is None:
            self._process.terminate()
            self.listen()
        self._process.join()
        self.answers.close()


def _work(training: Training, threads: int, answers: Connection) -> None:
    """A process's life: trains, and answers how that ended."""
    _stop_with_parent()
    training.speech.parent.mkdir(parents=True, exist_ok=True)
    with training.speech.open("ab") as speech:
        os.dup2(speech.fileno(), 2)
    torch.set_num_threads(threads)
    try:
        answers.send(training.go())
    except WriteheadError as error:
        answers.send(str(error))


def _stop_with_parent() -> None:
    """Tells this process to stop as soon as the one that started it is gone, even by kill -9."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
