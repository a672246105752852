"""Chooses the implementation of an op, and finds out whether Triton kernels can run."""

import functools
import os
from collections.abc import Mapping
from importlib.util import find_spec

import torch
from torch import Tensor

from writehead.errors import BackendError, ConfigError, nearest


def choose_implementation(op: str, name: str, why_not: Mapping[str, str | None]) -> str:
    """Returns `name`, or for "auto" the first implementation whose `why_not` is None.

    Raises if `name` is unknown, or if `why_not` gives a reason against it.
    """
    if name == "auto":
        return next(known for known, reason in why_not.items() if reason is None)
    if name not in why_not:
        known = nearest(name, ["auto", *why_not])
        raise ConfigError(f"unknown implementation of {op} {name!r}; {known}")
    if why_not[name]:
        raise BackendError(f"{name!r} cannot compute {op}: {why_not[name]}; use 'auto'")
    return name


def runs_triton(T: Tensor) -> bool:
    """Returns whether Triton kernels run on T: on a GPU, or anywhere with TRITON_INTERPRET=1."""
    if torch.compiler.is_compiling():  # torch.compile cannot trace the interpreter
        return T.device.type == "cuda"
    return has_triton() and (T.device.type == "cuda" or is_interpreted())


def is_interpreted() -> bool:
    """Returns whether Triton runs kernels in Python, on tensors of any device."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def has_triton() -> bool:
    """Returns whether Triton is installed."""
    return find_spec("triton") is not None
