"""Norms, feed-forward layers, and the layer stacks of the encoder and the decoder."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from writehead.config import ModelConfig
from writehead.model.attention import Attention, Context, dropout_factors
from writehead.model.projections import Projections, make_projection
from writehead.ops.embedding import sinusoidal
from writehead.ops.linear import can_split_depth, deferred_norm, linear
from writehead.ops.norm import Norm, normalize
from writehead.ops.relative import relative_buckets
from writehead.ops.rotary import Rotary, Scaling

NormModule = nn.RMSNorm | nn.LayerNorm


class OffsetRMSNorm(nn.RMSNorm):
    """The parameters of an RMS norm with the gain weight + offset, which is initially 1."""

    def __init__(self, d: int, epsilon: float, offset: float) -> None:
        super().__init__(d, eps=epsilon)
        self.offset = offset
        nn.init.constant_(self.weight, 1.0 - offset)


def make_norm(config: ModelConfig) -> NormModule:
    """Returns an RMS norm or a layer norm, which has a bias if the model has biases."""
    if config.norm == "rms":
        return OffsetRMSNorm(config.d, config.norm_epsilon, config.norm_offset)
    return nn.LayerNorm(config.d, eps=config.norm_epsilon, bias=config.bias)


class SharedDropout(nn.Module):
    """Dropout of X [b, n, d] with the same noise for all n positions, as in the paper's library."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, X: Tensor) -> Tensor:
        """Applies dropout to X [b, n, d] in training."""
        if not self.training or self.p == 0.0:
            return X
        return X * dropout_factors((X.shape[0], 1, X.shape[2]), self.p, X.device).to(X.dtype)


class FeedForward(Projections):
    """d -> f -> d with an activation between; if gated, a second d -> f multiplies its output."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.widen = make_projection(config.d, config.f, bias=config.bias)
        if config.gated:
            self.gate = make_projection(config.d, config.f, bias=config.bias)
        self.narrow = make_projection(config.f, config.d, bias=config.bias)
        self.activation, self.gated = config.activation, config.gated
        # relu(r x) = r relu(x) for r > 0, so the factor of an RMS norm may follow the activation
        self.can_defer = config.activation == "relu" and not config.gated and not config.bias
        self.wide = "gate widen" if config.gated else "widen"
        self.dropout = SharedDropout(config.dropout)

    def forward(
        self, X: Tensor, *, norm: Norm | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """residual + feed-forward of norm(X): [b, n, d] -> [b, n, d]."""
        widen, narrow = self.weight(self.wide, norm), self.weight("narrow")
        if self.training and self.activation == "relu" and not self.gated:
            # with dropout first, the backward pass needs only the output of relu, which is saved
            H = torch.relu(self.dropout(linear(X, widen)))
        elif self.can_defer and can_split_depth(X, narrow) and (late := deferred_norm(X, widen)):
            # the second product applies the norm of the first, and its relu
            H = linear(X, replace(widen, norm=None, bias=None))
            return linear(H, narrow, residual=residual, deferred=late, relu_input=True)
        else:
            H = self.dropout(linear(X, widen, activation=self.activation, gated=self.gated))
        return linear(H, narrow, residual=residual)


class Layer(nn.Module):
    """Self-attention, optional cross-attention to an encoder's output, and feed-forward."""

    def __init__(self, config: ModelConfig, attention: Attention, cross: Attention | None) -> None:
        super().__init__()
        self.is_pre_norm, self.has_cross = config.norm_place == "pre", cross is not None
        self.norm_attention = make_norm(config)
        self.attention = attention
        if cross is not None:
            self.norm_cross = make_norm(config)
            self.cross = cross
        self.norm_feed_forward = make_norm(config)
        self.feed_forward = FeedForward(config)
        self.dropout = SharedDropout(config.dropout)

    def forward(self, X: Tensor, context: Context, memory: Context | None = None) -> Tensor:
        """Computes a whole sequence or its next positions, by `context`: [b, n, d] -> [b, n, d]."""
        X = self._add(X, self.norm_attention, self.attention, context)
        if memory is not None:
            X = self._add(X, self.norm_cross, self.cross, memory)
        return self._add(X, self.norm_feed_forward, self.feed_forward)

    def _add(self, X: Tensor, norm: NormModule, sublayer: nn.Module, *context: Context) -> Tensor:
        """Returns X + sublayer(norm(X)), or norm(X + sublayer(X)) in a post-norm model."""
        inner = self._inner(norm)
        if self.training:
            Y = X + self.dropout(sublayer(X, *context, norm=inner))
        else:
            Y = sublayer(X, *context, norm=inner, residual=X)
        return Y if self.is_pre_norm else normalize(Y, Norm.of(norm))

    def _inner(self, norm: NormModule) -> Norm | None:
        """Returns the norm of a sublayer's input, which only a pre-norm model has."""
        return Norm.of(norm) if self.is_pre_norm else None

    def pack(self, **options: bool) -> None:
        """Prepares the weights of all sublayers for inference; see `Weight.pack`."""
        self.attention.pack(self._inner(self.norm_attention), "P_q P_k P_v", "P_o", **options)
        if self.has_cross:
            self.cross.pack(self._inner(self.norm_cross), "P_q", "P_k P_v", "P_o", **options)
        ff, norm = self.feed_forward, self._inner(self.norm_feed_forward)
        ff.pack(norm, ff.wide, "narrow", zero_bias=not ff.gated, **options)


class Stack(nn.Module):
    """The encoder or the decoder: positions, layers and, in a pre-norm model, a final norm."""

    def __init__(self, config: ModelConfig, *, encoder: bool, backend: str) -> None:
        super().__init__()
        attention = config.encoder_attention if encoder else config.decoder_attention
        layers = config.encoder_layers if encoder else config.decoder_layers
        cross = not encoder and config.encoder_layers > 0
        self.config, self.causal, self.window, rotary = config, not encoder, attention.window, None
        self.limit = config.source_positions if encoder else config.target_positions
        self.packed_bias: Tensor | None = None
        if config.positions == "learned":
            self.positions = nn.Embedding(config.position_offset + self.limit, config.d)
        elif config.positions == "rotary":
            factor, original = config.rotary_factor, config.rotary_original
            scaling = Scaling(factor, original, config.rotary_low, config.rotary_high)
            rotary = Rotary.make(self.limit, attention.k, config.rotary_base, scaling)
        elif config.positions == "relative":
            self.relative_bias = nn.Embedding(config.relative_buckets, attention.h)
            nn.init.normal_(self.relative_bias.weight, std=config.d**-0.5)
        self.compute_table()
        make = partial(Attention, dropout=config.dropout, backend=backend)
        self.layers = nn.ModuleList()
        for _ in range(layers):
            own = make(attention, rotary=rotary)
            self.layers.append(Layer(config, own, make(config.cross_attention) if cross else None))
        self.norm = make_norm(config) if config.norm_place == "pre" else None
        self.dropout = SharedDropout(config.dropout)

    def compute_table(self, device: torch.device | None = None) -> None:
        """Computes sinusoidal positions or the buckets of distances, which a run does not store."""
        config = self.config
        if config.positions == "sinusoidal":
            count = config.position_offset + self.limit
            table = sinusoidal(count, config.d, config.sinusoid, device=device)
        elif config.positions == "relative":
            buckets, furthest = config.relative_buckets, config.relative_distance
            sizes = min(self.limit, furthest), buckets, furthest
            table = relative_buckets(*sizes, causal=self.causal, device=device)
        else:
            return
        self.register_buffer("table", table, persistent=False)

    @property
    def position_table(self) -> Tensor | None:
        """The embedding of each position [positions, d]; None if none is added to tokens."""
        kind = self.config.positions
        if kind in ("rotary", "relative"):
            return None
        table = self.positions.weight if kind == "learned" else self.get_buffer("table")
        return table[self.config.position_offset :]

    def bias(self) -> Tensor | None:
        """Returns the bias of each read-head and distance, a table of relative positions."""
        if self.config.positions != "relative":
            return None
        if self.packed_bias is not None and not torch.is_grad_enabled():
            return self.packed_bias
        weight = self.relative_bias.weight.float()  # [buckets, h]
        return weight[self.get_buffer("table")].t().contiguous()

    def finish(self, X: Tensor) -> Tensor:
        """Applies the final norm and dropout to the output X [b, n, d] of the last layer."""
        Y: Tensor = self.dropout(normalize(X, None if self.norm is None else Norm.of(self.norm)))
        return Y

    def project_memory(self, M: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Projects an encoder's output M [b, m, d] to K and V for each layer."""
        return [layer.cross.project_memory(M) for layer in self.layers if isinstance(layer, Layer)]

    def forward(
        self, X: Tensor, contexts: Sequence[Context], memories: Sequence[Context] | None = None
    ) -> Tensor:
        """Runs the layers on embedded tokens X [b, n, d]; does not apply the final norm."""
        X = self.dropout(X)
        kind = X.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):
            X = X.to(torch.get_autocast_dtype(kind))  # residuals use the autocast dtype too
        for i, layer in enumerate(self.layers):
            X = layer(X, contexts[i], memories[i] if memories else None)
        return X
