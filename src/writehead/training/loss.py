"""Cross-entropy with label smoothing and z-loss, summed over the labels that count."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import nll_loss

from writehead.data.batches import Batch
from writehead.kernels.available import runs_triton


@dataclass(frozen=True, eq=False)
class Loss:
    """Sums over the labels: what is trained on, and the plain negative log-likelihood."""

    objective: Tensor
    nll: Tensor


def batch_loss(model: nn.Module, batch: Batch, label_smoothing: float, z_loss: float) -> Loss:
    """The loss of a model on a batch of either task."""
    if batch.source is None:
        logits = model(batch.inputs, packing=batch.packing)
    else:
        logits = model(
            batch.source,
            batch.inputs,
            source_packing=batch.source_packing,
            target_packing=batch.packing,
        )
    counts = batch.packing.segments != 0
    return sequence_loss(
        logits, batch.labels, counts, label_smoothing=label_smoothing, z_loss=z_loss
    )


def sequence_loss(
    logits: Tensor, labels: Tensor, counts: Tensor, *, label_smoothing: float, z_loss: float
) -> Loss:
    """The loss of logits [b, n, vocab_size] for labels [b, n], where counts [b, n] is true.

    Label smoothing moves that much probability from the label to the whole vocabulary. The z-loss
    adds z_loss · log²Z, which keeps the logits from drifting. All in float32.
    """
    logits = logits.flatten(0, 1)
    labels = torch.where(counts, labels, -100).flatten()  # nll_loss ignores -100
    if runs_triton(logits):
        from writehead.kernels.label_loss import label_loss  # which needs Triton

        each, each_nll = label_loss(logits, labels, label_smoothing, z_loss)
        return Loss(each.sum(), each_nll.sum())
    logits, weight = logits.float(), counts.flatten().float()
    # one reduction of the logits serves all: cross_entropy would take another
    log_z = logits.logsumexp(dim=-1)
    nll = (log_z * weight).sum() + nll_loss(logits, labels, reduction="sum")
    if label_smoothing == 0.0 and z_loss == 0.0:
        return Loss(nll, nll)
    uniform = ((log_z - logits.mean(dim=-1)) * weight).sum()
    objective = (1.0 - label_smoothing) * nll + label_smoothing * uniform
    objective = objective + z_loss * (log_z.square() * weight).sum()
    return Loss(objective, nll)
