"""Products of packed weights on a CPU: oneDNN equals the formula, int8 errs within its rounding."""

import pytest
import torch
from test_linear import OPTIONS, Case

from helpers import assert_close_in, randn
from writehead.errors import BackendError
from writehead.ops import cpu_weights
from writehead.ops.cpu_weights import quantize_rows, why_not_int8, why_not_onednn
from writehead.ops.embedding import QuantizedTable, embed
from writehead.ops.linear import Weight, linear
from writehead.ops.norm import DeferredRms

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="helpers make tensors on the GPU")
ANY = torch.zeros(1)
needs_onednn = pytest.mark.skipif(why_not_onednn(ANY) is not None, reason="needs oneDNN")
needs_int8 = pytest.mark.skipif(why_not_int8(ANY) is not None, reason="needs fbgemm")


@pytest.fixture(autouse=True)
def no_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def run(case, *, int8, shape=()):
    X = case.X.view(*shape, *case.X.shape[-1:]) if shape else case.X
    named = case.epilogue
    if shape and case.residual is not None:
        named["residual"] = named["residual"].view(*shape, -1)
    weight = case.weight.fold(scale=case.scale).pack(int8=int8)
    with torch.no_grad():
        return linear(X, weight, **named)


@needs_onednn
@pytest.mark.parametrize("rows", [1, 3, 18])
@pytest.mark.parametrize("options", [*OPTIONS, "residual", "relu residual", "silu"])
def test_onednn_equals_the_formula(options, rows):
    case = Case(rows, 21, 37, options)
    Y = run(case, int8=False, shape=(rows // 3, 3) if rows > 1 else (1,))
    assert_close_in(torch.float32, Y.flatten(0, -2), case.exact(), ulps=64)


@needs_int8
@pytest.mark.parametrize("rows", [1, 3, 18])
@pytest.mark.parametrize("columns", [1, 21, 300])
@pytest.mark.parametrize("depth", [5, 64, 333])
def test_int8_error_is_within_the_rounding_bound(depth, columns, rows):
    case = Case(rows, columns, depth, "")
    X, W = case.X.double(), case.W.double()
    x_step = X.abs().amax(1, keepdim=True) / 127
    w_step = W.abs().amax(1) / 63  # of CPUs without VNNI
    bound = x_step / 2 * W.abs().sum(1) + w_step / 2 * X.abs().sum(1, keepdim=True)
    bound += depth * x_step * w_step / 4
    error = (run(case, int8=True).double() - X @ W.T).abs()
    assert (error <= 1.001 * bound + 1e-6).all()
    if error.numel() > 100 and depth > 50:  # errors cancel
        assert error.square().mean().sqrt() <= bound.mean() / 4


@needs_int8
@pytest.mark.parametrize("options", OPTIONS)
def test_int8_applies_norms_biases_activations_and_residuals(options):
    case = Case(6, 21, 256, options)
    exact = case.exact()
    error = (run(case, int8=True, shape=(2, 3)).flatten(0, -2).double() - exact).norm()
    assert error < 0.03 * exact.norm()


@needs_int8
def test_int8_sums_of_the_largest_codes_do_not_overflow():
    X = torch.cat([torch.ones(1, 1000), -torch.ones(1, 1000)])
    for sign in (1.0, -1.0):
        W = torch.full((40, 1000), sign)
        Y = linear(X, Weight(W).pack(int8=True))
        torch.testing.assert_close(Y, X @ W.T, rtol=1e-5, atol=0.0)


@needs_int8
@pytest.mark.parametrize("options", ["", "rms", "layer bias relu"])
def test_a_row_has_the_same_int8_result_in_any_batch(options):
    case = Case(19, 21, 256, options)
    together = run(case, int8=True)
    for rows in (slice(0, 1), slice(4, 7), slice(2, 18)):
        alone = Case(19, 21, 256, options)
        vars(alone).update(vars(case) | {"X": 1.0 * case.X[rows]})
        assert_close_in(torch.float32, run(alone, int8=True), together[rows].double())


@needs_int8
def test_zeros_and_nan_are_preserved():
    W = randn(9, 16)
    W[2] = 0.0
    X = randn(3, 16)
    X[0], X[1, 4] = 0.0, torch.nan
    Y = linear(X, Weight(W).pack(int8=True))
    assert Y[0].tolist() == [0.0] * 9
    assert Y[1].isnan().all()
    assert Y[2, 2] == 0.0
    assert Y[2].isfinite().all()


@pytest.mark.parametrize("int8", [False, True])
def test_a_packed_weight_has_one_implementation(int8):
    case = Case(4, 21, 37, "")
    if (why_not_int8 if int8 else why_not_onednn)(case.W):
        pytest.skip("this PyTorch has no such library")
    weight = Weight(case.W).pack(int8=int8)
    assert weight.W.is_meta
    assert weight.W.shape == case.W.shape
    kind = "int8" if int8 else "onednn"
    assert torch.equal(linear(case.X, weight, implementation=kind), linear(case.X, weight))
    with pytest.raises(BackendError, match=f"packed for {kind}"):
        linear(case.X, weight, implementation="reference")
    with pytest.raises(BackendError, match=r"not packed for it"):
        linear(case.X, Weight(case.W), implementation=kind)
    assert linear(case.X[:0], weight).shape == (0, 21)


def test_weights_that_a_library_does_not_support_stay_unpacked(monkeypatch):
    assert Weight(randn(3, 4).double()).pack().packed is None
    assert Weight(randn(3, 4).bfloat16()).pack().packed is None
    assert "float32" in why_not_int8(randn(3, 4).double())
    monkeypatch.setattr(cpu_weights, "_int8_levels", lambda: None)
    assert "fbgemm" in why_not_int8(randn(3, 4))


def test_a_quantized_table_is_close_to_the_original():
    E, tokens = randn(13, 24), torch.tensor([[1, 12, 0], [5, 5, 7]])
    E[5] = 0.0
    P, positions = randn(4, 24), torch.tensor([0, 1, 3])
    table = QuantizedTable(*quantize_rows(E))
    assert len(table) == 13
    X = embed(tokens, table, positions=positions, P=P, scale=3.0)
    error = (X - embed(tokens, E, positions=positions, P=P, scale=3.0)).abs()
    assert (error <= 3.0 * E.abs().amax(1)[tokens].unsqueeze(2) / 127 / 2 * 1.01).all()


@needs_onednn
def test_a_packed_weight_refuses_what_it_does_not_support():
    X = randn(3, 8)
    weight = Weight(randn(8, 8)).pack()
    for options in ({"relu_input": True}, {"deferred": DeferredRms(X, 0.1)}):
        with pytest.raises(BackendError, match="deferred"):
            linear(X, weight, **options)
