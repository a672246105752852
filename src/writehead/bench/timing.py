"""Times work on an idle device, after a warm-up, several times."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from writehead.util.devices import capture_stream, wait_for

WARMUP_CALLS = 2  # before a CUDA graph is captured

Call = Callable[[], object]


@dataclass(frozen=True)
class Times:
    """The seconds that each repeat of the same work took."""

    repeats: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median of the repeats."""
        return statistics.median(self.repeats)

    def over(self, count: int) -> "Times":
        """Returns the times divided by `count`, such as the number of steps."""
        return Times(tuple(seconds / count for seconds in self.repeats))

    def to_json(self, unit: float) -> dict[str, Any]:
        """Returns median, spread and repeats, in units of `unit` seconds."""
        repeats = [seconds / unit for seconds in self.repeats]
        spread = [min(repeats), max(repeats)]
        return {"median": statistics.median(repeats), "spread": spread, "repeats": repeats}


def clocked(work: Call, device: torch.device) -> float:
    """Returns the seconds of `work`, from an idle device to an idle device."""
    wait_for(device)
    start = time.perf_counter()
    work()
    wait_for(device)
    return time.perf_counter() - start


def time_work(work: Call, device: torch.device, *, repeats: int) -> Times:
    """Times `work`, including host time; the caller warms it up."""
    return Times(tuple(clocked(work, device) for _ in range(repeats)))


def idle_fraction(work: Call, device: torch.device) -> float:
    """Returns the fraction of the time in which a GPU runs no kernel of `work`.

    Recording the kernels makes the work somewhat slower.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        seconds = clocked(work, device)
    events = (one.time_range for one in recorded.events() if one.device_type.name == "CUDA")
    busy, end = 0.0, 0.0  # in microseconds; kernels may overlap
    for times in sorted(events, key=lambda times: times.start):
        busy += max(0.0, times.end - max(times.start, end))
        end = max(end, times.end)
    return 1.0 - busy / 1e6 / seconds


@torch.no_grad()
def time_calls(calls: Sequence[Call], device: torch.device, *, repeats: int) -> Times:
    """Times the mean of `calls`; on a GPU, without host time.

    The calls are one CUDA graph. Each timed replay follows another, so the GPU does not wait for
    the host between the two events.
    """

    def work() -> None:
        for call in calls:
            call()

    if device.type != "cuda":
        work()
        return time_work(work, device, repeats=repeats).over(len(calls))
    graph = capture(work, device)
    start, end = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    times = []
    for _ in range(repeats):
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return Times(tuple(times)).over(len(calls))


def capture(work: Call, device: torch.device) -> torch.cuda.CUDAGraph:
    """Captures `work` in a CUDA graph, after warm-up calls that compile its kernels.

    The warm-up runs on the current stream: once a process has used a second stream, the kernels of
    some graphs start later until the process ends.
    """
    for _ in range(WARMUP_CALLS):
        work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=capture_stream(device)):
        work()
    return graph
