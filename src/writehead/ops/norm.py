"""RMS norm and layer norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn
from torch.nn import functional as F

from writehead.ops.available import choose_implementation, runs_triton

if TYPE_CHECKING:
    from torch import Tensor

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_DEPTH = 16384  # elements of a row, which one program holds


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm over the last dimension, with an optional gain [d] and bias [d]."""

    kind: Literal["rms", "layer"]
    gain: Tensor | None
    bias: Tensor | None
    epsilon: float

    @classmethod
    def of(cls, module: nn.RMSNorm | nn.LayerNorm) -> Norm:
        """Returns the norm that `module` computes."""
        if isinstance(module, nn.LayerNorm):
            return cls("layer", module.weight, module.bias, module.eps)
        epsilon = module.eps
        if epsilon is None:  # PyTorch's default
            dtype = torch.float32 if module.weight is None else module.weight.dtype
            epsilon = torch.finfo(dtype).eps
        return cls("rms", module.weight, None, epsilon)


def normalize(X: Tensor, norm: Norm, *, scale: float = 1.0, implementation: str = "auto") -> Tensor:
    """Returns scale * norm(X), for X [..., d]."""
    reasons = {"triton": _why_not_triton(X, norm), "reference": None}
    chosen = choose_implementation("norm", implementation, reasons)
    return (_triton if chosen == "triton" else _reference)(X, norm, scale)


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Returns whether autograd records operations on any of the tensors."""
    return torch.is_grad_enabled() and any(T is not None and T.requires_grad for T in tensors)


def _reference(X: Tensor, norm: Norm, scale: float) -> Tensor:
    if norm.kind == "rms":
        Y = F.rms_norm(X, X.shape[-1:], norm.gain, norm.epsilon)
    else:
        Y = F.layer_norm(X, X.shape[-1:], norm.gain, norm.bias, norm.epsilon)
    return Y if scale == 1.0 else Y * scale


def _triton(X: Tensor, norm: Norm, scale: float) -> Tensor:
    from writehead.ops import norm_kernels  # needs Triton, which is optional

    return norm_kernels.normalize(X, norm, scale)


def _why_not_triton(X: Tensor, norm: Norm) -> str | None:
    """Returns why the kernel cannot run, or None."""
    if X.is_meta or not runs_triton(X):
        return f"the norm kernel needs a GPU and Triton; X is on {X.device}"
    if needs_gradient(X, norm.gain, norm.bias):
        return "the norm kernel has no gradient"
    parameters = [T for T in (norm.gain, norm.bias) if T is not None]
    if X.dtype not in KERNEL_DTYPES or any(T.dtype != X.dtype for T in parameters):
        return f"the norm kernel needs X, gain and bias of one 16-bit or 32-bit type, not {X.dtype}"
    if X.shape[-1] > MAX_DEPTH:
        return f"the norm kernel takes rows of up to {MAX_DEPTH} elements, not {X.shape[-1]}"
    return None
