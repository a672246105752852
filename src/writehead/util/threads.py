"""Sets the number of CPU threads that PyTorch uses, and how they wait; does not import PyTorch.

OpenMP reads its settings from the environment once, when PyTorch is loaded.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

from writehead.errors import ConfigError, shown

NUM_THREADS = "OMP_NUM_THREADS"
MAX_THREADS = 1024


def wait_passively() -> None:
    """Lets idle OpenMP threads sleep instead of spin, unless OMP_WAIT_POLICY is already set.

    Spinning threads make several processes on the same cores many times slower.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def use_threads(threads: int | None = None) -> None:
    """Sets the number of CPU threads, at once or, if PyTorch is not loaded yet, when it loads.

    The default is OMP_NUM_THREADS or, if that is not set, the number that PyTorch chooses, but at
    most the number of cores available to this process.
    """
    torch = sys.modules.get("torch")
    if threads is None:
        threads = available_cores()
        default = (os.cpu_count() or 1) if torch is None else torch.get_num_threads()
        if NUM_THREADS in os.environ or default <= threads:
            return
    elif type(threads) is not int or not 1 <= threads <= MAX_THREADS:
        raise ConfigError(f"threads={shown(threads)} must be an integer from 1 to {MAX_THREADS}")
    if torch is not None:
        torch.set_num_threads(threads)
    else:
        os.environ[NUM_THREADS] = str(threads)


def available_cores(root: Path = Path("/")) -> int:
    """Returns the number of cores that the CPU affinity and the cgroups (version 2) allow.

    A limit of 2.5 cores is rounded up to 3. `root` is the folder that contains proc and sys.
    """
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    with suppress(OSError):
        group = Path((root / "proc/self/cgroup").read_text().strip().rpartition(":")[2])
        for parent in (group, *group.parents):
            with suppress(OSError, ValueError):  # no such file, or "max" instead of a quota
                path = root / "sys/fs/cgroup" / str(parent).lstrip("/") / "cpu.max"
                quota, period = map(int, path.read_text().split())
                cores = min(cores, max(1, -(-quota // period)))
    return cores
