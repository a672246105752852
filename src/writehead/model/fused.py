"""A model's decoding in few launches: the same function as `step`, for captured graphs.

Between two matrix products stands at most one kernel of ours. Queries, keys and values are one
product; residuals are added by the product that makes them; the activation is part of its own.
Queries to the encoder's memory have, where it pays, no product of their own (`_FusedLayer`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear

from writehead.config import AttentionConfig
from writehead.kernels import Visibility, attend
from writehead.kernels.choose import Rows
from writehead.kernels.decode import MOST_QUERIES, Unnormed, append_and_attend, attend_memory
from writehead.kernels.linear import Norm, few_rows, row_linear, rows_linear
from writehead.kernels.pointwise import embed, normalize
from writehead.kernels.tiles import choose_shape, tiled_linear
from writehead.model.attention import Attention
from writehead.model.cache import KVCache
from writehead.model.layers import FeedForward, Layer
from writehead.model.transformer import Transformer
from writehead.model.translation import TranslationModel

# Where a product less was measured to pay: for one row, and up to 128 of those that have tiles.
# With 256 it does not, nor with 16 and 32, whose kernels take longer for more columns. And up to
# which columns and size of a weight.
MERGED, WIDEST, LARGEST = 128, 2304, 2048 * 1024
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


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
        self._layers = _fused_layers(model.decoder.layers, rooted=True)
        self._encoder: list[_FusedLayer] = []
        if isinstance(model, TranslationModel):
            self._encoder = _fused_layers(model.encoder.layers, rooted=False)

    def step(
        self,
        rows: Rows,
        cache: KVCache,
        memories: Memories | None,
        clock: Tensor | None = None,
    ) -> Tensor:
        """Feeds rows.tokens at positions rows.lengths, which stay as they are: logits of the next.

        `clock` is told by one that a step was taken.
        """
        model, stack = self.model, self.model.decoder
        X = embed(rows.tokens, rows.lengths, model.tokens.weight, stack.positions.weight, clock)
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
        output = model.tokens.weight if self.config.tied else model.output.weight
        scale = self.config.effective_logit_scale
        return _normed_product(stack.norm, X, output, None, scale=scale)

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
        X = _norm(stack.norm, X)
        for i, layer in enumerate(self._layers):
            assert layer.cross is not None
            _put(X, layer.cross.P_k, into.K[i, :b, :, :m])
            _put(X, layer.cross.P_v, into.V[i, :b, :, :m])
        into.lengths[:b] = m if lengths is None else lengths


@dataclass(frozen=True, eq=False)
class _FusedLayer:
    """One layer: its modules, and the projections of its input as single products.

    In a `rooted` layer the gains of the norms before attention are part of the projections, and
    their roots are left to the attention kernels. Few rows have it so before feed-forward too.

    Then queries to the encoder's memory are linear in X + P_o(O): P_q(X) is made along with Q, K
    and V, and (P_q P_o)(O) along with P_o(O). That is more to compute, and one product less to wait
    for, which pays for one row and for some dozens (`_pays`).
    """

    attention: Attention
    norm_attention: nn.Module
    P_qkv: Tensor
    bias_qkv: Tensor | None
    cross: Attention | None
    norm_cross: nn.Module | None
    P_q: Tensor | None  # of `cross`
    P_first: Tensor | None  # P_qkv and P_q, one below the other, where queries are made so
    P_second: Tensor | None  # P_o of `attention`, and P_q P_o below it
    feed_forward: FeedForward
    norm_feed_forward: nn.Module
    bias_widen: Tensor
    P_widen: Tensor | None  # with the norm's gain, where that is all it needs
    rooted: bool

    def project(self, X: Tensor) -> tuple[Tensor, Tensor | None]:
        """Queries, keys and values of X [rows, d], and where it pays P_q(X) for `add_and_ask`."""
        if not self.rooted:
            return _normed_product(self.norm_attention, X, self.P_qkv, self.bias_qkv), None
        first, second = self.P_first, self.P_second
        if first is None or second is None or not _pays(X, first, second):
            return _product(X, self.P_qkv), None
        wide, width = _merged_product(X, first), len(self.P_qkv)
        return wide[:, :width], wide[:, width:]

    def add_and_ask(
        self,
        X: Tensor,
        O: Tensor,  # noqa: E741
        asked: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """X [rows, d] + P_o(O), and its queries to the encoder's memory where there is one."""
        if asked is None:
            X = self.add(X, O, self.attention.P_o)
            return X, None if self.cross is None else self.project_cross(X)
        assert self.P_second is not None
        both, d = _merged_product(O, self.P_second, X, asked), X.shape[1]
        return both[:, :d], both[:, d:]

    def project_cross(self, X: Tensor) -> Tensor:
        """The queries of X [rows, d] to the encoder's memory."""
        assert self.cross is not None
        assert self.norm_cross is not None
        assert self.P_q is not None
        if self.rooted:
            return _product(X, self.P_q)
        return _normed_product(self.norm_cross, X, self.P_q, self.cross.P_q.bias)

    def unnormed(self, X: Tensor) -> Unnormed | None:
        """What an attention kernel must know of a projection of X that left out the norm's root."""
        return Unnormed(X, _rms(self.norm_attention).epsilon) if self.rooted else None

    def add(self, X: Tensor, H: Tensor, P: nn.Linear) -> Tensor:
        """X [rows, d] + P(H), which may be X itself."""
        if len(X) == 1:
            return row_linear(H, P.weight, P.bias, residual=X)
        own = _own_product(H, P.weight, X) if self.rooted else None
        if own is not None:
            return own
        X.addmm_(H, P.weight.t())
        if P.bias is not None:
            X += P.bias
        return X

    def feed(self, X: Tensor) -> Tensor:
        """X [rows, d] + feed-forward of its norm; X itself may be what is returned."""
        norm, widen, narrow = (
            self.norm_feed_forward,
            self.feed_forward.widen,
            self.feed_forward.narrow,
        )
        if self.feed_forward.activation != "relu":
            approximate = "tanh" if self.feed_forward.activation == "gelu_tanh" else "none"
            H = gelu(_normed_product(norm, X, widen.weight, widen.bias), approximate=approximate)
        elif len(X) == 1 and isinstance(norm, nn.RMSNorm):
            H = row_linear(X, widen.weight, widen.bias, norm=_rms(norm), relu=True)
        elif self.P_widen is not None and few_rows(X, narrow.weight):
            # a root is not negative, so it may wait until after relu, and after the next product
            H = torch._addmm_activation(self.bias_widen, X, self.P_widen.t())
            unnormed = Unnormed(X, _rms(norm).epsilon)
            return rows_linear(H, narrow.weight, residual=X, unnormed=unnormed)
        else:
            H = torch._addmm_activation(self.bias_widen, _norm(norm, X), widen.weight.t())
        return self.add(X, H, narrow)


def _fused_layers(layers: nn.ModuleList, *, rooted: bool) -> list[_FusedLayer]:
    return [_fused_layer(layer, rooted) for layer in layers if isinstance(layer, Layer)]


def _fused_layer(layer: Layer, rooted: bool) -> _FusedLayer:
    attention, feed = layer.attention, layer.feed_forward
    parts = (attention.P_q, attention.P_k, attention.P_v)
    P_qkv = torch.cat([P.weight for P in parts])
    bias = torch.cat([P.bias for P in parts]) if attention.config.bias else None
    cross: Attention | None = getattr(layer, "cross", None)
    norm_cross: nn.Module | None = getattr(layer, "norm_cross", None)
    P_q = None if cross is None else cross.P_q.weight
    rooted = rooted and bias is None and isinstance(layer.norm_attention, nn.RMSNorm)
    rooted = rooted and P_qkv.dtype != torch.float16  # before the root, values may be too large
    P_first = P_second = None
    if rooted:
        P_qkv = _gained(P_qkv, layer.norm_attention)
        if P_q is not None and norm_cross is not None:
            P_o, P_q = attention.P_o.weight, _gained(P_q, norm_cross)
            if (len(P_o) + len(P_q)) * P_o.shape[1] <= LARGEST:
                P_first = torch.cat([P_qkv, P_q])
                P_qkv, P_q = P_first[: len(P_qkv)], P_first[len(P_qkv) :]
                P_second = torch.cat([P_o, (P_q.float() @ P_o.float()).to(P_o.dtype)])
    widen, P_widen = feed.widen, None
    if rooted and feed.activation == "relu":
        P_widen = _gained(widen.weight, layer.norm_feed_forward)
    none = widen.weight.new_zeros(len(widen.weight))
    return _FusedLayer(
        attention,
        layer.norm_attention,
        P_qkv,
        bias,
        cross,
        norm_cross,
        P_q,
        P_first,
        P_second,
        feed,
        layer.norm_feed_forward,
        none if widen.bias is None else widen.bias,
        P_widen,
        rooted,
    )


def _gained(P: Tensor, norm: nn.Module) -> Tensor:
    """P [columns, d] with the gain of the norm before it."""
    return (P.float() * _rms(norm).gain.float()).to(P.dtype)


def _rms(norm: nn.Module) -> Norm:
    assert isinstance(norm, nn.RMSNorm)
    assert norm.weight is not None
    assert norm.eps is not None
    return Norm(norm.weight, norm.eps)


def _norm(norm: nn.Module, X: Tensor, scale: float = 1.0) -> Tensor:
    """`norm` of X [rows, d], times `scale`."""
    if isinstance(norm, nn.LayerNorm):
        weight, bias, epsilon = norm.weight, norm.bias, norm.eps
        return normalize(X, weight, bias, epsilon=epsilon, centred=True, scale=scale)
    own = _rms(norm)
    return normalize(X, own.gain, None, epsilon=own.epsilon, centred=False, scale=scale)


def _product(X: Tensor, W: Tensor) -> Tensor:
    """X W^T of X [rows, d]."""
    own = _own_product(X, W)
    return linear(X, W) if own is None else own


def _pays(X: Tensor, first: Tensor, second: Tensor) -> bool:
    """Whether one product less pays for more to compute, for as many rows as X [rows, d] has."""
    shapes = (choose_shape(X, first, WIDEST), choose_shape(X, second, WIDEST))
    return len(X) == 1 or (len(X) <= MERGED and None not in shapes)


def _merged_product(
    X: Tensor, W: Tensor, residual: Tensor | None = None, beside: Tensor | None = None
) -> Tensor:
    """X W^T, plus `residual` and, in the columns past it, `beside`, where `_pays`."""
    if len(X) == 1:
        return row_linear(X, W, residual=residual, beside=beside)
    shape = choose_shape(X, W, WIDEST)
    assert shape is not None
    return tiled_linear(X, W, shape, residual=residual, beside=beside)


def _own_product(X: Tensor, W: Tensor, residual: Tensor | None = None) -> Tensor | None:
    """X W^T of X [rows, d], plus `residual`; None where the library's product is as quick."""
    if len(X) == 1:
        return row_linear(X, W, residual=residual)
    shape = choose_shape(X, W)
    if shape is not None:
        return tiled_linear(X, W, shape, residual=residual)
    return rows_linear(X, W, residual=residual) if few_rows(X, W) else None


def _put(X: Tensor, P: nn.Linear, into: Tensor) -> None:
    """Puts P(X) of X [b m, d] into a memory [b, g, m, k] whose heads are neighbours."""
    b, g, m, k = into.shape
    wide = into.transpose(1, 2).view(b, m, g * k)
    if P.bias is None and wide.is_contiguous():
        torch.mm(X, P.weight.t(), out=wide.view(b * m, g * k))
    else:
        wide.copy_(P(X).view_as(wide))


def _normed_product(
    norm: nn.Module, X: Tensor, W: Tensor, bias: Tensor | None, *, scale: float = 1.0
) -> Tensor:
    """scale × norm(X) W^T + bias of X [rows, d]."""
    if len(X) == 1 and isinstance(norm, nn.RMSNorm):
        return row_linear(X, W, bias, norm=_rms(norm), scale=scale)
    return linear(_norm(norm, X, scale), W, bias)
