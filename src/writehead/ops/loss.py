"""Cross-entropy with label smoothing and z-loss, for each row of logits.

With a vocabulary of tens of thousands, the logits are the largest tensor of a training step. The
Triton kernels read them once for the loss and once for its gradient.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op, register_autograd
from torch.nn.functional import nll_loss

from writehead.ops.available import choose_implementation
from writehead.ops.launch import LOG2E, launch, tl, triton
from writehead.util.devices import runs_triton

FORWARD_CHUNK = 32768  # logits that one program of the loss loads at once
BACKWARD_CHUNK = 8192  # logits that one program of the gradient computes


def label_loss(
    logits: Tensor,
    labels: Tensor,
    *,
    label_smoothing: float,
    z_loss: float,
    implementation: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Returns the training objective and the negative log-likelihood, [rows] each, in float32.

    logits: [rows, vocab_size]. labels: [rows]; both losses of a row with a negative label are 0.
    The objective includes z_loss · log²Z, which keeps the logits from drifting.
    """
    why_not = None if runs_triton(logits) else f"Triton does not run on {logits.device}"
    reasons = {"triton": why_not, "reference": None}
    if choose_implementation("loss", implementation, reasons) == "reference":
        return _reference(logits, labels, label_smoothing, z_loss)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    objective, nll, _ = _forward(logits, labels, label_smoothing, z_loss)
    return objective, nll


def _reference(
    logits: Tensor, labels: Tensor, label_smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor]:
    logits, counts = logits.float(), labels >= 0
    log_z = logits.logsumexp(dim=-1)
    labels = torch.where(counts, labels, -100)  # nll_loss ignores -100
    nll = log_z * counts + nll_loss(logits, labels, reduction="none")
    objective = nll
    if label_smoothing > 0.0:  # 0 times a logit of -inf would be NaN
        uniform = (log_z - logits.mean(dim=-1)) * counts
        objective = (1.0 - label_smoothing) * nll + label_smoothing * uniform
    return objective + z_loss * log_z.square() * counts, nll


@custom_op("writehead::label_loss", mutates_args=())
def _forward(
    logits: Tensor, labels: Tensor, label_smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the objective, the negative log-likelihood and log Z, [rows] each."""
    outputs = _empty_losses(logits)
    rows, vocab_size = logits.shape
    chunk = min(FORWARD_CHUNK, triton.next_power_of_2(vocab_size))
    with torch.cuda.device_of(logits):
        launch(loss_kernel, (rows,))(
            *(logits, logits.stride(0), labels, outputs, vocab_size, label_smoothing, z_loss),
            CHUNK=chunk,
            num_warps=max(1, min(16, chunk // 256)),
        )
    return outputs


@custom_op("writehead::label_loss_backward", mutates_args=())
def _backward(logits: Tensor, labels: Tensor, log_z: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """Returns the gradient of the logits: d_p · p + d_all, plus d_label at the label."""
    gradient = torch.empty_like(logits)
    rows, vocab_size = logits.shape
    chunk = min(BACKWARD_CHUNK, triton.next_power_of_2(vocab_size))
    given = tuple(T.contiguous() for T in factors)  # the gradient of a sum is an expanded scalar
    with torch.cuda.device_of(logits):
        launch(loss_gradient_kernel, (rows, triton.cdiv(vocab_size, chunk)))(
            *(logits, logits.stride(0), labels, log_z, given),
            *(gradient, gradient.stride(0), vocab_size),
            CHUNK=chunk,
            num_warps=max(1, min(8, chunk // 256)),
        )
    return gradient


def _empty_losses(logits: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    objective, nll, log_z = (logits.new_empty(len(logits), dtype=torch.float32) for _ in range(3))
    return objective, nll, log_z


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, labels, ctx.label_smoothing, ctx.z_loss = inputs
    ctx.save_for_backward(logits, labels, output[2])


def _differentiate(ctx: Any, d_objective: Tensor, d_nll: Tensor, _: Tensor) -> tuple[Any, ...]:
    logits, labels, log_z = ctx.saved_tensors
    smoothing = ctx.label_smoothing
    d_p = d_objective * (1.0 + 2.0 * ctx.z_loss * log_z) + d_nll
    d_all = d_objective * (-smoothing / logits.shape[1])
    d_label = -(1.0 - smoothing) * d_objective - d_nll
    return _backward(logits, labels, log_z, [d_p, d_all, d_label]), None, None, None


_forward.register_fake(_empty_losses)
_backward.register_fake(lambda logits, *_: torch.empty_like(logits))
register_autograd(_forward, _differentiate, setup_context=_save)


@triton.jit
def loss_kernel(
    logits, stride, labels, outputs, vocab_size, label_smoothing, z_loss, CHUNK: tl.constexpr
):
    """Computes one row per program, CHUNK logits at a time, with the softmax in base 2."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    label = tl.load(labels + row)
    counts = label >= 0
    x_label = tl.load(logits + label, mask=counts & (label < vocab_size), other=0.0).to(tl.float32)
    x_label = tl.where(label < vocab_size, x_label, float("nan"))
    highest, exp_sum, logit_sum = float("-inf"), 0.0, 0.0
    for start in range(0, vocab_size, CHUNK):
        j = start + tl.arange(0, CHUNK)
        x = tl.load(logits + j, mask=(j < vocab_size) & counts, other=0.0).to(tl.float32)
        logit_sum += tl.sum(x, axis=0)
        x = tl.where(j < vocab_size, x * LOG2E, float("-inf"))
        higher = tl.maximum(highest, tl.max(x, axis=0))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf would be NaN
        exp_sum = exp_sum * tl.exp2(highest - base) + tl.sum(tl.exp2(x - base), axis=0)
        highest = higher
    z = (highest + tl.log2(exp_sum)) / LOG2E
    loss = z - x_label
    smoothed = (1.0 - label_smoothing) * loss + label_smoothing * (z - logit_sum / vocab_size)
    if label_smoothing == 0.0:
        smoothed = loss  # 0 times a logit of -inf would be NaN
    objective, nll, log_z = outputs
    tl.store(objective + row, tl.where(counts, smoothed + z_loss * z * z, 0.0))
    tl.store(nll + row, tl.where(counts, loss, 0.0))
    tl.store(log_z + row, z)


@triton.jit
def loss_gradient_kernel(
    logits, stride, labels, log_z, factors, gradient, d_stride, vocab_size, CHUNK: tl.constexpr
):
    """Computes the gradient of CHUNK logits of one row per program."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    label = tl.load(labels + row)
    inside = j < vocab_size
    x = tl.load(logits + row * stride + j, mask=inside & (label >= 0), other=0.0).to(tl.float32)
    p = tl.exp2((x - tl.load(log_z + row)) * LOG2E)
    d_p, d_all, d_label = factors
    d = tl.load(d_p + row) * p + tl.load(d_all + row)
    d += tl.where(j == label, tl.load(d_label + row), 0.0)
    d = tl.where(label >= 0, d, 0.0)
    tl.store(gradient + row * d_stride + j, d.to(gradient.dtype.element_ty), mask=inside)
