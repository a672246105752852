"""The Triton kernels of `loss.py`."""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def loss_kernel(
    logits,
    stride,
    labels,
    objective,
    nll,
    log_z,
    vocab_size,
    label_smoothing,
    z_loss,
    CHUNK: tl.constexpr,
):
    """Computes one row per program, CHUNK logits at a time, with the softmax in base 2."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    label = tl.load(labels + row)
    counts = label >= 0
    x_label = tl.load(logits + label, mask=counts & (label < vocab_size), other=0.0).to(tl.float32)
    x_label = tl.where(label < vocab_size, x_label, float("nan"))
    highest = float("-inf")
    exp_sum = 0.0
    logit_sum = 0.0
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
    tl.store(objective + row, tl.where(counts, smoothed + z_loss * z * z, 0.0))
    tl.store(nll + row, tl.where(counts, loss, 0.0))
    tl.store(log_z + row, z)


@triton.jit
def loss_gradient_kernel(
    logits,
    stride,
    labels,
    log_z,
    d_p,
    d_all,
    d_label,
    gradient,
    gradient_stride,
    vocab_size,
    CHUNK: tl.constexpr,
):
    """Computes the gradient of CHUNK logits of one row per program."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    label = tl.load(labels + row)
    inside = j < vocab_size
    x = tl.load(logits + row * stride + j, mask=inside & (label >= 0), other=0.0).to(tl.float32)
    p = tl.exp2((x - tl.load(log_z + row)) * LOG2E)
    d = tl.load(d_p + row) * p + tl.load(d_all + row)
    d += tl.where(j == label, tl.load(d_label + row), 0.0)
    d = tl.where(label >= 0, d, 0.0)
    tl.store(gradient + row * gradient_stride + j, d.to(gradient.dtype.element_ty), mask=inside)
