"""Norms against those of PyTorch, and against the formula in float64."""

import pytest
import torch
from torch import nn

from helpers import DEVICE, DTYPES, assert_at_most_twice, assert_close_in, randn
from writehead.errors import BackendError, ConfigError
from writehead.ops.linear import Weight
from writehead.ops.norm import Norm, normalize

pytest.importorskip("triton", reason="Triton is not installed")


def make(kind: str, d: int, *, affine: bool = True, bias: bool = True) -> nn.Module:
    if kind == "rms":
        norm = nn.RMSNorm(d, eps=0.3, elementwise_affine=affine)
    else:
        norm = nn.LayerNorm(d, eps=0.3, elementwise_affine=affine, bias=bias)
    for P in norm.parameters():
        nn.init.normal_(P)
    return norm.to(DEVICE).requires_grad_(False)


@pytest.mark.parametrize("implementation", ["reference", "triton", "auto"])
@pytest.mark.parametrize("d", [21, 1])
@pytest.mark.parametrize(
    "options", [("rms", True), ("rms", False), ("layer", True), ("layer", False)], ids=str
)
def test_norms_equal_those_of_pytorch(monkeypatch, options, d, implementation):
    monkeypatch.setattr("writehead.ops.norm.MIN_ROWS_FOR_PAIRS", 5)
    kind, affine = options
    norm = make(kind, d, affine=affine)
    for shape in ((3,), (1, 5), (2, 3)):
        X = 5.0 + 2.0 * randn(*shape, d)
        for scale in (1.0, 0.25):
            Y = normalize(X, Norm.of(norm), scale=scale, implementation=implementation)
            assert_close_in(torch.float32, Y, scale * norm(X), ulps=64)


@pytest.mark.parametrize("dtype", DTYPES[:-1], ids=str)  # not float32
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_kernel_errs_at_most_twice_as_much_as_plain_pytorch(kind, dtype):
    norm, X = make(kind, 64, bias=False), 300.0 + randn(3, 64)  # squares overflow float16
    exact = norm.double()(X.to(dtype).double())
    norm, X = norm.to(dtype), X.to(dtype)
    Y = normalize(X, Norm.of(norm), implementation="triton")
    assert_at_most_twice(Y, norm(X), exact)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_offset_is_added_to_the_gain_without_rounding(dtype, implementation):
    norm, X = make("rms", 21).to(dtype), randn(3, 21, dtype=dtype)
    gain = 1.0 + norm.weight.double()
    exact = nn.functional.rms_norm(X.double(), [21], eps=0.3) * gain
    norm.offset = 1.0
    Y = normalize(X, Norm.of(norm), implementation=implementation)
    assert_close_in(dtype, Y, exact, ulps=4)
    W = randn(5, 21)
    folded = Weight(W, norm=Norm.of(norm.float())).fold()
    assert_close_in(torch.float32, folded.W, W.double() * gain)
    assert folded.norm is not None
    assert folded.norm.offset == 0.0


def test_gradients_are_pytorchs():
    norm, X = make("layer", 7).requires_grad_(True), randn(3, 7).requires_grad_(True)
    ours = torch.autograd.grad(normalize(X, Norm.of(norm)).sin().sum(), [X, *norm.parameters()])
    plain = torch.autograd.grad(norm(X).sin().sum(), [X, *norm.parameters()])
    for G, expected in zip(ours, plain, strict=True):
        assert_close_in(torch.float32, G, expected)


def test_auto_never_raises_and_names_do():
    norm, X = make("rms", 7), randn(3, 7)
    with pytest.raises(BackendError, match="gradient"):
        normalize(X.requires_grad_(True), Norm.of(norm), implementation="triton")
    with pytest.raises(ConfigError, match="triton"):
        normalize(X, Norm.of(norm), implementation="tritan")
    double = X.detach().double()
    assert normalize(double, Norm.of(norm.double())).dtype == torch.float64
    assert normalize(double[:0], Norm.of(norm)).shape == (0, 7)
    assert normalize(randn(0, 7), Norm.of(norm.float())).shape == (0, 7)
