"""§2.3-2.4, §3: one attention layer with g write-heads, over a whole sequence or step by step.

The K and V of the input are appended to a past, which returns the memory to attend to: `WholePast`
returns the sequence itself, and a KV cache returns all positions so far.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from writehead.config import AttentionConfig
from writehead.kernels import Visibility, attend
from writehead.kernels.attend import attend_fused, check_backend
from writehead.kernels.heads import Heads, apart
from writehead.model.dropout import noise


class Past(Protocol):
    """The memory of self-attention."""

    def append(self, K: Tensor, V: Tensor) -> tuple[Tensor, Tensor, Visibility]:
        """Appends K and V; returns the K and V to attend to, and their visibility."""


@dataclass(frozen=True, eq=False)
class WholePast:
    """The past of a whole sequence: the sequence itself."""

    visibility: Visibility

    def append(self, K: Tensor, V: Tensor) -> tuple[Tensor, Tensor, Visibility]:
        """Returns K and V unchanged."""
        return K, V, self.visibility


@dataclass(frozen=True, eq=False)
class Memory:
    """A fixed memory, projected once: the encoder's K [b, g, m, k] and V [b, g, m, v]."""

    K: Tensor
    V: Tensor
    visibility: Visibility


class Attention(nn.Module):
    """Multi-head, multi-query or grouped-query attention, depending on g.

    The logits are scaled by k^-0.5. The paper folds this factor into P_q, which gives the same
    function but a different initialization (docs/paper-map.md).
    """

    def __init__(
        self, config: AttentionConfig, *, dropout: float = 0.0, backend: str = "auto"
    ) -> None:
        super().__init__()
        check_backend(backend)
        self.config = config
        self.dropout = dropout
        self.backend = backend
        d, h, g, k, v = config.d, config.h, config.g, config.k, config.v
        self.P_q = init_projection(nn.Linear(d, h * k, bias=config.bias))
        self.P_k = init_projection(nn.Linear(d, g * k, bias=config.bias))
        self.P_v = init_projection(nn.Linear(d, g * v, bias=config.bias))
        self.P_o = init_projection(nn.Linear(h * v, d, bias=config.bias))

    def forward(self, X: Tensor, past: Past) -> Tensor:
        """Self-attention of X [b, n, d] over `past` and itself: Y [b, n, d]."""
        if self.training and isinstance(past, WholePast):
            return self._attend_whole(X, past.visibility)
        Q = apart(self.P_q(X), self.config.h)
        return self._attend(Q, *past.append(*self.project_kv(X)))

    def read(self, X: Tensor, memory: Memory) -> Tensor:
        """Attention of X [b, n, d] over a fixed memory: Y [b, n, d]."""
        Q = apart(self.P_q(X), self.config.h)
        return self._attend(Q, memory.K, memory.V, memory.visibility)

    def memorize(self, M: Tensor, visibility: Visibility) -> Memory:
        """Projects M [b, m, d] to K and V, which can be read many times."""
        return Memory(*self.project_kv(M), visibility)

    def project_kv(self, M: Tensor) -> tuple[Tensor, Tensor]:
        """Projects M [b, m, d] to K [b, g, m, k] and V [b, g, m, v]."""
        g = self.config.g
        return apart(self.P_k(M), g), apart(self.P_v(M), g)

    def _attend_whole(self, X: Tensor, visibility: Visibility) -> Tensor:
        """Self-attention of X [b, n, d] in training, with one product for Q, K, V: Y [b, n, d]."""
        c, projections = self.config, (self.P_q, self.P_k, self.P_v)
        weight = torch.cat([P.weight for P in projections])
        bias = torch.cat([P.bias for P in projections]) if c.bias else None
        QKV = linear(X, weight, bias)  # [b, n, h k + g k + g v]
        heads, factors = Heads(c.h, c.g, c.k, c.v), self._noise(X.shape[0], X.shape[1], X.device)
        O = attend_fused(  # noqa: E741
            QKV, heads, visibility, scale=c.k**-0.5, noise=factors, backend=self.backend
        )
        return self._join(O)

    def _attend(self, Q: Tensor, K: Tensor, V: Tensor, visibility: Visibility) -> Tensor:
        """Attention of the queries Q [b, h, n, k] over K and V: Y [b, n, d]."""
        scale, factors = self.config.k**-0.5, self._noise(K.shape[0], K.shape[2], K.device)
        O = attend(  # noqa: E741
            Q, K, V, visibility, scale=scale, noise=factors, backend=self.backend
        )
        return self._join(O)

    def _noise(self, b: int, m: int, device: torch.device) -> Tensor | None:
        """Returns dropout factors [b, g, m], the same for all queries; None outside of training."""
        if not self.training or self.dropout == 0.0:
            return None
        return noise((b, self.config.g, m), self.dropout, device)

    def _join(self, O: Tensor) -> Tensor:  # noqa: E741
        """Joins the heads of O [b, h, n, v] and projects them: Y [b, n, d]."""
        Y: Tensor = self.P_o(O.transpose(1, 2).flatten(2))  # [b, n, h v] -> [b, n, d]
        return Y


def init_projection(P: nn.Linear) -> nn.Linear:
    """Initializes a projection so that it keeps the variance of its input."""
    nn.init.normal_(P.weight, std=P.in_features**-0.5)
    if P.bias is not None:
        nn.init.zeros_(P.bias)
    return P
