"""How many CPU threads PyTorch uses, and how they wait; imports no PyTorch itself.

OpenMP reads its settings from the environment once, when PyTorch loads it.
"""

import os
import sys
from collections.abc import Iterator

from writehead.errors import ConfigError, shown

NUM_THREADS = "OMP_NUM_THREADS"
MAX_THREADS = 1024


def wait_passively() -> None:
    """Lets idle OpenMP threads sleep instead of spin, unless the environment says otherwise.

    A spinning thread occupies the core that another process needs: two translations at once would
    take many times as long as one after the other. Once PyTorch is loaded this has no effect.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def use_threads(threads: int | None = None) -> None:
    """Sets the number of CPU threads, now if PyTorch is loaded and else for when it is.

    Without a number, OMP_NUM_THREADS is respected. If it is not set either, PyTorch chooses, but
    uses no more threads than this process has cores.
    """
    torch = sys.modules.get("torch")
    if threads is None:
        if NUM_THREADS in os.environ:
            return
        threads = available_cores()
        most = (os.cpu_count() or 1) if torch is None else torch.get_num_threads()
        if most <= threads:
            return
    elif type(threads) is not int or not 1 <= threads <= MAX_THREADS:
        raise ConfigError(f"threads={shown(threads)} must be an integer from 1 to {MAX_THREADS}")
    if torch is not None:
        torch.set_num_threads(threads)
    else:
        os.environ[NUM_THREADS] = str(threads)


def available_cores(root: str = "/") -> int:
    """The cores that this process may use, by its CPU affinity and the CPU limit of its cgroup.

    A limit of two and a half cores counts as three. `root` is where /proc and /sys are.
    """
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return min([cores, *_cgroup_limits(root)])


def _cgroup_limits(root: str) -> Iterator[int]:
    """The CPU limits, in cores, of this process's cgroups and of those that contain them."""
    mounts = os.path.join(root, "sys/fs/cgroup")
    for line in _read(os.path.join(root, "proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        while True:  # in a container the path may be the host's, of which only the top is mounted
            for mount in ("", "unified", "cpu", controllers):
                folder = os.path.join(mounts, mount, path.lstrip("/"))
                names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
                words = " ".join(_read(os.path.join(folder, name)) for name in names).split()
                if len(words) == 2 and all(word.isdigit() for word in words):  # else no limit
                    quota, period = map(int, words)
                    yield max(1, -(-quota // max(1, period)))
            if path.strip("/") == "":
                break
            path = os.path.dirname(path)


def _read(path: str) -> str:
    """The text of a file, empty where there is none."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
