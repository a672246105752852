"""What stands between the products of a decoding step: embedding and norms, one pass each.

One program owns one row, reads it once and writes it once; sums are float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from writehead.kernels.launch import chained, hand_over, launch, wait_for_input

MANY = 4096  # rows from which on a program of `normalize` takes two: that many bytes under way


def embed(
    tokens: Tensor,
    positions: Tensor,
    E: Tensor,
    P: Tensor,
    clock: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """E[tokens] + P[positions], [rows, d], in `out` if given; adds one to `clock` [1] if given.

    tokens and positions: [rows]; a position past the last row of P counts as the last.
    """
    rows, d = len(tokens), E.shape[1]
    X = torch.empty(rows, d, dtype=E.dtype, device=E.device) if out is None else out
    chain = chained(E)
    launch(_embed_kernel, (rows,))(
        tokens,
        positions,
        E,
        P,
        X,
        tokens if clock is None else clock,
        P.shape[0] - 1,
        d,
        SIZE=triton.next_power_of_2(d),
        TICKS=clock is not None,
        CHAINED=bool(chain),
        num_warps=4,
        **chain,
    )
    return X


def normalize(
    X: Tensor, gain: Tensor, bias: Tensor | None, *, epsilon: float, centred: bool, scale: float = 1
) -> Tensor:
    """RMS norm of X [rows, d] or, `centred`, layer norm; times gain, plus bias, times `scale`."""
    count, d = X.shape
    rows = 1 if count < MANY else 2
    Y = torch.empty_like(X)
    chain = chained(X)
    launch(_normalize_kernel, (triton.cdiv(count, rows),))(
        X,
        gain,
        gain if bias is None else bias,
        Y,
        count,
        d,
        epsilon,
        float(scale),
        ROWS=rows,
        SIZE=triton.next_power_of_2(d),
        CENTRED=centred,
        BIAS=bias is not None,
        CHAINED=bool(chain),
        num_warps=1 if rows == 1 else 2,
        **chain,
    )
    return Y


@triton.jit
def _embed_kernel(
    tokens,
    positions,
    E,
    P,
    X,
    clock,
    last,
    d,
    SIZE: tl.constexpr,
    TICKS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One program owns one row; the first of them ticks the clock, which no other reads."""
    wait_for_input(CHAINED)
    hand_over(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    embed_row(E, P, X, row, tl.load(tokens + row), tl.load(positions + row), last, d, SIZE)
    if TICKS:
        if row == 0:
            tl.store(clock, tl.load(clock) + 1)


@triton.jit
def embed_row(E, P, X, row, token, position, last, d, SIZE: tl.constexpr):
    """Puts the embedding of a token at a position, at most `last`, into a row of X."""
    at = tl.arange(0, SIZE)
    e_at, p_at = token.to(tl.int64) * d, tl.minimum(position.to(tl.int64), last) * d
    e = tl.load(E + e_at + at, mask=at < d, other=0.0).to(tl.float32)
    p = tl.load(P + p_at + at, mask=at < d, other=0.0).to(tl.float32)
    tl.store(X + row * d + at, (e + p).to(X.dtype.element_ty), mask=at < d)


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
    CENTRED: tl.constexpr,
    BIAS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One program owns ROWS rows."""
    wait_for_input(CHAINED)
    hand_over(CHAINED)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    at = tl.arange(0, SIZE)[None, :]
    is_there = (rows < count) & (at < d)
    x = tl.load(X + rows * d + at, mask=is_there, other=0.0).to(tl.float32)
    if CENTRED:
        x = tl.where(at < d, x - tl.sum(x, axis=1)[:, None] / d, 0.0)
    x = x * tl.rsqrt(tl.sum(x * x, axis=1)[:, None] / d + epsilon)
    y = x * tl.load(gain + at, mask=at < d, other=0.0).to(tl.float32)
    if BIAS:
        y += tl.load(bias + at, mask=at < d, other=0.0).to(tl.float32)
    tl.store(Y + rows * d + at, (y * scale).to(Y.dtype.element_ty), mask=is_there)
