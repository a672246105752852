"""Finds devices and dtypes by name; a device's streams, modes, memory and capabilities."""

import functools
import logging
import math
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from writehead.errors import ConfigError, nearest, shown

log = logging.getLogger(__name__)

CPU_INFO, MEMORY_INFO = Path("/proc/cpuinfo"), Path("/proc/meminfo")
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # two x86 flags and one ARM flag
MEMORY_FRACTION = 0.8  # of the free memory; the rest is for temporary tensors
DEVICES = ("auto", "cpu", "cuda", "mps")
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
}


def find_device(name: torch.device | str) -> torch.device:
    """Returns a device by name; "auto" is the GPU if there is one."""
    if str(name) == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind = str(name).partition(":")[0]
    if kind not in DEVICES or str(name).startswith("cpu:"):
        hint = nearest("cuda" if kind == "gpu" else kind, DEVICES)
        raise ConfigError(f"unknown device {shown(str(name))}; {hint}")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {shown(str(name))} is not available; use auto or cpu") from error
    return device


def find_dtype(name: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    """Returns a dtype by name; the default is bfloat16 on a GPU and float32 elsewhere."""
    if name is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if not isinstance(name, torch.dtype):
        if name not in DTYPES:
            raise ConfigError(f"unknown dtype {shown(name)}; {nearest(name, DTYPES)}")
        name = DTYPES[name]
    if name == torch.bfloat16 and device.type == "cpu":
        warn_if_emulated()
    return name


@functools.cache
def warn_if_emulated() -> None:
    """Warns, once per process, if the feature list of this CPU has no bfloat16."""
    text = CPU_INFO.read_text(errors="replace") if CPU_INFO.is_file() else ""
    flags = [line for line in text.splitlines() if line.startswith(("flags", "Features"))]
    if flags and BFLOAT16_FLAGS.isdisjoint(flags[0].split()):
        log.warning("this CPU has no bfloat16 instructions; float32 is faster and more accurate")


@functools.cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which all CUDA graphs of a device are captured.

    Memory that a graph frees is reused only by graphs of the same stream. By default, PyTorch
    captures on a stream of the first device that it ever captured on.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@functools.cache
def supports_pdl(device: torch.device) -> bool:
    """Returns whether kernels may use programmatic dependent launch."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def shared_memory(device: torch.device) -> float:
    """Returns the bytes of shared memory that a program of a kernel may use."""
    if device.type != "cuda":
        return math.inf
    import triton

    index = torch.cuda.current_device() if device.index is None else device.index
    return float(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


def launches_on(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the current device, which Triton and CUDA graphs use."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def steady_modes(device: torch.device) -> Iterator[None]:
    """Turns gradients off and uses the default stream, whatever mode and stream the caller uses."""
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        if device.type == "cuda":
            stack.enter_context(torch.cuda.stream(torch.cuda.default_stream(device)))
        yield


def available_memory(device: torch.device) -> float:
    """Returns the bytes of memory to plan with; infinity if that is not known."""
    if device.type == "cpu" and MEMORY_INFO.is_file():
        match = re.search(r"^MemAvailable:\s+(\d+) kB", MEMORY_INFO.read_text(), re.M)
        return MEMORY_FRACTION * 1024 * int(match[1]) if match else math.inf
    if device.type != "cuda":
        return math.inf
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return MEMORY_FRACTION * (free + cached)


def wait_for(device: torch.device) -> None:
    """Waits until a device has finished all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def runs_triton(T: Tensor) -> bool:
    """Returns whether Triton kernels run on T: on a GPU, or on a CPU with TRITON_INTERPRET=1."""
    if torch.compiler.is_compiling():  # torch.compile cannot trace the interpreter
        return T.is_cuda
    is_interpreted = T.is_cpu and os.environ.get("TRITON_INTERPRET") == "1"
    return has_triton() and (T.is_cuda or is_interpreted)


@functools.cache
def has_triton() -> bool:
    """Returns whether Triton is installed."""
    return find_spec("triton") is not None
