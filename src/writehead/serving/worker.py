"""One thread that steps the schedulers of all models, and hands results to asyncio."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import NamedTuple, TypeVar

import torch

from writehead.engine.scheduler import Request, Scheduler
from writehead.errors import OutOfRoom
from writehead.serving.logprobs import Scored, Scorer

log = logging.getLogger(__name__)

T = TypeVar("T")
Command = Callable[[], None]


class Stopped(Exception):
    """The request was cancelled, or the server stops."""


@dataclass(eq=False)
class Job:
    """The requests of one call. All fields but the last are set in the worker's thread.

    If the job is streamed, `events` receives an event for each token, and one without a token when
    a request is finished. At the end, it receives None; if the job failed, `error` says why.
    """

    id: str
    scheduler: Scheduler
    requests: Sequence[Request]
    is_streamed: bool = False
    scorer: Scorer | None = None  # scores the tokens of a stream
    started: float | None = None  # when its first request entered a slot
    error: Exception | None = None
    left: int = 0  # unfinished requests
    is_over: bool = False
    is_refused: bool = False  # the scheduler did not accept its requests
    running: set[Request] = field(default_factory=set)  # that have entered a slot
    counts: dict[Request, list[int]] = field(default_factory=dict)  # tokens: decoded, and sent
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    events: "asyncio.Queue[Event | None]" = field(default_factory=asyncio.Queue)


class Event(NamedTuple):
    """A new token of a streamed request, or None when the request is finished."""

    place: int  # of the request in the job
    token: int | None
    time: float
    scored: Scored | None = None


class Worker:
    """Decodes jobs of several schedulers, one step of each in turn."""

    def __init__(self) -> None:
        self._inbox: SimpleQueue[Command | None] = SimpleQueue()
        self._busy: dict[Scheduler, set[Job]] = {}
        self._ended: list[tuple[Job, int, Request]] = []
        self._events: list[tuple[Job, Event | None]] = []
        # sequences; each is written by one thread only
        self._submitted, self._dequeued = 0, 0
        self._thread = threading.Thread(target=self._run, name="writehead-worker", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs; it ends only by `stop`, or by a fault of its own."""
        return self._thread.is_alive()

    @property
    def waiting(self) -> int:
        """The number of sequences that wait for a slot."""
        return self._submitted - self._dequeued

    def submit(self, job: Job) -> None:
        """Starts to decode a job; all calls come from one thread."""
        self._submitted += len(job.requests)
        self._inbox.put(partial(self._submit, job))

    def cancel(self, job: Job) -> None:
        """Ends a job without a result; its slots become free before the next step."""
        self._inbox.put(partial(self._cancel, job))

    def call(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        """Calls `work` between two steps, so that only one thread computes."""
        result: Future[T] = Future()

        def command() -> None:
            if not result.set_running_or_notify_cancel():
                return
            try:
                result.set_result(work())
            except Exception as error:
                result.set_exception(error)

        self._inbox.put(command)
        return asyncio.wrap_future(result)

    def stop(self) -> None:
        """Ends all jobs with an error, and the thread."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._take_commands():
                for scheduler in [*self._busy]:
                    self._step(scheduler)
                self._score()
                self._send()
        finally:
            for job in [job for jobs in self._busy.values() for job in jobs]:
                self._end(job, Stopped("the server stops"))
            self._send()

    def _take_commands(self) -> bool:
        """Runs the commands that have arrived, or waits for one; returns whether to continue."""
        with suppress(Empty):
            command = self._inbox.get(block=not self._busy)
            while command is not None:
                command()
                command = self._inbox.get_nowait()
            return False
        return True

    def _submit(self, job: Job) -> None:
        job.left = len(job.requests)
        for i, request in enumerate(job.requests):
            request.on_start = partial(self._start, job, request)
            request.on_done = partial(self._ended.append, (job, i, request))
            if job.is_streamed:
                job.counts[request] = [0, 0]
                request.on_tokens = partial(self._stream, job, i, request)
        self._busy.setdefault(job.scheduler, set()).add(job)
        if not job.requests:
            self._end(job)
            return
        self._queue(job, job.requests)

    def _queue(self, job: Job, requests: Sequence[Request]) -> None:
        try:
            job.scheduler.submit(requests)
        except Exception as error:
            job.is_refused = not job.running
            self._end(job, error)

    def _cancel(self, job: Job) -> None:
        if not job.is_over:
            self._end(job, Stopped("cancelled"))

    def _start(self, job: Job, request: Request) -> None:
        job.started = job.started or time.perf_counter()
        job.running.add(request)
        self._dequeued += 1

    def _stream(self, job: Job, index: int, request: Request, tokens: list[int]) -> None:
        now, counts = time.perf_counter(), job.counts[request]
        for token in tokens:
            counts[0] += 1
            if counts[0] > counts[1]:  # else it was sent before the request was repeated
                counts[1] = counts[0]
                self._events.append((job, Event(index, token, now)))

    def _step(self, scheduler: Scheduler) -> None:
        failure: Exception | None = None
        is_smaller = False
        try:
            remains = scheduler.step()
        except Exception as error:
            failure, remains, is_smaller = error, True, self._shrink(scheduler, error)
        ended = [*self._ended]
        self._ended.clear()
        # if no request was in a slot, the step would fail again
        has_run = any(request in job.running for job, _, request in ended)
        for job, index, request in ended:
            if job.is_over:
                continue
            if request.error is None:
                self._finish(job, index)
            elif failure and (is_smaller or (has_run and request not in job.running)):
                self._retry(job, request)
            else:
                log.error("request %s failed: %s", job.id, failure or request.error)
                self._end(job, failure or request.error)
        if not remains and not self._busy[scheduler]:
            del self._busy[scheduler]

    def _shrink(self, scheduler: Scheduler, error: Exception) -> bool:
        """Logs why a step failed; returns whether memory was short and batches are now smaller."""
        if not isinstance(error, OutOfRoom):
            log.error("a decoding step failed", exc_info=error)
            return False
        rows, scheduler.max_rows = scheduler.max_rows, max(1, scheduler.max_rows // 2)
        log.warning("out of memory; batches now have up to %d rows", scheduler.max_rows)
        return rows > 1

    def _finish(self, job: Job, index: int) -> None:
        job.left -= 1
        if job.is_streamed:
            self._events.append((job, Event(index, None, time.perf_counter())))
        if not job.left:
            self._end(job)

    def _retry(self, job: Job, request: Request) -> None:
        """Repeats a request that a failed step has ended."""
        if request in job.running:
            job.running.remove(request)
            self._dequeued -= 1
        request.is_done, request.error = False, None
        if request in job.counts:
            job.counts[request][0] = 0
        self._queue(job, [request])

    def _end(self, job: Job, error: Exception | None = None) -> None:
        for request in job.requests:
            if not request.is_done:
                job.scheduler.cancel(request)
        job.error, job.is_over = error, True
        self._dequeued += len(job.requests) - len(job.running)
        self._busy[job.scheduler].discard(job)
        self._events.append((job, None))

    def _score(self) -> None:
        """Scores the new tokens of streams with a scorer; a failure ends its job."""
        new: dict[Job, list[int]] = {}  # places in `_events`
        for place, (job, event) in enumerate(self._events):
            if job.scorer is not None and event is not None and event.token is not None:
                new.setdefault(job, []).append(place)
        failed: list[tuple[Job, Exception]] = []
        for job, places in new.items():
            assert job.scorer is not None
            events = [event for _, event in map(self._events.__getitem__, places) if event]
            try:
                scores = job.scorer(
                    [(one.place, one.token) for one in events if one.token is not None]
                )
            except Exception as error:
                log.exception("request %s failed", job.id)
                failed.append((job, error))
                continue
            for place, event, scored in zip(places, events, scores, strict=True):
                self._events[place] = job, event._replace(scored=scored)
        for job, reason in failed:  # afterwards, because it removes events
            self._fail(job, reason)

    def _fail(self, job: Job, error: Exception) -> None:
        """Ends a job whose tokens could not be scored; it may have just ended without an error."""
        if isinstance(error, torch.OutOfMemoryError):
            error = OutOfRoom("the device has too little memory for log probabilities")
        if job.is_over:
            job.error = job.error or error
        else:
            self._end(job, error)
        self._events = [one for one in self._events if one[0] is not job or one[1] is None]

    def _send(self) -> None:
        """Hands events to the event loops of their jobs, at once for each loop."""
        events, self._events = self._events, []
        loops: dict[asyncio.AbstractEventLoop, list[tuple[Job, Event | None]]] = {}
        for job, event in events:
            loops.setdefault(job.loop, []).append((job, event))
        for loop, some in loops.items():
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_deliver, some)


def _deliver(events: Sequence[tuple[Job, Event | None]]) -> None:
    for job, event in events:
        job.events.put_nowait(event)
