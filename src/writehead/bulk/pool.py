"""Translates shards with a pool of workers; replaces workers that die and repeats their shards."""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from writehead.bulk.job import Job, Progress
from writehead.errors import RunError

log = logging.getLogger(__name__)

MAX_DEATHS = 5  # of workers, on the same shard or while one starts
RETRY_SECONDS = 1.0  # between attempts to lock shards that other processes have locked


class WorkerDied(Exception):
    """The process of a worker has ended."""


class WorkerHandle(Protocol):
    """A worker in this process (`Worker`) or another; methods raise WorkerDied if it has ended."""

    def identity(self) -> dict[str, Any]:
        """Returns a description of the model."""

    def start(self, job: Job) -> None:
        """Prepares to translate shards of this job."""

    def translate(self, shard: int, report: Progress) -> int | None:
        """Translates a shard; see `Worker.translate`."""

    def close(self) -> None:
        """Ends the worker; a running `translate` raises WorkerDied."""


class PoolSpec(NamedTuple):
    """The workers of a pool: a function that starts each one, and whether all of them use CPUs."""

    factories: Sequence[Callable[[], WorkerHandle]]
    on_cpu: bool


class ShardQueue:
    """The unfinished shards of a job; thread-safe."""

    def __init__(self, job: Job, shards: Iterable[int], progress: Progress) -> None:
        self.in_pieces = 0  # lines that were split because they were too long
        self.error: BaseException | None = None
        self._job, self._progress = job, progress
        self._waiting = deque(shards)
        self._locked: list[int] = []  # by other processes
        self._running: dict[int, float] = {}  # finished lines
        self._done = 0  # lines
        self._deaths: Counter[int] = Counter()
        self._changed = threading.Condition()

    def take(self) -> int | None:
        """Waits for a shard to translate; returns None if all are finished or there was an error.

        This also waits for the last shards of other threads, because their workers may die.
        """
        with self._changed:
            while not self.is_over:
                if self._waiting:
                    shard = self._waiting.popleft()
                    self._running[shard] = 0.0
                    return shard
                if not self._changed.wait(RETRY_SECONDS):
                    self._waiting.extend(self._locked)
                    self._locked.clear()
            return None

    @property
    def is_over(self) -> bool:
        """Whether all shards are finished, or there was an error."""
        with self._changed:
            left = self._waiting or self._running or self._locked
            return self.error is not None or not left

    def wait(self) -> None:
        """Waits until the job is over."""
        with self._changed:
            while not self.is_over:
                self._changed.wait()

    def report(self, shard: int, lines: float) -> None:
        """Records how many lines of a running shard are finished."""
        with self._changed:
            self._running[shard] = lines
            self._progress(self._done + sum(self._running.values()))

    def finish(self, shard: int, in_pieces: int | None) -> None:
        """Marks a running shard as finished, or as locked if `in_pieces` is None."""
        with self._changed:
            del self._running[shard]
            if in_pieces is None:
                self._locked.append(shard)
            else:
                self.in_pieces += in_pieces
                self._done += self._job.lines([shard])
                self._progress(self._done + sum(self._running.values()))
            self._changed.notify_all()

    def put_back(self, shard: int) -> None:
        """Queues the shard of a dead worker again; raises RunError after MAX_DEATHS deaths."""
        with self._changed:
            self._deaths[shard] += 1
            if self._deaths[shard] == MAX_DEATHS:
                first, end = (self._job.boundaries[i].line for i in (shard, shard + 1))
                raise RunError(
                    f"{MAX_DEATHS} workers have died while translating shard {shard} (lines "
                    f"{first + 1:,} to {end:,}); check their messages and their memory use"
                )
            del self._running[shard]
            self._waiting.appendleft(shard)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Stores the error, which stops all threads, unless the job is over."""
        with self._changed:
            if not self.is_over:
                self.error = error
            self._changed.notify_all()


class WorkerPool:
    """Workers, each driven by its own thread; a single worker is driven by the calling thread."""

    def __init__(self, spec: PoolSpec) -> None:
        self._factories = spec.factories
        self._workers: list[WorkerHandle] = []
        self._queue: ShardQueue | None = None

    def __enter__(self) -> "WorkerPool":
        try:
            for make in self._factories:
                self._workers.append(make())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all workers, even while they translate."""
        if self._queue is not None:
            self._queue.fail(RunError("the job was stopped"))
        for worker in self._workers:
            worker.close()

    def identity(self) -> dict[str, Any]:
        """Waits until the first worker has loaded the model; returns its description."""
        found: dict[str, Any] = self._retry(0, lambda worker: worker.identity())
        return found

    def run(self, job: Job, shards: Sequence[int], progress: Progress) -> int:
        """Translates shards; returns how many lines were too long and were translated in pieces.

        This waits for shards that other processes have locked, and takes them over if those die.
        """
        left = [shard for shard in shards if not job.is_finished(shard)]
        finished = job.lines(shards) - job.lines(left)
        queue = self._queue = ShardQueue(job, left, lambda lines: progress(finished + lines))
        progress(finished)
        if len(self._workers) == 1:
            self._serve(0, job, queue)
        else:
            for i in range(min(len(self._workers), len(left))):
                threading.Thread(target=self._serve, args=(i, job, queue), daemon=True).start()
            queue.wait()
        if queue.error is not None:
            raise queue.error
        return queue.in_pieces

    def _serve(self, i: int, job: Job, queue: ShardQueue) -> None:
        """Gives shards to a worker until none is left."""
        started: WorkerHandle | None = None
        try:
            while not queue.is_over:
                # before taking a shard, because a cluster may have no resources for a new worker
                if started is not self._workers[i]:
                    self._retry(i, lambda worker: worker.start(job))
                    started = self._workers[i]
                if (shard := queue.take()) is None:
                    break
                try:
                    found = started.translate(shard, partial(queue.report, shard))
                except WorkerDied as death:
                    queue.put_back(shard)
                    self._replace(i, death)
                else:
                    queue.finish(shard, found)
        except BaseException as error:  # raised again by `run`
            queue.fail(error)

    def _retry(self, i: int, call: Callable[[WorkerHandle], Any]) -> Any:
        """Calls a method of a worker; starts another worker if it dies, up to MAX_DEATHS times."""
        for _ in range(MAX_DEATHS):
            try:
                return call(self._workers[i])
            except WorkerDied as death:
                self._replace(i, death)
        raise RunError(f"{MAX_DEATHS} workers have died while starting; check their messages")

    def _replace(self, i: int, death: WorkerDied) -> None:
        """Starts another worker, or raises `death` if the job is over."""
        if self._queue is not None and self._queue.is_over:
            raise death
        log.warning("a worker has died (%s); starting another", death)
        self._workers[i].close()
        self._workers[i] = self._factories[i]()
