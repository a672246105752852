"""§2.3-2.4, §3: one attention layer with g write-heads, for whole sequences and single steps.

The context determines what the layer attends to: with `WholeSequence`, the sequence itself; with
`CacheLayer`, the positions in the KV cache; with `Memory` or `MemoryLayer`, an encoder's output.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from writehead.config import AttentionConfig
from writehead.model.projections import Projections, make_projection
from writehead.ops.attention import IMPLEMENTATIONS, attend
from writehead.ops.available import choose_implementation
from writehead.ops.decode_attention import CacheLayer, MemoryLayer, decode_attention
from writehead.ops.heads import Heads, split_heads
from writehead.ops.linear import Weight, deferred_norm, linear
from writehead.ops.norm import Norm
from writehead.ops.rotary import Rotary, rotate
from writehead.ops.visibility import Visibility


@dataclass(frozen=True, eq=False)
class WholeSequence:
    """The context of self-attention over a whole sequence: the sequence itself."""

    visibility: Visibility
    positions: Tensor | None = None  # [b or 1, n], for rotary positions; None: 0, 1, …, n-1
    bias: Tensor | None = None  # [h, …], a table of relative positions


@dataclass(frozen=True, eq=False)
class Memory:
    """K [b, g, m, k] and V [b, g, m, v] of an encoder's output, for whole sequences."""

    K: Tensor
    V: Tensor
    visibility: Visibility


Context = WholeSequence | Memory | MemoryLayer  # includes CacheLayer


class Attention(Projections):
    """Multi-head, multi-query or grouped-query attention, depending on g.

    By default, the logits are scaled by k^-0.5. The paper folds this factor into P_q, which gives
    the same function but a different initialization (docs/paper-map.md).
    """

    def __init__(
        self,
        config: AttentionConfig,
        *,
        dropout: float = 0.0,
        backend: str = "auto",
        rotary: Rotary | None = None,
    ) -> None:
        super().__init__()
        choose_implementation("attention", backend, dict.fromkeys(IMPLEMENTATIONS))  # checks it
        self.config, self.dropout, self.backend, self.rotary = config, dropout, backend, rotary
        d, h, g, k, v = config.d, config.h, config.g, config.k, config.v
        self.heads, self.scale = Heads(h, g, k, v), config.scale or k**-0.5
        self.P_q = make_projection(d, h * k, bias=config.bias)
        self.P_k = make_projection(d, g * k, bias=config.bias)
        self.P_v = make_projection(d, g * v, bias=config.bias)
        self.P_o = make_projection(h * v, d, bias=config.bias)

    def forward(
        self,
        X: Tensor,
        context: Context,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Computes attention of norm(X) [b, n, d] to `context`; returns residual + Y [b, n, d]."""
        is_self = isinstance(context, WholeSequence | CacheLayer)
        weight = self.weight("P_q P_k P_v" if is_self else "P_q", norm)
        if isinstance(context, WholeSequence | Memory):
            O = self._attend_whole(linear(X, weight), context)  # noqa: E741
        else:
            O = self._attend_next(X, weight, context)  # noqa: E741
        return linear(O, self.weight("P_o"), residual=residual)

    def project_memory(self, M: Tensor) -> tuple[Tensor, Tensor]:
        """Projects the output of an encoder M [b, m, d] to K [b, g, m, k] and V [b, g, m, v]."""
        packed = self.packed.get("P_k P_v")
        if packed is not None and packed.is_usable:
            KV = linear(M, packed)  # [b, m, g k + g v]
            K, V = torch.split(KV, self.heads.widths[1:], dim=2)
        else:  # module calls, because FSDP gathers weights before them
            K, V = self.P_k(M), self.P_v(M)
        return split_heads(K, self.heads.g), split_heads(V, self.heads.g)

    def _attend_whole(self, projected: Tensor, context: WholeSequence | Memory) -> Tensor:
        """Computes O [b, n, h v] of whole sequences from their projected QKV or Q [b, n, …]."""
        options: dict[str, Any] = {"scale": self.scale, "implementation": self.backend}
        options["batch_invariant"] = self.is_int8  # other rounding would give other integers
        if isinstance(context, Memory):
            Q, K, V = split_heads(projected, self.heads.h), context.K, context.V
        else:
            Q, K, V = self.heads.split(projected)
            options["bias"] = context.bias
            if self.rotary is None:
                options["fused"] = projected
            else:
                at, rotary = context.positions, self.rotary.on(Q.device)
                at = torch.arange(Q.shape[2], device=Q.device).unsqueeze(0) if at is None else at
                Q, K = rotate(Q, at, rotary), rotate(K, at, rotary)
        if self.training and self.dropout > 0.0:  # the noise is the same for all queries
            options["noise"] = dropout_factors(K.shape[:3], self.dropout, K.device)
        O = attend(Q, K, V, context.visibility, **options)  # noqa: E741
        return O.transpose(1, 2).flatten(2)  # [b, h, n, v] -> [b, n, h v]

    def _attend_next(self, X: Tensor, weight: Weight, context: MemoryLayer) -> Tensor:
        """Computes O [rows, n, h v] of the next positions X [rows, n, d]."""
        backend = "auto" if self.backend == "auto" else "reference"
        options: dict[str, Any] = {"scale": self.scale, "implementation": backend}
        if X.shape[1] == 1 and (deferred := deferred_norm(X, weight)):
            options["deferred"], weight = deferred, replace(weight, norm=None)
        rotary = None if self.rotary is None else self.rotary.on(X.device)
        return decode_attention(linear(X, weight), context, self.heads, rotary=rotary, **options)


def dropout_factors(shape: Sequence[int], p: float, device: torch.device) -> Tensor:
    """Returns factors that are 0 with probability p, and 1/(1-p) otherwise."""
    return (torch.rand(shape, device=device) >= p) / (1.0 - p)
