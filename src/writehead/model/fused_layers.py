"""One layer of a `FusedDecoder`: which products it is, and which kernel takes each."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear

from writehead.kernels import cublas
from writehead.kernels.decode import Unnormed
from writehead.kernels.linear import Norm, few_rows, row_linear, rows_linear
from writehead.kernels.pointwise import normalize
from writehead.kernels.tiles import choose_shape, tiled_linear
from writehead.model.attention import Attention
from writehead.model.layers import FeedForward, Layer

# Where a product less was measured to pay: for one row, and up to 128 of those that have tiles.
# With 256 it does not, nor with 16 and 32, whose kernels take longer for more columns. And up to
# which columns and size of a weight.
MERGED, WIDEST, LARGEST = 128, 2304, 2048 * 1024


@dataclass(frozen=True, eq=False)
class FusedLayer:
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
    passing: bool  # whether weights do not stay in the device's cache anyway

    def project(self, X: Tensor) -> tuple[Tensor, Tensor | None]:
        """Queries, keys and values of X [rows, d], and where it pays P_q(X) for `add_and_ask`."""
        if not self.rooted:
            return normed_product(self.norm_attention, X, self.P_qkv, self.bias_qkv), None
        first, second = self.P_first, self.P_second
        if first is None or second is None or not _pays(X, first, second):
            return _product(X, self.P_qkv, passing=self.passing), None
        wide, width = _merged_product(X, first, passing=self.passing), len(self.P_qkv)
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
        both = _merged_product(O, self.P_second, X, asked, passing=self.passing)
        d = X.shape[1]
        return both[:, :d], both[:, d:]

    def project_cross(self, X: Tensor) -> Tensor:
        """The queries of X [rows, d] to the encoder's memory."""
        assert self.cross is not None
        assert self.norm_cross is not None
        assert self.P_q is not None
        if self.rooted:
            return _product(X, self.P_q, passing=self.passing)
        return normed_product(self.norm_cross, X, self.P_q, self.cross.P_q.bias)

    def unnormed(self, X: Tensor) -> Unnormed | None:
        """What an attention kernel must know of a projection of X that left out the norm's root."""
        return Unnormed(X, _rms(self.norm_attention).epsilon) if self.rooted else None

    def add(self, X: Tensor, H: Tensor, P: nn.Linear) -> Tensor:
        """X [rows, d] + P(H), which may be X itself."""
        if len(X) == 1:
            return row_linear(H, P.weight, P.bias, residual=X, passing=self.passing)
        own = _own_product(H, P.weight, X, passing=self.passing) if self.rooted else None
        if own is not None:
            return own
        if cublas.product(H, P.weight, out=X, adds=True) is None:
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
            H = gelu(normed_product(norm, X, widen.weight, widen.bias), approximate=approximate)
        elif len(X) == 1 and isinstance(norm, nn.RMSNorm):
            H = row_linear(
                X, widen.weight, widen.bias, norm=_rms(norm), relu=True, passing=self.passing
            )
        elif self.P_widen is not None and few_rows(X, narrow.weight):
            # a root is not negative, so it may wait until after relu, and after the next product
            H = self._widened(X, self.P_widen)
            unnormed = Unnormed(X, _rms(norm).epsilon)
            return rows_linear(H, narrow.weight, residual=X, unnormed=unnormed)
        else:
            H = self._widened(apply_norm(norm, X), widen.weight)
        return self.add(X, H, narrow)

    def _widened(self, X: Tensor, W: Tensor) -> Tensor:
        """relu of X W^T, plus the bias where feed-forward has one."""
        H = None if self.feed_forward.widen.bias is not None else cublas.product(X, W, relu=True)
        return torch._addmm_activation(self.bias_widen, X, W.t()) if H is None else H


def fused_layers(layers: nn.ModuleList, *, rooted: bool, passing: bool = False) -> list[FusedLayer]:
    """The layers of a stack; `rooted` where all that reads their projections takes the root.

    passing: whether the weights of one row leave the device's cache first.
    """
    return [_fused_layer(layer, rooted, passing) for layer in layers if isinstance(layer, Layer)]


def _fused_layer(layer: Layer, rooted: bool, passing: bool) -> FusedLayer:
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
    return FusedLayer(
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
        passing,
    )


def _gained(P: Tensor, norm: nn.Module) -> Tensor:
    """P [columns, d] with the gain of the norm before it."""
    return (P.float() * _rms(norm).gain.float()).to(P.dtype)


def _rms(norm: nn.Module) -> Norm:
    assert isinstance(norm, nn.RMSNorm)
    assert norm.weight is not None
    assert norm.eps is not None
    return Norm(norm.weight, norm.eps)


def apply_norm(norm: nn.Module, X: Tensor, scale: float = 1.0) -> Tensor:
    """`norm` of X [rows, d], times `scale`."""
    if isinstance(norm, nn.LayerNorm):
        weight, bias, epsilon = norm.weight, norm.bias, norm.eps
        return normalize(X, weight, bias, epsilon=epsilon, centred=True, scale=scale)
    own = _rms(norm)
    return normalize(X, own.gain, None, epsilon=own.epsilon, centred=False, scale=scale)


def _product(X: Tensor, W: Tensor, *, passing: bool) -> Tensor:
    """X W^T of X [rows, d]."""
    own = _own_product(X, W, passing=passing)
    return _library_product(X, W) if own is None else own


def _library_product(X: Tensor, W: Tensor, bias: Tensor | None = None) -> Tensor:
    """X W^T + bias of X [rows, d], by the library's quickest where it is told no bias."""
    quickest = cublas.product(X, W) if bias is None else None
    return linear(X, W, bias) if quickest is None else quickest


def _pays(X: Tensor, first: Tensor, second: Tensor) -> bool:
    """Whether one product less pays for more to compute, for as many rows as X [rows, d] has."""
    shapes = (choose_shape(X, first, WIDEST), choose_shape(X, second, WIDEST))
    return len(X) == 1 or (len(X) <= MERGED and None not in shapes)


def _merged_product(
    X: Tensor,
    W: Tensor,
    residual: Tensor | None = None,
    beside: Tensor | None = None,
    *,
    passing: bool,
) -> Tensor:
    """X W^T, plus `residual` and, in the columns past it, `beside`, where `_pays`."""
    if len(X) == 1:
        return row_linear(X, W, residual=residual, beside=beside, passing=passing)
    shape = choose_shape(X, W, WIDEST)
    assert shape is not None
    return tiled_linear(X, W, shape, residual=residual, beside=beside)


def _own_product(
    X: Tensor, W: Tensor, residual: Tensor | None = None, *, passing: bool
) -> Tensor | None:
    """X W^T of X [rows, d], plus `residual`; None where the library's product is as quick."""
    if len(X) == 1:
        return row_linear(X, W, residual=residual, passing=passing)
    shape = choose_shape(X, W)
    if shape is not None:
        return tiled_linear(X, W, shape, residual=residual)
    return rows_linear(X, W, residual=residual) if few_rows(X, W) else None


def normed_product(
    norm: nn.Module,
    X: Tensor,
    W: Tensor,
    bias: Tensor | None,
    *,
    scale: float = 1.0,
    passing: bool = False,
) -> Tensor:
    """scale × norm(X) W^T + bias of X [rows, d]."""
    if len(X) == 1 and isinstance(norm, nn.RMSNorm):
        return row_linear(X, W, bias, norm=_rms(norm), scale=scale, passing=passing)
    return _library_product(apply_norm(norm, X, scale), W, bias)
