"""A model's decoding in few launches: the same function as `step`, for captured graphs.

Between two matrix products stands at most one kernel of ours. Queries, keys and values are one
product; residuals are added by the product that makes them; the activation is part of its own.
Queries to the encoder's memory have, where it pays, no product of their own (`fused_layers`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from writehead.config import AttentionConfig
from writehead.kernels import Visibility, attend, cublas
from writehead.kernels.choose import Feed, Rows
from writehead.kernels.decode import MOST_QUERIES, append_and_attend, attend_memory
from writehead.kernels.pointwise import embed
from writehead.model.cache import KVCache
from writehead.model.fused_layers import FusedLayer, apply_norm, fused_layers, normed_product
from writehead.model.transformer import Transformer
from writehead.model.translation import TranslationModel

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STAYS = 0.5  # of a device's cache: more weights than that are not there at the next step


@dataclass(frozen=True, eq=False)
class Memories:
    """The encoder's K [layers, b, g, m, k] and V [layers, b, g, m, v], and lengths [b].

    In memory the heads of a position are neighbours, as the product that makes them leaves them.
    """

    K: Tensor
    V: Tensor
    lengths: Tensor

    @classmethod
    def make(
        cls,
        heads: AttentionConfig,
        layers: int,
        b: int,
        m: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "Memories":
        """Room for b sentences of m positions."""
        K, V = (
            torch.zeros(layers, b, m, heads.g, width, dtype=dtype, device=device).transpose(2, 3)
            for width in (heads.k, heads.v)
        )
        return cls(K, V, torch.ones(b, dtype=torch.long, device=device))


def why_not(model: Transformer) -> str | None:
    """None, or the sentence that says why a model cannot be decoded by these kernels."""
    config = model.config
    for name, size in (("k", config.k), ("v", config.v)):
        if size < 16 or size > 256 or size & (size - 1):
            return (
                f"the decoding kernels need {name} to be a power of two from 16 to 256, not {size}"
            )
    if model.dtype not in DTYPES:
        return f"the decoding kernels do not compute in {model.dtype}"
    return None


def largest_beam(model: Transformer) -> int:
    """The widest beam that the decoding kernels have room for."""
    return MOST_QUERIES // (model.config.h // model.config.g)


class FusedDecoder:
    """A model with its weights arranged for decoding; the model must not change any more."""

    @torch.no_grad()
    def __init__(self, model: Transformer) -> None:
        self.model, self.config = model, model.config
        self._passing = False
        if model.device.type == "cuda":
            cache = torch.cuda.get_device_properties(model.device).L2_cache_size
            self._passing = decoder_bytes(model) > STAYS * cache
        self._layers = fused_layers(model.decoder.layers, rooted=True, passing=self._passing)
        self._encoder: list[FusedLayer] = []
        if isinstance(model, TranslationModel):
            self._encoder = fused_layers(model.encoder.layers, rooted=False)

    def feed(self, X: Tensor) -> Feed:
        """What makes X [rows, d] the embeddings of the tokens that are chosen."""
        return Feed(self.model.tokens.weight, self.model.decoder.positions.weight, X)

    def embed(self, rows: Rows, clock: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """The embeddings [rows, d] of rows.tokens at positions rows.lengths, in `out` if given.

        `clock` [1] goes on by one.
        """
        E, P = self.model.tokens.weight, self.model.decoder.positions.weight
        return embed(rows.tokens, rows.lengths, E, P, clock, out)

    def step(self, X: Tensor, rows: Rows, cache: KVCache, memories: Memories | None) -> Tensor:
        """Logits of what follows X, the embeddings of `rows`, which stay as they are; X may not."""
        model, stack = self.model, self.model.decoder
        for i, layer in enumerate(self._layers):
            attention = layer.attention
            QKV, asked = layer.project(X)
            O = append_and_attend(  # noqa: E741
                QKV,
                cache.K[i],
                cache.V[i],
                rows.lengths,
                rows.growing,
                cache.ancestors,
                heads=attention.config.h,
                scale=attention.config.k**-0.5,
                unnormed=layer.unnormed(X),
                padded=cache.padded,
            )
            X, Q = layer.add_and_ask(X, O, asked)
            if layer.cross is not None and memories is not None:
                assert Q is not None
                O = attend_memory(  # noqa: E741
                    Q,
                    memories.K[i],
                    memories.V[i],
                    memories.lengths,
                    rows.growing,
                    heads=layer.cross.config.h,
                    scale=layer.cross.config.k**-0.5,
                    unnormed=layer.unnormed(X),
                    padded=cache.padded,
                )
                X = layer.add(X, O, layer.cross.P_o)
            X = layer.feed(X)
        scale = self.config.effective_logit_scale
        return normed_product(
            stack.norm, X, _output(model), None, scale=scale, passing=self._passing
        )

    @torch.no_grad()
    def encode(self, source: Tensor, lengths: Tensor | None, into: Memories) -> None:
        """Encodes source [b, m] and puts its K and V into the first rows of `into`."""
        assert isinstance(self.model, TranslationModel)
        b, m = source.shape
        positions = torch.arange(m, device=source.device).repeat(b)
        stack = self.model.encoder
        X = embed(source.flatten(), positions, self.model.tokens.weight, stack.positions.weight)
        visibility = Visibility(lengths=lengths)
        for layer in self._encoder:
            config = layer.attention.config
            QKV, _ = layer.project(X)
            widths = [config.h * config.k, config.g * config.k, config.g * config.v]
            Q, K, V = (
                T.reshape(b, m, heads, -1).transpose(1, 2)
                for T, heads in zip(
                    torch.split(QKV, widths, dim=1), (config.h, config.g, config.g), strict=True
                )
            )
            O = attend(Q, K, V, visibility, scale=config.k**-0.5)  # noqa: E741
            X = layer.add(X, O.transpose(1, 2).reshape(b * m, -1), layer.attention.P_o)
            X = layer.feed(X)
        X = apply_norm(stack.norm, X)
        for i, layer in enumerate(self._layers):
            assert layer.cross is not None
            _put(X, layer.cross.P_k, into.K[i, :b, :, :m])
            _put(X, layer.cross.P_v, into.V[i, :b, :, :m])
        into.lengths[:b] = m if lengths is None else lengths


def decoder_bytes(model: Transformer) -> int:
    """Bytes of the decoder's weights, of which a step reads all but what the memory is made by."""
    return sum(P.nbytes for P in (*model.decoder.layers.parameters(), _output(model)))


def _output(model: Transformer) -> Tensor:
    """What makes logits."""
    return model.tokens.weight if model.config.tied else model.output.weight


def _put(X: Tensor, P: nn.Linear, into: Tensor) -> None:
    """Puts P(X) of X [b m, d] into a memory [b, g, m, k] whose heads are neighbours."""
    b, g, m, k = into.shape
    wide = into.transpose(1, 2).view(b, m, g * k)
    if P.bias is None and wide.is_contiguous():
        out = wide.view(b * m, g * k)
        if cublas.product(X, P.weight, out=out) is None:
            torch.mm(X, P.weight.t(), out=out)
    else:
        wide.copy_(P(X).view_as(wide))
