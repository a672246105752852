"""Continuous batching: requests enter free slots, advance together, and leave when they end.

Requests with the same beam size share a lane; greedy search and sampling use beam size 1. New
requests are encoded or prefilled between steps, a limited number of tokens at a time.
"""

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from writehead import cost
from writehead.data.tokenizer import Tokens
from writehead.engine.runner import GRAPH_STEPS, Lane, Model, Shape
from writehead.engine.search import Hypothesis, Options, TargetTokens, make_hypotheses, no_token
from writehead.errors import ConfigError, OutOfRoom, SearchError, TokenError, WriteheadError
from writehead.model import DecoderState, LanguageModel
from writehead.util.devices import available_memory, steady_modes
from writehead.util.transfer import HostCopy, send

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
        return [one.with_tuple() for one in self.hypotheses]

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
        self,
        model: Model,
        targets: TargetTokens,
        *,
        batch_tokens: int | None = None,
        graphs: bool = True,
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
                self._queues[width].waiting.add(group)

    def cancel(self, request: Request) -> None:
        """Drops a request; its slot becomes free at the start of the next step."""
        with self._lock:
            if not request.is_done:
                request.is_cancelled = request.is_done = True
                if queue := self._queues.get(request.config.width):
                    queue.has_cancelled = True

    def step(self, times: int = 1) -> bool:
        """Runs one or a few steps of every lane with requests; returns whether work remains.

        Repeating this in one call, `times` times, has less overhead than several calls.
        """
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
        queues = self._queues.values()
        if self.memory - sum(queue.load.bytes for queue in queues) < wanted:
            for queue in queues:
                queue.drop_idle_lane()
        return self.memory - sum(queue.load.bytes for queue in queues)

    def _step(self, queue: "_Queue") -> bool:
        try:
            return queue.step()
        except BaseException as error:
            self._queues.pop(queue.beam, None)  # the state of its lane is unknown
            queue.fail()
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


class _Waiting:
    """Requests that wait for a slot. Those of different `submit` calls take turns."""

    def __init__(self) -> None:
        self._groups: deque[deque[Request]] = deque()

    def __len__(self) -> int:
        return sum(map(len, self._groups))

    def __iter__(self) -> Iterator[Request]:  # starts with the request that `take` returns first
        return chain.from_iterable(self._groups)

    def add(self, requests: Iterable[Request]) -> None:
        """Adds the requests of one call, at least one."""
        self._groups.append(deque(requests))

    def take(self, most: int, tokens: int, fits: Callable[[Request], bool]) -> list[Request]:
        """Removes and returns up to `most` requests; stops before one that does not fit.

        Together they have up to `tokens` tokens, unless the first alone has more.
        """
        taken: list[Request] = []
        while self._groups and len(taken) < most:
            group = self._groups[0]
            tokens -= len(group[0].tokens)
            if (taken and tokens < 0) or not fits(group[0]):
                break
            taken.append(group.popleft())
            self._groups.rotate(-1)
            if not group:
                self._groups.pop()
        return taken

    def drop_cancelled(self) -> None:
        """Removes cancelled requests."""
        kept = (deque(one for one in group if not one.is_cancelled) for group in self._groups)
        self._groups = deque(group for group in kept if group)


class _Queue:
    """The requests of one beam size: those that wait, and those in the slots of a lane."""

    def __init__(self, scheduler: Scheduler, beam: int) -> None:
        self.scheduler, self.model, self.beam = scheduler, scheduler.model, beam
        self.kind = self.model.device.type
        self.waiting = _Waiting()
        self.lane: Lane | None = None
        self.has_cancelled = False
        self.active: dict[int, Request] = {}  # by slot
        self._steps = 0
        self._admitted = np.zeros(0, np.int64)  # by slot: `_steps` then, or FREE, or ENTERING
        self._free = np.zeros(0, np.int64)  # slots, sorted
        self._slots = np.zeros(0, np.int32)  # the active ones, sorted
        self._streams = 0  # active requests that are streamed
        self._entering: list[Request] = []  # on their way from `waiting` to `active`
        self._prefill: _Prefill | None = None
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

    def step(self) -> bool:
        """Admits new requests, runs a few steps, and finishes the sequences that have ended."""
        self._drop_cancelled()
        self._admit()
        if self.lane is not None and self.active:
            self._run(self.lane, 1 if self._streams or self.waiting else POLL_STEPS[self.kind])
            self._poll()
            self._collect(self.lane)
        self._deliver()
        return bool(self.active or self.waiting or self._collected or self._prefill)

    def fail(self) -> None:
        """Ends all requests with an error."""
        lost = [*self.active.values(), *self._entering, *self.waiting]
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
        if not self.has_cancelled:
            return
        self.waiting.drop_cancelled()
        if self._prefill is not None and all(one.is_cancelled for one in self._entering):
            self._mark(self._prefill.slots, FREE)
            self._prefill, self._entering = None, []
        # the others are dropped when they are active
        self.has_cancelled = any(one.is_cancelled for one in self._entering)
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
        if self._prefill is not None and self.lane is not None:
            self._continue_prefill(self.lane, self._prefill)
        if not self.waiting or self._prefill is not None:
            return
        lane = self._prepare_lane()
        if lane is None:  # the lanes of other beam sizes use the memory
            return
        if self.active and len(self._free) < self._least_to_admit():
            return
        # a larger request waits for a larger lane, which is made when this one is empty
        self._entering = self.waiting.take(
            len(self._free), ADMIT_TOKENS[self.kind], lambda one: lane.shape.fits(*self._sizes(one))
        )
        if not self._entering:
            return
        for request in self._entering:
            if request.on_start is not None:
                request.on_start()
        slots = self._free[: len(self._entering)].tolist()
        if isinstance(self.model, LanguageModel):
            self._mark(slots, ENTERING)
            self._prefill = _Prefill(self.model, self._entering, slots)
            self._continue_prefill(lane, self._prefill)
        else:
            lane.encode(slots, [request.tokens for request in self._entering])
            self._start(lane, slots, self.model.config.bos)

    def _least_to_admit(self) -> int:
        """The number of slots that must be free before waiting requests are admitted."""
        batch = max(1, int(len(self._admitted) * ADMIT_FRACTION[self.kind]))
        return min(batch, len(self.waiting))

    def _continue_prefill(self, lane: Lane, prefill: "_Prefill") -> None:
        """Feeds one piece of the prompts; starts their searches after the last piece."""
        if prefill.advance(PREFILL_TOKENS[self.kind]):
            self._prefill = None
            lane.copy_prompts(prefill.slots, prefill.state.cache)
            self._start(lane, prefill.slots, prefill.last, prefill.lengths)

    def _start(self, lane: Lane, slots: list[int], *first: Sequence[int] | int) -> None:
        """Starts the searches of the entering requests; `first` are arguments of `Lane.admit`."""
        requests, self._entering = self._entering, []
        lane.admit(slots, requests, *first)
        self.active.update(zip(slots, requests, strict=True))
        self._mark(slots, self._steps)
        self._streams += sum(one.on_tokens is not None for one in requests)

    def _run(self, lane: Lane, steps: int) -> None:
        """Runs steps of all active slots."""
        lane.step(self._slots, steps)
        self._steps += steps
        slots = steps * lane.shape.slots if self.waiting else 0
        tokens = lane.copy(lane.search.tokens) if self._streams else None
        live = lane.copy(lane.live)
        self._polls.append(_Poll(self._steps, steps, slots, live, tokens))

    def _poll(self) -> None:
        """Finds the sequences that have ended; on a GPU, one poll late.

        The host reads the previous poll while the device runs the newest steps.
        """
        stats = self.scheduler.stats
        while len(self._polls) > (self.kind == "cuda"):
            poll = self._polls.popleft()
            live = poll.live.numpy()[: len(self._admitted)]
            seen = self._admitted < poll.step
            if poll.tokens is not None:
                self._stream(np.flatnonzero(seen).tolist(), poll.tokens.numpy())
            self._ended = np.flatnonzero(seen & (live == 0)).tolist()
            rows = poll.steps * int(np.count_nonzero(live))
            stats.steps += poll.steps
            stats.rows += rows
            if poll.loaded_slots:
                stats.loaded_rows += rows
                stats.loaded_slots += poll.loaded_slots

    def _collect(self, lane: Lane) -> None:
        """Releases slots whose sequences have ended, and starts to copy their results.

        While requests wait, slots are released once enough of them are free to admit a batch.
        """
        few = len(self._free) + len(self._ended) < self._least_to_admit()
        if self._ended and (self._streams or not few):
            slots = self._ended
            requests = self._release(slots)
            self._collected.append((slots, requests, lane.collect(slots, requests)))

    def _stream(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        eos = self.scheduler.targets.eos
        for slot in slots:
            request, token = self.active[slot], int(tokens[slot * self.beam])
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
                request.finish(hypotheses, None if hypotheses else no_token())
                if not hypotheses and slot in self._free and self.lane is not None:
                    self.lane.erase([slot])

    def _sizes(self, request: Request) -> tuple[int, int]:
        """Returns the source positions and the cache positions that a request needs."""
        if self.model.task == "translation":
            return len(request.tokens), request.max_length
        return 0, len(request.tokens) + request.max_length - 1

    def _prepare_lane(self) -> Lane | None:
        """Returns the lane; replaces it if it is idle and too small for the next request."""
        sizes = [self._sizes(next(iter(self.waiting)))]
        if self.lane is not None:
            if self.active or self.lane.shape.fits(*sizes[0]):
                return self.lane
            sizes.append((self.lane.shape.source, self.lane.shape.capacity))
            self.lane = None  # the new lane needs its memory
        sizes += map(self._sizes, self.waiting)
        config = self.model.config
        source = round_up(max(size for size, _ in sizes), config.source_positions)
        capacity = round_up(max(size for _, size in sizes), config.target_positions)
        each = self._slot_bytes(source, capacity)
        if each > self.scheduler.make_room(each):  # the requests do not fit in one lane together
            source, capacity = sizes[0]
            each = self._slot_bytes(source, capacity)
            if each > self.scheduler.make_room(each):
                return None
        slots = self._plan_slots(source, capacity)
        shape = Shape(slots, self.beam, source, capacity)
        self.lane = Lane(self.model, shape, self.scheduler.targets, graphs=self.scheduler.graphs)
        self._admitted = np.full(slots, FREE)
        self._mark([], FREE)
        return self.lane

    def _plan_slots(self, source: int, capacity: int) -> int:
        """Returns the default number of slots or that of `batch_tokens`, limited by free memory."""
        slots, tokens = self.scheduler.max_rows // self.beam, self.scheduler.batch_tokens
        if tokens is not None:
            slots = tokens // (self.beam * (source + capacity))
        slots, each = min(slots, MAX_SLOTS), self._slot_bytes(source, capacity)
        return max(1, int(min(slots, self.scheduler.make_room(slots * each) / each)))

    def _slot_bytes(self, source: int, capacity: int) -> int:
        setting = cost.Setting(1, source, capacity, self.beam, self.model.dtype.itemsize)
        return cost.sentence_bytes(self.model.config, setting)


class _Poll(NamedTuple):
    """Copies of the device's state after a step: live slots, and tokens if any are streamed."""

    step: int
    steps: int  # since the previous poll
    loaded_slots: int  # slots × steps, if requests waited for slots
    live: HostCopy
    tokens: HostCopy | None


class _Prefill:
    """Prompts that are fed to the model in pieces before they enter their slots."""

    def __init__(self, model: LanguageModel, requests: list[Request], slots: list[int]) -> None:
        self.model, self.slots = model, slots
        self.last = [int(request.tokens[-1]) for request in requests]
        self.lengths = [len(request.tokens) - 1 for request in requests]  # without the last token
        tokens = np.full((len(requests), max(self.lengths)), model.config.pad)
        for row, request in zip(tokens, requests, strict=True):
            row[: len(request.tokens) - 1] = request.tokens[:-1]
        self._tokens = send(tokens, model.device)
        self._counts = send(np.array(self.lengths), model.device)
        self.state: DecoderState = model.new_state(len(requests), max(1, tokens.shape[1]))
        self._fed = 0

    def advance(self, tokens: int) -> bool:
        """Feeds up to `tokens` tokens; returns whether all prompts have been fed."""
        rows, width = self._tokens.shape
        end = min(width, self._fed + max(1, tokens // rows))
        if end > self._fed:
            counts = (self._counts - self._fed).clamp(0, end - self._fed)
            self.model.feed(self._tokens[:, self._fed : end], self.state, counts)
        self._fed = end
        return end == width


def round_up(positions: int, most: int) -> int:
    """Rounds up to a power of two, at least MIN_POSITIONS and at most `most`; 0 stays 0."""
    if positions == 0:
        return 0
    return min(most, max(MIN_POSITIONS, 1 << (positions - 1).bit_length()))
