"""Linear projections, fused with the norm of the input, bias, activation, gate and residual."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch.nn import functional as F

from writehead.errors import BackendError, ConfigError, ShapeError, nearest
from writehead.ops.available import runs_triton
from writehead.ops.norm import KERNEL_DTYPES, Norm, needs_gradient, normalize

if TYPE_CHECKING:
    from torch import Tensor

Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
MAX_SMALL_ROWS = 256
MAX_SMALL_COLUMNS = 2048  # of a weight, for more than 1 row
MAX_SMALL_DEPTH = 1024  # of a weight, for more than 16 rows


@dataclass(frozen=True, eq=False)
class Weight:
    """A projection, and the norm of its input."""

    W: Tensor  # [columns, depth]
    bias: Tensor | None = None  # [columns]
    norm: Norm | None = None
    column_sums: Tensor | None = None  # [columns] float32, for a folded layer norm
    streamed: bool = False  # W does not stay in the L2 cache until the next step

    @property
    def is_folded(self) -> bool:
        """Whether the norm needs only the statistics of X, besides W and `column_sums`."""
        norm = self.norm
        if norm is None:
            return True
        has_sums = norm.kind == "rms" or self.column_sums is not None
        return norm.gain is None and norm.bias is None and has_sums

    @torch.no_grad()
    def fold(self, *, scale: float = 1.0, zero_bias: bool = False) -> Weight:
        """Returns this weight for inference, with `scale` and the norm's gain and bias folded in.

        zero_bias: add a bias of zeros if there is none; cuBLAS fuses activations only with a bias.
        """
        W, bias, norm, sums = self.W, self.bias, self.norm, None
        wide = torch.promote_types(W.dtype, torch.float32)
        if norm is not None and norm.bias is not None:
            shift = scale * (W.to(wide) @ norm.bias.to(wide))
            bias = (shift if bias is None else bias + shift).to(W.dtype)
        if norm is not None and norm.gain is not None:
            W = (scale * W.to(wide) * norm.gain.to(wide)).to(W.dtype)
        elif scale != 1.0:
            W = (scale * W.to(wide)).to(W.dtype)
        if norm is not None:
            norm = replace(norm, gain=None, bias=None)
            sums = W.float().sum(1) if norm.kind == "layer" else None
        if bias is None and zero_bias:
            bias = W.new_zeros(len(W))
        return replace(self, W=W, bias=bias, norm=norm, column_sums=sums)


@dataclass(frozen=True, eq=False)
class Epilogue:
    """The operations after the product; see `linear`."""

    activation: Activation | None
    gated: bool
    residual: Tensor | None  # [rows, columns]
    scale: float


def linear(
    X: Tensor,
    weight: Weight,
    *,
    activation: Activation | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
    scale: float = 1.0,
    implementation: str = "auto",
) -> Tensor:
    """Returns residual + activation(scale * norm(X) W^T + bias), for X [..., depth].

    gated: W has 2 f rows; the activation of the first f columns is multiplied by the last f.
    Without gradients, the result may overwrite `residual`.
    """
    columns = len(weight.W) // 2 if gated else len(weight.W)
    if X.shape[-1] != weight.W.shape[1]:
        raise ShapeError(f"X has depth {X.shape[-1]}, but W has depth {weight.W.shape[1]}")
    shape = (*X.shape[:-1], columns)
    if residual is not None and residual.shape != shape:
        raise ShapeError(f"residual has shape {list(residual.shape)}; it must be {list(shape)}")
    epilogue = Epilogue(activation, gated, residual, scale)
    if implementation == "auto":
        implementation = _choose(X, weight, epilogue)
    if implementation not in IMPLEMENTATIONS:
        known = nearest(implementation, IMPLEMENTATIONS)
        raise ConfigError(f"unknown implementation of linear {implementation!r}; {known}")
    return IMPLEMENTATIONS[implementation](X, weight, epilogue)


def _choose(X: Tensor, weight: Weight, epilogue: Epilogue) -> str:
    """Returns the fastest implementation, by measurements on an H200."""
    if X.is_meta or not runs_triton(X) or _why_not_library(X, weight, epilogue):
        return "reference"
    if _why_not_small_rows(X, weight, epilogue):
        return "library"
    rows, (columns, depth) = X.numel() // X.shape[-1], weight.W.shape
    if rows == 1:
        return "small_rows"
    is_narrow = columns <= MAX_SMALL_COLUMNS and (depth <= MAX_SMALL_DEPTH or rows <= 16)
    return "small_rows" if is_narrow and X.dtype != torch.float32 else "library"


def can_defer_norm(X: Tensor, weight: Weight) -> bool:
    """Returns whether a projection may leave its norm to the attention kernel (`DeferredRms`).

    For one row, the projection computes the norm for free. In float16, rows that are not
    normalized may overflow.
    """
    norm, rows = weight.norm, X.numel() // X.shape[-1]
    if norm is None or norm.kind != "rms" or rows == 1 or X.dtype == torch.float16:
        return False
    return runs_triton(X) and weight.is_folded and not needs_gradient(X, weight.W)


def _activate(Y: Tensor, activation: Activation | None) -> Tensor:
    if activation is None:
        return Y
    if activation == "relu":
        return torch.relu(Y)
    if activation == "silu":
        return F.silu(Y)
    return F.gelu(Y, approximate="tanh" if activation == "gelu_tanh" else "none")


def _reference(X: Tensor, weight: Weight, epilogue: Epilogue) -> Tensor:
    if weight.norm is not None:
        X = normalize(X, weight.norm, implementation="reference")
    if epilogue.scale != 1.0:
        X = X * epilogue.scale
    return _finish(F.linear(X, weight.W, weight.bias), epilogue)


def _finish(Y: Tensor, epilogue: Epilogue) -> Tensor:
    if epilogue.gated:
        Y, gate = Y.chunk(2, dim=-1)
        Y = _activate(Y, epilogue.activation) * gate
    else:
        Y = _activate(Y, epilogue.activation)
    return Y if epilogue.residual is None else epilogue.residual + Y


def _library(X: Tensor, weight: Weight, epilogue: Epilogue) -> Tensor:
    """Runs a norm kernel, then a cuBLAS product fused with as much of the epilogue as possible."""
    reason = _why_not_library(X, weight, epilogue)
    if reason is not None:
        raise BackendError(reason)
    W, bias, activation, residual = weight.W, weight.bias, epilogue.activation, epilogue.residual
    if weight.norm is not None:
        X = normalize(X, weight.norm, scale=epilogue.scale)
    elif epilogue.scale != 1.0:
        X = X * epilogue.scale
    rows = X.reshape(-1, X.shape[-1])
    if epilogue.gated and residual is None and len(rows) > 0 and _runs_kernels(X):
        from writehead.ops import linear_kernels

        Y = linear_kernels.gate(F.linear(rows, W, bias), activation)
        return Y.view(*X.shape[:-1], -1)
    fusable = activation in ("relu", "gelu_tanh") and not epilogue.gated
    if fusable and bias is not None and X.is_cuda:  # on a CPU this would be the exact gelu
        Y = torch._addmm_activation(bias, rows, W.t(), use_gelu=activation == "gelu_tanh")
        Y = Y.view(*X.shape[:-1], len(W))
        return Y if residual is None else residual + Y
    if residual is None or activation or epilogue.gated or not residual.is_contiguous():
        return _finish(F.linear(X, W, bias), epilogue)
    if residual.data_ptr() == X.data_ptr():
        residual = residual.clone()
    residual.view(-1, len(W)).addmm_(rows, W.t())
    return residual if bias is None else residual.add_(bias)


def _small_rows(X: Tensor, weight: Weight, epilogue: Epilogue) -> Tensor:
    reason = _why_not_small_rows(X, weight, epilogue)
    if reason is not None:
        raise BackendError(reason)
    from writehead.ops import linear_kernels

    rows = X.reshape(-1, X.shape[-1]).contiguous()
    columns = len(weight.W) // 2 if epilogue.gated else len(weight.W)
    residual = epilogue.residual
    if residual is not None:
        epilogue = replace(epilogue, residual=residual.reshape(-1, columns).contiguous())
    return linear_kernels.small_rows(rows, weight, epilogue).view(*X.shape[:-1], columns)


def _runs_kernels(X: Tensor) -> bool:
    return runs_triton(X) and X.dtype in KERNEL_DTYPES


def _why_not_library(X: Tensor, weight: Weight, epilogue: Epilogue) -> str | None:
    """Returns why the library product cannot run, or None."""
    norm = weight.norm
    parameters = (None, None) if norm is None else (norm.gain, norm.bias)
    if needs_gradient(X, weight.W, weight.bias, epilogue.residual, *parameters):
        return "this product has no gradient; use the reference"
    if torch.is_autocast_enabled(X.device.type):
        return "this product does not support autocast; use the reference"
    tensors = (weight.W, weight.bias, epilogue.residual)
    if any(T is not None and T.dtype != X.dtype for T in tensors):
        return f"this product needs X, W, bias and residual of one dtype; X has {X.dtype}"
    return None


def _why_not_small_rows(X: Tensor, weight: Weight, epilogue: Epilogue) -> str | None:
    """Returns why the kernel cannot run, or None."""
    if not _runs_kernels(X):
        place = f"{X.dtype} on {X.device}"
        return f"the small-rows product needs Triton, a GPU and 16 or 32 bits, not {place}"
    reason = _why_not_library(X, weight, epilogue)
    if reason is not None:
        return reason
    rows = X.numel() // max(X.shape[-1], 1)
    if not 1 <= rows <= MAX_SMALL_ROWS:
        return f"the small-rows product takes 1 to {MAX_SMALL_ROWS} rows, not {rows}"
    if not weight.is_folded:
        return "the small-rows product needs its norm folded into W; call Weight.fold"
    if not weight.W.is_contiguous():
        return "the small-rows product needs a contiguous W"
    return None


IMPLEMENTATIONS = {"reference": _reference, "library": _library, "small_rows": _small_rows}
