"""The paper's ratios against the tensors of its listings, counted one by one."""

import math
from unittest.mock import patch

import pytest
import torch

from writehead.config import AttentionConfig
from writehead.paper import listings
from writehead.paper.ratios import ratios


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
