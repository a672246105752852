"""One attention module, by g alone, against the paper's multi-head and multi-query listings."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from helpers import causal_mask, projections, random
from writehead.config import AttentionConfig
from writehead.model import Attention, KVCache
from writehead.model.attention import Memory, WholeSequence
from writehead.model.layers import SharedDropout
from writehead.ops.attention import attend
from writehead.ops.heads import split_heads
from writehead.ops.visibility import Visibility
from writehead.paper.listings import (
    MultiheadAttentionBatched,
    MultiheadSelfAttentionIncremental,
    MultiqueryAttentionBatched,
    MultiquerySelfAttentionIncremental,
)

b, n, h, k, v, m, d = 2, 3, 6, 7, 11, 13, 17


def attention(g: int, v: int = v, **options: object) -> Attention:
    return Attention(AttentionConfig(d, h, g, k, v, **options)).double()


@pytest.mark.parametrize("v", [k, v])
@pytest.mark.parametrize("g", [h, 2, 1])
@pytest.mark.parametrize("window", [None, 1, 4, m + 1])
def test_whole_sequences_and_steps_through_a_cache_are_the_listings(window, g, v):
    module, X = attention(g, v, window=window), random(b, m, d)
    mask, own = causal_mask(b, h, m, window), projections(module)
    right = MultiheadAttentionBatched(X, X, mask, *own)
    assert_close(module(X, WholeSequence(Visibility(causal=True, window=window))), right)
    cache = KVCache(module.config, layers=1, rows=b, capacity=m, dtype=torch.float64)
    K, V, shared_K, shared_V = (
        random(b, *heads, 0, size) for heads in ((h,), ()) for size in (k, v)
    )
    for i, x in enumerate(X.unbind(1)):
        cache.reserve(1)
        Y = module(x.unsqueeze(1), cache.layers()[0]).squeeze(1)
        cache.advance(1)
        assert_close(Y, right[:, i])
        if window is None:
            y, K, V = MultiheadSelfAttentionIncremental(x, K, V, *own)
            assert_close(Y, y)
        if window is None and g == 1:
            y, shared_K, shared_V = MultiquerySelfAttentionIncremental(
                x, shared_K, shared_V, *projections(module, shared=True)
            )
            assert_close(Y, y)
    if g == 1:
        one = MultiqueryAttentionBatched(X, X, mask, *projections(module, shared=True))
        assert_close(one, right)
    assert cache.size == min(window or m, m)
    if window is None:
        assert_close(cache.K[0], K[:, :: h // g])
        assert_close(cache.V[0], V[:, :: h // g])


@pytest.mark.parametrize("depth", [k, v], ids=["sdpa", "eager"])
def test_dropout_in_training_is_that_of_the_values(depth):
    module = Attention(AttentionConfig(d, h, 2, k, depth, bias=True), dropout=0.5).double()
    for P in (module.P_q, module.P_k, module.P_v, module.P_o):
        torch.nn.init.normal_(P.bias)
    X, M = (random(b, size, d).requires_grad_() for size in (m, n))

    def by_hand(kv: Tensor, visibility: Visibility) -> Tensor:
        Q = split_heads(module.P_q(X), h)
        K, V = split_heads(module.P_k(kv), 2), split_heads(module.P_v(kv), 2)
        V = V * 2.0 * (torch.rand(*V.shape[:3], 1) >= 0.5)
        O = attend(Q, K, V, visibility, scale=k**-0.5)  # noqa: E741
        return module.P_o(O.transpose(1, 2).flatten(2))

    def by_module() -> Tensor:
        memory = Memory(*module.project_memory(M), Visibility())
        return module(X, WholeSequence(Visibility(causal=True))) + module(X, memory)

    found = []
    for work in (by_module, lambda: by_hand(X, Visibility(causal=True)) + by_hand(M, Visibility())):
        torch.manual_seed(7)
        Y = work()
        found.append([Y, *torch.autograd.grad(Y.square().sum(), (X, M, *module.parameters()))])
    for ours, right in zip(*found, strict=True):
        assert_close(ours, right)


def test_dropout_is_the_same_for_all_positions_and_keeps_the_mean():
    dropout, X = SharedDropout(0.25), torch.ones(4000, 3, 5)
    Y = dropout(X)
    assert torch.equal(Y, Y[:, :1].expand_as(Y))
    assert_close(Y.unique(), torch.tensor([0.0, 4 / 3]))
    assert_close(Y.mean(), torch.tensor(1.0), atol=0.02, rtol=0.0)
    assert torch.equal(dropout.eval()(X), X)
