"""Runs each worker in its own process, one per device."""

import logging
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from writehead.bulk.job import Job, Progress
from writehead.bulk.pool import PoolSpec, WorkerDied
from writehead.bulk.translator import Translation
from writehead.bulk.worker import Loader, Outcome, Worker, capture
from writehead.errors import ConfigError
from writehead.util.devices import find_device
from writehead.util.garbage import frozen_objects
from writehead.util.threads import available_cores

STOP_SECONDS = 10.0


def device_names(text: str) -> list[str]:
    """Parses a list of devices such as "0,1" or "cpu,cpu"; "all" names every GPU."""
    if text == "all":
        count = torch.cuda.device_count()
        if not count:
            raise ConfigError("there are no GPUs; name the devices instead of all, such as cpu,cpu")
        return [f"cuda:{i}" for i in range(count)]
    names = [f"cuda:{name}" if name.isdecimal() else name for name in text.split(",")]
    for name in names:
        _device_type(name)  # raises if it does not exist
    return names


def process_workers(translation: Translation, devices: Sequence[str]) -> PoolSpec:
    """Returns one worker per device; workers on CPUs share the cores."""
    on_cpu = sum(_device_type(name) == "cpu" for name in devices)
    threads = translation.threads or max(1, available_cores() // max(1, on_cpu))
    given = (replace(translation, device=name, threads=threads) for name in devices)
    return PoolSpec([partial(ProcessWorker, one) for one in given], on_cpu == len(devices))


def _device_type(name: str) -> str:
    """Returns the type of a device; unlike `find_device`, does not use memory of a GPU."""
    match = re.fullmatch(r"cuda(?::(\d{1,9}))?", name)
    if match is None:
        return find_device(name).type
    count = torch.cuda.device_count()
    if int(match[1] or 0) >= count:
        raise ConfigError(f"device {name} is not available; the number of GPUs is {count}")
    return "cuda"


class ProcessWorker:
    """A `Worker` in a new process, which ends when this process ends."""

    def __init__(self, loader: Loader) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(loader, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def identity(self) -> dict[str, Any]:
        """Waits until the model is loaded; returns its description."""
        found: dict[str, Any] = self._call("identity")
        return found

    def start(self, job: Job) -> None:
        """Prepares to translate shards of this job."""
        self._call("start", job)

    def translate(self, shard: int, report: Progress) -> int | None:
        """Translates a shard; see `Worker.translate`."""
        found: int | None = self._call("translate", shard, report=report)
        return found

    def close(self) -> None:
        """Kills the process."""
        self.process.kill()
        self.process.join(STOP_SECONDS)

    def _call(self, name: str, *arguments: Any, report: Progress | None = None) -> Any:
        """Calls a method in the other process; raises WorkerDied if the process has ended."""
        try:
            self._connection.send((name, arguments))
            while not isinstance(message := self._connection.recv(), Outcome):
                if report is not None:
                    report(message)
        except (EOFError, ConnectionError) as error:
            self.process.join(STOP_SECONDS)  # until its exit code is known
            raise WorkerDied(f"exit code {self.process.exitcode}") from error
        return message.unwrap()


def _serve(loader: Loader, connection: Connection) -> None:
    """Serves the calls of a ProcessWorker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C, the parent ends this process
    threading.Thread(target=_die_with_parent, daemon=True).start()
    logging.basicConfig(format="%(levelname)s: %(message)s")
    loaded = capture(lambda: Worker(loader.load()))
    with frozen_objects():
        while True:
            name, arguments = connection.recv()
            if loaded.error is not None:
                connection.send(loaded)
                continue
            call = getattr(loaded.result, name)
            if name == "translate":
                arguments = (*arguments, connection.send)  # to report progress
            connection.send(capture(call, *arguments))


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
