"""RMS norm and layer norm; the kernel makes one pass over X, with sums in float32."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from writehead.ops.available import choose_implementation, needs_gradient, why_not_kernel
from writehead.ops.launch import launch_pdl, multiply, tl, triton, wait_for_previous

MAX_DEPTH = 16384  # elements of a row, which one program holds
MAX_ROWS_FOR_WARPS = 512  # with more rows, several warps per row would compete for an SM
MIN_ROWS_FOR_PAIRS = 4096  # from here on, a program owns two rows, for more loads in flight


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm over the last dimension, with an optional gain [d] and bias [d]."""

    kind: Literal["rms", "layer"]
    gain: Tensor | None
    bias: Tensor | None
    epsilon: float
    offset: float = 0.0  # added to the gain

    @classmethod
    def of(cls, module: nn.RMSNorm | nn.LayerNorm) -> "Norm":
        """Returns the norm that `module` computes; its `offset`, if any, is added to the gain."""
        if isinstance(module, nn.LayerNorm):
            return cls("layer", module.weight, module.bias, module.eps)
        assert module.eps is not None
        return cls("rms", module.weight, None, module.eps, getattr(module, "offset", 0.0))

    def wide_gain(self, dtype: torch.dtype) -> Tensor:
        """The gain with its offset, in a dtype that does not round the sum."""
        assert self.gain is not None
        return self.gain.to(dtype) + self.offset if self.offset else self.gain.to(dtype)


@dataclass(frozen=True, eq=False)
class DeferredRms:
    """The RMS norm of X [..., d], which a projection of X has left to a later op.

    The gain is folded into the projection. The later op multiplies each row by the remaining
    factor, for less than the cost of a separate kernel.
    """

    X: Tensor
    epsilon: float

    def apply(self, Y: Tensor) -> Tensor:
        """Multiplies each row of Y [..., columns] by 1 / RMS of its row of X."""
        X = self.X.to(torch.promote_types(self.X.dtype, torch.float32))
        return (Y * rms_factors(X, self.epsilon)).to(Y.dtype)

    def for_kernel(self) -> tuple[Tensor, int, float, Any]:
        """Returns X, d, epsilon and the power of two above d, as kernels take them."""
        d = self.X.shape[-1]
        size = tl.constexpr(triton.next_power_of_2(d))
        return self.X.reshape(-1, d).contiguous(), d, self.epsilon, size


def rms_factors(X: Tensor, epsilon: float) -> Tensor:
    """Returns 1 / sqrt(mean(x²) + epsilon) of each row of X [..., d], [..., 1]."""
    if needs_gradient(X):
        return (X.square().mean(dim=-1, keepdim=True) + epsilon).rsqrt()
    factors: Tensor = torch.linalg.vector_norm(X, dim=-1, keepdim=True)
    return factors.square_().div_(X.shape[-1]).add_(epsilon).rsqrt_()


def normalize(
    X: Tensor, norm: Norm | None, *, scale: float = 1.0, implementation: str = "auto"
) -> Tensor:
    """Returns scale * norm(X), for X [..., d]."""
    if norm is None:
        return X if scale == 1.0 else X * scale
    reasons = {"triton": _why_not_triton(X, norm), "reference": None}
    chosen = choose_implementation("norm", implementation, reasons)
    return (_triton if chosen == "triton" else _reference)(X, norm, scale)


def _why_not_triton(X: Tensor, norm: Norm) -> str | None:
    """Returns why the kernel cannot run, or None."""
    if reason := why_not_kernel(X, norm.gain, norm.bias):
        return reason
    if any(T is not None and T.dtype != X.dtype for T in (norm.gain, norm.bias)):
        return f"the kernel needs X, gain and bias of one dtype; X has {X.dtype}"
    if X.shape[-1] > MAX_DEPTH:
        return f"the kernel takes rows of up to {MAX_DEPTH} elements, not {X.shape[-1]}"
    return None


def _reference(X: Tensor, norm: Norm, scale: float) -> Tensor:
    if norm.kind == "rms" and norm.offset:
        wide = torch.promote_types(X.dtype, torch.float32)
        Y = F.rms_norm(X.to(wide), X.shape[-1:], norm.wide_gain(wide), norm.epsilon).to(X.dtype)
    elif norm.kind == "rms" and norm.gain is None and not needs_gradient(X):
        Y = DeferredRms(X, norm.epsilon).apply(X)
    elif norm.kind == "rms":
        Y = F.rms_norm(X, X.shape[-1:], norm.gain, norm.epsilon)
    else:
        Y = F.layer_norm(X, X.shape[-1:], norm.gain, norm.bias, norm.epsilon)
    return Y if scale == 1.0 else Y * scale


def _triton(X: Tensor, norm: Norm, scale: float) -> Tensor:
    X, d = X.contiguous(), X.shape[-1]
    Y, count = torch.empty_like(X), X.numel() // d
    if count == 0:
        return Y
    rows = 1 if count < MIN_ROWS_FOR_PAIRS else 2
    constants = map(tl.constexpr, (rows, triton.next_power_of_2(d), norm.kind == "layer"))
    launch_pdl(_normalize_kernel, (triton.cdiv(count, rows),), X)(
        *(X, norm.gain, norm.bias, Y, count, d),
        *(norm.epsilon, norm.offset, float(scale), *constants),
        num_warps=8 if d > 4096 else 4 if count <= MAX_ROWS_FOR_WARPS else rows,
    )
    return Y


@triton.jit
def _normalize_kernel(
    X, gain, bias, Y, count, d, epsilon, offset, scale, ROWS, SIZE, CENTERED, PDL: tl.constexpr
):
    """Normalizes ROWS rows per program."""
    wait_for_previous(PDL)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    at = tl.arange(0, SIZE)[None, :]
    mask = (rows < count) & (at < d)
    y = tl.load(X + rows * d + at, mask=mask, other=0.0).to(tl.float32)
    if CENTERED:
        y = tl.where(at < d, y - tl.sum(y, axis=1)[:, None] / d, 0.0)
    y = y * tl.rsqrt(tl.sum(multiply(y, y), axis=1)[:, None] / d + epsilon)
    if gain is not None:
        y = y * (tl.load(gain + at, mask=at < d, other=0.0).to(tl.float32) + offset)
    if bias is not None:
        y += tl.load(bias + at, mask=at < d, other=0.0).to(tl.float32)
    tl.store(Y + rows * d + at, (y * scale).to(Y.dtype.element_ty), mask=mask)
