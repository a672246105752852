"""A lane: slots of one beam size, their buffers on the device, and the steps that advance them.

A step runs the model and the search for the sequences in some slots. On a GPU, a CUDA graph runs
one step, or several, for 1, 16, 64, 256, … slots. All graphs of a lane use the same buffers, and a
list of slots on the device selects the rows. Results are copied to the host asynchronously.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from writehead.data.tokenizer import Tokens
from writehead.engine.search import Ints, Options, Search, Targets
from writehead.model import LanguageModel, TranslationModel
from writehead.model.cache import KVCache
from writehead.ops.decode_attention import why_not_triton
from writehead.ops.heads import Heads
from writehead.ops.launch import compile_kernels
from writehead.util.devices import launches_on
from writehead.util.graphs import Graphs, graph_size
from writehead.util.transfer import HostCopies, HostCopy, send

log = logging.getLogger(__name__)

MIN_GRAPH_TOKENS = 64  # tokens of the smallest graph of the encoder
GRAPH_STEPS = 4  # in the longer graph: between two graphs, a GPU is idle for a few microseconds
EAGER_TOKENS = {"cpu": 2048, "cuda": 16_384}  # source tokens encoded at once without graphs
DENSE_FRACTION = 0.75  # of slots active, from which eager steps compute all slots in place

Model = TranslationModel | LanguageModel


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


class Lane:
    """Buffers and steps for `shape.slots` sequences."""

    @torch.no_grad()
    def __init__(self, model: Model, shape: Shape, targets: Targets, graphs: bool = True) -> None:
        self.model, self.shape = model, shape
        slots = shape.slots + 1  # the last is never used; it pads the list of slots of a graph
        self.cache = model.new_state(slots, shape.capacity, shape.beam, shape.padded).cache
        self.cache.live.zero_()
        sizes = slots, shape.beam, shape.capacity
        self.search = Search(*sizes, targets, device=model.device, cache=self.cache)
        self.graphs = self._make_graphs() if graphs else None  # None: steps are not captured
        self.memory = None
        if isinstance(model, TranslationModel):
            self.memory = model.new_memory(slots, shape.source)
        self.live = self.cache.live.view(-1, shape.beam)[:, 0]  # whether each slot is searched
        self._copies = HostCopies()
        self._lengths, self._sources = np.zeros((2, slots), np.int64)  # on the host, by slot
        self._listed = torch.full((slots,), shape.slots, dtype=torch.int32, device=model.device)
        self._slots: NDArray[np.int32] | None = None  # the slots in `_listed`
        self._sizes = (0, False)  # of their graphs: slots, and whether any of them samples

    def _make_graphs(self) -> Graphs | None:
        """Returns the graphs of this lane, or None if its steps cannot be captured."""
        if self.model.device.type != "cuda":
            return None
        config, reason = self.model.config, self.search.why_not_triton
        probe = self.search.tokens.to(self.model.dtype)
        beams = ((config.decoder_attention, 1), (config.cross_attention, self.shape.beam))
        for attention, beam in beams:
            heads = Heads(attention.h, attention.g, attention.k, attention.v)
            reason = reason or why_not_triton(probe, heads, beam * heads.h // heads.g)
        if reason is None:
            return Graphs(self.model.device, compile_kernels)
        log.warning("decoding without CUDA graphs, which is slower: %s", reason)
        return None

    def encode(self, slots: Sequence[int], sources: Sequence[Tokens]) -> None:
        """Encodes sources, packed into one row, into the memory of `slots`.

        With graphs, the row is padded to a power of two, and each length has its own graph.
        """
        model, memory = self.model, self.memory
        assert isinstance(model, TranslationModel)
        assert memory is not None
        index, lengths = np.array(slots), np.array([len(source) for source in sources])
        self._sources[index], ends = lengths, np.cumsum(lengths)
        tokens, sentences = np.concatenate(sources), np.repeat(np.arange(len(lengths)), lengths)
        positions = np.arange(len(tokens)) - (ends - lengths)[sentences]
        columns = tokens, sentences + 1, positions, index[sentences], lengths[sentences]
        table, fill = np.stack(columns, axis=1), partial(model.fill_packed, memory)
        # graphs require the kernels for packed rows, which do not support relative positions
        if self.graphs is None or model.config.positions == "relative":
            parts = np.diff(ends // EAGER_TOKENS[model.device.type]).nonzero()
            with launches_on(model.device):
                for part in np.split(table, ends[parts]):
                    fill(send(part, model.device))
            return
        size = max(MIN_GRAPH_TOKENS, 1 << (len(tokens) - 1).bit_length())
        padding = [0, 0, 0, self.shape.slots, 1]  # segment 0, in the unused slot
        self.graphs.call(("encode", size), fill, table, padding)

    @torch.no_grad()
    def copy_prompts(self, slots: Sequence[int], prompts: KVCache) -> None:
        """Copies K and V of prompts, one row per slot, to the rows of the first beams."""
        rows = send(np.array(slots), self.model.device) * self.shape.beam
        size = min(prompts.size, self.cache.size)
        for own, theirs in ((self.cache.K, prompts.K), (self.cache.V, prompts.V)):
            own[:, :, :, :size].index_copy_(1, rows, theirs[:, :, :, :size])

    def admit(
        self, slots: Sequence[int], options: Sequence[Options], first: Ints, lengths: Ints = 0
    ) -> None:
        """Starts searches in `slots`, whose sources or prompts are in place; see `Search.admit`."""
        start = partial(self._call, "admit", self.search.start)
        self.search.admit(slots, options, first, lengths, start)
        self._lengths[[*slots]] = lengths
        self._slots = None

    def erase(self, slots: Sequence[int]) -> None:
        """Zeroes K and V of `slots`: the reference multiplies hidden values, even NaN, by 0."""
        index, tensors = send(np.array(slots), self.model.device), [self.cache.K, self.cache.V]
        if self.memory is not None:
            tensors += self.memory.K, self.memory.V
        for T in tensors:
            T.view(len(T), self.shape.slots + 1, -1, *T.shape[2:]).index_fill_(1, index, 0.0)

    def step(self, slots: NDArray[np.int32], steps: int = 1) -> None:
        """Feeds one token of each sequence in `slots`, and chooses the next; `steps` times."""
        if self.graphs is None:
            for _ in range(steps):
                self._step_eagerly(slots)
            return
        # an array is recognized by its identity, so its content must not change
        if slots is not self._slots:
            count = min(graph_size(len(slots)), self.shape.slots)
            self._sizes = count, bool(self.search.samples[slots].any())
        for each in (GRAPH_STEPS,) * (steps // GRAPH_STEPS) + (1,) * (steps % GRAPH_STEPS):
            key = (*self._sizes, each)
            if key not in self.graphs.captured:
                self._list(slots[:0])  # only the unused slot, on which steps have no effect
                self.graphs.capture(key, partial(self._run, self._listed[: key[0]], *key))
            if slots is not self._slots:
                self._list(slots)
            self.graphs.captured[key].replay()

    def collect(self, slots: Sequence[int], options: Sequence[Options]) -> HostCopy:
        """Starts copying the results of `slots` to the host; the slots can be reused at once."""
        n_best = max(one.config.n_best for one in options)
        rows, work = np.array(slots, np.int32), partial(self.search.collect, n_best=n_best)
        return self.copy(self._call(f"collect {n_best}", work, rows.reshape(-1, 1)))

    def copy(self, T: Tensor) -> HostCopy:
        """Starts copying a tensor of this lane to the host."""
        return HostCopy(T) if self.graphs is None else self._copies.start(T)

    def _call(self, name: str, work: Callable[[Tensor], Any], rows: NDArray[np.int32]) -> Any:
        """Calls `work` with a row per slot, which starts with the slot; by a graph if possible."""
        if self.graphs is None:
            with launches_on(self.model.device):
                return work(send(rows, self.model.device))
        # graphs have fixed sizes, so rows of the unused slot follow
        padding = [self.shape.slots, *[0] * (rows.shape[1] - 1)]
        return self.graphs.call((name, graph_size(len(rows))), work, rows, padding)

    def _step_eagerly(self, slots: NDArray[np.int32]) -> None:
        self.cache.bound = int(self._lengths[slots].max())
        self._lengths[slots] += 1
        if self.memory is not None and self.model.device.type == "cpu":
            self.memory.bound = int(self._sources[slots].max())
        # without a list of slots, K and V are read in place, including those of idle slots
        count, end = len(slots), int(slots.max()) + 1
        if count >= DENSE_FRACTION * end:
            self._run(None, end)
        else:
            self._run(torch.from_numpy(slots).to(self.model.device), count)

    def _run(self, listed: Tensor | None, count: int, samples: bool = True, steps: int = 1) -> None:
        """Runs the model and the search for the slots in `listed`, by default the first `count`."""
        tokens = self.search.tokens
        tokens = tokens if listed is not None else tokens[: count * self.shape.beam]
        given = tokens, self.cache, self.memory, listed
        with launches_on(self.model.device), torch.no_grad():
            for _ in range(steps):
                self.search.advance(self.model.decode(*given), listed, sampling=samples)

    def _list(self, slots: NDArray[np.int32]) -> None:
        """Sets the slots that the next steps compute; the unused slot pads the list."""
        assert self.graphs is not None
        self.graphs.staged.send(slots.reshape(-1, 1), self._listed.view(-1, 1), [self.shape.slots])
        self._slots = slots
