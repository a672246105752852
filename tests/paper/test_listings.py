"""§2-3: the listings compute the same thing in six ways, and the ratios count their tensors."""

import math
from unittest.mock import patch

import pytest
import torch
from torch.testing import assert_close

from helpers import causal_mask, random
from writehead.config import AttentionConfig
from writehead.paper import listings
from writehead.paper.ratios import ratios

b, n, h, k, v, m, d = 2, 3, 5, 7, 11, 13, 17


def multihead_projections():
    return [random(h, d, depth) * d**-0.5 for depth in (k, k, v, v)]


def multiquery_projections():
    """The projections of multi-query attention, and of multi-head whose heads share theirs."""
    P_q, P_k, P_v, P_o = multihead_projections()
    shared = [P_q, P_k[:1].expand(h, d, k), P_v[:1].expand(h, d, v), P_o]
    return [P_q, P_k[0], P_v[0], P_o], shared


def test_dot_product_attention_is_a_weighted_mean_of_the_values():
    q, K, V = random(k), random(m, k), random(m, v)
    exps = [math.exp(sum(float(q[i] * K[j, i]) for i in range(k))) for j in range(m)]
    expected = [sum(exps[j] * float(V[j, i]) for j in range(m)) / sum(exps) for i in range(v)]
    assert_close(listings.DotProductAttention(q, K, V), torch.tensor(expected, dtype=torch.float64))


def test_multihead_attention_sums_dot_product_attention_over_heads():
    x, M = random(d), random(m, d)
    P_q, P_k, P_v, P_o = multihead_projections()
    heads = [listings.DotProductAttention(x @ P_q[i], M @ P_k[i], M @ P_v[i]) for i in range(h)]
    expected = sum(P_o[i] @ heads[i] for i in range(h))
    assert_close(listings.MultiheadAttention(x, M, P_q, P_k, P_v, P_o), expected)


def test_a_batch_is_its_queries_and_masked_positions_are_not_there():
    X, M = random(b, n, d), random(b, m, d)
    projections = multihead_projections()
    mask = torch.zeros(b, h, n, m, dtype=torch.float64)
    mask[..., m - 4 :] = -math.inf
    for seen, Y in (
        (m, listings.MultiheadAttentionBatched(X, M, torch.zeros(b, h, n, m), *projections)),
        (m - 4, listings.MultiheadAttentionBatched(X, M, mask, *projections)),
    ):
        for row in range(b):
            for i in range(n):
                expected = listings.MultiheadAttention(X[row, i], M[row, :seen], *projections)
                assert_close(Y[row, i], expected)


@pytest.mark.parametrize("kind", ["Multihead", "Multiquery"])
def test_increments_are_the_batch_under_a_causal_mask(kind):
    X, heads = random(b, m, d), (h,) if kind == "Multihead" else ()
    projections = multihead_projections() if heads else multiquery_projections()[0]
    batched = getattr(listings, f"{kind}AttentionBatched")
    incremental = getattr(listings, f"{kind}SelfAttentionIncremental")
    Y = batched(X, X, causal_mask(b, h, m), *projections)
    K, V = random(b, *heads, 0, k), random(b, *heads, 0, v)
    for i in range(m):
        y, K, V = incremental(X[:, i], K, V, *projections)
        assert_close(y, Y[:, i])
    assert (K.shape, V.shape) == ((b, *heads, m, k), (b, *heads, m, v))


def test_multiquery_is_multihead_whose_heads_share_one_key_and_value_projection():
    X, M = random(b, n, d), random(b, m, d)
    query, shared = multiquery_projections()
    mask = torch.where(torch.rand(b, h, n, m) < 0.3, -math.inf, 0.0).to(torch.float64)
    mask[..., 0] = 0.0
    expected = listings.MultiheadAttentionBatched(X, M, mask, *shared)
    assert_close(listings.MultiqueryAttentionBatched(X, M, mask, *query), expected)


class Einsum:
    """Replaces the listings' einsum, and counts multiply-adds and the tensors it is given."""

    def __init__(self) -> None:
        self.multiply_adds = 0
        self.seen: dict[int, torch.Tensor] = {}

    def __call__(self, equation: str, *operands: torch.Tensor) -> torch.Tensor:
        result = torch.einsum(equation, *operands)
        letters = equation.split("->")[0].replace(",", "")
        sizes = dict(zip(letters, (size for T in operands for size in T.shape), strict=True))
        self.multiply_adds += math.prod(sizes.values())
        self.seen.update({id(T): T for T in (*operands, result)})
        return result


@pytest.mark.parametrize("kind", ["Multihead", "Multiquery"])
def test_the_ratios_count_the_tensors_of_the_listings(kind):
    b, n, d, h, k, v = 2, 4, 5, 3, 11, 13
    heads = (h,) if kind == "Multihead" else ()
    P = [torch.randn(*s) for s in ((h, d, k), (*heads, d, k), (*heads, d, v), (h, d, v))]
    K, V = torch.empty(b, *heads, 0, k), torch.empty(b, *heads, 0, v)
    elements, einsum = 0, Einsum()
    with patch.object(listings, "einsum", einsum):
        for _ in range(n):
            x = torch.randn(b, d)
            y, K, V = getattr(listings, f"{kind}SelfAttentionIncremental")(x, K, V, *P)
            q_and_o = b * h * (k + v)
            elements += q_and_o + sum(T.numel() for T in (x, y, K, V, *P))
    batched, *incremental = ratios(AttentionConfig(d, h, h if heads else 1, k, v), b, n)
    counted = incremental[kind == "Multiquery"].counted
    assert counted == pytest.approx(elements / einsum.multiply_adds)
    if kind == "Multiquery":
        X, M, einsum = torch.randn(b, n, d), torch.randn(b, n, d), Einsum()
        with patch.object(listings, "einsum", einsum):
            listings.MultiqueryAttentionBatched(X, M, torch.zeros(b, h, n, n), *P)
        elements = sum(T.numel() for T in einsum.seen.values())
        assert batched.counted == pytest.approx(elements / einsum.multiply_adds)
        assert batched.theta == pytest.approx(1 / k + 1 / (b * n))
