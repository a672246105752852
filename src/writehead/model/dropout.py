"""Dropout whose noise is shared by all positions of a row, as in the paper's library.

Sharing it makes the noise cheap to generate.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def noise(shape: Sequence[int], p: float, device: torch.device) -> Tensor:
    """Returns factors that are 0 with probability p, and 1/(1-p) otherwise."""
    return (torch.rand(shape, device=device) >= p) / (1.0 - p)


def shared_dropout(X: Tensor, p: float, dim: int) -> Tensor:
    """Applies dropout with the same noise for all indices along `dim`."""
    shape = list(X.shape)
    shape[dim] = 1
    return X * noise(shape, p, X.device).to(X.dtype)


class SharedDropout(nn.Module):
    """`shared_dropout` over the positions of X [b, n, d], in training only."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, X: Tensor) -> Tensor:
        """[b, n, d] -> [b, n, d]."""
        return shared_dropout(X, self.p, dim=1) if self.training and self.p > 0.0 else X
