"""One step of a search over buffers of its own, captured as a CUDA graph: one launch.

A graph is captured on the model's device, and in a rehearsal before it all kernels of the step, and
of what comes before the first, are compiled at the same time. An encoder of few tokens is captured
too, since the host takes longer to launch its kernels than the device to run them.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from writehead.decoding.buffers import Buffers, Shape
from writehead.decoding.search import Constraints
from writehead.kernels.beams import choose_beam, trace_back
from writehead.kernels.choose import choose_greedy, survey
from writehead.kernels.cublas import trying
from writehead.kernels.launch import is_rehearsal, rehearse
from writehead.model.fused import FusedDecoder, Memories
from writehead.util.devices import capture_stream

# of padded sources: 2048 took the launches 4 ms and an H200 1, and 16,384 both the same
FEW_TOKENS = 1 << 12


class Captured:
    """One step over buffers of its own: on a GPU one launch, elsewhere as it is written."""

    def __init__(
        self,
        fused: FusedDecoder,
        shape: Shape,
        vocab_size: int,
        eos: int,
        pool: Any = None,
    ) -> None:
        model = fused.model
        self.eos = eos
        self.buffers = Buffers(shape, model.config, vocab_size, model.dtype, model.device)
        self._fused, self._vocab_size, self._pool = fused, vocab_size, pool
        self._graph: torch.cuda.CUDAGraph | None = None
        self._encoder: CapturedEncoder | None = None
        if model.device.type == "cuda":
            with launching_on(model.device):
                self._record()
            if self.buffers.memories is not None and shape.sentences * shape.source <= FEW_TOKENS:
                self._encoder = CapturedEncoder(fused, self.buffers.memories, pool)

    def _record(self) -> None:
        """Captures the step, once its kernels are compiled and its products were tried.

        Nothing grows yet, so that it does not matter what any of these steps do.
        """
        rehearse(self._take_all)
        self._embed()  # numbers that products may be timed with
        with trying():
            self._take()
        self._graph = _graph_of(self._take, self._fused.model.device, self._pool)

    def encode(self, source: Tensor, lengths: Tensor | None) -> None:
        """Puts K and V of sources [b, m] into the memories.

        lengths: [b], the tokens that each has; by default m.
        """
        memories = self.buffers.memories
        assert memories is not None
        with launching_on(self._fused.model.device):
            if self._encoder is not None:
                self._encoder.encode(source, lengths)
            else:
                memories.lengths.fill_(1)  # of a sentence that is not there
                self._fused.encode(source, lengths, memories)

    def begin(self, first: Tensor, lengths: Tensor | None, constraints: Constraints) -> None:
        """Makes sentences ready to be decoded, from what the caches hold of them.

        first: [sentences], tokens to feed. lengths: [sentences], positions in the caches, of which
        the first beam has K and V; by default none.
        """
        self.buffers.place(first, lengths, constraints)
        with launching_on(self._fused.model.device):
            self.buffers.begin()
            self._embed()

    def step(self) -> None:
        """Feeds the tokens there are, and chooses the next."""
        if self._graph is None:
            self._take()
        else:
            self._graph.replay()

    def _take_all(self) -> None:
        """A step, what comes before the first, and what follows beams back after the last."""
        self.buffers.begin()
        self._embed()
        self._take()
        if self.buffers.shape.beam > 1:
            trace_back(self.buffers.history, self.buffers.pool, self.buffers.shape.n_best)

    @torch.no_grad()
    def _embed(self) -> None:
        """Makes the input of a step from the tokens; beams are told of it by the clock."""
        clock = self.buffers.limits.clock if self.buffers.shape.beam > 1 else None
        self._fused.embed(self.buffers.rows, clock, self.buffers.X)

    @torch.no_grad()
    def _take(self) -> None:
        buffers, shape = self.buffers, self.buffers.shape
        limits, rows, found = buffers.limits, buffers.rows, buffers.found
        logits = self._fused.step(buffers.X, rows, buffers.cache, buffers.memories)
        if shape.beam == 1:
            choose_greedy(
                logits,
                found,
                limits,
                rows,
                buffers.texts,
                buffers.log_p,
                self._fused.feed(buffers.X),
                vocab_size=self._vocab_size,
                eos=self.eos,
            )
            return
        assert buffers.cache.ancestors is not None
        survey(logits, found, vocab_size=self._vocab_size)
        choose_beam(
            logits,
            found,
            limits,
            rows,
            buffers.history,
            buffers.live,
            buffers.pool,
            buffers.cache.ancestors,
            vocab_size=self._vocab_size,
            eos=self.eos,
            n_best=shape.n_best,
            alpha=shape.alpha,
        )
        self._embed()


class CapturedEncoder:
    """An encoder whose sources are padded to the memories it fills: on a GPU one launch.

    The first sources are encoded as it is written; with the second, if they come, it is captured.
    """

    def __init__(self, fused: FusedDecoder, memories: Memories, pool: Any = None) -> None:
        _, b, _, m, _ = memories.K.shape
        self._fused, self._memories, self._pool = fused, memories, pool
        self._source = torch.zeros(b, m, dtype=torch.long, device=memories.K.device)
        self._lengths = torch.ones_like(memories.lengths)
        self._has_encoded = False
        self._graph: torch.cuda.CUDAGraph | None = None

    def encode(self, source: Tensor, lengths: Tensor | None) -> None:
        """Puts K and V of sources [b, m] into the memories, as `Captured.encode` says."""
        b, m = source.shape
        self._source.zero_()  # what nobody sees must be a number all the same
        self._source[:b, :m] = source
        self._lengths.fill_(1)  # of a sentence that is not there
        self._lengths[:b] = m if lengths is None else lengths
        if self._source.is_cuda and self._has_encoded and self._graph is None:
            self._graph = _graph_of(self._take, self._source.device, self._pool)
        if self._graph is None:
            self._take()
        else:
            self._graph.replay()
        self._has_encoded = not is_rehearsal()

    def _take(self) -> None:
        self._fused.encode(self._source, self._lengths, self._memories)


def _graph_of(work: Callable[[], None], device: torch.device, pool: Any) -> torch.cuda.CUDAGraph:
    """`work`, which was done before, so that its kernels are there, as a graph."""
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    # what other threads do on the device meanwhile is theirs
    with torch.cuda.graph(
        graph, pool=pool, stream=capture_stream(device), capture_error_mode="thread_local"
    ):
        work()
    return graph


def launching_on(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the one that Triton launches on and graphs are captured on, whichever it is."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
