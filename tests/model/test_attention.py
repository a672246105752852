"""One attention module, by g alone, against the paper's multi-head and multi-query listings."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from helpers import additive, causal_mask, random
from writehead.config import AttentionConfig
from writehead.kernels import Visibility, attend
from writehead.model import Attention, KVCache
from writehead.model.attention import WholePast
from writehead.model.dropout import shared_dropout
from writehead.paper.listings import (
    MultiheadAttentionBatched,
    MultiheadSelfAttentionIncremental,
    MultiqueryAttentionBatched,
    MultiquerySelfAttentionIncremental,
)

b, n, h, k, v, m, d = 2, 3, 6, 7, 11, 13, 17

every_kind = pytest.mark.parametrize("g", [h, 3, 2, 1])
every_depth = pytest.mark.parametrize("v", [k, v])


def attention(g: int, v: int = v, **options: object) -> Attention:
    return Attention(AttentionConfig(d, h, g, k, v, **options)).double()


def projections(module: Attention) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The listings' P_q, P_k [h, d, k] and P_v, P_o [h, d, v]: scaled, and repeated to h heads."""
    g, v = module.config.g, module.config.v
    P_q = module.P_q.weight.view(h, k, d).transpose(1, 2) * k**-0.5
    P_k = module.P_k.weight.view(g, k, d).transpose(1, 2).repeat_interleave(h // g, dim=0)
    P_v = module.P_v.weight.view(g, v, d).transpose(1, 2).repeat_interleave(h // g, dim=0)
    P_o = module.P_o.weight.view(d, h, v).transpose(0, 1)
    return P_q, P_k, P_v, P_o


def one_write_head(module: Attention) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same for multi-query: P_k [d, k] and P_v [d, v]."""
    P_q, P_k, P_v, P_o = projections(module)
    return P_q, P_k[0], P_v[0], P_o


def step(module: Attention, x: Tensor, cache: KVCache) -> Tensor:
    reservation = cache.reserve(1)
    y = module(x.unsqueeze(1), reservation.layer(0)).squeeze(1)
    cache.advance(reservation)
    return y


@every_depth
@every_kind
@pytest.mark.parametrize("window", [None, 1, 4, m + 1])
def test_self_attention_is_the_multihead_listing_with_its_write_heads_repeated(window, g, v):
    module, X = attention(g, v), random(b, m, d)

    Y = module(X, WholePast(Visibility(causal=True, window=window)))

    mask = causal_mask(b, h, m, window)
    assert_close(Y, MultiheadAttentionBatched(X, X, mask, *projections(module)))


@every_depth
def test_self_attention_with_one_write_head_is_the_multiquery_listing(v):
    module, X = attention(1, v), random(b, m, d)

    Y = module(X, WholePast(Visibility(causal=True)))

    mask = causal_mask(b, h, m)
    assert_close(Y, MultiqueryAttentionBatched(X, X, mask, *one_write_head(module)))


@every_depth
@every_kind
def test_reading_a_memory_is_the_batched_listing(g, v):
    module, X, M = attention(g, v), random(b, n, d), random(b, m, d)
    lengths = torch.tensor([m, 4])

    memory = module.memorize(M, Visibility(lengths=lengths))

    mask = additive(torch.arange(m) < lengths.view(b, 1, 1, 1)).expand(b, h, n, m)
    expected = MultiheadAttentionBatched(X, M, mask, *projections(module))
    assert_close(module.read(X, memory), expected)
    assert memory.K.shape == (b, g, m, k)
    assert memory.V.shape == (b, g, m, v)
    assert memory.nbytes == b * g * m * (k + v) * 8


@every_depth
@every_kind
def test_steps_through_a_cache_are_the_multihead_incremental_listing(g, v):
    module, X = attention(g, v), random(b, m, d)
    cache = KVCache(module.config, layers=1, rows=b, capacity=m, dtype=torch.float64)
    K, V = random(b, h, 0, k), random(b, h, 0, v)

    for x in X.unbind(1):
        y, K, V = MultiheadSelfAttentionIncremental(x, K, V, *projections(module))
        assert_close(step(module, x, cache), y)

    assert_close(cache.K[0], K[:, :: h // g])
    assert_close(cache.V[0], V[:, :: h // g])


@every_depth
def test_steps_through_a_cache_are_the_multiquery_incremental_listing(v):
    module, X = attention(1, v), random(b, m, d)
    cache = KVCache(module.config, layers=1, rows=b, capacity=m, dtype=torch.float64)
    K, V = random(b, 0, k), random(b, 0, v)

    for x in X.unbind(1):
        y, K, V = MultiquerySelfAttentionIncremental(x, K, V, *one_write_head(module))
        assert_close(step(module, x, cache), y)

    assert_close(cache.K[0].squeeze(1), K)
    assert_close(cache.V[0].squeeze(1), V)


@pytest.mark.parametrize("window", [1, 4, m])
def test_steps_through_a_ring_are_the_batched_listing_under_a_window(window):
    module, X = attention(2, window=window), random(b, m, d)
    cache = KVCache(module.config, layers=1, rows=b, capacity=m, dtype=torch.float64)

    Y = torch.stack([step(module, x, cache) for x in X.unbind(1)], dim=1)

    mask = causal_mask(b, h, m, window)
    assert_close(Y, MultiheadAttentionBatched(X, X, mask, *projections(module)))
    assert cache.size == window


def test_biases_are_added_to_each_projection():
    module, X = attention(2, bias=True), random(b, m, d)
    with torch.no_grad():
        for P in (module.P_q, module.P_k, module.P_v, module.P_o):
            P.bias.normal_()

    Y = module(X, WholePast(Visibility()))

    # a bias is one more column of the weight, read by an input that is always 1
    wide = torch.cat([X, torch.ones(b, m, 1)], dim=2)
    unbiased = Attention(AttentionConfig(d + 1, h, 2, k, v)).double()
    with torch.no_grad():
        for name in ("P_q", "P_k", "P_v"):
            P = getattr(module, name)
            getattr(unbiased, name).weight.copy_(torch.cat([P.weight, P.bias[:, None]], dim=1))
        unbiased.P_o.weight.zero_()[:d].copy_(module.P_o.weight)
    assert_close(Y, unbiased(wide, WholePast(Visibility()))[..., :d] + module.P_o.bias)


def test_dropout_acts_in_training_and_not_in_evaluation():
    module, X = Attention(AttentionConfig(d, h, 1, k, v), dropout=0.5).double(), random(b, m, d)
    past = WholePast(Visibility())

    assert not torch.equal(module(X, past), module(X, past))
    module.eval()
    assert torch.equal(module(X, past), module(X, past))


@pytest.mark.parametrize("g", [h, 1])
@pytest.mark.parametrize("bias", [False, True])
def test_one_wide_product_in_training_equals_three(g, bias):
    module, X = Attention(AttentionConfig(d, h, g, k, v, bias=bias)).double(), random(b, m, d)
    if bias:
        for P in (module.P_q, module.P_k, module.P_v, module.P_o):
            torch.nn.init.normal_(P.bias)
    past = WholePast(Visibility(causal=True))
    assert_close(module.train()(X, past), module.eval()(X, past))


@pytest.mark.parametrize("depth", [k, v], ids=["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dropout_in_training_is_that_of_the_values_bit_for_bit(dtype, depth):
    module = Attention(AttentionConfig(d, h, 2, k, depth), dropout=0.3).to(dtype)
    X, M = (torch.randn(b, size, d, dtype=dtype, requires_grad=True) for size in (m, n))
    visibility, parts = Visibility(causal=True), (module.P_q, module.P_k, module.P_v)

    def attend_with_dropped_values(Q, K, V, visibility):
        V = shared_dropout(V, 0.3, dim=3)
        O = attend(Q, K, V, visibility, scale=k**-0.5)  # noqa: E741
        return module.P_o(O.transpose(1, 2).flatten(2))

    def by_hand() -> Tensor:
        wide = torch.nn.functional.linear(X, torch.cat([P.weight for P in parts]))
        QKV = torch.split(wide, [P.out_features for P in parts], dim=2)
        Q, K, V = (
            T.unflatten(2, (g, -1)).transpose(1, 2) for T, g in zip(QKV, (h, 2, 2), strict=True)
        )
        Y = attend_with_dropped_values(Q, K, V, visibility)
        Q = module.P_q(X).unflatten(2, (h, k)).transpose(1, 2)
        return Y + attend_with_dropped_values(Q, *module.project_kv(M), Visibility())

    def by_module() -> Tensor:
        memory = module.memorize(M, Visibility())
        return module(X, WholePast(visibility)) + module.read(X, memory)

    found = []
    for work in (by_module, by_hand):
        torch.manual_seed(7)
        Y = work()
        found.append([Y, *torch.autograd.grad(Y.square().sum(), (X, M, *module.parameters()))])
    for ours, right in zip(*found, strict=True):
        assert torch.equal(ours, right)
