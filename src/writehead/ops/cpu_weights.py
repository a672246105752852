"""Packs weights in the layouts of CPU libraries: float32 for oneDNN, int8 for fbgemm.

A product with int8 weights quantizes each row of X to 8 bits with its own scale, so the result for
a row does not depend on the batch. Each row of W has a scale too. Sums are exact, in 32 bits.
"""

import functools
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from writehead.ops.norm import Norm, normalize, rms_factors

ZERO_POINT = 128  # of rows of X, which fbgemm stores as unsigned integers
LEVELS = 127  # largest code
# CPUs without VNNI add two products in 16 bits. Weights of 7 bits cannot overflow such sums.
LEVELS_WITHOUT_VNNI = 63
MIN_SCALE = 1e-30  # instead of the scale 0
ONEDNN_ROWS = 16  # rows of X that the layout is chosen for; it is as fast for other numbers
# oneDNN's names of activations: attribute and algorithm
ONEDNN_ACTIVATIONS = {
    None: ("none", ""),
    "relu": ("relu", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "silu": ("swish", ""),
}


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight W [columns, depth] in a library's own layout."""

    kind: Literal["onednn", "int8"]
    data: Any

    def multiply(
        self,
        X: Tensor,
        bias: Tensor | None,
        activation: str | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Returns residual + activation(X W^T + bias), for X [rows, depth]."""
        product = torch.ops.mkldnn._linear_pointwise
        if residual is not None and activation is None:
            Y: Tensor = product.binary(X, residual, self.data, bias, "add")
            return Y
        name, algorithm = ONEDNN_ACTIVATIONS[activation]
        Y = product(X, self.data, bias, name, [], algorithm)
        return Y if residual is None else Y.add_(residual)

    def multiply_quantized(self, X: Tensor, norm: Norm | None) -> Tensor:
        """Returns norm(X) W^T for X [rows, depth], with rows quantized to 8 bits."""
        factors = None
        if norm is not None and norm.kind == "rms" and norm.gain is None:
            factors = rms_factors(X, norm.epsilon)
        elif norm is not None:
            X = normalize(X, norm)
        scales = X.abs().amax(dim=1, keepdim=True).div_(LEVELS).clamp_(min=MIN_SCALE)
        multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
        # fbgemm rounds differently at the ends of parts, so that rows would depend on the batch
        Y: Tensor = multiply((X / scales).round_(), 1.0, ZERO_POINT, self.data)
        return Y.mul_(scales if factors is None else scales.mul_(factors))


def _why_not_float32(W: Tensor) -> str | None:
    if W.device.type == "cpu" and W.dtype == torch.float32:
        return None
    dtype = str(W.dtype).removeprefix("torch.")
    return f"it needs float32 weights on a CPU, not {dtype} on {W.device}"


def why_not_onednn(W: Tensor) -> str | None:
    """Returns why oneDNN cannot multiply with W, or None."""
    if reason := _why_not_float32(W):
        return reason
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return "this PyTorch has no oneDNN"
    return None


def why_not_int8(W: Tensor) -> str | None:
    """Returns why fbgemm cannot multiply with W in int8, or None."""
    if reason := _why_not_float32(W):
        return reason
    if _int8_levels() is None:
        return "this PyTorch has no int8 products (fbgemm) for this CPU"
    return None


def int8_name() -> str:
    """Describes int8 weights, which have fewer bits on some CPUs."""
    return "int8" if _int8_levels() == LEVELS else "int8, 7 bits"


@torch.no_grad()
def pack_onednn(W: Tensor) -> PackedWeight:
    """Returns W in the layout of oneDNN."""
    data = torch.ops.mkldnn._reorder_linear_weight(W.detach().contiguous(), ONEDNN_ROWS)
    return PackedWeight("onednn", data)


@torch.no_grad()
def pack_int8(W: Tensor, levels: int | None = None) -> PackedWeight:
    """Returns W in int8, with a scale per row, in the layout of fbgemm."""
    levels = levels or _int8_levels()
    assert levels is not None
    codes, scales = quantize_rows(W.detach(), levels)
    zeros = torch.zeros(len(W), dtype=torch.long)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # PyTorch will replace quantized tensors
        W = torch._make_per_channel_quantized_tensor(codes, scales[:, 0].double(), zeros, 0)
        return PackedWeight("int8", torch.ops.quantized.linear_prepack(W, None))


def quantize_rows(W: Tensor, levels: int = LEVELS) -> tuple[Tensor, Tensor]:
    """Returns int8 codes of W up to `levels`, and the scale of each row [rows, 1]."""
    scales = W.abs().amax(dim=1, keepdim=True).div_(levels).clamp_(min=MIN_SCALE)
    return (W / scales).round_().to(torch.int8), scales


@functools.cache
def _int8_levels() -> int | None:
    """Returns the largest code of a weight: 127, 63 where 127 overflows, None without fbgemm."""
    largest = torch.full((1, 64), float(LEVELS))
    for levels in (LEVELS, LEVELS_WITHOUT_VNNI):
        try:
            W = pack_int8(torch.full((32, 64), float(levels)), levels)
            Y = W.multiply_quantized(largest, None)
        except (RuntimeError, AttributeError, NotImplementedError):
            return None
        if torch.equal(Y, torch.full_like(Y, float(64 * LEVELS * levels))):
            return levels
    return None
