"""Runs shards on one or more workers; replaces workers that die and repeats their shards."""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from writehead.bulk.job import Job, Progress
from writehead.errors import RunError

log = logging.getLogger(__name__)

MAX_DEATHS = 5  # of workers, for the same shard or in a row while they start
RETRY_SECONDS = 1.0  # between attempts at shards that other processes have locked


class WorkerDied(Exception):
    """The process of a worker has ended."""


class Member(Protocol):
    """A worker in this process (`Worker`) or in another; its methods raise WorkerDied."""

    def identity(self) -> dict[str, Any]:
        """Describes the model."""

    def start(self, job: Job) -> None:
        """Takes shards of this job from now on."""

    def translate(self, shard: int, report: Progress) -> int | None:
        """Translates a shard; see `Worker.translate`."""

    def close(self) -> None:
        """Ends the worker; makes a running `translate` raise WorkerDied."""


class Team(NamedTuple):
    """The workers to start: a function for each, and whether they compute on CPUs."""

    makers: Sequence[Callable[[], Member]]
    on_cpu: bool


class Queue:
    """The shards that are left; several threads take them."""

    def __init__(self, job: Job, shards: Iterable[int], progress: Progress) -> None:
        self.in_pieces = 0  # lines
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

        While other threads translate the last shards, waits in case one of their workers dies.
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
        """Reports how many lines of a running shard are finished."""
        with self._changed:
            self._running[shard] = lines
            self._progress(self._done + sum(self._running.values()))

    def finish(self, shard: int, in_pieces: int | None) -> None:
        """Ends a shard: it is finished, or locked if `in_pieces` is None."""
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
        """Queues a shard again whose worker has died; raises RunError if that happens often."""
        with self._changed:
            self._deaths[shard] += 1
            if self._deaths[shard] == MAX_DEATHS:
                first, end = (self._job.marks[i].line for i in (shard, shard + 1))
                raise RunError(
                    f"{MAX_DEATHS} workers have died while they translated shard {shard} (lines "
                    f"{first + 1:,} to {end:,}); see their messages, and the memory they use"
                )
            del self._running[shard]
            self._waiting.appendleft(shard)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Stops all threads, unless the job is over."""
        with self._changed:
            if not self.is_over:
                self.error = error
            self._changed.notify_all()


class Crew:
    """The workers of a job; each is served by a thread, or the only one by the calling thread."""

    def __init__(self, team: Team) -> None:
        self._makers = team.makers
        self._members: list[Member] = []
        self._queue: Queue | None = None

    def __enter__(self) -> "Crew":
        try:
            for make in self._makers:
                self._members.append(make())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all workers, also if they are at work."""
        if self._queue is not None:
            self._queue.fail(RunError("the job was stopped"))
        for member in self._members:
            member.close()

    def identity(self) -> dict[str, Any]:
        """Waits until the first worker has loaded the model; describes the model."""
        found: dict[str, Any] = self._retry(0, lambda member: member.identity())
        return found

    def run(self, job: Job, shards: Sequence[int], progress: Progress) -> int:
        """Translates shards; returns how many lines were too long and translated in pieces.

        Waits for shards that other processes have locked, and takes over if these processes die.
        """
        left = [shard for shard in shards if not job.is_finished(shard)]
        finished = job.lines(shards) - job.lines(left)
        queue = self._queue = Queue(job, left, lambda lines: progress(finished + lines))
        progress(finished)
        if len(self._members) == 1:
            self._serve(0, job, queue)
        else:
            for i in range(min(len(self._members), len(left))):
                threading.Thread(target=self._serve, args=(i, job, queue), daemon=True).start()
            queue.wait()
        if queue.error is not None:
            raise queue.error
        return queue.in_pieces

    def _serve(self, i: int, job: Job, queue: Queue) -> None:
        """Gives shards to a worker until none is left."""
        started: Member | None = None
        try:
            while not queue.is_over:
                # before it takes a shard, because a cluster may have no place for a new worker
                if started is not self._members[i]:
                    self._retry(i, lambda member: member.start(job))
                    started = self._members[i]
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

    def _retry(self, i: int, call: Callable[[Member], Any]) -> Any:
        """Calls a method of a worker that may die while it starts."""
        for _ in range(MAX_DEATHS):
            try:
                return call(self._members[i])
            except WorkerDied as death:
                self._replace(i, death)
        raise RunError(f"{MAX_DEATHS} workers have died while they started; see their messages")

    def _replace(self, i: int, death: WorkerDied) -> None:
        """Starts another worker; ends the thread if the job is over."""
        if self._queue is not None and self._queue.is_over:
            raise death
        log.warning("a worker has died (%s); starting another one", death)
        self._members[i].close()
        self._members[i] = self._makers[i]()
