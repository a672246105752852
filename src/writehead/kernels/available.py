"""Whether Triton's kernels can work on a tensor, without importing Triton."""

import functools
import os
from importlib.util import find_spec

import torch
from torch import Tensor


def runs_triton(T: Tensor) -> bool:
    """Whether kernels run where T is: on a GPU, or in Python where Triton is told to interpret."""
    if torch.compiler.is_compiling():  # which needs Triton itself, and interprets nothing
        return T.device.type == "cuda"
    return has_triton() and (T.device.type == "cuda" or is_interpreted())


def is_interpreted() -> bool:
    """Whether Triton's kernels run in Python, on tensors anywhere."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None
