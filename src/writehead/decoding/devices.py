"""Where to decode and in which type, from the words that a user says."""

import functools

import torch

from writehead.errors import ConfigError, nearest

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
        raise ConfigError(f"there is no device {str(name)!r}; {nearest(kind, DEVICES)}")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"the device {str(name)!r} is not here; use auto or cpu") from error
    if device.type == "cpu" and device.index:  # which PyTorch takes, and weights do not
        raise ConfigError(f"the device {str(name)!r} is not here; use auto or cpu")
    return device


def find_dtype(name: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    """The type of a name; without one, bfloat16 on a GPU and float32 elsewhere."""
    if name is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if isinstance(name, torch.dtype):
        return name
    if name not in DTYPES:
        raise ConfigError(f"there is no dtype {name!r}; {nearest(name, DTYPES)}")
    return DTYPES[name]


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
