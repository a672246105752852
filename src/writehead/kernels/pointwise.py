"""What stands between the products of a decoding step: embedding and norms, one pass each.

One program owns one row, reads it once and writes it once; sums are float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from writehead.kernels.launch import chained, hand_over, launch, wait_for_input

ROWS = 32  # positions that one program of `lay_out` moves


def embed(
    tokens: Tensor, positions: Tensor, E: Tensor, P: Tensor, clock: Tensor | None = None
) -> Tensor:
    """E[tokens] + P[positions], [rows, d]; adds one to `clock` [1] where there is one.

    tokens and positions: [rows]; a position past the last row of P counts as the last.
    """
    rows, d = len(tokens), E.shape[1]
    X = torch.empty(rows, d, dtype=E.dtype, device=E.device)
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
    rows, d = X.shape
    Y = torch.empty_like(X)
    chain = chained(X)
    launch(_normalize_kernel, (rows,))(
        X,
        gain,
        gain if bias is None else bias,
        Y,
        d,
        epsilon,
        float(scale),
        SIZE=triton.next_power_of_2(d),
        CENTRED=centred,
        BIAS=bias is not None,
        CHAINED=bool(chain),
        num_warps=4,
        **chain,
    )
    return Y


def lay_out(T: Tensor, into: Tensor) -> None:
    """Puts T [b, m, g k], positions of heads, into `into` [b, g, m, k], heads of positions."""
    b, m, _ = T.shape
    g, k = into.shape[1], into.shape[3]
    rows = triton.cdiv(m, ROWS)
    launch(_lay_out_kernel, (b, rows, g))(
        T,
        into,
        T.stride(0),
        T.stride(1),
        into.stride(0),
        into.stride(1),
        m,
        k,
        ROWS=ROWS,
        SIZE=triton.next_power_of_2(k),
        num_warps=4,
    )


@triton.jit
def _lay_out_kernel(
    T, into, t_row, t_position, i_row, i_head, m, k, ROWS: tl.constexpr, SIZE: tl.constexpr
):
    """One program owns ROWS positions of one head of one row."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    at = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    ks = tl.arange(0, SIZE)
    mask = (at < m)[:, None] & (ks < k)[None, :]
    x = tl.load(
        T + row * t_row + at[:, None] * t_position + head * k + ks[None, :], mask=mask, other=0.0
    )
    tl.store(into + row * i_row + head * i_head + at[:, None] * k + ks[None, :], x, mask=mask)


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
    at = tl.arange(0, SIZE)
    token = tl.load(tokens + row).to(tl.int64)
    position = tl.minimum(tl.load(positions + row).to(tl.int64), last)
    e = tl.load(E + token * d + at, mask=at < d, other=0.0).to(tl.float32)
    p = tl.load(P + position * d + at, mask=at < d, other=0.0).to(tl.float32)
    tl.store(X + row * d + at, (e + p).to(X.dtype.element_ty), mask=at < d)
    if TICKS:
        if row == 0:
            tl.store(clock, tl.load(clock) + 1)


@triton.jit
def _normalize_kernel(
    X,
    gain,
    bias,
    Y,
    d,
    epsilon,
    scale,
    SIZE: tl.constexpr,
    CENTRED: tl.constexpr,
    BIAS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One program owns one row."""
    wait_for_input(CHAINED)
    hand_over(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, SIZE)
    x = tl.load(X + row * d + at, mask=at < d, other=0.0).to(tl.float32)
    if CENTRED:
        x = tl.where(at < d, x - tl.sum(x, axis=0) / d, 0.0)
    x = x * tl.rsqrt(tl.sum(x * x, axis=0) / d + epsilon)
    y = x * tl.load(gain + at, mask=at < d, other=0.0).to(tl.float32)
    if BIAS:
        y += tl.load(bias + at, mask=at < d, other=0.0).to(tl.float32)
    tl.store(Y + row * d + at, (y * scale).to(Y.dtype.element_ty), mask=at < d)
