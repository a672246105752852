"""§2-3: the paper's six listings say the same thing in six ways."""

import math

import torch
from torch.testing import assert_close

from helpers import causal_mask, random
from writehead.paper.listings import (
    DotProductAttention,
    MultiheadAttention,
    MultiheadAttentionBatched,
    MultiheadSelfAttentionIncremental,
    MultiqueryAttentionBatched,
    MultiquerySelfAttentionIncremental,
)

b, n, h, k, v, m, d = 2, 3, 5, 7, 11, 13, 17


def multihead_projections():
    return [random(h, d, depth) * d**-0.5 for depth in (k, k, v, v)]


def multiquery_projections():
    P_q, P_k, P_v, P_o = multihead_projections()
    return [P_q, P_k[0], P_v[0], P_o]


def test_dot_product_attention_is_a_weighted_mean_of_the_values():
    q, K, V = random(k), random(m, k), random(m, v)

    exps = [math.exp(sum(float(q[i] * K[j, i]) for i in range(k))) for j in range(m)]
    expected = [sum(exps[j] * float(V[j, i]) for j in range(m)) / sum(exps) for i in range(v)]

    assert_close(DotProductAttention(q, K, V), torch.tensor(expected, dtype=torch.float64))


def test_multihead_attention_is_one_dot_product_attention_a_head_summed():
    x, M = random(d), random(m, d)
    P_q, P_k, P_v, P_o = multihead_projections()

    heads = [DotProductAttention(x @ P_q[i], M @ P_k[i], M @ P_v[i]) for i in range(h)]
    expected = sum(P_o[i] @ heads[i] for i in range(h))

    assert_close(MultiheadAttention(x, M, P_q, P_k, P_v, P_o), expected)


def test_a_batched_row_is_one_query():
    X, M = random(b, n, d), random(b, m, d)
    projections = multihead_projections()

    Y = MultiheadAttentionBatched(X, M, torch.zeros(b, h, n, m), *projections)

    for row in range(b):
        for i in range(n):
            assert_close(Y[row, i], MultiheadAttention(X[row, i], M[row], *projections))


def test_a_masked_position_is_one_that_is_not_there():
    X, M = random(b, n, d), random(b, m, d)
    projections = multihead_projections()
    mask = torch.zeros(b, h, n, m, dtype=torch.float64)
    mask[..., m - 4 :] = -math.inf

    Y = MultiheadAttentionBatched(X, M, mask, *projections)

    shorter = MultiheadAttentionBatched(X, M[:, : m - 4], mask[..., : m - 4], *projections)
    assert_close(Y, shorter)


def test_multihead_increments_are_the_batch_under_a_causal_mask():
    X = random(b, m, d)
    projections = multihead_projections()
    Y = MultiheadAttentionBatched(X, X, causal_mask(b, h, m), *projections)

    K, V = random(b, h, 0, k), random(b, h, 0, v)
    for i in range(m):
        y, K, V = MultiheadSelfAttentionIncremental(X[:, i], K, V, *projections)
        assert_close(y, Y[:, i])

    assert K.shape == (b, h, m, k)
    assert V.shape == (b, h, m, v)


def test_multiquery_increments_are_the_batch_under_a_causal_mask():
    X = random(b, m, d)
    projections = multiquery_projections()
    Y = MultiqueryAttentionBatched(X, X, causal_mask(b, h, m), *projections)

    K, V = random(b, 0, k), random(b, 0, v)
    for i in range(m):
        y, K, V = MultiquerySelfAttentionIncremental(X[:, i], K, V, *projections)
        assert_close(y, Y[:, i])

    assert K.shape == (b, m, k)
    assert V.shape == (b, m, v)


def test_multiquery_is_multihead_whose_heads_share_one_key_and_value_projection():
    X, M = random(b, n, d), random(b, m, d)
    P_q, P_k, P_v, P_o = multiquery_projections()
    mask = torch.where(torch.rand(b, h, n, m) < 0.3, -math.inf, 0.0).to(torch.float64)
    mask[..., 0] = 0.0

    expected = MultiheadAttentionBatched(
        X, M, mask, P_q, P_k.expand(h, d, k), P_v.expand(h, d, v), P_o
    )

    assert_close(MultiqueryAttentionBatched(X, M, mask, P_q, P_k, P_v, P_o), expected)


def test_a_multiquery_step_is_a_multihead_step_whose_heads_share_a_past():
    x, prev_K, prev_V = random(b, d), random(b, m, k), random(b, m, v)
    P_q, P_k, P_v, P_o = multiquery_projections()

    y, K, V = MultiquerySelfAttentionIncremental(x, prev_K, prev_V, P_q, P_k, P_v, P_o)

    heads_K, heads_V = (T.unsqueeze(1).repeat(1, h, 1, 1) for T in (prev_K, prev_V))
    expected_y, expected_K, expected_V = MultiheadSelfAttentionIncremental(
        x, heads_K, heads_V, P_q, P_k.expand(h, d, k), P_v.expand(h, d, v), P_o
    )
    assert_close(y, expected_y)
    for i in range(h):
        assert_close(K, expected_K[:, i])
        assert_close(V, expected_V[:, i])
