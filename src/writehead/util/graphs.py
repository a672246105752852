"""CUDA graphs that share a memory pool, and their inputs, which are copied without waiting."""

import threading
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from writehead.util.devices import capture_stream, launches_on
from writehead.util.transfer import StagedCopies

Capturable = Callable[[], Any]
MIN_SIZE = 16  # a graph for 2 to 15 rows is no faster than one for 16
_capturing = threading.Lock()


class Graphs:
    """CUDA graphs of one device that share a memory pool, with their inputs and outputs."""

    def __init__(self, device: torch.device, prepare: Callable[[Capturable], object]) -> None:
        """`prepare` is called before each capture, with the work to capture."""
        self._device, self._pool = device, torch.cuda.graph_pool_handle()
        self._prepare = prepare
        self.captured: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._buffers: dict[Hashable, tuple[Tensor, Any]] = {}  # the inputs and outputs of calls
        self.staged = StagedCopies()

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
        if key not in self.captured:
            row = torch.tensor(padding, dtype=torch.int32, device=self._device)
            given = row.expand(key[1], -1).contiguous()
            self._buffers[key] = given, self.capture(key, partial(work, given))
        given, result = self._buffers[key]
        self.staged.send(rows, given, padding)
        self.captured[key].replay()
        return result

    def capture(self, key: Hashable, work: Capturable) -> Any:
        """Captures `work` as a graph, after a run that loads its kernels; returns its result."""
        graph, stream = torch.cuda.CUDAGraph(), capture_stream(self._device)
        with launches_on(self._device), torch.no_grad():
            self._prepare(work)
            work()
            # other threads may use the device meanwhile, but captures share a stream
            with _capturing:
                torch.cuda.synchronize(self._device)
                mode = "thread_local"
                with torch.cuda.graph(graph, self._pool, stream, capture_error_mode=mode):
                    result = work()
        self.captured[key] = graph
        return result


def graph_size(count: int) -> int:
    """Returns the rows of the smallest graph that computes `count` rows: 1, 16, 64, 256, …"""
    size = 1
    while size < count:  # capturing more graphs takes more time than finer sizes save
        size = max(MIN_SIZE, 4 * size)
    return size
