"""One step of a search over buffers of its own, captured as a CUDA graph: one launch.

A graph is captured on the model's device, and in a rehearsal before it all kernels of the step, and
of what comes before the first, are compiled at the same time.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from writehead.decoding.buffers import Buffers, Shape
from writehead.decoding.devices import capture_stream
from writehead.decoding.search import Constraints
from writehead.kernels.beams import choose_beam, trace_back
from writehead.kernels.choose import choose_greedy, survey
from writehead.kernels.cublas import trying
from writehead.kernels.launch import rehearse
from writehead.model.fused import FusedDecoder


class Captured:
    """One step over buffers of its own: on a GPU one launch, elsewhere as it is written."""

    def __init__(
        self,
        fused: FusedDecoder,
        shape: Shape,
        vocabulary: int,
        end: int,
        pool: Any = None,
    ) -> None:
        model = fused.model
        self.end = end
        self.buffers = Buffers(shape, model.config, vocabulary, model.dtype, model.device)
        self._fused, self._vocabulary, self._pool = fused, vocabulary, pool
        self._graph: torch.cuda.CUDAGraph | None = None
        if model.device.type == "cuda":
            with launching_on(model.device):
                self._record()

    def _record(self) -> None:
        """Captures the step, once its kernels are compiled and its products were tried.

        Nothing grows yet, so that it does not matter what any of these steps do.
        """
        rehearse(self._take_all)
        self._embed()  # numbers that products may be timed with
        with trying():
            self._take()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        # what other threads do on the device meanwhile is theirs
        with torch.cuda.graph(
            self._graph,
            pool=self._pool,
            stream=capture_stream(self._fused.model.device),
            capture_error_mode="thread_local",
        ):
            self._take()

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
                vocabulary=self._vocabulary,
                end=self.end,
            )
            return
        assert buffers.cache.ancestors is not None
        survey(logits, found, vocabulary=self._vocabulary)
        choose_beam(
            logits,
            found,
            limits,
            rows,
            buffers.history,
            buffers.live,
            buffers.pool,
            buffers.cache.ancestors,
            vocabulary=self._vocabulary,
            end=self.end,
            n_best=shape.n_best,
            alpha=shape.alpha,
        )
        self._embed()


def launching_on(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the one that Triton launches on and graphs are captured on, whichever it is."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
