"""How time is taken: after a warm-up, between two waits for the device, several times over."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from writehead.util.devices import capture_stream, wait_for

WARM_CALLS = 2  # before a capture
CACHES = 4  # times the device's cache that is read in turn, so that memory is what is timed
CACHE_BYTES = 16 << 20  # of a device that does not say
MOST_SETS = 256  # so small ones stay in the cache, which results show

Call = Callable[[], object]


@dataclass(frozen=True)
class Times:
    """Seconds that one and the same piece of work took, repeat by repeat."""

    repeats: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.repeats)

    def over(self, count: int) -> "Times":
        """Of one of `count` equal pieces that the work was made of."""
        return Times(tuple(seconds / count for seconds in self.repeats))

    def to_json(self, unit: float) -> dict[str, Any]:
        """Median, spread and every repeat, in units of `unit` seconds."""
        repeats = [seconds / unit for seconds in self.repeats]
        return {
            "median": statistics.median(repeats),
            "spread": [min(repeats), max(repeats)],
            "repeats": repeats,
        }


def bytes_past_cache(device: torch.device) -> int:
    """How much must be read in turn for none of it to be in the device's cache when it is due."""
    cache = CACHE_BYTES
    if device.type == "cuda":
        cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20)
    return CACHES * cache


def count_sets(size: int, device: torch.device) -> int:
    """How many sets of `size` bytes to read in turn: at least two, at most MOST_SETS."""
    return min(MOST_SETS, max(2, math.ceil(bytes_past_cache(device) / size)))


def clocked(work: Call, device: torch.device) -> float:
    """Seconds that `work` takes by the host's clock, from an idle device to an idle one."""
    wait_for(device)
    began = time.perf_counter()
    work()
    wait_for(device)
    return time.perf_counter() - began


def time_work(work: Call, device: torch.device, *, repeats: int, warmup: int = 1) -> Times:
    """Times of `work` with the host's part in it."""
    for _ in range(warmup):
        work()
    return Times(tuple(clocked(work, device) for _ in range(repeats)))


@torch.no_grad()
def time_calls(calls: Sequence[Call], device: torch.device, *, repeats: int) -> Times:
    """Times of one call, the mean of `calls` done in turn; on a GPU without the host's part.

    There the calls are one captured graph. It is launched behind another launch of itself, so that
    the device never waits for the host between the two events that time it.
    """
    if device.type != "cuda":
        return time_work(lambda: [call() for call in calls], device, repeats=repeats).over(
            len(calls)
        )
    graph = capture(lambda: [call() for call in calls], device)
    began, ended = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    times = []
    for _ in range(repeats):
        graph.replay()
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) / 1e3)
    return Times(tuple(times)).over(len(calls))


def capture(work: Call, device: torch.device) -> torch.cuda.CUDAGraph:
    """A graph of `work`, which is done twice before, so that whatever compiles has compiled.

    That is done on the stream there is. Once a process has run work on a second one, the kernels of
    some graphs start later, for as long as it lives.
    """
    for _ in range(WARM_CALLS):
        work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=capture_stream(device)):
        work()
    return graph
