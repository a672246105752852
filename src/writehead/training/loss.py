"""Cross-entropy with label smoothing and z-loss, summed over the labels that are not padding."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from writehead.data.batches import Batch
from writehead.ops.loss import label_loss


class Loss(NamedTuple):
    """Sums over labels: the training objective, and the negative log-likelihood alone."""

    objective: Tensor
    nll: Tensor


def batch_loss(model: nn.Module, batch: Batch, label_smoothing: float, z_loss: float) -> Loss:
    """Returns the loss of a translation model or a language model on a batch."""
    if batch.source is None:
        logits = model(batch.inputs, packing=batch.packing)
    else:
        packings = {"source_packing": batch.source_packing, "target_packing": batch.packing}
        logits = model(batch.source, batch.inputs, **packings)
    mask = batch.packing.segments != 0
    return sequence_loss(logits, batch.labels, mask, label_smoothing=label_smoothing, z_loss=z_loss)


def sequence_loss(
    logits: Tensor, labels: Tensor, mask: Tensor, *, label_smoothing: float, z_loss: float
) -> Loss:
    """Returns the loss of logits [b, n, vocab_size] for labels [b, n] where mask [b, n] is true."""
    labels = torch.where(mask, labels, -100).flatten()
    objectives, nlls = label_loss(
        logits.flatten(0, 1), labels, label_smoothing=label_smoothing, z_loss=z_loss
    )
    return Loss(objectives.sum(), nlls.sum())
