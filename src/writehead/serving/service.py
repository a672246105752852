"""What all APIs share: limits, keys, and requests that are decoded, streamed or cancelled."""

import asyncio
import hashlib
import hmac
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypedDict, TypeVar, Unpack
from weakref import WeakKeyDictionary

from writehead.config import DecodeConfig
from writehead.data.outputs import Output
from writehead.engine.engine import Line
from writehead.errors import OutOfRoom, WriteheadError
from writehead.serving.detect import Detected, Detector
from writehead.serving.errors import ApiError
from writehead.serving.logprobs import Scored, Scorer
from writehead.serving.metrics import Metrics
from writehead.serving.models import AUTO, Codes, Models, Served
from writehead.serving.settings import Settings
from writehead.serving.worker import Event, Job, Worker
from writehead.util.extras import requires

with requires("serve"):
    from fastapi import Request

INLINE_CHARACTERS = 2_000  # shorter texts are tokenized in the event loop
# of all streams with log probabilities, whose caches are not part of the lanes' memory
SCORED_POSITIONS = 16_384
GONE = 499  # the status in the log if the client has gone away

T = TypeVar("T")


@dataclass
class Facts:
    """What is known about one HTTP request: for its log line, and for its deadline."""

    id: str
    arrived: float  # by time.perf_counter
    model: str | None = None
    prompt_tokens: int = 0
    tokens: int = 0
    queued: float | None = None  # seconds
    first_token: float | None = None  # seconds
    texts: list[str] = field(default_factory=list)


class More(TypedDict, total=False):
    """Arguments of a call that not all APIs have."""

    prefixes: Sequence[str] | None
    samples: int
    codes: Codes | None


class ClientGone(Exception):
    """The client has closed the connection."""


@dataclass
class Decoded:
    """The result of a call: one output and the finished requests of each text."""

    outputs: list[Output]
    lines: list[Line]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all sources or prompts, without bos and eos; samples of a prompt share it."""
        return sum(_prompt_tokens(line) for line in self.lines)

    @property
    def tokens(self) -> int:
        """Tokens of all hypotheses, with eos."""
        return sum(
            len(one.tokens) + one.finished
            for line in self.lines
            for request in line
            for one in request.hypotheses
        )


class Service:
    """Decodes for the APIs, and refuses what exceeds the limits."""

    def __init__(self, models: Models, settings: Settings, worker: Worker) -> None:
        self.models, self.settings, self.limits = models, settings, settings.limits
        self.metrics = Metrics(models)
        self.detector = Detector([str(one["code"]) for one in models.languages()])
        self.worker = worker
        self.is_draining = False
        self.deepl_characters = 0  # translated by DeepL's API
        self._keys = [_digest(key) for key in settings.keys]
        self._waits = 0.0  # an average of the time in the queue
        self._scored: WeakKeyDictionary[Job, int] = WeakKeyDictionary()  # positions of scorers

    def check_key(self, key: str | None) -> None:
        """Raises 401 unless the server has no keys or `key` is one; takes the same time."""
        given = _digest(key or "")
        matches = [hmac.compare_digest(given, one) for one in self._keys]
        if matches and not any(matches):
            raise ApiError(401, "the API key is missing or wrong; ask the operator for one")

    def check_texts(self, texts: Sequence[str]) -> int:
        """Returns the number of characters; raises 422 if it is too high, or they are no UTF-8."""
        size, most = sum(map(len, texts)), self.limits.characters
        if size > most:
            raise ApiError(422, f"the request has {size:,} characters; the limit is {most:,}")
        try:
            "".join(texts).encode()
        except UnicodeEncodeError as error:
            raise ApiError(422, "the text is not UTF-8, as it has half a character") from error
        return size

    async def decode(
        self,
        http: Request,
        model: Served,
        texts: Sequence[str],
        options: DecodeConfig,
        **more: Unpack[More],
    ) -> Decoded:
        """Decodes texts; ends early if the client goes away or the deadline passes."""
        lines = await self.requests(http, model, texts, options, **more)
        job, facts = self._submit(http, model, lines), facts_of(http)
        try:
            await self.guarded(http, job.events.get())
            _raise_error(job, facts)
        finally:
            self.end(model, job, facts)
        decoded = Decoded(model.engine.outputs(lines), lines)
        facts.tokens = decoded.tokens
        return decoded

    async def stream(
        self,
        http: Request,
        model: Served,
        texts: Sequence[str],
        options: DecodeConfig,
        *,
        logprobs: int | None = None,
        **more: Unpack[More],
    ) -> "Streaming":
        """Starts to decode texts; returns with the first token, so that errors have a status.

        With `logprobs`, each token has its log probability and those of as many likeliest tokens.
        """
        lines = await self.requests(http, model, texts, options, **more)
        job = self._submit(http, model, lines, streamed=True, logprobs=logprobs)
        facts = facts_of(http)
        try:
            first = await self.guarded(http, job.events.get())
            _raise_error(job, facts)
        except BaseException:
            self.end(model, job, facts)
            raise
        return Streaming(self, model, job, lines, facts, first)

    async def detect(self, http: Request, texts: Sequence[str]) -> list[Detected]:
        """Ranks the languages of texts that share one, likeliest first."""
        self.check_texts(texts)
        return await self.guarded(http, asyncio.to_thread(self.detector.rank, texts))

    async def translator(
        self,
        http: Request,
        texts: Sequence[str],
        source: str | None,
        target: str | None,
        name: str | None = None,
    ) -> tuple[Served, Codes, Detected | None]:
        """Returns a translation model, the codes of the languages, and the source if detected.

        The source is the likeliest of the languages that a model translates to the target.
        """
        sources = self.models.sources(target, name) if source == AUTO else []
        if not sources:
            return *self.models.translator(name, source, target), None
        ranked = await self.detect(http, texts)
        known = (one for one in ranked if one.language in sources)
        found = next(known, Detected(sources[0], 0.0))
        return *self.models.translator(name, found.language, target), found

    async def between_steps(self, http: Request, work: Callable[[], T]) -> T:
        """Calls `work` in the thread of the worker."""
        return await self.guarded(http, self.worker.call(work))

    async def requests(
        self,
        http: Request,
        model: Served,
        texts: Sequence[str],
        options: DecodeConfig,
        *,
        prefixes: Sequence[str] | None = None,
        samples: int = 1,
        codes: Codes | None = None,
    ) -> list[Line]:
        """Returns the requests of texts; raises if they exceed a limit."""
        facts, size = facts_of(http), self.check_texts([*texts, *(prefixes or ())])
        facts.model = model.name
        if self.settings.log_text:
            facts.texts = [*texts]
        if len(texts) * samples > self.limits.queue:
            raise ApiError(
                422,
                f"the request has {len(texts) * samples:,} sequences; the limit is "
                f"{self.limits.queue:,}",
            )
        self._check_queue(1)
        make = partial(
            model.engine.requests,
            texts,
            options,
            prefixes=prefixes,
            samples=samples,
            **(codes or {}),
        )
        try:
            small = size <= INLINE_CHARACTERS
            lines = make() if small else await self.guarded(http, asyncio.to_thread(make))
        except WriteheadError as error:
            raise ApiError(422, str(error)) from error
        facts.prompt_tokens = sum(map(_prompt_tokens, lines))
        return lines

    def _submit(
        self,
        http: Request,
        model: Served,
        lines: Sequence[Line],
        *,
        streamed: bool = False,
        logprobs: int | None = None,
    ) -> Job:
        requests = [request for line in lines for request in line]
        self._check_queue(len(requests))
        scorer = None if logprobs is None else Scorer(model.engine, requests, logprobs)
        if scorer is not None:
            self._check_scored(scorer.positions)
        facts = facts_of(http)
        self.metrics.prompt_tokens.labels(model.name).inc(facts.prompt_tokens)
        job = Job(facts.id, model.engine.scheduler, requests, streamed, scorer)
        if scorer is not None:
            self._scored[job] = scorer.positions
        self.worker.submit(job)
        return job

    def _check_scored(self, positions: int) -> None:
        """Raises unless one more stream with log probabilities of so many positions may start."""
        if positions > SCORED_POSITIONS:
            raise ApiError(
                422,
                f"the sequences of this stream need {positions:,} cache positions for log "
                f"probabilities; the limit is {SCORED_POSITIONS:,}; lower n or max_tokens",
            )
        if sum(self._scored.values()) + positions > SCORED_POSITIONS:
            reason = "too many streams with log probabilities are running; retry later"
            raise ApiError(429, reason, {"Retry-After": "5"})

    def _check_queue(self, count: int) -> None:
        """Raises 429 if too many sequences wait, and 503 if the server cannot decode."""
        if self.is_draining or not self.worker.is_alive:
            raise ApiError(503, "the server is shutting down; retry", {"Retry-After": "5"})
        waiting = self.worker.waiting
        if waiting and waiting + count > self.limits.queue:
            seconds = {"Retry-After": str(max(1, math.ceil(self._waits)))}
            raise ApiError(429, f"{waiting:,} sequences are waiting; retry later", seconds)

    async def guarded(self, http: Request, work: Awaitable[T]) -> T:
        """Awaits `work`; raises if the client goes away or the deadline passes."""
        left = facts_of(http).arrived + self.limits.deadline - time.perf_counter()
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(_disconnected(http))
        try:
            await asyncio.wait((task, gone), timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if gone.done():
                raise ClientGone
            raise self.too_late()
        finally:
            gone.cancel()
            task.cancel()

    def too_late(self) -> ApiError:
        """Returns the error for a request whose deadline has passed."""
        return ApiError(504, f"decoding took longer than {self.limits.deadline:g} s")

    def end(self, model: Served, job: Job, facts: Facts, *, is_enough: bool = False) -> None:
        """Cancels what is left of a job, and records its metrics."""
        now = time.perf_counter()
        aborted = not is_enough and (job.error is not None or not job.is_over)
        self._scored.pop(job, None)
        if not job.is_over:
            self.worker.cancel(job)
        if job.started is not None:
            facts.queued = job.started - facts.arrived
            self._waits += 0.1 * (facts.queued - self._waits)
        done = (one.finished for request in job.requests for one in request.hypotheses)
        reason = "abort" if aborted else "stop" if all(done) else "length"
        self.metrics.observe_end(model.name, job, facts.arrived, now, reason)


class Piece(NamedTuple):
    """New text of a stream, which may be empty, and its token; None after the last token."""

    place: int  # of the request in the job
    text: str
    token: int | None
    scored: Scored | None = None


@dataclass
class Streaming:
    """The tokens of a stream as text. Iterate over it once; closing the iterator cancels it."""

    service: Service
    model: Served
    job: Job
    lines: list[Line]
    facts: Facts
    first: Event | None
    is_enough: bool = False  # set by a reader that needs no more text, as after a stop string

    async def __aiter__(self) -> AsyncGenerator[Piece, None]:
        engine, job, facts = self.model.engine, self.job, self.facts
        requests = job.requests
        texts = [*map(engine.streamed_text, requests)]
        before: dict[int, float] = {}
        metrics, name = self.service.metrics, self.model.name
        deadline = facts.arrived + self.service.limits.deadline
        try:
            event = self.first
            while event is not None:
                index, token, now, scored = event
                if token is None:
                    facts.tokens += requests[index].hypotheses[0].finished  # eos
                    yield Piece(index, texts[index].rest(), None)
                    event = await self._next(deadline)
                    continue
                if index in before:
                    metrics.inter_token.labels(name).observe(now - before[index])
                else:
                    metrics.first_token.labels(name).observe(now - facts.arrived)
                    facts.first_token = facts.first_token or now - facts.arrived
                before[index] = now
                facts.tokens += 1
                yield Piece(index, texts[index].add([token]), token, scored)
                event = await self._next(deadline)
            _raise_error(job, facts)
        finally:
            self.service.end(self.model, job, facts, is_enough=self.is_enough)

    async def _next(self, deadline: float) -> Event | None:
        try:
            async with asyncio.timeout(deadline - time.perf_counter()):
                return await self.job.events.get()
        except TimeoutError:
            raise self.service.too_late() from None


def facts_of(http: Request) -> Facts:
    """Returns the facts of an HTTP request."""
    facts = http.scope["writehead.facts"]
    assert isinstance(facts, Facts)
    return facts


def _prompt_tokens(line: Line) -> int:
    """Returns the tokens of the text of a line; samples share a prompt."""
    pieces = {id(request.tokens): len(request.tokens) - 1 for request in line}
    return sum(pieces.values())


def _raise_error(job: Job, facts: Facts) -> None:
    error = job.error
    if error is None:
        return
    if job.is_refused and isinstance(error, WriteheadError):
        raise ApiError(422, str(error)) from error
    if isinstance(error, OutOfRoom):
        raise ApiError(503, str(error), {"Retry-After": "5"}) from error
    raise ApiError(
        500, f"decoding failed; the operator finds the cause by the id {facts.id}"
    ) from error


async def _disconnected(http: Request) -> None:
    """Returns when the client has closed the connection."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _digest(key: str) -> bytes:
    """Returns a hash of a key: comparing hashes tells nothing about the length of the key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
