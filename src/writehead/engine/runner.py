"""A lane: slots of one beam size, their buffers on the device, and the steps that advance them.

A step runs the model and the search for the sequences in some slots. On a GPU, it is a CUDA graph
for 1, 16, 64, 256, … slots. All graphs of a lane use the same buffers, and a list of slots on the
device selects the rows. Results are copied to the host asynchronously.
"""

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from writehead.data.tokenizer import Tokens
from writehead.engine.search import Options, Search, send
from writehead.model import LanguageModel, Packing, TranslationModel
from writehead.model.cache import EncoderMemory, KVCache
from writehead.ops.available import has_triton
from writehead.ops.decode_attention import why_not_triton
from writehead.ops.heads import Heads
from writehead.util.devices import capture_stream

log = logging.getLogger(__name__)

MIN_GRAPH_SLOTS = 16  # a graph for 2 to 15 slots is no faster than one for 16
MIN_GRAPH_TOKENS = 64  # tokens of the smallest graph of the encoder
STAGING_BUFFERS = 8  # inputs of graphs that can be on their way to the device
HOST_COPIES = 3  # of each tensor; all but the newest may still be unread
DENSE_FRACTION = 0.75  # of slots active, from which eager steps compute all slots in place

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


def graph_slots(count: int) -> int:
    """Returns the slots of the smallest graph that computes `count` slots: 1, 16, 64, 256, …

    The sizes are coarse, because capturing more graphs takes more time than finer sizes save.
    """
    size = 1
    while size < count:
        size = max(MIN_GRAPH_SLOTS, 4 * size)
    return size


class Lane:
    """Buffers and steps for `shape.slots` sequences; some tokens are never chosen.

    `vocab_size` excludes higher token ids, and `suppressed` lists others.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: Model,
        shape: Shape,
        *,
        vocab_size: int,
        eos: int,
        suppressed: Sequence[int] = (),
        graphs: bool = True,
    ) -> None:
        self.model, self.shape = model, shape
        slots = shape.slots + 1  # the last is never used; it pads the list of slots of a graph
        self.cache = model.new_state(slots, shape.capacity, shape.beam, shape.padded).cache
        self.cache.live.zero_()
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
        self._suppressed = torch.tensor(suppressed, dtype=torch.long, device=model.device)
        self._graphs = self._make_graphs() if graphs else None
        self.memory, self.encoder = None, None
        if isinstance(model, TranslationModel):
            self.memory = model.new_memory(slots, shape.source)
            self.encoder = Encoder(model, self.memory, self._graphs)
        self.live = self.cache.live.view(-1, shape.beam)[:, 0]  # whether each slot is searched
        self._copies: dict[int, deque[HostCopy]] = {}  # by the address of the tensor
        self._lengths, self._sources = np.zeros((2, slots), np.int64)  # on the host, by slot
        self._listed = torch.full((slots,), shape.slots, dtype=torch.int32, device=model.device)
        self._slots: NDArray[np.int32] | None = None  # the slots in `_listed`
        self._key = (0, False)  # of their graph: its slots, and whether any of them samples

    def _make_graphs(self) -> "Graphs | None":
        """Returns the graphs of this lane, or None if its steps cannot be captured."""
        if self.model.device.type != "cuda":
            return None
        if reason := self._why_not_graphs():
            log.warning("decoding without CUDA graphs, which is slower: %s", reason)
            return None
        return Graphs(self.model.device)

    @property
    def has_graphs(self) -> bool:
        """Whether steps are captured as CUDA graphs."""
        return self._graphs is not None

    def _why_not_graphs(self) -> str | None:
        """Returns why a step cannot be captured as a CUDA graph, or None."""
        if not has_triton():
            return "Triton is not installed"
        if self.search.implementation != "triton":
            return f"the search kernels do not support beam={self.shape.beam}"
        config, probe = self.model.config, self.search.tokens.to(self.model.dtype)
        beams = ((config.decoder_attention, 1), (config.cross_attention, self.shape.beam))
        for attention, beam in beams:
            heads = Heads(attention.h, attention.g, attention.k, attention.v)
            if reason := why_not_triton(probe, heads, beam * heads.h // heads.g):
                return reason
        return None

    def encode(self, slots: Sequence[int], sources: Sequence[Tokens]) -> None:
        """Encodes sources into the memory of `slots`."""
        assert self.encoder is not None
        self._sources[[*slots]] = [len(source) for source in sources]
        self.encoder.encode(slots, sources)

    @torch.no_grad()
    def copy_prompts(self, slots: Sequence[int], prompts: KVCache) -> None:
        """Copies K and V of prompts, one row per slot, to the rows of the first beams."""
        rows, size = self._send(slots) * self.shape.beam, prompts.size
        for own, theirs in ((self.cache.K, prompts.K), (self.cache.V, prompts.V)):
            own[:, :, :, :size].index_copy_(1, rows, theirs)

    def admit(
        self,
        slots: Sequence[int],
        options: Sequence[Options],
        first: Sequence[int] | int,
        lengths: Sequence[int] | int = 0,
    ) -> None:
        """Starts searches in `slots`, whose sources or prompts are in place; see `Search.admit`."""
        rows = self.search.pack(slots, options, first, lengths)
        self._call("admit", self.search.start, rows)
        self.search.send_sequences(slots, options)
        self._lengths[[*slots]] = lengths
        self._slots = None

    def erase(self, slots: Sequence[int]) -> None:
        """Zeroes K and V of `slots`: the reference multiplies hidden values, even NaN, by 0."""
        beam, index = self.shape.beam, self._send(slots)
        for T in (self.cache.K, self.cache.V):
            T.view(len(T), -1, beam, *T.shape[2:]).index_fill_(1, index, 0.0)
        if self.memory is not None:
            self.memory.K.index_fill_(1, index, 0.0)
            self.memory.V.index_fill_(1, index, 0.0)

    def step(self, slots: NDArray[np.int32]) -> None:
        """Feeds one token of each sequence in `slots`, and chooses the next.

        Passing the same array again is faster, so its content must not change.
        """
        if self._graphs is None:
            self._step_eagerly(slots)
            return
        if slots is not self._slots:
            count = min(graph_slots(len(slots)), self.shape.slots)
            self._key = count, bool(self.search.samples[slots].any())
            if self._key not in self._graphs:
                self._list(slots[:0])  # only the unused slot, on which steps have no effect
                self._graphs.capture(
                    self._key, partial(self._run, self._listed[:count], *self._key)
                )
            self._list(slots)
        self._graphs.replay(self._key)

    def collect(self, slots: Sequence[int], options: Sequence[Options]) -> "HostCopy":
        """Starts copying the results of `slots` to the host; the slots can be reused at once."""
        n_best = max(one.config.n_best for one in options)
        rows = np.array(slots, np.int32).reshape(-1, 1)
        return self.copy(self._call(f"collect {n_best}", partial(self._collect, n_best), rows))

    def copy(self, T: Tensor) -> "HostCopy":
        """Starts copying a tensor of this lane to the host."""
        if self._graphs is None:
            return HostCopy(T)
        copies = self._copies.setdefault(T.data_ptr(), deque())
        if len(copies) < HOST_COPIES:
            copies.append(HostCopy(T))
        else:
            copies.rotate(-1)
            copies[-1].start(T)
        return copies[-1]

    def _collect(self, n_best: int, rows: Tensor) -> Tensor:
        return self.search.collect(rows[:, 0], n_best)

    def _call(self, name: str, work: Callable[[Tensor], Any], rows: NDArray[np.int32]) -> Any:
        """Calls `work` with one row per slot, which starts with the slot; by a graph if possible.

        Graphs have fixed sizes, so rows of the unused slot follow.
        """
        if self._graphs is None:
            with launches_on(self.model.device):
                return work(send(rows, self.model.device))
        padding = [self.shape.slots, *[0] * (rows.shape[1] - 1)]
        return self._graphs.call((name, graph_slots(len(rows))), work, rows, padding)

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

    def _run(self, listed: Tensor | None, count: int, samples: bool = True) -> None:
        """Runs the model and the search for the slots in `listed`, by default the first `count`."""
        with launches_on(self.model.device), torch.no_grad():
            tokens = self.search.tokens
            tokens = tokens if listed is not None else tokens[: count * self.shape.beam]
            logits = self.model.decode(tokens, self.cache, self.memory, listed)
            if len(self._suppressed):
                logits.index_fill_(1, self._suppressed, -math.inf)
            self.search.advance(logits, listed, sampling=samples)

    def _list(self, slots: NDArray[np.int32]) -> None:
        """Sets the slots that the next steps compute; the unused slot pads the list."""
        assert self._graphs is not None
        self._graphs.send(slots.reshape(-1, 1), self._listed.view(-1, 1), [self.shape.slots])
        self._slots = slots

    def _send(self, slots: Sequence[int]) -> Tensor:
        """Copies slots to the device as int64, without waiting."""
        return send(np.array(slots), self.model.device)


class Encoder:
    """Encodes sources into an `EncoderMemory`, whose last slot is unused.

    On a GPU, the sources form one row, without padding between them. Its length is rounded up to a
    power of two, and each length has its own CUDA graph. Elsewhere, each source is a padded row.
    """

    def __init__(
        self, model: TranslationModel, memory: EncoderMemory, graphs: "Graphs | None"
    ) -> None:
        self.model, self.memory, self._graphs = model, memory, graphs

    def encode(self, slots: Sequence[int], sources: Sequence[Tokens]) -> None:
        """Encodes sources into `slots`."""
        lengths, index = np.array([len(source) for source in sources]), np.array(slots)
        tokens = np.concatenate(sources)
        if self._graphs is not None:
            self._encode_row(tokens, lengths, index)
        else:
            with launches_on(self.model.device), torch.no_grad():
                self._encode_padded(tokens, lengths, index)

    def _encode_padded(
        self, tokens: NDArray[Any], lengths: NDArray[Any], slots: NDArray[Any]
    ) -> None:
        """Encodes sources as padded rows."""
        device, (b, n) = self.model.device, (len(lengths), lengths.max())
        padded = np.full((b, n), self.model.config.pad)
        padded[np.arange(n) < lengths[:, None]] = tokens
        source, sent, rows = (send(T, device) for T in (padded, lengths, slots))
        M = self.model.encode(source, source_lengths=None if (lengths == n).all() else sent)
        places = rows.unsqueeze(1) * self.memory.positions + torch.arange(n, device=device)
        self.memory.write(self.model.decoder.project_memory(M), places.flatten())
        self.memory.lengths.index_copy_(0, rows, sent)

    def _encode_row(self, tokens: NDArray[Any], lengths: NDArray[Any], slots: NDArray[Any]) -> None:
        """Encodes sources as the segments of one row."""
        assert self._graphs is not None
        size = max(MIN_GRAPH_TOKENS, 1 << (len(tokens) - 1).bit_length())
        sentences = np.repeat(np.arange(len(lengths)), lengths)
        positions = np.arange(len(tokens)) - (np.cumsum(lengths) - lengths)[sentences]
        rows = np.stack([tokens, sentences + 1, positions, slots[sentences]], axis=1)
        # the rest of the row is padding: segment 0, in the unused slot
        padding = [0, 0, 0, len(self.memory.lengths) - 1]
        self._graphs.call(("encode", size), self._run_row, rows, padding)

    def _run_row(self, rows: Tensor) -> None:
        """Encodes n tokens, each given by [token, segment, position, slot]: [n, 4]."""
        tokens, segments, positions, slots = rows.t().contiguous().long().unsqueeze(1).unbind()
        M = self.model.encode(tokens, packing=Packing(segments, positions))
        slots, positions = slots.flatten(), positions.flatten()
        KV = self.model.decoder.project_memory(M)
        self.memory.write(KV, slots * self.memory.positions + positions)
        self.memory.lengths.scatter_reduce_(0, slots, positions + 1, "amax", include_self=False)


class Graphs:
    """CUDA graphs of one device that share a memory pool, with their inputs and outputs."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, torch.cuda.graph_pool_handle()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._inputs: dict[Hashable, Tensor] = {}
        self._outputs: dict[Hashable, Any] = {}
        self._staging = deque(_Staging() for _ in range(STAGING_BUFFERS))

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def replay(self, key: Hashable) -> None:
        """Runs a captured graph."""
        self._graphs[key].replay()

    def call(
        self,
        key: tuple[str, int],
        work: Callable[[Tensor], Any],
        rows: NDArray[Any],
        padding: Sequence[int],
    ) -> Any:
        """Runs `work` as a graph on `rows` and padding, as many rows as key[1]; returns its result.

        The next call with this key overwrites the result. Capturing runs `work` on padding.
        """
        if key not in self:
            row = torch.tensor(padding, dtype=torch.int32, device=self._device)
            self._inputs[key] = row.expand(key[1], -1).contiguous()
            self.capture(key, partial(work, self._inputs[key]))
        self.send(rows, self._inputs[key], padding)
        self.replay(key)
        return self._outputs[key]

    def send(self, rows: NDArray[Any], to: Tensor, padding: Sequence[int]) -> None:
        """Copies rows, followed by padding, to a tensor on the device; does not wait."""
        self._staging.rotate()
        self._staging[0].send(rows, to, padding)

    def capture(self, key: Hashable, work: Callable[[], Any]) -> None:
        """Captures `work` as a graph, after a run that loads its kernels."""
        from writehead.ops.launch import compile_kernels

        graph, stream = torch.cuda.CUDAGraph(), capture_stream(self._device)
        with launches_on(self._device), torch.no_grad():
            compile_kernels(work)
            work()
            # other threads may use the device meanwhile, but captures share a stream
            with _capturing:
                torch.cuda.synchronize(self._device)
                mode = "thread_local"
                with torch.cuda.graph(graph, self._pool, stream, capture_error_mode=mode):
                    self._outputs[key] = work()
        self._graphs[key] = graph


class _Staging:
    """Pinned memory for one copy to a device at a time."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.int32)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def send(self, rows: NDArray[Any], to: Tensor, padding: Sequence[int]) -> None:
        """Copies rows and padding to a tensor; waits only for the previous copy."""
        self._copied.synchronize()
        if len(self._memory) < to.numel():
            self._memory = torch.empty(to.numel(), dtype=torch.int32, pin_memory=True)
        staged = self._memory[: to.numel()].view(to.shape)
        array = staged.numpy()
        array[: len(rows)], array[len(rows) :] = rows, padding
        to.copy_(staged, non_blocking=True)
        self._copied.record()


class HostCopy:
    """An asynchronous copy of a tensor to the host; reading it waits for the device."""

    def __init__(self, T: Tensor) -> None:
        self._copy = torch.empty(T.shape, dtype=T.dtype, pin_memory=T.is_cuda)
        self._event = torch.cuda.Event() if T.is_cuda else None  # type: ignore[no-untyped-call]
        self.start(T)

    def start(self, T: Tensor) -> "HostCopy":
        """Starts another copy; T has the same shape."""
        self._copy.copy_(T, non_blocking=True)
        if self._event is not None:
            self._event.record()
        return self

    def numpy(self) -> Any:
        """Waits until the copy is complete; returns it in memory that is not pinned."""
        if self._event is None:
            return self._copy.numpy()
        self._event.synchronize()
        return self._copy.numpy().copy()


def launches_on(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the current device, which Triton and CUDA graphs use."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
