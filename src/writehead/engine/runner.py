"""A lane: slots of one beam size, their buffers on the device, and the steps that advance them.

A step runs the model and the search for the sequences in some slots. On a GPU, each number of slots
has its own CUDA graph. All graphs of a lane use the same buffers, and a list of slots selects the
rows. The host reads which sequences have ended a few steps late, so the device never waits for it.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from writehead.config import ModelConfig
from writehead.engine.search import Hypothesis, Options, Search, make_hypotheses
from writehead.model import LanguageModel, TranslationModel
from writehead.model.cache import KVCache
from writehead.ops.available import has_triton
from writehead.ops.decode_attention import why_not_triton
from writehead.ops.heads import Heads
from writehead.util.devices import capture_stream

log = logging.getLogger(__name__)

MIN_GRAPH_SLOTS = 16  # a graph for 2 to 15 slots is no faster than one for 16
DENSE_FRACTION = 0.75  # of slots in use: above it, eager steps compute all slots in place

Model = TranslationModel | LanguageModel
_capturing = threading.Lock()


@dataclass(frozen=True)
class Shape:
    """The sizes of a lane: slots, rows per slot, and positions of the source and the cache."""

    slots: int
    beam: int
    source: int  # 0 for a language model
    capacity: int
    padded: bool = False

    def fits(self, source: int, capacity: int) -> bool:
        """Returns whether a sequence of these sizes fits in a slot."""
        return source <= self.source and capacity <= self.capacity


def bytes_per_slot(config: ModelConfig, shape: Shape, element: int) -> int:
    """Returns the bytes of K and V in one slot."""
    own, cross = config.decoder_attention, config.cross_attention
    size = min(shape.capacity, own.window or shape.capacity)
    values = shape.beam * size * own.kv_size + shape.source * cross.kv_size
    return config.decoder_layers * values * element


def graph_slots(count: int) -> int:
    """Returns how many slots the graph for `count` computes: 1, 16, 64, 256, …

    Sizes are coarse because capturing more graphs costs more time than tighter sizes save.
    """
    size = 1
    while size < count:
        size = max(MIN_GRAPH_SLOTS, 4 * size)
    return size


class Lane:
    """Buffers and steps for `shape.slots` sequences; never chooses token ids >= `vocab_size`."""

    @torch.no_grad()
    def __init__(
        self, model: Model, shape: Shape, *, vocab_size: int, eos: int, graphs: bool = True
    ) -> None:
        self.model, self.shape, config = model, shape, model.config
        slots = shape.slots + 1  # the last is never used; it pads the list of slots of a graph
        self.cache = KVCache(
            config.decoder_attention,
            layers=config.decoder_layers,
            rows=slots * shape.beam,
            capacity=shape.capacity,
            beam=shape.beam,
            padded=shape.padded,
            dtype=model.dtype,
            device=model.device,
        )
        self.cache.live.zero_()
        self.memory = None
        if isinstance(model, TranslationModel):
            self.memory = model.new_memory(slots, shape.source)
        self.search = Search(
            slots,
            shape.beam,
            shape.capacity,
            vocab_size=vocab_size,
            eos=eos,
            device=model.device,
            live=self.cache.live,
            lengths=self.cache.lengths,
            ancestors=self.cache.ancestors,
            sampling=shape.beam == 1,
        )
        # host copies, per slot: the length in the cache, and of the source
        self._lengths, self._sources = np.zeros((2, slots), np.int64)
        self._listed = torch.full((slots,), shape.slots, dtype=torch.int32, device=model.device)
        self._rows: tuple[int, ...] = ()  # the slots in `_listed`
        self._samples: bool | None = None  # whether any of them samples; None: not known
        # by the number of slots, and whether any of them samples
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] | None = None
        if graphs and model.device.type == "cuda":
            reason = self._why_not_graphs()
            if reason is None:
                self._graphs, self._pool = {}, torch.cuda.graph_pool_handle()
            else:
                log.warning("decoding without CUDA graphs, which is slower: %s", reason)

    def _why_not_graphs(self) -> str | None:
        """Returns why a step cannot be captured as a CUDA graph, or None."""
        if not has_triton():
            return "Triton is not installed"
        if self.search.implementation != "triton":
            return f"the search kernels do not support beam={self.shape.beam}"
        config, probe = self.model.config, self._listed.to(self.model.dtype)
        beams = ((config.decoder_attention, 1), (config.cross_attention, self.shape.beam))
        for attention, beam in beams:
            heads = Heads(attention.h, attention.g, attention.k, attention.v)
            if reason := why_not_triton(probe, heads, beam * heads.h // heads.g):
                return reason
        return None

    @torch.no_grad()
    def encode(self, slots: Sequence[int], source: Tensor, lengths: Tensor) -> None:
        """Encodes source [b, m], right-padded with lengths [b], into the memory of `slots`."""
        assert isinstance(self.model, TranslationModel)
        assert self.memory is not None
        with launches_on(self.model.device):
            M = self.model.encode(source, source_lengths=lengths)
            KV = self.model.decoder.project_memory(M)
            self.memory.write(KV, lengths, self._send(slots))
        if not source.is_cuda:
            self._sources[[*slots]] = lengths.numpy()

    @torch.no_grad()
    def copy_prompts(self, slots: Sequence[int], prompts: KVCache) -> None:
        """Copies K and V of prompts, one row per slot, to the rows of the first beams."""
        rows, size = self._send(slots) * self.shape.beam, prompts.size
        for own, theirs in ((self.cache.K, prompts.K), (self.cache.V, prompts.V)):
            own[:, :, :, :size].index_copy_(1, rows, theirs)

    def admit(self, slots: Sequence[int], options: Sequence[Options]) -> None:
        """Starts a search in each of `slots`, whose source or prompt must be in place."""
        self.search.admit(slots, options)
        self._samples = None
        self._lengths[list(slots)] = [one.length for one in options]

    def erase(self, slots: Sequence[int]) -> None:
        """Clears K and V of `slots`: the reference masks by multiplying, which would spread NaN."""
        beam, index = self.shape.beam, self._send(slots)
        for T in (self.cache.K, self.cache.V):
            T.view(len(T), -1, beam, *T.shape[2:]).index_fill_(1, index, 0.0)
        if self.memory is not None:
            self.memory.K.index_fill_(1, index, 0.0)
            self.memory.V.index_fill_(1, index, 0.0)

    @torch.no_grad()
    def step(self, slots: Sequence[int]) -> None:
        """Feeds one token of each sequence in `slots`, and chooses the next."""
        rows = tuple(slots)
        if self._graphs is None:
            self._step_eagerly(rows)
            return
        if rows != self._rows or self._samples is None:
            requests = self.search.requests
            self._samples = any(one.samples for i in rows if (one := requests[i]) is not None)
        key = min(graph_slots(len(rows)), self.shape.slots), self._samples
        graph = self._graphs.get(key) or self._capture(*key)
        if rows != self._rows:
            self._list(rows)
        graph.replay()

    def collect(self, slots: Sequence[int]) -> "Collected":
        """Starts copying the results of `slots` to the host; the slots can be reused at once."""
        with launches_on(self.model.device):
            limits = [one.n_best if (one := self.search.requests[i]) else 0 for i in slots]
            return Collected(HostCopy(self.search.collect(slots)), limits)

    def copy_live(self) -> "HostCopy":
        """Starts copying to the host whether each slot is live."""
        return HostCopy(self.cache.live.view(-1, self.shape.beam)[:, 0])

    def _step_eagerly(self, rows: tuple[int, ...]) -> None:
        index = np.array(rows)
        self.cache.bound = int(self._lengths[index].max())
        self._lengths[index] += 1
        if self.memory is not None and self.model.device.type == "cpu":
            self.memory.bound = int(self._sources[index].max())
        # without a list of slots, K and V are read in place, including those of idle slots
        if len(rows) >= DENSE_FRACTION * (max(rows) + 1):
            self._run(None, max(rows) + 1)
        else:
            self._run(torch.tensor(rows, dtype=torch.int32, device=self.model.device), len(rows))

    def _run(self, listed: Tensor | None, count: int, samples: bool = True) -> None:
        """Runs the model and the search for the slots in `listed`, by default the first `count`."""
        with launches_on(self.model.device):
            tokens = self.search.tokens
            tokens = tokens if listed is not None else tokens[: count * self.shape.beam]
            logits = self.model.decode(tokens, self.cache, self.memory, listed)
            self.search.advance(logits, listed, sampling=samples)

    def _capture(self, count: int, samples: bool) -> torch.cuda.CUDAGraph:
        """Captures a step over the first `count` slots of `_listed`."""
        assert self._graphs is not None
        from writehead.ops.launch import compile_kernels  # needs Triton, which is optional

        listed = self._listed[:count]
        self._list(())  # only the unused slot, on which steps have no effect
        step = partial(self._run, listed, count, samples)
        with launches_on(self.model.device):
            compile_kernels(step)
            step()  # loads kernels and allocates workspaces
            graph = capture(step, self.model.device, self._pool)
        self._graphs[count, samples] = graph
        return graph

    def _list(self, rows: tuple[int, ...]) -> None:
        """Sets the slots that the next steps compute; the unused slot pads the list."""
        array = np.full(len(self._listed), self.shape.slots, np.int32)
        array[: len(rows)] = rows
        self._listed.copy_(torch.from_numpy(array).pin_memory(), non_blocking=True)
        self._rows = rows

    def _send(self, slots: Sequence[int]) -> Tensor:
        """Copies slots to the device as int64, without waiting."""
        return send(torch.tensor(slots), self.model.device)


class HostCopy:
    """An asynchronous copy of a tensor to the host; reading it waits for the device."""

    def __init__(self, T: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if not T.is_cuda:
            self._copy = T.clone()
            return
        self._copy = torch.empty(T.shape, dtype=T.dtype, pin_memory=True)
        self._copy.copy_(T, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(T.device))

    def numpy(self) -> Any:
        """Waits until the copy is complete, and returns it."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy.numpy()


@dataclass(frozen=True, eq=False)
class Collected:
    """The results of some slots, which are being copied to the host."""

    packed: HostCopy
    limits: list[int]  # n_best of each slot

    def hypotheses(self) -> list[list[Hypothesis]]:
        """Returns the hypotheses of each slot, best first; none if its logits allowed no token."""
        found = make_hypotheses(self.packed.numpy())
        return [best[:limit] for best, limit in zip(found, self.limits, strict=True)]


def send(T: Tensor, device: torch.device) -> Tensor:
    """Copies a host tensor to a device without waiting."""
    return T.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else T


def capture(work: Callable[[], object], device: torch.device, pool: Any) -> torch.cuda.CUDAGraph:
    """Captures `work`, which has run before, so that its kernels are loaded."""
    graph = torch.cuda.CUDAGraph()
    # other threads may use the device meanwhile, but captures share a stream
    with _capturing:
        torch.cuda.synchronize(device)
        with torch.cuda.graph(
            graph, pool=pool, stream=capture_stream(device), capture_error_mode="thread_local"
        ):
            work()
    return graph


def launches_on(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the current device, which Triton and CUDA graphs use."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
