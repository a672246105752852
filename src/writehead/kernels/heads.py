"""How the heads of Q, K and V stand side by side in one wide product."""

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
        """Q [b, h, n, k], K [b, g, n, k] and V [b, g, n, v], views of QKV [b, n, hk + gk + gv]."""
        if QKV.dim() != 3 or QKV.shape[2] != sum(self.widths):
            raise ShapeError(
                f"QKV has shape {list(QKV.shape)}; {self} need [b, n, {sum(self.widths)}], which "
                f"is h k + g k + g v"
            )
        Q, K, V = torch.split(QKV, self.widths, dim=2)
        return apart(Q, self.h), apart(K, self.g), apart(V, self.g)


def apart(X: Tensor, heads: int) -> Tensor:
    """[b, n, heads k] -> [b, heads, n, k], a view."""
    b, n, width = X.shape
    return X.view(b, n, heads, width // heads).transpose(1, 2)
