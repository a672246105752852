"""Cross-entropy with label smoothing and z-loss, summed over the labels that are not padding."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import nll_loss

from writehead.data.batches import Batch
from writehead.kernels.available import runs_triton


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
    """Returns the loss of logits [b, n, vocab_size] for labels [b, n] where mask [b, n] is true.

    The z-loss, z_loss · log²Z, keeps the logits from drifting. The computation is in float32.
    """
    logits = logits.flatten(0, 1)
    labels = torch.where(mask, labels, -100).flatten()  # nll_loss ignores -100
    if runs_triton(logits):
        from writehead.kernels.label_loss import label_loss  # needs Triton

        objectives, nlls = label_loss(logits, labels, label_smoothing, z_loss)
        return Loss(objectives.sum(), nlls.sum())
    logits, weight = logits.float(), mask.flatten().float()
    log_z = logits.logsumexp(dim=-1)
    nll = (log_z * weight).sum() + nll_loss(logits, labels, reduction="sum")
    uniform = ((log_z - logits.mean(dim=-1)) * weight).sum()
    objective = (1.0 - label_smoothing) * nll + label_smoothing * uniform
    return Loss(objective + z_loss * (log_z.square() * weight).sum(), nll)
