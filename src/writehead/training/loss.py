"""Cross-entropy with label smoothing and z-loss, and distillation from a teacher.

Losses are summed over the labels that are not padding.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from writehead.data.batches import Batch
from writehead.ops.loss import label_loss


class SoftLabels(NamedTuple):
    """The logits of a teacher, the weight of its loss in the objective, and the temperature."""

    logits: Tensor  # [b, n, vocab_size]
    weight: float
    temperature: float


class Loss(NamedTuple):
    """Sums over labels: the training objective, and the negative log-likelihood alone."""

    objective: Tensor
    nll: Tensor


def batch_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Returns the logits [b, n, vocab_size] of a translation model or a language model."""
    if batch.source is None:
        logits: Tensor = model(batch.inputs, packing=batch.packing)
    else:
        packings = {"source_packing": batch.source_packing, "target_packing": batch.packing}
        logits = model(batch.source, batch.inputs, **packings)
    return logits


def batch_loss(
    model: nn.Module,
    batch: Batch,
    label_smoothing: float,
    z_loss: float,
    soft: SoftLabels | None = None,
) -> Loss:
    """Returns the loss of a model on a batch, mixed with distillation if `soft` is given."""
    logits, mask = batch_logits(model, batch), batch.packing.segments != 0
    options = {"label_smoothing": label_smoothing, "z_loss": z_loss}
    loss = sequence_loss(logits, batch.labels, mask, **options)
    if soft is None:
        return loss
    distilled = distillation_loss(logits, soft.logits, mask, soft.temperature)
    return Loss(torch.lerp(loss.objective, distilled, soft.weight), loss.nll)


def sequence_loss(
    logits: Tensor, labels: Tensor, mask: Tensor, *, label_smoothing: float, z_loss: float
) -> Loss:
    """Returns the loss of logits [b, n, vocab_size] for labels [b, n] where mask [b, n] is true."""
    labels = torch.where(mask, labels, -100).flatten()
    objectives, nlls = label_loss(
        logits.flatten(0, 1), labels, label_smoothing=label_smoothing, z_loss=z_loss
    )
    return Loss(objectives.sum(), nlls.sum())


def distillation_loss(logits: Tensor, teacher: Tensor, mask: Tensor, temperature: float) -> Tensor:
    """Returns the cross-entropy of softmax(logits / T) to softmax(teacher / T), times T².

    logits, teacher: [b, n, vocab_size]. The factor T² keeps the size of the gradient (Hinton et
    al., 2015).
    """
    p = torch.softmax(teacher.float() / temperature, dim=-1)
    log_q = torch.log_softmax(logits.float() / temperature, dim=-1)
    terms = torch.where(p > 0.0, p * log_q, 0.0)  # 0 times a log probability of -inf would be NaN
    return -(terms.sum(dim=-1) * mask).sum() * temperature**2
