"""Dropout whose noise is shared by all positions of a row, as in the paper's library."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def dropout_factors(shape: Sequence[int], p: float, device: torch.device) -> Tensor:
    """Returns factors that are 0 with probability p, and 1/(1-p) otherwise."""
    return (torch.rand(shape, device=device) >= p) / (1.0 - p)


class SharedDropout(nn.Module):
    """Dropout of X [b, n, d] with the same noise for all n positions, in training only."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, X: Tensor) -> Tensor:
        """Applies dropout to X [b, n, d]."""
        if not self.training or self.p == 0.0:
            return X
        return X * dropout_factors((X.shape[0], 1, X.shape[2]), self.p, X.device).to(X.dtype)
