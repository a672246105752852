"""Relative positions (T5): a bias of the attention logits for each read-head and distance.

A table of biases is [h, 2 limit + 1]: column limit + i is for a query i positions after the memory
position. Distances beyond the limit use the last column on their side.
"""

import math

import torch
from torch import Tensor


def relative_buckets(
    limit: int, buckets: int, furthest: int, *, causal: bool, device: torch.device | None = None
) -> Tensor:
    """Returns the bucket of each distance, [2 limit + 1], as in T5.

    Half of the buckets hold one distance each; the others hold ranges that grow up to `furthest`.
    If causal, memory positions after a query share its bucket; otherwise, half of all are for them.
    """
    # on the CPU and in T5's order, because rounding matters at the ends of the ranges
    distances = torch.arange(-limit, limit + 1, device="cpu")
    offset = torch.zeros_like(distances)
    if causal:
        distances = distances.clamp(min=0)
    else:
        buckets //= 2
        offset, distances = (distances < 0) * buckets, distances.abs()
    exact = buckets // 2
    steps = torch.log(distances.clamp(min=1).float() / exact) / math.log(furthest / exact)
    ranges = (exact + (steps * (buckets - exact)).long()).clamp(max=buckets - 1)
    return (offset + torch.where(distances < exact, distances, ranges)).to(device)


def bias_at(table: Tensor, distances: Tensor) -> Tensor:
    """Returns the biases [..., h, n, m] of a table at distances [..., n, m]."""
    limit = table.shape[1] // 2
    return table[:, distances.clamp(-limit, limit) + limit].movedim(0, -3)
