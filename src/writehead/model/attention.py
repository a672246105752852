"""§2.3-2.4, §3: one attention layer with g write-heads, for whole sequences and single steps.

The context determines what the layer attends to: with `WholeSequence`, the sequence itself; with
`CacheLayer`, the positions in the KV cache; with `Memory` or `MemoryLayer`, an encoder's output.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from writehead.config import AttentionConfig
from writehead.model.dropout import dropout_factors
from writehead.ops.attention import attend, attend_fused, check_implementation
from writehead.ops.decode_attention import (
    CacheLayer,
    DeferredRms,
    MemoryLayer,
    decode_attention,
    memory_attention,
)
from writehead.ops.heads import Heads, split_heads
from writehead.ops.linear import Weight, can_defer_norm, linear
from writehead.ops.norm import Norm
from writehead.ops.rotary import LazyRotary, rotate
from writehead.ops.visibility import Visibility


@dataclass(frozen=True, eq=False)
class WholeSequence:
    """The context of self-attention over a whole sequence: the sequence itself."""

    visibility: Visibility
    positions: Tensor | None = None  # [b or 1, n], for rotary positions; None: 0, 1, …, n-1


@dataclass(frozen=True, eq=False)
class Memory:
    """K [b, g, m, k] and V [b, g, m, v] of an encoder's output, for whole sequences."""

    K: Tensor
    V: Tensor
    visibility: Visibility


class Attention(nn.Module):
    """Multi-head, multi-query or grouped-query attention, depending on g.

    The logits are scaled by k^-0.5. The paper folds this factor into P_q, which gives the same
    function but a different initialization (docs/paper-map.md).
    """

    def __init__(
        self,
        config: AttentionConfig,
        *,
        dropout: float = 0.0,
        backend: str = "auto",
        rotary: LazyRotary | None = None,
    ) -> None:
        super().__init__()
        check_implementation(backend)
        self.config, self.dropout, self.rotary = config, dropout, rotary
        self.backend, self.decoding_backend = backend, "auto" if backend == "auto" else "reference"
        self.heads, self.scale = Heads(config.h, config.g, config.k, config.v), config.k**-0.5
        d, h, g, k, v = config.d, config.h, config.g, config.k, config.v
        self.P_q = init_projection(nn.Linear(d, h * k, bias=config.bias))
        self.P_k = init_projection(nn.Linear(d, g * k, bias=config.bias))
        self.P_v = init_projection(nn.Linear(d, g * v, bias=config.bias))
        self.P_o = init_projection(nn.Linear(h * v, d, bias=config.bias))
        self.packed: dict[str, Weight] = {}

    def forward(
        self,
        X: Tensor,
        context: WholeSequence | CacheLayer,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Computes self-attention of norm(X) [b, n, d]; returns residual + Y [b, n, d]."""
        if isinstance(context, WholeSequence):
            QKV = linear(X, self._weight("qkv", norm))  # [b, n, h k + g k + g v]
            O = self._attend_whole(QKV, context)  # noqa: E741
        else:
            QKV, deferred = self._project_next(X, self._weight("qkv", norm))
            O = decode_attention(  # noqa: E741
                QKV,
                context,
                self.heads,
                scale=self.scale,
                rotary=None if self.rotary is None else self.rotary.on(X.device),
                deferred=deferred,
                implementation=self.decoding_backend,
            )
        return linear(O, self._weight("o"), residual=residual)

    def read(
        self,
        X: Tensor,
        memory: Memory | MemoryLayer,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Computes attention of norm(X) [b, n, d] to `memory`; returns residual + Y [b, n, d]."""
        if isinstance(memory, Memory):
            Q = linear(X, self._weight("q", norm))  # [b, n, h k]
            K, V = memory.K, memory.V
            O = self._attend(split_heads(Q, self.heads.h), K, V, memory.visibility)  # noqa: E741
        else:
            Q, deferred = self._project_next(X, self._weight("q", norm))
            O = memory_attention(  # noqa: E741
                Q,
                memory,
                self.heads,
                scale=self.scale,
                deferred=deferred,
                implementation=self.decoding_backend,
            )
        return linear(O, self._weight("o"), residual=residual)

    def project_memory(self, M: Tensor) -> tuple[Tensor, Tensor]:
        """Projects the output of an encoder M [b, m, d] to K [b, g, m, k] and V [b, g, m, v]."""
        if "kv" in self.packed and not torch.is_grad_enabled():
            KV = linear(M, self.packed["kv"])  # [b, m, g k + g v]
            K, V = torch.split(KV, self.heads.widths[1:], dim=2)
        else:  # module calls, because FSDP gathers weights before them
            K, V = self.P_k(M), self.P_v(M)
        return split_heads(K, self.heads.g), split_heads(V, self.heads.g)

    def pack(self, norm: Norm | None, *, cross: bool, streamed: bool) -> None:
        """Joins projections of the same input and folds the norm before them, for inference."""
        self.packed = {}
        norms = {"q": norm, "kv": None, "o": None} if cross else {"qkv": norm, "o": None}
        weights = {name: self._weight(name, one).fold() for name, one in norms.items()}
        self.packed = {name: replace(one, streamed=streamed) for name, one in weights.items()}

    def _weight(self, name: str, norm: Norm | None = None) -> Weight:
        """Returns the projections in `name`, such as "qkv", as one weight."""
        if name in self.packed and not torch.is_grad_enabled():
            return self.packed[name]
        return join([getattr(self, f"P_{letter}") for letter in name], norm)

    def _project_next(self, X: Tensor, weight: Weight) -> tuple[Tensor, DeferredRms | None]:
        """Projects the next positions X [rows, n, d]; may defer the RMS norm to attention."""
        if X.shape[1] > 1 or weight.norm is None or not can_defer_norm(X, weight):
            return linear(X, weight), None
        return linear(X, replace(weight, norm=None)), DeferredRms(X, weight.norm.epsilon)

    def _attend_whole(self, QKV: Tensor, context: WholeSequence) -> Tensor:
        """Computes attention within whole sequences: [b, n, h k + g k + g v] -> O [b, n, h v]."""
        (b, n), device = QKV.shape[:2], QKV.device
        if self.rotary is None:
            O = attend_fused(  # noqa: E741
                QKV,
                self.heads,
                context.visibility,
                scale=self.scale,
                noise=self._dropout_factors(b, n, device),
                implementation=self.backend,
            )
            return _join_heads(O)
        Q, K, V = self.heads.split(QKV)
        positions, rotary = context.positions, self.rotary.on(device)
        if positions is None:
            positions = torch.arange(n, device=device).unsqueeze(0)
        Q, K = rotate(Q, positions, rotary), rotate(K, positions, rotary)
        return self._attend(Q, K, V, context.visibility)

    def _attend(self, Q: Tensor, K: Tensor, V: Tensor, visibility: Visibility) -> Tensor:
        """Computes [b, h, n, k] [b, g, m, k] [b, g, m, v] -> O [b, n, h v]."""
        noise = self._dropout_factors(K.shape[0], K.shape[2], K.device)
        O = attend(  # noqa: E741
            Q, K, V, visibility, scale=self.scale, noise=noise, implementation=self.backend
        )
        return _join_heads(O)

    def _dropout_factors(self, b: int, m: int, device: torch.device) -> Tensor | None:
        """Returns dropout factors [b, g, m], the same for all queries; None outside training."""
        if not self.training or self.dropout == 0.0:
            return None
        return dropout_factors((b, self.config.g, m), self.dropout, device)


def _join_heads(O: Tensor) -> Tensor:  # noqa: E741
    """Returns O [b, h, n, v] as [b, n, h v]."""
    return O.transpose(1, 2).flatten(2)


def join(projections: list[nn.Linear], norm: Norm | None = None) -> Weight:
    """Returns projections of the same input, and the norm before them, as one weight."""
    if len(projections) == 1:
        return Weight(projections[0].weight, projections[0].bias, norm)
    has_bias = projections[0].bias is not None
    bias = torch.cat([P.bias for P in projections]) if has_bias else None
    return Weight(torch.cat([P.weight for P in projections]), bias, norm)


def init_projection(P: nn.Linear) -> nn.Linear:
    """Initializes a projection so that it keeps the variance of its input."""
    nn.init.normal_(P.weight, std=P.in_features**-0.5)
    if P.bias is not None:
        nn.init.zeros_(P.bias)
    return P
