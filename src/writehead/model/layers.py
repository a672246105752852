"""Norms, feed-forward layers, and the stacks of layers of the encoder and the decoder.

Every sublayer is X + dropout(sublayer(norm(X))), which is pre-norm, as in the paper's library.
"""

import torch
from torch import Tensor, nn

from writehead.config import AttentionConfig, ModelConfig
from writehead.kernels import Visibility
from writehead.model.attention import Attention, Memory, Past, init_projection
from writehead.model.dropout import SharedDropout


def make_norm(config: ModelConfig) -> nn.Module:
    """Returns an RMS norm or a layer norm, which has a bias if the model has biases."""
    if config.norm == "rms":
        return nn.RMSNorm(config.d, eps=config.norm_epsilon)
    return nn.LayerNorm(config.d, eps=config.norm_epsilon, bias=config.bias)


class FeedForward(nn.Module):
    """Two projections, d -> f -> d, with an activation between."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.widen = init_projection(nn.Linear(config.d, config.f, bias=config.bias))
        self.narrow = init_projection(nn.Linear(config.f, config.d, bias=config.bias))
        self.activation = config.activation
        self.dropout = SharedDropout(config.dropout)

    def forward(self, X: Tensor) -> Tensor:
        """[b, n, d] -> [b, n, d]."""
        X = self.widen(X)
        if self.activation == "relu":
            # dropout comes first, so that backward needs only the output of relu, which is saved
            X = torch.relu(self.dropout(X))
        else:
            approximate = "tanh" if self.activation == "gelu_tanh" else "none"
            X = self.dropout(nn.functional.gelu(X, approximate=approximate))
        Y: Tensor = self.narrow(X)
        return Y


class Layer(nn.Module):
    """Self-attention, optional cross-attention to a memory, and feed-forward."""

    def __init__(
        self, config: ModelConfig, attention: AttentionConfig, *, cross: bool, backend: str
    ) -> None:
        super().__init__()
        self.norm_attention = make_norm(config)
        p = config.dropout
        self.attention = Attention(attention, dropout=p, backend=backend)
        if cross:
            self.norm_cross = make_norm(config)
            self.cross = Attention(config.encoder_attention, dropout=p, backend=backend)
        self.norm_feed_forward = make_norm(config)
        self.feed_forward = FeedForward(config)
        self.dropout = SharedDropout(p)

    def forward(self, X: Tensor, past: Past, memory: Memory | None = None) -> Tensor:
        """[b, n, d] -> [b, n, d]: a whole sequence or its next positions, depending on `past`."""
        X = X + self.dropout(self.attention(self.norm_attention(X), past))
        if memory is not None:
            X = X + self.dropout(self.cross.read(self.norm_cross(X), memory))
        Y: Tensor = X + self.dropout(self.feed_forward(self.norm_feed_forward(X)))
        return Y


class Stack(nn.Module):
    """The encoder or the decoder: learned positions, layers and a final norm."""

    def __init__(self, config: ModelConfig, *, encoder: bool, backend: str) -> None:
        super().__init__()
        attention = config.encoder_attention if encoder else config.decoder_attention
        positions = config.source_positions if encoder else config.target_positions
        layers = config.encoder_layers if encoder else config.decoder_layers
        cross = not encoder and config.encoder_layers > 0
        self.positions = nn.Embedding(positions, config.d)
        self.layers = nn.ModuleList(
            Layer(config, attention, cross=cross, backend=backend) for _ in range(layers)
        )
        self.norm = make_norm(config)
        self.dropout = SharedDropout(config.dropout)

    def memorize(self, M: Tensor, visibility: Visibility) -> list[Memory]:
        """Projects M [b, m, d] to K and V for each layer, once for all steps and beams."""
        crosses = (layer.cross for layer in self.layers if isinstance(layer, Layer))
        return [cross.memorize(M, visibility) for cross in crosses]

    def forward(
        self, X: Tensor, positions: Tensor, pasts: list[Past], memories: list[Memory] | None = None
    ) -> Tensor:
        """Embedded tokens X [b, n, d] at positions [b or 1, n] -> [b, n, d]."""
        X = self.dropout(X + self.positions(positions))
        kind = X.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):
            X = X.to(torch.get_autocast_dtype(kind))  # residuals are 16-bit too
        for i, layer in enumerate(self.layers):
            X = layer(X, pasts[i], memories[i] if memories else None)
        Y: Tensor = self.dropout(self.norm(X))
        return Y
