"""Embedding, norms and the memory's layout against PyTorch's; interpreted where no GPU is."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

pointwise = pytest.importorskip("writehead.kernels.pointwise", reason="Triton is not installed")
pytestmark = pytest.mark.usefixtures("interpreted")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
rows, d = 3, 21


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE)


def integers(*values: int) -> Tensor:
    return torch.tensor(values, device=DEVICE)


def test_a_token_is_its_embedding_and_its_positions():
    E, P = random(13, d), random(7, d)
    tokens, positions = integers(12, 0, 5), integers(0, 6, 3)
    assert torch.equal(pointwise.embed(tokens, positions, E, P), E[tokens] + P[positions])


def test_a_position_past_the_last_counts_as_the_last():
    E, P = random(13, d), random(7, d)
    tokens = integers(4, 4, 4)
    X = pointwise.embed(tokens, integers(6, 7, 900), E, P)
    assert torch.equal(X, (E[4] + P[6]).expand(rows, d))


def test_embedding_ticks_the_clock_once_and_only_where_there_is_one():
    E, P, clock = random(13, d), random(7, d), integers(5).int()
    tokens, positions = integers(2, 3, 1), integers(0, 1, 2)
    for expected in (6, 7):
        pointwise.embed(tokens, positions, E, P, clock)
        assert clock.item() == expected
    pointwise.embed(tokens, positions, E, P)
    assert tokens.tolist() == [2, 3, 1]
    assert clock.item() == 7


def trained(norm: nn.Module) -> nn.Module:
    for P in norm.to(DEVICE).requires_grad_(False).parameters():
        P.normal_()
    return norm


@pytest.mark.parametrize("size", [d, 16, 1])
@pytest.mark.parametrize("bias", [False, True])
def test_layer_norm_is_pytorchs(bias, size):
    norm = trained(nn.LayerNorm(size, eps=0.3, bias=bias))
    X = 5.0 + 2.0 * random(rows, size)
    found = pointwise.normalize(X, norm.weight, norm.bias, epsilon=0.3, centred=True)
    assert_close(found, norm(X), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [d, 16, 1])
def test_rms_norm_is_pytorchs(size):
    norm = trained(nn.RMSNorm(size, eps=0.3))
    X = 5.0 + 2.0 * random(rows, size)
    found = pointwise.normalize(X, norm.weight, None, epsilon=0.3, centred=False)
    assert_close(found, norm(X), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("count", [5, 6])
def test_many_rows_are_normalized_two_at_a_time(monkeypatch, count):
    monkeypatch.setattr(pointwise, "MANY", 5)
    wide = random(count + 1, d)
    norm, X = trained(nn.LayerNorm(d, eps=0.3)), wide[:count]
    found = pointwise.normalize(X, norm.weight, norm.bias, epsilon=0.3, centred=True)
    assert_close(found, norm(X), atol=1e-5, rtol=1e-5)


def test_the_scale_is_that_of_the_whole_norm():
    norm = trained(nn.LayerNorm(d, eps=0.3))
    X = random(rows, d)
    found = pointwise.normalize(X, norm.weight, norm.bias, epsilon=0.3, centred=True, scale=0.25)
    assert_close(found, 0.25 * norm(X))


def test_sums_are_float32_whatever_comes_in():
    X = (300.0 + random(rows, 64)).half()  # whose squares float16 cannot hold
    gain = torch.ones(64, device=DEVICE).half()
    for centred in (False, True):
        found = pointwise.normalize(X, gain, None, epsilon=1e-6, centred=centred)
        exact = X.double() - (X.double().mean(1, keepdim=True) if centred else 0.0)
        exact = exact / exact.square().mean(1, keepdim=True).sqrt()
        assert found.dtype == torch.float16
        assert_close(found, exact.half(), atol=2e-3, rtol=2e-3)
