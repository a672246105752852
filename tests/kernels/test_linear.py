"""The product of one row against PyTorch's modules; interpreted where there is no GPU."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

linear = pytest.importorskip("writehead.kernels.linear", reason="Triton is not installed")
pytestmark = pytest.mark.usefixtures("interpreted")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
columns, depth = 21, 37
TILES = [
    linear.Tile(8, 16, warps=2),  # neither divides its size
    linear.Tile(4, 64, warps=1),  # deeper than the row
    linear.Tile(32, 32, warps=4),  # wider than the result
    None,  # the one that it chooses itself
]

every_tile = pytest.mark.parametrize("tile", TILES, ids=str)


def row(size: int = depth) -> Tensor:
    return torch.randn(1, size, device=DEVICE)


def product(*, bias: bool = False) -> nn.Linear:
    return nn.Linear(depth, columns, bias=bias, device=DEVICE).requires_grad_(False)


def norm(epsilon: float = 0.3) -> nn.RMSNorm:
    """One with a gain, and an epsilon so large that it counts."""
    made = nn.RMSNorm(depth, eps=epsilon, device=DEVICE).requires_grad_(False)
    made.weight.normal_()
    return made


def own(module: nn.RMSNorm) -> object:
    return linear.Norm(module.weight, module.eps)


def assert_right(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert_close(found, expected, atol=1e-5, rtol=1e-5)


@every_tile
def test_it_is_the_product(tile):
    X, P = row(), product()
    assert_right(linear.row_linear(X, P.weight, tile=tile), P(X))


@every_tile
def test_it_takes_the_norm_before_it_upon_itself(tile):
    X, P, before = row(), product(bias=True), norm()
    found = linear.row_linear(X, P.weight, P.bias, norm=own(before), tile=tile)
    assert_right(found, P(before(X)))


@every_tile
def test_what_it_makes_is_added_to_the_residual_in_place(tile):
    X, P, Y = row(), product(bias=True), row(columns)
    expected = Y + P(X)
    found = linear.row_linear(X, P.weight, P.bias, residual=Y, tile=tile)
    assert found is Y
    assert_right(Y, expected)


def test_relu_comes_after_the_bias():
    X, P, before = row(), product(bias=True), norm()
    expected = torch.relu(P(before(X)))
    assert 0 < int((expected == 0).sum()) < columns
    assert_right(linear.row_linear(X, P.weight, P.bias, norm=own(before), relu=True), expected)


def test_the_scale_is_the_products_and_not_the_biass():
    X, P, before = row(), product(bias=True), norm()
    expected = 0.3 * before(X) @ P.weight.T + P.bias
    assert_right(linear.row_linear(X, P.weight, P.bias, norm=own(before), scale=0.3), expected)


@pytest.mark.parametrize("deep", [1, 16, 1024, 1100])
def test_rows_of_any_depth_have_a_tile(deep):
    X, W = row(deep), torch.randn(5, deep, device=DEVICE)
    assert_close(linear.row_linear(X, W), X @ W.T, atol=1e-4, rtol=1e-4)


def test_low_precision_errs_at_most_twice_as_much_as_plain_pytorch():
    X, P, before = row().half(), product(bias=True).half(), norm().half()
    right = before.double()(X.double()) @ P.weight.double().T + P.bias.double()
    before.half()
    found = linear.row_linear(X, P.weight, P.bias, norm=own(before))
    assert found.dtype == torch.float16
    error, allowed = (found - right).abs(), (P(before(X)) - right).abs()
    assert error.max() <= 2 * allowed.max()
    assert error.mean() <= 2 * allowed.mean()
