"""Continuous batching: requests enter free slots, advance together, and leave when they end.

Requests with the same beam size share a lane; greedy search and sampling use beam size 1. New
requests are encoded or prefilled between steps, a limited number of tokens at a time.
"""

import heapq
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from writehead import cost
from writehead.data.tokenizer import Tokens
from writehead.engine.runner import GRAPH_STEPS, Lane, Model, Shape
from writehead.engine.search import NO_TOKEN, Hypothesis, Ints, Options, Targets, make_hypotheses
from writehead.errors import ConfigError, OutOfRoom, SearchError, TokenError, WriteheadError
from writehead.model import LanguageModel
from writehead.util.devices import available_memory, steady_modes
from writehead.util.transfer import HostCopy, send_padded

# steps between checks for ended sequences, if no request waits or is streamed
POLL_STEPS = {"cpu": 1, "cuda": GRAPH_STEPS}
# fraction of the slots that must be free before waiting requests are admitted
ADMIT_FRACTION = {"cpu": 1 / 16, "cuda": 1 / 10}
ADMIT_TOKENS = {"cpu": 4096, "cuda": 16_384}  # of sources or prompts, admitted together
PREFILL_TOKENS = {"cpu": 512, "cuda": 16_384}  # of prompts, fed between two steps
MAX_SLOTS, MAX_ROWS = 1024, {"cpu": 256, "cuda": 4096}  # in a lane
FREE = np.iinfo(np.int64).max  # as a step of admission
ENTERING = FREE - 1
MIN_POSITIONS = 64  # of a slot; larger sizes are powers of two


@dataclass(eq=False, slots=True)
class Request(Options):
    """One sequence to decode: search options, and a source or prompt."""

    tokens: Tokens = ()
    on_tokens: Callable[[list[int]], None] | None = None  # called with new tokens, for streaming
    on_done: Callable[[], None] | None = None
    on_start: Callable[[], None] | None = None  # called when it enters a slot
    hypotheses: Sequence[Hypothesis] = ()
    error: WriteheadError | None = None
    is_done: bool = False
    is_cancelled: bool = False

    def result(self) -> Sequence[Hypothesis]:
        """Returns the hypotheses, best first; raises the error, if any."""
        if self.error is not None:
            raise self.error
        return self.hypotheses

    def finish(
        self, hypotheses: Sequence[Hypothesis] = (), error: WriteheadError | None = None
    ) -> None:
        """Sets the result, unless the request was cancelled."""
        if self.is_cancelled:
            return
        self.hypotheses, self.error, self.is_done = hypotheses, error, True
        if self.on_done is not None:
            self.on_done()


@dataclass
class Stats:
    """Counters of a scheduler, summed over steps."""

    steps: int = 0
    rows: int = 0  # sequences that had not ended
    loaded_rows: int = 0  # the same, in steps while other requests waited for slots
    loaded_slots: int = 0  # slots in those steps


class Load(NamedTuple):
    """The requests in a scheduler, and the bytes of its slots: in use and in total."""

    running: int = 0
    waiting: int = 0
    used_bytes: float = 0.0
    bytes: float = 0.0


class Scheduler:
    """Decodes requests with a model; several threads may call it."""

    def __init__(
        self, model: Model, targets: Targets, batch_tokens: int | None = None, graphs: bool = True
    ) -> None:
        self.model, self.targets = model, targets
        self.batch_tokens, self.graphs = batch_tokens, graphs
        self.memory = 0.0  # bytes for all lanes
        self.max_rows = MAX_ROWS[model.device.type]  # of a lane, if `batch_tokens` is not set
        self.stats = Stats()
        self._queues: dict[int, _Queue] = {}
        self._lock = threading.RLock()
        self._packed: object = None  # the weights that the lanes were made for

    def submit(self, requests: Iterable[Request]) -> None:
        """Queues requests; raises OutOfRoom if the device's memory cannot hold one of them."""
        with self._lock:
            self._pack()
            groups: dict[int, list[Request]] = {}
            for request in requests:
                groups.setdefault(request.config.width, []).append(request)
            for width, group in groups.items():
                if width not in self._queues:
                    self._queues[width] = _Queue(self, width)
                self._queues[width].check(group)
            for width, group in groups.items():
                self._queues[width].add(group)

    def cancel(self, request: Request) -> None:
        """Drops a request; its slot becomes free at the start of the next step."""
        with self._lock:
            if not request.is_done:
                request.is_cancelled = request.is_done = True
                if queue := self._queues.get(request.config.width):
                    queue.has_cancelled = True

    def step(self, times: int = 1) -> bool:
        """Runs a step of every lane with requests, `times` times; returns whether work remains."""
        with self._lock, steady_modes(self.model.device):
            for _ in range(times):
                remain = [self._step(queue) for queue in [*self._queues.values()]]
                if not any(remain):
                    return False
        return True

    @property
    def load(self) -> Load:
        """The current requests and memory; does not wait for a running step."""
        loads = [queue.load for queue in [*self._queues.values()]]
        return Load(*map(sum, zip(Load(), *loads, strict=True)))

    def make_room(self, wanted: float) -> float:
        """Returns the bytes free for a new lane; if fewer than `wanted`, first drops idle lanes."""
        if self.memory - self.load.bytes < wanted:
            for queue in self._queues.values():
                queue.drop_idle_lane()
        return self.memory - self.load.bytes

    def _step(self, queue: "_Queue") -> bool:
        try:
            return queue.step()
        except BaseException as error:
            self._queues.pop(queue.beam, queue).fail()  # the state of its lane is unknown
            if isinstance(error, torch.OutOfMemoryError):
                raise OutOfRoom(
                    "the device ran out of memory while decoding; use a smaller beam or fewer "
                    "tokens per batch, or free memory that other programs use"
                ) from error
            raise

    def _pack(self) -> None:
        """Packs the model's weights; drops lanes that were made for other weights."""
        model = self.model
        if model.packed_output is None:
            if model.training and model.config.dropout > 0.0:
                raise ConfigError("the model is in training mode; call model.eval() first")
            with torch.inference_mode(False):
                model.pack()
        if self._packed is not model.packed_output:
            queues, self._queues = self._queues, {}
            for queue in queues.values():
                queue.fail()
            self._packed, self.memory = model.packed_output, available_memory(model.device)


class _Queue:
    """The requests of one beam size: those that wait, and those in the slots of a lane."""

    def __init__(self, scheduler: Scheduler, beam: int) -> None:
        self.scheduler, self.model, self.beam = scheduler, scheduler.model, beam
        self.kind = self.model.device.type
        self.waiting: list[tuple[int, int, Request]] = []  # a heap by turn and arrival
        self._arrivals = count()
        self.lane: Lane | None = None
        self.has_cancelled = False
        self.active: dict[int, Request] = {}  # by slot
        self._steps = 0
        self._admitted = np.zeros(0, np.int64)  # by slot: `_steps` then, or FREE, or ENTERING
        self._free = np.zeros(0, np.int64)  # slots, sorted
        self._slots = np.zeros(0, np.int32)  # the active ones, sorted
        self._streams = 0  # active requests that are streamed
        self._entering: dict[int, Request] = {}  # by slot, on their way from `waiting` to `active`
        self._prefill: Iterator[None] | None = None  # of the prompts in `_entering`
        self._polls: deque[_Poll] = deque()
        self._ended: list[int] = []  # active slots whose sequences have ended
        # slots, requests that have ended, and their results, which are being copied to the host
        self._collected: deque[tuple[list[int], list[Request], HostCopy]] = deque()

    def check(self, requests: Sequence[Request]) -> None:
        """Raises if a prefix is outside the vocabulary, or a request needs too much memory."""
        vocab_size = self.scheduler.targets.vocab_size
        for token in chain.from_iterable(request.prefix for request in requests):
            if token >= vocab_size:
                raise TokenError(f"token {token} is outside the vocabulary of {vocab_size}")
        room, sizes = self.scheduler.memory, [self._sizes(request) for request in requests]
        if self._slot_bytes(*map(max, zip(*sizes, strict=True))) <= room:
            return
        for request, (source, capacity) in zip(requests, sizes, strict=True):
            each = partial(self._slot_bytes, source)
            longest = bisect_right(range(1, capacity + 1), room, key=each)
            if longest < capacity:
                most = request.max_length - (capacity - longest)  # tokens that it could generate
                advice = f"use max_length={most} or less" if most > 0 else "shorten the input"
                beams = f" with beam={self.beam}" if self.beam > 1 else ""
                raise OutOfRoom(
                    f"{len(request.tokens)} + {request.max_length} tokens{beams} do not fit in the "
                    f"device's memory; {advice}{', or a smaller beam' if beams else ''}"
                )

    def add(self, requests: Iterable[Request]) -> None:
        """Queues the requests of one call, which take turns with those of other calls."""
        turn = self.waiting[0][0] if self.waiting else 0
        for i, request in enumerate(requests):
            heapq.heappush(self.waiting, (turn + i, next(self._arrivals), request))

    def step(self) -> bool:
        """Admits new requests, runs a few steps, and finishes the sequences that have ended."""
        if self.has_cancelled:
            self._drop_cancelled()
        self._admit()
        if self.lane is not None and self.active:
            self._run(self.lane)
            self._poll()
            self._collect(self.lane)
        self._deliver()
        return bool(self.active or self.waiting or self._collected or self._prefill)

    def fail(self) -> None:
        """Ends all requests with an error."""
        lost = [*self.active.values(), *self._entering.values()]
        lost += [request for *_, request in sorted(self.waiting)]
        lost += chain.from_iterable(requests for _, requests, _ in self._collected)
        for request in lost:
            if not request.is_done:
                request.finish(error=SearchError("the request was interrupted; submit it again"))

    @property
    def load(self) -> Load:
        """See `Scheduler.load`; the bytes of a lane are those that were planned."""
        lane, running, slots, each = self.lane, len(self.active), 0, 0
        if lane is not None:
            slots, each = lane.shape.slots, self._slot_bytes(lane.shape.source, lane.shape.capacity)
        return Load(running + len(self._entering), len(self.waiting), running * each, slots * each)

    def drop_idle_lane(self) -> None:
        """Frees the memory of the lane if it has no requests."""
        if not self.active and not self._entering:
            self.lane = None

    def _drop_cancelled(self) -> None:
        self.waiting = [entry for entry in self.waiting if not entry[2].is_cancelled]
        heapq.heapify(self.waiting)
        if all(one.is_cancelled for one in self._entering.values()):
            self._mark([*self._entering], FREE)
            self._prefill, self._entering = None, {}
        # the others are dropped when they are active
        self.has_cancelled = any(one.is_cancelled for one in self._entering.values())
        slots = [slot for slot, request in self.active.items() if request.is_cancelled]
        if slots and self.lane is not None:
            self.lane.search.release(slots)
            self.lane.erase(slots)
            self._release(slots)

    def _release(self, slots: list[int]) -> list[Request]:
        """Frees active slots; returns their requests."""
        requests = [self.active.pop(slot) for slot in slots]
        self._mark(slots, FREE)
        self._streams -= sum(one.on_tokens is not None for one in requests)
        self._ended = []  # the next poll finds the remaining slots again
        if not self.active:
            self._polls.clear()
        return requests

    def _mark(self, slots: list[int], step: int) -> None:
        """Sets the step at which slots were admitted, and updates the lists of slots."""
        self._admitted[slots] = step
        self._free = np.flatnonzero(self._admitted == FREE)
        self._slots = np.flatnonzero(self._admitted < ENTERING).astype(np.int32)

    def _admit(self) -> None:
        """Moves waiting requests to free slots, once enough slots are free for a batch."""
        self._continue_prefill()
        if not self.waiting or self._prefill is not None:
            return
        lane = self._prepare_lane()
        if lane is None:  # the lanes of other beam sizes use the memory
            return
        if self.active and len(self._free) < self._least_to_admit():
            return
        requests = self._take(lane)
        slots = self._free[: len(requests)].tolist()
        self._entering = dict(zip(slots, requests, strict=True))
        for request in requests:
            if request.on_start is not None:
                request.on_start()
        if requests and isinstance(self.model, LanguageModel):
            self._mark(slots, ENTERING)
            self._prefill = self._feed_prompts(lane, self.model)
            self._continue_prefill()
        elif requests:
            lane.encode(slots, [request.tokens for request in requests])
            self._start(lane, self.model.config.bos)

    def _take(self, lane: Lane) -> list[Request]:
        """Removes and returns the waiting requests that enter the free slots next."""
        taken: list[Request] = []
        tokens = ADMIT_TOKENS[self.kind]  # the first request alone may have more
        while self.waiting and len(taken) < len(self._free):
            request = self.waiting[0][2]
            tokens -= len(request.tokens)
            # a larger request waits for a larger lane, which is made when this one is empty
            if (taken and tokens < 0) or not lane.shape.fits(*self._sizes(request)):
                break
            taken.append(heapq.heappop(self.waiting)[2])
        return taken

    def _least_to_admit(self) -> int:
        """The number of slots that must be free before waiting requests are admitted."""
        batch = max(1, int(len(self._admitted) * ADMIT_FRACTION[self.kind]))
        return min(batch, len(self.waiting))

    def _continue_prefill(self) -> None:
        if self._prefill is not None and next(self._prefill, "done") == "done":
            self._prefill = None

    def _feed_prompts(self, lane: Lane, model: LanguageModel) -> Iterator[None]:
        """Feeds the entering prompts in pieces, then starts their searches; yields in between."""
        prompts = [request.tokens for request in self._entering.values()]
        lengths = [len(prompt) - 1 for prompt in prompts]  # the search feeds the last token
        fed = [prompt[:-1] for prompt in prompts]
        tokens, counts = send_padded(fed, model.config.pad, model.device)
        state = model.new_state(len(prompts), max(1, max(lengths)))
        size = max(1, PREFILL_TOKENS[self.kind] // len(prompts))
        for begin in range(0, max(lengths), size):
            if begin > 0:
                yield
            piece = tokens[:, begin : begin + size]
            model.feed(piece, state, (counts - begin).clamp(0, piece.shape[1]))
        lane.copy_prompts([*self._entering], state.cache)
        self._start(lane, [int(prompt[-1]) for prompt in prompts], lengths)

    def _start(self, lane: Lane, *first: Ints) -> None:
        """Starts the searches of the entering requests; `first` are arguments of `Lane.admit`."""
        slots, requests = [*self._entering], [*self._entering.values()]
        lane.admit(slots, requests, *first)
        self.active.update(self._entering)
        self._entering = {}
        self._mark(slots, self._steps)
        self._streams += sum(one.on_tokens is not None for one in requests)

    def _run(self, lane: Lane) -> None:
        """Runs a few steps of all active slots."""
        steps = 1 if self._streams or self.waiting else POLL_STEPS[self.kind]
        lane.step(self._slots, steps)
        self._steps += steps
        tokens = lane.copy(lane.search.tokens) if self._streams else None
        live = lane.copy(lane.live)
        self._polls.append(_Poll(self._steps, steps, bool(self.waiting), live, tokens))

    def _poll(self) -> None:
        """Finds the sequences that have ended."""
        stats = self.scheduler.stats
        # a GPU runs the newest steps while the host reads the poll of the steps before
        while len(self._polls) > (self.kind == "cuda"):
            poll = self._polls.popleft()
            live = poll.live.numpy()[: len(self._admitted)]
            seen = self._admitted < poll.step
            if poll.tokens is not None:
                self._stream(np.flatnonzero(seen), poll.tokens.numpy())
            self._ended = np.flatnonzero(seen & (live == 0)).tolist()
            rows = poll.steps * int(np.count_nonzero(live))
            stats.steps += poll.steps
            stats.rows += rows
            if poll.is_loaded:
                stats.loaded_rows += rows
                stats.loaded_slots += poll.steps * len(live)

    def _collect(self, lane: Lane) -> None:
        """Releases slots whose sequences have ended, and starts to copy their results."""
        # if requests wait, once enough slots are free to admit a batch
        few = len(self._free) + len(self._ended) < self._least_to_admit()
        if self._ended and (self._streams or not few):
            slots = self._ended
            requests = self._release(slots)
            self._collected.append((slots, requests, lane.collect(slots, requests)))

    def _stream(self, slots: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        eos = self.scheduler.targets.eos
        for slot, token in zip(slots.tolist(), tokens[slots * self.beam].tolist(), strict=True):
            request = self.active[slot]
            if token != eos and request.on_tokens and not request.is_cancelled:
                request.on_tokens([token])

    def _deliver(self) -> None:
        """Delivers results; on a GPU, except the newest, which are still being copied."""
        # without graphs, the reference may run, and a slot with NaN must be erased before its reuse
        late = 1 if self.active and self.lane is not None and self.lane.graphs else 0
        while len(self._collected) > late:
            slots, requests, packed = self._collected.popleft()
            found = make_hypotheses(packed.numpy(), requests)
            for slot, request, hypotheses in zip(slots, requests, found, strict=True):
                request.finish(hypotheses, None if hypotheses else SearchError(NO_TOKEN))
                if not hypotheses and slot in self._free and self.lane is not None:
                    self.lane.erase([slot])

    def _sizes(self, request: Request) -> tuple[int, int]:
        """Returns the source positions and the cache positions that a request needs."""
        if self.model.task == "translation":
            return len(request.tokens), request.max_length
        return 0, len(request.tokens) + request.max_length - 1

    def _prepare_lane(self) -> Lane | None:
        """Returns the lane; replaces it if it is idle and too small for the next request."""
        sizes = [self._sizes(self.waiting[0][2])]
        if self.lane is not None:
            if self.active or self.lane.shape.fits(*sizes[0]):
                return self.lane
            sizes.append((self.lane.shape.source, self.lane.shape.capacity))
            self.lane = None  # the new lane needs its memory
        sizes += [self._sizes(request) for *_, request in self.waiting]
        config = self.model.config
        longest = round_up(max(source for source, _ in sizes), config.source_positions)
        largest = round_up(max(capacity for _, capacity in sizes), config.target_positions)
        # the requests may not fit in one lane together
        for source, capacity in ((longest, largest), sizes[0]):
            each = self._slot_bytes(source, capacity)
            if each <= self.scheduler.make_room(each):
                break
        else:
            return None
        slots = self.scheduler.max_rows // self.beam
        if self.scheduler.batch_tokens is not None:
            slots = self.scheduler.batch_tokens // (self.beam * (source + capacity))
        slots = min(slots, MAX_SLOTS)
        slots = max(1, int(min(slots, self.scheduler.make_room(slots * each) / each)))
        shape = Shape(slots, self.beam, source, capacity)
        self.lane = Lane(self.model, shape, self.scheduler.targets, self.scheduler.graphs)
        self._admitted = np.full(slots, FREE)
        self._mark([], FREE)
        return self.lane

    def _slot_bytes(self, source: int, capacity: int) -> int:
        setting = cost.Setting(1, source, capacity, self.beam, self.model.dtype.itemsize)
        return cost.sentence_bytes(self.model.config, setting)


class _Poll(NamedTuple):
    """Copies of the device's state after a step: live slots, and tokens if any are streamed."""

    step: int
    steps: int  # since the previous poll
    is_loaded: bool  # whether requests waited for slots
    live: HostCopy
    tokens: HostCopy | None


def round_up(positions: int, most: int) -> int:
    """Rounds up to a power of two, at least MIN_POSITIONS and at most `most`; 0 stays 0."""
    return min(most, max(MIN_POSITIONS, 1 << (positions - 1).bit_length())) if positions else 0
