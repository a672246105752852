"""Continuous batching: requests enter free slots, advance together, and leave when they end.

Requests with the same beam size share a lane; greedy search and sampling have size 1. New requests
are encoded or prefilled between steps, a limited number of tokens at a time.
"""

import heapq
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from writehead.config import DecodeConfig
from writehead.engine.runner import Collected, HostCopy, Lane, Model, Shape, bytes_per_slot, send
from writehead.engine.search import Hypothesis, Options, no_hypothesis
from writehead.errors import ConfigError, OutOfRoom, SearchError, TokenError, WriteheadError
from writehead.model import DecoderState, LanguageModel

log = logging.getLogger(__name__)

# steps after which the host checks which sequences have ended, if none is streamed
POLL_STEPS = {"cpu": 1, "cuda": 2}
# of the slots must be free before new requests are encoded together
ADMIT_FRACTION = {"cpu": 1 / 16, "cuda": 1 / 8}
ADMIT_TOKENS = {"cpu": 4096, "cuda": 16_384}  # of sources that are encoded together
PREFILL_TOKENS = {"cpu": 512, "cuda": 16_384}  # of prompts, between two steps
MAX_SLOTS, MAX_ROWS = 1024, {"cpu": 128, "cuda": 4096}  # in a lane
NOT_ADMITTED = np.iinfo(np.int64).max
MEMORY_FRACTION = 0.5  # of the device's memory, for K and V
MIN_POSITIONS = 64  # in a slot; capacities are powers of two


@dataclass(eq=False, slots=True)
class Request:
    """One sequence to decode: a source or prompt, and search options."""

    tokens: Sequence[int]
    config: DecodeConfig
    max_length: int
    seed: int = 0
    prefix: tuple[int, ...] = ()
    on_tokens: Callable[[list[int]], None] | None = None  # called with new tokens, for streaming
    on_done: Callable[[], None] | None = None
    hypotheses: Sequence[Hypothesis] = ()
    error: WriteheadError | None = None
    is_done: bool = False
    is_cancelled: bool = False

    def result(self) -> Sequence[Hypothesis]:
        """Returns the hypotheses, best first; raises the error, if any."""
        if self.error is not None:
            raise self.error
        return self.hypotheses


@dataclass
class Stats:
    """Counters of a scheduler, summed over steps."""

    steps: int = 0
    rows: int = 0  # sequences that were computed
    loaded_rows: int = 0  # the same, in steps while other requests waited for slots
    loaded_slots: int = 0  # slots in those steps
    requests: int = 0

    @property
    def occupancy(self) -> float:
        """The fraction of slots in use while requests waited for slots; 1 if none ever waited."""
        return self.loaded_rows / self.loaded_slots if self.loaded_slots else 1.0


class Scheduler:
    """Decodes requests with a model; safe to call from several threads."""

    def __init__(
        self,
        model: Model,
        *,
        vocab_size: int,
        eos: int,
        batch_tokens: int | None = None,
        graphs: bool = True,
    ) -> None:
        self.model, self.vocab_size, self.eos = model, vocab_size, eos
        self.batch_tokens, self.graphs = batch_tokens, graphs
        self.stats = Stats()
        self._queues: dict[int, _Queue] = {}
        self._lock = threading.RLock()
        self._packed: object = None  # the weights that the lanes were made for

    def submit(self, requests: Iterable[Request]) -> None:
        """Queues requests; raises OutOfRoom if the device's memory cannot hold one of them."""
        with self._lock:
            self._pack()
            queued: dict[_Queue, list[Request]] = {}
            for request in requests:
                if max(request.prefix, default=0) >= self.vocab_size:
                    token, size = max(request.prefix), self.vocab_size
                    raise TokenError(f"token {token} is outside the vocabulary of {size}")
                width = request.config.width
                if width not in self._queues:
                    self._queues[width] = _Queue(self, width)
                self._queues[width].check_size(request)
                queued.setdefault(self._queues[width], []).append(request)
            for queue, own in queued.items():
                queue.waiting.add(own)

    def cancel(self, request: Request) -> None:
        """Drops a request; its slot becomes free at the start of the next step."""
        with self._lock:
            if not request.is_done:
                request.is_cancelled = request.is_done = True
                self._queues[request.config.width].has_cancelled = True

    def step(self) -> bool:
        """Runs a few steps of every lane with requests; returns whether there is more to do."""
        with self._lock, _steady(self.model.device):
            return sum(self._step(queue) for queue in [*self._queues.values()]) > 0

    def _step(self, queue: "_Queue") -> bool:
        try:
            return queue.step()
        except BaseException:
            queue.abandon()  # the state of its lane is unknown
            raise

    def _pack(self) -> None:
        """Packs the model's weights; drops lanes that were made for other weights."""
        model = self.model
        if model.packed_output is None:
            if model.training and model.config.dropout > 0.0:
                raise ConfigError("the model is in training mode; call model.eval() first")
            with torch.inference_mode(False):
                model.pack()
        if self._packed is not None and self._packed is not model.packed_output:
            for queue in self._queues.values():
                queue.abandon()
        self._packed = model.packed_output

    def run(self, requests: Sequence[Request]) -> None:
        """Steps until all `requests` are done; those of other threads advance too."""
        try:
            while not all(request.is_done for request in requests):
                self.step()
        except BaseException:
            for request in requests:
                self.cancel(request)
            raise

    def free_room(self, queue: "_Queue", *, drop_idle: bool = False) -> float:
        """Returns the bytes that K and V of a queue's lane may use, beside those of other lanes."""
        others = [one for one in self._queues.values() if one is not queue]
        if drop_idle:
            for one in others:
                one.drop_idle_lane()
        return kv_room(self.model.device) - sum(one.lane_bytes for one in others)


class _Waiting:
    """Requests that wait for a slot. Those of different `submit` calls take turns."""

    def __init__(self) -> None:
        self._groups: deque[deque[Request]] = deque()

    def __len__(self) -> int:
        return sum(map(len, self._groups))

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(self._groups)

    @property
    def next(self) -> Request:
        """The request that `pop` returns."""
        return self._groups[0][0]

    def add(self, requests: Iterable[Request], *, first: bool = False) -> None:
        """Adds the requests of one call; with `first`, their turn is next."""
        if group := deque(requests):
            (self._groups.appendleft if first else self._groups.append)(group)

    def pop(self) -> Request:
        """Removes and returns the next request."""
        group = self._groups[0]
        request = group.popleft()
        self._groups.rotate(-1)
        if not group:
            self._groups.pop()
        return request

    def drop_cancelled(self) -> None:
        """Removes cancelled requests."""
        kept = (deque(one for one in group if not one.is_cancelled) for group in self._groups)
        self._groups = deque(group for group in kept if group)


class _Queue:
    """The requests of one beam size: those that wait, and those in the slots of a lane."""

    def __init__(self, scheduler: Scheduler, beam: int) -> None:
        self.scheduler, self.model, self.beam = scheduler, scheduler.model, beam
        self.kind = self.model.device.type
        self._most_encoded: int | None = None  # together, once memory has run out
        self._checked = (0, 0)  # sizes of a slot that memory holds
        self._reset()

    def _reset(self) -> None:
        self.waiting = _Waiting()
        self.lane: Lane | None = None
        self.has_cancelled = False
        self.active: dict[int, Request] = {}  # by slot
        self._free: list[int] = []  # slots, as a heap
        self._slots = np.zeros(0, np.int32)  # the active ones, sorted
        self._streams = 0  # active requests that are streamed
        self._steps = 0
        self._admitted = np.zeros(0, np.int64)  # by slot: the number of steps before its first
        self._entering: list[Request] = []  # on their way from `waiting` to `active`
        self._prefill: _Prefill | None = None
        self._polls: deque[_Poll] = deque()
        self._collected: deque[tuple[dict[int, Request], Collected]] = deque()  # by slot

    def step(self) -> bool:
        """Admits new requests, runs a few steps, and finishes the sequences that have ended."""
        self._drop_cancelled()
        self._admit()
        if self.active:
            self._run(1 if self._streams else POLL_STEPS[self.kind])
            self._poll()
        self._deliver()
        return bool(self.active or self.waiting or self._collected or self._prefill)

    def _run(self, steps: int) -> None:
        """Runs steps of all active slots."""
        assert self.lane is not None
        for _ in range(steps):
            self.lane.step(self._slots)
        self._steps += steps
        stats, rows = self.scheduler.stats, steps * len(self._slots)
        stats.steps += steps
        stats.rows += rows
        if self.waiting:
            stats.loaded_rows += rows
            stats.loaded_slots += steps * self.lane.shape.slots

    def abandon(self) -> None:
        """Ends all requests with an error after a step that failed, and drops the lane."""
        lost = [*self.active.values(), *self._entering, *self.waiting]
        lost += [request for requests, _ in self._collected for request in requests.values()]
        self._reset()
        for request in lost:
            if not request.is_done:
                self._finish(request, [], SearchError("decoding was interrupted; submit it again"))

    @property
    def lane_bytes(self) -> int:
        """Bytes of K and V in the lane."""
        if self.lane is None:
            return 0
        shape = self.lane.shape
        return shape.slots * self._slot_bytes(shape.source, shape.capacity)

    def drop_idle_lane(self) -> None:
        """Gives back the memory of the lane if it has no requests."""
        if not self.active and not self._entering:
            self.lane = None

    def _drop_cancelled(self) -> None:
        if not self.has_cancelled:
            return
        self.has_cancelled = False
        self.waiting.drop_cancelled()
        if self._prefill is not None and all(one.is_cancelled for one in self._entering):
            self._give_back(self._prefill.slots)
            self._prefill, self._entering = None, []
        slots = [slot for slot, request in self.active.items() if request.is_cancelled]
        if slots and self.lane is not None:
            self.lane.search.release(slots)
            self.lane.erase(slots)
            self._release(slots)

    def _give_back(self, slots: Iterable[int]) -> None:
        for slot in slots:
            heapq.heappush(self._free, slot)

    def _release(self, slots: Sequence[int]) -> dict[int, Request]:
        """Frees active slots; returns their requests."""
        requests = {slot: self.active.pop(slot) for slot in slots}
        self._give_back(slots)
        self._mark(slots, NOT_ADMITTED)
        self._streams -= sum(one.on_tokens is not None for one in requests.values())
        return requests

    def _mark(self, slots: Sequence[int], step: int) -> None:
        """Sets the step at which slots were admitted."""
        self._admitted[[*slots]] = step
        self._slots = np.flatnonzero(self._admitted != NOT_ADMITTED).astype(np.int32)

    def _admit(self) -> None:
        """Moves waiting requests to free slots, once enough slots are free for a batch."""
        if self._prefill is not None:
            self._continue_prefill(self._prefill)
        if not self.waiting or self._prefill is not None:
            return
        lane = self._prepare_lane()
        if lane is None:
            return
        few = max(1, int(lane.shape.slots * ADMIT_FRACTION[self.kind]))
        if self.active and len(self._free) < min(few, len(self.waiting)):
            return
        requests = self._take(lane)
        if not requests:
            return
        self._entering = requests
        slots = [heapq.heappop(self._free) for _ in requests]
        try:
            if isinstance(self.model, LanguageModel):
                self._prefill = _Prefill(self.model, requests, slots)
                self._continue_prefill(self._prefill)
                return
            lane.encode(slots, [request.tokens for request in requests])
            self._start(requests, slots)
        except torch.OutOfMemoryError:
            self._prefill = None
            self._encode_fewer(requests, slots)

    def _take(self, lane: Lane) -> list[Request]:
        """Removes and returns the waiting requests to admit next."""
        requests: list[Request] = []
        most, tokens = min(len(self._free), self._most_encoded or MAX_SLOTS), 0
        while self.waiting and len(requests) < most:
            request = self.waiting.next
            tokens += len(request.tokens)
            # a larger request waits for a larger lane, which is made when this one is empty
            too_many = requests and tokens > ADMIT_TOKENS[self.kind]
            if too_many or not lane.shape.fits(*self._sizes(request)):
                break
            requests.append(self.waiting.pop())
        return requests

    def _encode_fewer(self, requests: list[Request], slots: list[int]) -> None:
        """Puts newcomers back after they ran out of memory; fewer are encoded together then."""
        self._entering = []
        self._give_back(slots)
        if len(requests) == 1:
            problem = (
                f"a line of {len(requests[0].tokens)} tokens with beam={self.beam} does not fit in "
                f"the device's memory; use a smaller beam or max_length, or a larger device"
            )
            self._finish(requests[0], [], SearchError(problem))
            return
        self.waiting.add(requests, first=True)
        if self._most_encoded is None:
            log.warning(
                "encoding %d lines does not fit in the device's memory; encoding fewer at a time",
                len(requests),
            )
        self._most_encoded = len(requests) // 2
        if self.kind == "cuda":
            torch.cuda.empty_cache()

    def _continue_prefill(self, prefill: "_Prefill") -> None:
        """Feeds one piece of the prompts; starts their searches after the last piece."""
        assert self.lane is not None
        if prefill.advance(PREFILL_TOKENS[self.kind]):
            self._prefill = None
            self.lane.copy_prompts(prefill.slots, prefill.state.cache)
            self._start(prefill.requests, prefill.slots)

    def _start(self, requests: Sequence[Request], slots: Sequence[int]) -> None:
        assert self.lane is not None
        self.lane.admit(slots, [self._options(request) for request in requests])
        self._entering = []
        self.active.update(zip(slots, requests, strict=True))
        self._mark(slots, self._steps)
        self._streams += sum(one.on_tokens is not None for one in requests)

    def _options(self, request: Request) -> Options:
        first, length = self.model.config.bos, 0
        if self.model.task == "language":
            first, length = request.tokens[-1], len(request.tokens) - 1
        given = request.config, request.max_length, request.prefix, request.seed
        return Options(*given, first, length)

    def _poll(self) -> None:
        """Collects the sequences that have ended; on a GPU, one poll late.

        The host reads the previous poll, which is complete, so that the device does not wait.
        """
        assert self.lane is not None
        tokens = HostCopy(self.lane.search.tokens) if self._streams else None
        self._polls.append(_Poll(self._steps, self.lane.copy_live(), tokens))
        while len(self._polls) > (self.kind == "cuda"):
            poll = self._polls.popleft()
            live = poll.live.numpy()[: len(self._admitted)]
            seen = self._admitted < poll.step
            if poll.tokens is not None:
                self._stream(np.flatnonzero(seen).tolist(), poll.tokens.numpy())
            if ended := np.flatnonzero(seen & (live == 0)).tolist():
                collected = self.lane.collect(ended)
                self._collected.append((self._release(ended), collected))
        if not self.active:
            self._polls.clear()

    def _stream(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        for slot in slots:
            request, token = self.active[slot], int(tokens[slot * self.beam])
            if request.on_tokens is not None and token != self.scheduler.eos:
                request.on_tokens([token])

    def _deliver(self) -> None:
        """Delivers results; on a GPU, leaves the newest, which are still being copied."""
        late = 1 if self.kind == "cuda" and self.active else 0
        while len(self._collected) > late:
            requests, collected = self._collected.popleft()
            found = zip(requests.items(), collected.hypotheses(), strict=True)
            for (slot, request), hypotheses in found:
                self._finish(request, hypotheses, None if hypotheses else no_hypothesis())
                if not hypotheses and slot in self._free and self.lane is not None:
                    self.lane.erase([slot])

    def _finish(
        self, request: Request, hypotheses: Sequence[Hypothesis], error: WriteheadError | None
    ) -> None:
        request.hypotheses, request.error, request.is_done = hypotheses, error, True
        self.scheduler.stats.requests += 1
        if request.on_done is not None:
            request.on_done()

    def _sizes(self, request: Request) -> tuple[int, int]:
        """Returns the source positions and the cache positions that a request needs."""
        if self.model.task == "translation":
            return len(request.tokens), request.max_length
        return 0, len(request.tokens) + request.max_length - 1

    def _prepare_lane(self) -> Lane | None:
        """Returns the lane; replaces it if it is idle and too small for the next request.

        Returns None if the next request does not fit in memory and has ended with an error.
        """
        if self.lane is not None:
            too_small = not self.lane.shape.fits(*self._sizes(self.waiting.next))
            if self.active or not too_small:
                return self.lane
        old, self.lane = self.lane, None
        try:
            source, capacity = self.check_room(self.waiting, old)
        except OutOfRoom:  # the requests do not fit in one lane together
            source, capacity = self.check_room([self.waiting.next])
        slots = self._plan_slots(source, capacity)
        del old  # the new lane needs its memory
        while self.lane is None:
            try:
                self.lane = self._make_lane(Shape(slots, self.beam, source, capacity))
            except torch.OutOfMemoryError:
                if slots == 1:
                    error = self._out_of_room(source, capacity)
                    self._finish(self.waiting.pop(), [], error)
                    return None
                slots //= 2
                self.scheduler.free_room(self, drop_idle=True)
                torch.cuda.empty_cache()
        self._free, self._admitted = [*range(slots)], np.full(slots, NOT_ADMITTED)
        return self.lane

    def check_size(self, request: Request) -> None:
        """Raises OutOfRoom if the device's memory does not hold a request."""
        source, capacity = self._sizes(request)
        if source > self._checked[0] or capacity > self._checked[1]:
            self._checked = self.check_room([request])

    def check_room(self, requests: Iterable[Request], lane: Lane | None = None) -> tuple[int, int]:
        """Returns the sizes of a slot that holds any of `requests`, at least those of `lane`.

        Raises OutOfRoom if such a slot does not fit in the device's memory.
        """
        sizes = [self._sizes(request) for request in requests]
        if lane is not None:
            sizes.append((lane.shape.source, lane.shape.capacity))
        config = self.model.config
        exact = max(size for size, _ in sizes), max(size for _, size in sizes)
        limits = config.source_positions, config.target_positions
        rounded = round_up(exact[0], limits[0]), round_up(exact[1], limits[1])
        for source, capacity in (rounded, exact):
            if self._slot_bytes(source, capacity) <= kv_room(self.model.device):
                return source, capacity
        raise self._out_of_room(*exact)

    def _make_lane(self, shape: Shape) -> Lane:
        own = self.scheduler
        return Lane(self.model, shape, vocab_size=own.vocab_size, eos=own.eos, graphs=own.graphs)

    def _plan_slots(self, source: int, capacity: int) -> int:
        """Returns how many slots to use, by the rows that are fast and the memory there is."""
        slots = min(MAX_SLOTS, MAX_ROWS[self.kind] // self.beam)
        tokens = self.scheduler.batch_tokens
        if tokens is not None:
            slots = tokens // (self.beam * (source + capacity))
        each, room = self._slot_bytes(source, capacity), self.scheduler.free_room(self)
        if slots * each > room:
            room = self.scheduler.free_room(self, drop_idle=True)
            slots = min(slots, int(room / each))
        return max(1, slots)

    def _slot_bytes(self, source: int, capacity: int) -> int:
        shape = Shape(1, self.beam, source, capacity)
        return bytes_per_slot(self.model.config, shape, self.model.dtype.itemsize)

    def _out_of_room(self, source: int, capacity: int) -> OutOfRoom:
        room = kv_room(self.model.device) - self._slot_bytes(source, 0)
        longest = max(0, int(room / self._slot_bytes(0, 1)))
        return OutOfRoom(
            f"K and V of {source} + {capacity} tokens with beam={self.beam} do not fit in the "
            f"device's memory, but {longest} output tokens do; use a smaller beam or max_length"
        )


@contextmanager
def _steady(device: torch.device) -> Iterator[None]:
    """Makes steps independent of the caller's autograd mode and CUDA stream."""
    on_gpu = device.type == "cuda"
    stream = torch.cuda.stream(torch.cuda.default_stream(device)) if on_gpu else nullcontext()
    with torch.inference_mode(False), torch.no_grad(), stream:
        yield


@dataclass(frozen=True, eq=False)
class _Poll:
    """Copies of the device's state after a step: live slots, and tokens if any are streamed."""

    step: int
    live: HostCopy
    tokens: HostCopy | None


class _Prefill:
    """Prompts that are fed to the model in pieces before they enter their slots."""

    def __init__(self, model: LanguageModel, requests: list[Request], slots: list[int]) -> None:
        self.model, self.requests, self.slots = model, requests, slots
        lengths = np.array([len(request.tokens) - 1 for request in requests])
        tokens = np.full((len(requests), lengths.max()), model.config.pad)
        for row, request in zip(tokens, requests, strict=True):
            row[: len(request.tokens) - 1] = request.tokens[:-1]
        self._tokens, self._lengths = (
            send(torch.from_numpy(T), model.device) for T in (tokens, lengths)
        )
        self.state: DecoderState = model.new_state(len(requests), max(1, tokens.shape[1]))
        self._fed = 0

    def advance(self, tokens: int) -> bool:
        """Feeds up to `tokens` tokens; returns whether all prompts have been fed."""
        rows, width = self._tokens.shape
        end = min(width, self._fed + max(1, tokens // rows))
        if end > self._fed:
            counts = (self._lengths - self._fed).clamp(0, end - self._fed)
            self.model.feed(self._tokens[:, self._fed : end], self.state, counts)
        self._fed = end
        return end == width


def kv_room(device: torch.device) -> float:
    """Returns the number of bytes that K and V may use on a device."""
    if device.type != "cuda":
        return math.inf
    return MEMORY_FRACTION * torch.cuda.get_device_properties(device).total_memory


def round_up(positions: int, most: int) -> int:
    """Rounds up to a power of two, at least MIN_POSITIONS and at most `most`; 0 stays 0."""
    if positions == 0:
        return 0
    return min(most, max(MIN_POSITIONS, 1 << (positions - 1).bit_length()))
