"""Embeddings and norms against those of PyTorch."""

import pytest
import torch
from torch import nn

from helpers import DEVICE, assert_close_in, integers, randn
from writehead.kernels import pointwise

rows, d = 3, 21


@pytest.mark.parametrize("positions", [(0, 6, 3), (6, 7, 900)])  # positions past the last use it
def test_embed_adds_the_embeddings_of_token_and_position(positions):
    E, P, clock = randn(13, d), randn(7, d), integers(5, dtype=torch.int32)
    tokens, at = integers(12, 0, 5), integers(*positions)
    expected = E[tokens] + P[at.clamp(max=6)]
    assert_close_in(torch.float32, pointwise.embed(tokens, at, E, P), expected, ulps=1)
    assert_close_in(torch.float32, pointwise.embed(tokens, at, E, P, clock), expected, ulps=1)
    assert (tokens.tolist(), clock.tolist()) == ([12, 0, 5], [6])


@pytest.mark.parametrize("size", [d, 16, 1])
@pytest.mark.parametrize(
    ("centred", "bias"), [(False, False), (True, False), (True, True)], ids=str
)
@pytest.mark.parametrize("count", [rows, 5, 6])
def test_norms_equal_those_of_pytorch(monkeypatch, count, centred, bias, size):
    monkeypatch.setattr(pointwise, "MANY", 5)  # from here on a program takes two rows
    kind = {"bias": bias} if centred else {}
    norm = (nn.LayerNorm if centred else nn.RMSNorm)(size, eps=0.3, **kind, device=DEVICE)
    for P in norm.requires_grad_(False).parameters():
        P.normal_()
    X = 5.0 + 2.0 * randn(count, size)
    tensors = X, norm.weight, norm.bias if bias else None
    for scale in (1.0, 0.25):
        Y = pointwise.normalize(*tensors, epsilon=0.3, centred=centred, scale=scale)
        assert_close_in(torch.float32, Y, scale * norm(X), ulps=64)


@pytest.mark.parametrize("centred", [False, True])
def test_norms_of_float16_accumulate_in_float32(centred):
    X = (300.0 + randn(rows, 64)).half()  # their squares overflow float16
    gain = torch.ones(64, device=DEVICE).half()
    Y = pointwise.normalize(X, gain, None, epsilon=1e-6, centred=centred)
    exact = X.double() - (X.double().mean(1, keepdim=True) if centred else 0.0)
    exact = exact / exact.square().mean(1, keepdim=True).sqrt()
    assert Y.dtype == torch.float16
    assert_close_in(torch.float16, Y, exact, ulps=1)
