"""Chooses the implementation of an op, and checks whether Triton kernels can run."""

from collections.abc import Mapping

import torch
from torch import Tensor

from writehead.errors import BackendError, ConfigError, nearest
from writehead.util.devices import runs_triton

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KERNEL_DEPTHS = {16, 32, 64, 128, 256}  # of keys and values, in attention


def choose_implementation(op: str, name: str, why_not: Mapping[str, str | None]) -> str:
    """Returns `name`, unless `why_not` gives a reason; for "auto", the first without a reason."""
    if name == "auto":
        return next(known for known, reason in why_not.items() if reason is None)
    if name not in why_not:
        known = nearest(name, ["auto", *why_not])
        raise ConfigError(f"unknown implementation of {op} {name!r}; {known}")
    if why_not[name]:
        raise BackendError(f"{name!r} cannot compute {op}: {why_not[name]}; use 'auto'")
    return name


def why_not_kernel(X: Tensor, *others: Tensor | None) -> str | None:
    """Returns why a Triton kernel without gradients cannot run on X and the others, or None."""
    if not runs_triton(X):
        return f"Triton does not run on {X.device}"
    if torch.compiler.is_compiling():
        return "torch.compile fuses the reference itself"
    if needs_gradient(X, *others):
        return "the kernel has no gradient"
    if X.dtype not in KERNEL_DTYPES:
        return f"the kernel needs a floating-point type of 16 or 32 bits, not {X.dtype}"
    return None


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Returns whether autograd records operations on any of the tensors."""
    return torch.is_grad_enabled() and any(T is not None and T.requires_grad for T in tensors)
