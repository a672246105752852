"""Sets the number of CPU threads that PyTorch uses, and how they wait; does not import PyTorch.

OpenMP reads its settings from the environment once, when PyTorch is loaded.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from writehead.errors import ConfigError, shown

NUM_THREADS = "OMP_NUM_THREADS"
MAX_THREADS = 1024
SPIN_COUNT = "4000"

T = TypeVar("T")


def limit_spinning() -> None:
    """Limits how long idle OpenMP threads spin before they sleep, to about 0.2 ms.

    This is longer than most operations between two matrix products, but short enough for several
    processes to share the cores. Environment variables that are already set take precedence.
    """
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
        if sys.platform == "darwin":  # where PyTorch uses another OpenMP library
            os.environ.setdefault("KMP_BLOCKTIME", "0")


def use_threads(threads: int | None = None) -> None:
    """Sets the number of CPU threads, at once or, if PyTorch is not loaded yet, when it loads.

    Without a number, OMP_NUM_THREADS is respected. If it is not set either, PyTorch chooses, but
    uses no more threads than this process has cores.
    """
    torch = sys.modules.get("torch")
    if threads is None:
        threads = available_cores()
        most = (os.cpu_count() or 1) if torch is None else torch.get_num_threads()
        if NUM_THREADS in os.environ or most <= threads:
            return
    elif type(threads) is not int or not 1 <= threads <= MAX_THREADS:
        raise ConfigError(f"threads={shown(threads)} must be an integer from 1 to {MAX_THREADS}")
    if torch is not None:
        torch.set_num_threads(threads)
    else:
        os.environ[NUM_THREADS] = str(threads)


def available_cores(root: Path = Path("/")) -> int:
    """The number of cores allowed by the CPU affinity and by the cgroups.

    A limit of 2.5 cores is rounded up to 3. `root` is the folder that contains proc and sys.
    """
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return min([cores, *_cgroup_limits(root)])


def _cgroup_limits(root: Path) -> Iterator[int]:
    """Yields the CPU limits of this process's cgroups and of their parents, in cores."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            mount = root / "sys/fs/cgroup" / ("cpu" if controllers else "")  # version 1 or 2
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
            for parent in (Path(group), *Path(group).parents):
                with suppress(OSError, ValueError):  # no such file, or no limit
                    folder = mount / str(parent).lstrip("/")
                    words = " ".join((folder / name).read_text() for name in names).split()
                    quota, period = map(int, words)
                    if quota > 0:
                        yield max(1, -(-quota // period))


def run_alone(work: Callable[[], T]) -> T:
    """Calls `work` in a thread of its own, so that Ctrl-C does not wait for C++ code that it runs.

    OpenMP keeps a team of threads for each thread that has used it. If the teams outnumber the
    cores, idle threads sleep at once, and decoding takes 1.6 times as long. The team of this thread
    ends with it.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result()
