"""A training step as one CUDA graph: captured once, replayed on the batches that follow."""

from collections.abc import Callable

import torch
from torch import Tensor

from writehead.data.batches import Batch

WARM = 3  # steps that run as usual first: they compile, tune and allocate


class Replay:
    """`work` on batches of one shape, which a graph does after the first few calls.

    `work` must wait for nothing and read whatever changes from memory that stays in place.
    """

    def __init__(self, work: Callable[[list[Batch]], Tensor]) -> None:
        self._work = work
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._parts: list[Batch] = []
        self._values = torch.empty(0)

    def __call__(self, parts: list[Batch]) -> Tensor:
        """What `work` returns of these batches; the next call writes over it."""
        self._calls += 1
        if self._calls <= WARM:
            return self._as_usual(parts)
        if self._graph is None:
            self._parts, self._graph = parts, torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=self._stream):
                self._values = self._work(parts)
        else:
            for held, new in zip(self._parts, parts, strict=True):
                held.copy_(new)
        self._graph.replay()
        return self._values

    def _as_usual(self, parts: list[Batch]) -> Tensor:
        """On the stream that is captured later, as autograd wants it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            values = self._work(parts)
        torch.cuda.current_stream().wait_stream(self._stream)
        return values
