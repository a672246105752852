"""Norms, feed-forward layers, and the layer stacks of the encoder and the decoder."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from writehead.config import AttentionConfig, ModelConfig
from writehead.model.attention import Attention, Memory, WholeSequence, init_projection, join
from writehead.model.dropout import SharedDropout
from writehead.ops.decode_attention import CacheLayer, MemoryLayer
from writehead.ops.embedding import sinusoidal
from writehead.ops.linear import Weight, linear
from writehead.ops.norm import Norm, normalize
from writehead.ops.rotary import LazyRotary

Context = WholeSequence | CacheLayer
Sublayer = Callable[..., Tensor]


def make_norm(config: ModelConfig) -> nn.RMSNorm | nn.LayerNorm:
    """Returns an RMS norm or a layer norm, which has a bias if the model has biases."""
    if config.norm == "rms":
        return nn.RMSNorm(config.d, eps=config.norm_epsilon)
    return nn.LayerNorm(config.d, eps=config.norm_epsilon, bias=config.bias)


class FeedForward(nn.Module):
    """d -> f -> d with an activation between; if gated, a second d -> f multiplies its output."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.widen = init_projection(nn.Linear(config.d, config.f, bias=config.bias))
        if config.gated:
            self.gate = init_projection(nn.Linear(config.d, config.f, bias=config.bias))
        self.narrow = init_projection(nn.Linear(config.f, config.d, bias=config.bias))
        self.activation, self.gated = config.activation, config.gated
        self.dropout = SharedDropout(config.dropout)
        self.packed: tuple[Weight, Weight] | None = None

    def forward(
        self, X: Tensor, *, norm: Norm | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """residual + feed-forward of norm(X): [b, n, d] -> [b, n, d]."""
        packed = None if torch.is_grad_enabled() else self.packed
        widen, narrow = packed or self._weights(norm)
        if self.training and self.activation == "relu" and not self.gated:
            # with dropout first, the backward pass needs only the output of relu, which is saved
            H = torch.relu(self.dropout(linear(X, widen)))
        else:
            H = self.dropout(linear(X, widen, activation=self.activation, gated=self.gated))
        return linear(H, narrow, residual=residual)

    def pack(self, norm: Norm | None, *, streamed: bool) -> None:
        """Prepares the weights for inference."""
        widen, narrow = self._weights(norm)
        widen = widen.fold(zero_bias=not self.gated)
        self.packed = replace(widen, streamed=streamed), replace(narrow, streamed=streamed)

    def _weights(self, norm: Norm | None) -> tuple[Weight, Weight]:
        wide = [self.gate, self.widen] if self.gated else [self.widen]
        return join(wide, norm), join([self.narrow])


class Layer(nn.Module):
    """Self-attention, optional cross-attention to an encoder's output, and feed-forward."""

    def __init__(
        self,
        config: ModelConfig,
        attention: AttentionConfig,
        *,
        cross: bool,
        backend: str,
        rotary: LazyRotary | None,
    ) -> None:
        super().__init__()
        self.is_pre_norm, p = config.norm_place == "pre", config.dropout
        self.norm_attention = make_norm(config)
        self.attention = Attention(attention, dropout=p, backend=backend, rotary=rotary)
        self.has_cross = cross
        if cross:
            self.norm_cross = make_norm(config)
            self.cross = Attention(config.cross_attention, dropout=p, backend=backend)
        self.norm_feed_forward = make_norm(config)
        self.feed_forward = FeedForward(config)
        self.dropout = SharedDropout(p)

    def forward(
        self, X: Tensor, context: Context, memory: Memory | MemoryLayer | None = None
    ) -> Tensor:
        """Computes a whole sequence or its next positions, by `context`: [b, n, d] -> [b, n, d]."""
        X = self._add(
            X, self.norm_attention, lambda X, **options: self.attention(X, context, **options)
        )
        if memory is not None:
            X = self._add(
                X, self.norm_cross, lambda X, **options: self.cross.read(X, memory, **options)
            )
        return self._add(X, self.norm_feed_forward, self.feed_forward)

    def _add(self, X: Tensor, module: nn.RMSNorm | nn.LayerNorm, sublayer: Sublayer) -> Tensor:
        """Returns X + sublayer(norm(X)), or norm(X + sublayer(X)) in a post-norm model."""
        norm = Norm.of(module)
        inner = norm if self.is_pre_norm else None
        if self.training:
            Y = X + self.dropout(sublayer(X, norm=inner))
        else:
            Y = sublayer(X, norm=inner, residual=X)
        return Y if self.is_pre_norm else normalize(Y, norm)

    def pack(self, *, streamed: bool) -> None:
        """Prepares the weights of all sublayers for inference; see `Weight` for `streamed`."""

        def inner(module: nn.RMSNorm | nn.LayerNorm) -> Norm | None:
            return Norm.of(module) if self.is_pre_norm else None

        self.attention.pack(inner(self.norm_attention), cross=False, streamed=streamed)
        if self.has_cross:
            self.cross.pack(inner(self.norm_cross), cross=True, streamed=streamed)
        self.feed_forward.pack(inner(self.norm_feed_forward), streamed=streamed)

    def unpack(self) -> None:
        """Drops the packed weights, so that the layer uses its parameters."""
        self.attention.packed, self.feed_forward.packed = {}, None
        if self.has_cross:
            self.cross.packed = {}


class Stack(nn.Module):
    """The encoder or the decoder: positions, layers and, in a pre-norm model, a final norm."""

    def __init__(self, config: ModelConfig, *, encoder: bool, backend: str) -> None:
        super().__init__()
        attention = config.encoder_attention if encoder else config.decoder_attention
        count = config.source_positions if encoder else config.target_positions
        layers = config.encoder_layers if encoder else config.decoder_layers
        cross = not encoder and config.encoder_layers > 0
        rotary = None
        if config.positions == "learned":
            self.positions = nn.Embedding(config.position_offset + count, config.d)
        elif config.positions == "sinusoidal":
            table = sinusoidal(config.position_offset + count, config.d)
            self.register_buffer("table", table, persistent=False)
        else:
            rotary = LazyRotary(count, attention.k, config.rotary_base)
        self.kind, self.offset = config.positions, config.position_offset
        self.layers = nn.ModuleList(
            Layer(config, attention, cross=cross, backend=backend, rotary=rotary)
            for _ in range(layers)
        )
        self.norm = make_norm(config) if config.norm_place == "pre" else None
        self.dropout = SharedDropout(config.dropout)

    @property
    def position_table(self) -> Tensor | None:
        """The embedding of each position [positions, d]; None for rotary positions."""
        if self.kind == "rotary":
            return None
        table = self.positions.weight if self.kind == "learned" else self.get_buffer("table")
        return table[self.offset :]

    @property
    def final_norm(self) -> Norm | None:
        """The norm after the last layer."""
        return None if self.norm is None else Norm.of(self.norm)

    def project_memory(self, M: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Projects an encoder's output M [b, m, d] to K and V for each layer."""
        return [layer.cross.project_memory(M) for layer in self.layers if isinstance(layer, Layer)]

    def forward(
        self,
        X: Tensor,
        contexts: Sequence[Context],
        memories: Sequence[Memory | MemoryLayer] | None = None,
    ) -> Tensor:
        """Runs the layers on embedded tokens X [b, n, d]; does not apply the final norm."""
        X = self.dropout(X)
        kind = X.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):
            X = X.to(torch.get_autocast_dtype(kind))  # residuals use the autocast dtype too
        for i, layer in enumerate(self.layers):
            X = layer(X, contexts[i], memories[i] if memories else None)
        return X
