"""The layout of Q, K and V in the columns of one projection."""

from dataclasses import dataclass

import torch
from torch import Tensor

from writehead.errors import ShapeError


@dataclass(frozen=True)
class Heads:
    """h read-heads and g write-heads, with keys of depth k and values of depth v."""

    h: int
    g: int
    k: int
    v: int

    @property
    def widths(self) -> list[int]:
        """Columns of Q, K and V."""
        return [self.h * self.k, self.g * self.k, self.g * self.v]

    def split(self, QKV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns views Q [b, h, n, k], K [b, g, n, k], V [b, g, n, v] of QKV [b, n, columns]."""
        if QKV.dim() != 3 or QKV.shape[2] != sum(self.widths):
            raise ShapeError(
                f"QKV has shape {list(QKV.shape)}; {self} need [b, n, {sum(self.widths)}], which "
                f"is h k + g k + g v"
            )
        Q, K, V = torch.split(QKV, self.widths, dim=2)
        return split_heads(Q, self.h), split_heads(K, self.g), split_heads(V, self.g)


def split_heads(X: Tensor, heads: int) -> Tensor:
    """Returns a view [b, heads, n, k] of X [b, n, heads k]."""
    b, n, width = X.shape
    return X.view(b, n, heads, width // heads).transpose(1, 2)
