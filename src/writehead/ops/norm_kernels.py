"""The Triton kernel of `norm.py`: one pass over X, with sums in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from writehead.ops.launch import launch, launch_dependents, pdl, wait_for_previous

if TYPE_CHECKING:
    from torch import Tensor

    from writehead.ops.norm import Norm

MAX_ROWS_FOR_WARPS = 512  # with which several warps per row do not compete for an SM
MIN_ROWS_FOR_PAIRS = 4096  # from here on a program owns two rows, to have more loads in flight


def normalize(X: Tensor, norm: Norm, scale: float) -> Tensor:
    """Returns scale * norm(X), for X [..., d]."""
    X = X.contiguous()
    d = X.shape[-1]
    count = X.numel() // d
    rows = 1 if count < MIN_ROWS_FOR_PAIRS else 2
    Y = torch.empty_like(X)
    options = pdl(X)
    if count == 0:
        return Y
    launch(_normalize_kernel, (triton.cdiv(count, rows),))(
        X,
        X if norm.gain is None else norm.gain,
        X if norm.bias is None else norm.bias,
        Y,
        count,
        d,
        norm.epsilon,
        float(scale),
        ROWS=rows,
        SIZE=triton.next_power_of_2(d),
        CENTERED=norm.kind == "layer",
        GAIN=norm.gain is not None,
        BIAS=norm.bias is not None,
        PDL=bool(options),
        num_warps=8 if d > 4096 else 4 if count <= MAX_ROWS_FOR_WARPS else rows,
        **options,
    )
    return Y


@triton.jit
def _normalize_kernel(
    X,
    gain,
    bias,
    Y,
    count,
    d,
    epsilon,
    scale,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    CENTERED: tl.constexpr,
    GAIN: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Normalizes ROWS rows per program."""
    wait_for_previous(PDL)
    launch_dependents(PDL)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    at = tl.arange(0, SIZE)[None, :]
    mask = (rows < count) & (at < d)
    y = tl.load(X + rows * d + at, mask=mask, other=0.0).to(tl.float32)
    if CENTERED:
        y = tl.where(at < d, y - tl.sum(y, axis=1)[:, None] / d, 0.0)
    y = y * tl.rsqrt(tl.sum(y * y, axis=1)[:, None] / d + epsilon)
    if GAIN:
        y = y * tl.load(gain + at, mask=at < d, other=0.0).to(tl.float32)
    if BIAS:
        y += tl.load(bias + at, mask=at < d, other=0.0).to(tl.float32)
    tl.store(Y + rows * d + at, (y * scale).to(Y.dtype.element_ty), mask=mask)
