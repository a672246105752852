"""Where to decode and in which type, from the words that a user says."""

import functools
import logging
from pathlib import Path

import torch

from writehead.errors import ConfigError, nearest, shown

log = logging.getLogger(__name__)

CPU_INFO = Path("/proc/cpuinfo")
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # two x86 flags and one ARM flag
DEVICES = ("auto", "cpu", "cuda", "mps")
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def find_device(name: torch.device | str) -> torch.device:
    """The device of a name; "auto" is the GPU where there is one."""
    if str(name) == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind = str(name).partition(":")[0]
    if kind not in DEVICES:
        raise ConfigError(f"there is no device {shown(str(name))}; {nearest(kind, DEVICES)}")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {shown(str(name))} is not available; use auto or cpu") from error
    if device.type == "cpu" and device.index:  # which PyTorch takes, and weights do not
        raise ConfigError(f"device {shown(str(name))} is not available; use auto or cpu")
    return device


def find_dtype(name: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    """The type of a name; without one, bfloat16 on a GPU and float32 elsewhere."""
    if name is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if not isinstance(name, torch.dtype):
        if name not in DTYPES:
            raise ConfigError(f"there is no dtype {shown(name)}; {nearest(name, DTYPES)}")
        name = DTYPES[name]
    if name == torch.bfloat16 and device.type == "cpu":
        warn_if_emulated()
    return name


@functools.cache
def warn_if_emulated() -> None:
    """Warns, once per process, if this CPU has no bfloat16 instructions."""
    if not has_native_bfloat16():
        log.warning("this CPU has no bfloat16 instructions; float32 is faster and more accurate")


def has_native_bfloat16() -> bool:
    """Whether this CPU has bfloat16 instructions; True if the system does not list its features."""
    try:
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        return True
    flags = [line for line in lines if line.startswith(("flags", "Features"))]
    return not flags or not BFLOAT16_FLAGS.isdisjoint(flags[0].split())


@functools.cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Where graphs of a GPU are captured, and nothing is run.

    PyTorch would take a stream of whichever GPU a process captured on first. It is one for all
    graphs of a GPU, since what one lets go of is given only to others of the same stream.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def wait_for(device: torch.device) -> None:
    """Returns when a device has done all it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
