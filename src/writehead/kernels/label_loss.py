"""The loss of labels and its gradient, each in one pass over the logits.

With a vocabulary of tens of thousands the logits are the largest tensor of a training step, and
their loss is the time to read them. A program of `_sum_kernel` owns a row and reads it once for
log Z, the label's logit and the sum of all; one of `_differentiate_kernel` owns a part of a row.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op, register_autograd

WHOLE = 32768  # logits that a program of the first kernel takes at once
PART = 8192  # and of the second
LOG2E = tl.constexpr(1.4426950408889634)


def label_loss(
    logits: Tensor, labels: Tensor, label_smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor]:
    """What is trained on and the negative log-likelihood, [rows] each, float32.

    logits: [rows, vocab_size]. labels: [rows]; a row whose label is negative does not count, and
    both of it are 0. A label past the vocabulary makes them NaN.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    objective, nll, _ = _losses(logits, labels, label_smoothing, z_loss)
    return objective, nll


@custom_op("writehead::label_loss", mutates_args=())
def _losses(
    logits: Tensor, labels: Tensor, label_smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Objective, negative log-likelihood and log Z, [rows] each."""
    objective, nll, log_z = _empty(logits, labels, label_smoothing, z_loss)
    rows, vocab_size = logits.shape
    size = min(WHOLE, triton.next_power_of_2(vocab_size))
    with torch.cuda.device_of(logits):
        _sum_kernel[(rows,)](
            logits,
            logits.stride(0),
            labels,
            objective,
            nll,
            log_z,
            vocab_size,
            label_smoothing,
            z_loss,
            SIZE=size,
            num_warps=max(1, min(16, size // 256)),
        )
    return objective, nll, log_z


@_losses.register_fake
def _empty(
    logits: Tensor, labels: Tensor, label_smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor, Tensor]:
    objective, nll, log_z = (logits.new_empty(len(logits), dtype=torch.float32) for _ in range(3))
    return objective, nll, log_z


@custom_op("writehead::label_loss_backward", mutates_args=())
def _differentiate(
    logits: Tensor, labels: Tensor, log_z: Tensor, shares: Tensor, evenly: Tensor, own: Tensor
) -> Tensor:
    """The gradient of the logits: shares · p + evenly, and `own` more at the label; [rows] each."""
    gradient = torch.empty_like(logits)
    rows, vocab_size = logits.shape
    # what comes from a sum may be one number, repeated
    shares, evenly, own = (T.contiguous() for T in (shares, evenly, own))
    size = min(PART, triton.next_power_of_2(vocab_size))
    with torch.cuda.device_of(logits):
        _differentiate_kernel[(rows, triton.cdiv(vocab_size, size))](
            logits,
            logits.stride(0),
            labels,
            log_z,
            shares,
            evenly,
            own,
            gradient,
            gradient.stride(0),
            vocab_size,
            SIZE=size,
            num_warps=max(1, min(8, size // 256)),
        )
    return gradient


@_differentiate.register_fake
def _empty_gradient(
    logits: Tensor, labels: Tensor, log_z: Tensor, shares: Tensor, evenly: Tensor, own: Tensor
) -> Tensor:
    return torch.empty_like(logits)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, labels, ctx.label_smoothing, ctx.z_loss = inputs
    ctx.save_for_backward(logits, labels, output[2])


def _backward(ctx: Any, d_objective: Tensor, d_nll: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    logits, labels, log_z = ctx.saved_tensors
    smoothing = ctx.label_smoothing
    shares = d_objective * (1.0 + 2.0 * ctx.z_loss * log_z) + d_nll
    evenly = d_objective * (-smoothing / logits.shape[1])
    own = -(1.0 - smoothing) * d_objective - d_nll
    return _differentiate(logits, labels, log_z, shares, evenly, own), None, None, None


register_autograd(_losses, _backward, setup_context=_save)


@triton.jit
def _sum_kernel(
    logits,
    stride,
    labels,
    objective,
    nll,
    log_z,
    vocab_size,
    label_smoothing,
    z_loss,
    SIZE: tl.constexpr,
):
    """One program owns a row: log Z in base 2 on the way, SIZE logits at a time."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    label = tl.load(labels + row)
    counts = label >= 0
    own = tl.load(start + label, mask=counts & (label < vocab_size), other=0.0).to(tl.float32)
    own = tl.where(label < vocab_size, own, float("nan"))
    largest = float("-inf")
    total = 0.0
    whole = 0.0
    for first in range(0, vocab_size, SIZE):
        at = first + tl.arange(0, SIZE)
        inside = (at < vocab_size) & counts
        x = tl.load(start + at, mask=inside, other=0.0).to(tl.float32)
        whole += tl.sum(x, axis=0)
        x = tl.where(at < vocab_size, x * LOG2E, float("-inf"))
        now = tl.maximum(largest, tl.max(x, axis=0))
        base = tl.where(now == float("-inf"), 0.0, now)  # all that was seen is minus infinity
        total = total * tl.exp2(largest - base) + tl.sum(tl.exp2(x - base), axis=0)
        largest = now
    z = (largest + tl.log2(total)) / LOG2E
    mine = z - own
    smoothed = (1.0 - label_smoothing) * mine + label_smoothing * (z - whole / vocab_size)
    if label_smoothing == 0.0:
        smoothed = mine  # a logit of minus infinity is no harm then
    tl.store(objective + row, tl.where(counts, smoothed + z_loss * z * z, 0.0))
    tl.store(nll + row, tl.where(counts, mine, 0.0))
    tl.store(log_z + row, z)


@triton.jit
def _differentiate_kernel(
    logits,
    stride,
    labels,
    log_z,
    shares,
    evenly,
    own,
    gradient,
    gradient_stride,
    vocab_size,
    SIZE: tl.constexpr,
):
    """One program owns SIZE logits of a row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    label = tl.load(labels + row)
    inside = at < vocab_size
    x = tl.load(logits + row * stride + at, mask=inside & (label >= 0), other=0.0).to(tl.float32)
    z = tl.load(log_z + row)
    p = tl.exp2((x - z) * LOG2E)
    d = tl.load(shares + row) * p + tl.load(evenly + row)
    d += tl.where(at == label, tl.load(own + row), 0.0)
    d = tl.where(label >= 0, d, 0.0)
    tl.store(gradient + row * gradient_stride + at, d.to(gradient.dtype.element_ty), mask=inside)
