"""Runs workers as Ray actors: one per GPU of a cluster or, without GPUs, one per few CPU cores.

All machines must have this package, and the model and the folders of the job at the same paths.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

from writehead.bulk.job import Job, Progress
from writehead.bulk.pool import PoolSpec, WorkerDied
from writehead.bulk.translator import Translation
from writehead.bulk.worker import Loader, Outcome, Worker, capture
from writehead.errors import RunError
from writehead.util.extras import requires

POLL_SECONDS = 0.5  # between reports of progress
LOCAL_OPTIONS: dict[str, Any] = {"include_dashboard": False}  # of a cluster that we start
CORES_PER_WORKER = 4  # without GPUs; fewer if a machine has fewer


@contextmanager
def connected(address: str | None = None) -> Iterator[None]:
    """Connects to a Ray cluster, by default the one of this machine; starts it if there is none.

    A cluster that this function starts listens only on the loopback interface, and ends with the
    block. If the program has already called `ray.init`, that cluster is used.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with requires("ray"):
        import ray
    if ray.is_initialized():
        yield
        return
    try:
        if address is not None:
            ray.init(address, logging_level=logging.ERROR)
        else:
            _init_here(ray)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError, ImportError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        where = "on this machine" if address is None else f"at {address}"
        raise RunError(
            f"cannot connect to a Ray cluster {where} ({reason}); check the address and, if the "
            f"cluster requires a token, RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _init_here(ray: Any) -> None:
    """Connects to the cluster of this machine, or starts one."""
    with suppress(ConnectionError):
        ray.init("auto", logging_level=logging.ERROR)
        return
    from ray._private import ray_constants

    # Ray listens only on the loopback interface on macOS, but has no option for it elsewhere
    with mock.patch.object(ray_constants, "ENABLE_RAY_CLUSTER", False):
        ray.init("local", logging_level=logging.ERROR, **LOCAL_OPTIONS)


def ray_workers(translation: Translation) -> PoolSpec:
    """Returns one worker per GPU of the cluster or, without GPUs, one per CORES_PER_WORKER cores.

    The `threads` of the translation override the number of cores.
    """
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = int(sum(node.get("GPU", 0) for node in nodes))
    if gpus:
        return PoolSpec([partial(RayWorker, translation, 1, 1)] * gpus, on_cpu=False)
    cores = [int(node["CPU"]) for node in nodes if node.get("CPU", 0) >= 1]
    if not cores:
        raise RunError("the Ray cluster has neither GPUs nor CPUs; add a machine that has some")
    each = translation.threads or min(CORES_PER_WORKER, *cores)
    count = sum(most // each for most in cores)
    if count == 0:
        raise RunError(f"no machine of the Ray cluster has {each} cores; use fewer threads")
    translation = replace(translation, threads=each)
    return PoolSpec([partial(RayWorker, translation, each, 0)] * count, on_cpu=True)


class RayWorker:
    """A `Worker` in a Ray actor."""

    def __init__(self, loader: Loader, cores: int, gpus: int) -> None:
        import ray

        self._ray = ray
        # a second thread reports the progress of the first
        options = {"num_cpus": cores, "num_gpus": gpus, "max_concurrency": 2}
        self._actor = ray.remote(**options)(Actor).remote(loader)

    def identity(self) -> dict[str, Any]:
        """Waits until the model is loaded; returns its description."""
        found: dict[str, Any] = self._call("identity")
        return found

    def start(self, job: Job) -> None:
        """Prepares to translate shards of this job."""
        # actors may have other working directories
        self._call("start", replace(job, output=job.output.absolute()))

    def translate(self, shard: int, report: Progress) -> int | None:
        """Translates a shard; see `Worker.translate`."""
        found: int | None = self._call("translate", shard, report=report)
        return found

    def close(self) -> None:
        """Kills the actor."""
        with suppress(Exception):  # the cluster may be gone
            self._ray.kill(self._actor)

    def _call(self, name: str, *arguments: Any, report: Progress | None = None) -> Any:
        """Calls a method of the actor; raises WorkerDied if it or its machine is lost."""
        ray, errors = self._ray, self._ray.exceptions
        try:
            result = self._actor.call.remote(name, *arguments)
            while not ray.wait([result], timeout=POLL_SECONDS)[0]:
                if report is not None:
                    report(ray.get(self._actor.lines.remote()))
            found: Outcome = ray.get(result)
        except errors.RayError as error:  # includes errors in the actor other than WriteheadError
            lines = str(error).strip().splitlines() or [type(error).__name__]
            is_traceback = isinstance(error, errors.RayTaskError)
            raise WorkerDied(lines[-1 if is_traceback else 0]) from error
        return found.unwrap()


class Actor:
    """The Ray actor of a RayWorker."""

    def __init__(self, loader: Loader) -> None:
        self._loaded = capture(lambda: Worker(loader.load()))
        self._lines = 0.0

    def call(self, name: str, *arguments: Any) -> Outcome:
        """Calls a method of the worker."""
        if self._loaded.error is not None:
            return self._loaded
        method = getattr(self._loaded.result, name)
        if name != "translate":
            return capture(method, *arguments)
        self._lines = 0.0
        return capture(method, *arguments, self._report)

    def lines(self) -> float:
        """Returns how many lines of the running shard are finished."""
        return self._lines

    def _report(self, lines: float) -> None:
        self._lines = lines
