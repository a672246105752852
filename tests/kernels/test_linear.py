"""Products of one row and of few against PyTorch; interpreted where there is no GPU."""

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
def test_the_residual_is_added_and_stays_as_it_is(tile):
    X, P, R = row(), product(bias=True), row(columns)
    before = R.clone()
    assert_right(linear.row_linear(X, P.weight, P.bias, residual=R, tile=tile), R + P(X))
    assert torch.equal(R, before)


@every_tile
def test_past_the_residual_what_stands_beside_it_is_added(tile):
    X, P, wide = row(), product(), row(50)
    R, S = wide[:, :13], wide[:, 20 : 20 + columns - 13]
    found = linear.row_linear(X, P.weight, residual=R, beside=S, tile=tile)
    assert_right(found, torch.cat([R, S], dim=1) + P(X))


@pytest.mark.parametrize("deep", [600, 5000])
def test_a_weight_that_does_not_stay_in_the_cache_gives_the_same(deep):
    W, X = torch.randn(columns, deep, device=DEVICE), row(deep)
    assert_close(linear.row_linear(X, W, passing=True), X @ W.T, atol=1e-3, rtol=1e-4)


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


ROWS_TILES = [
    linear.RowsTile(16, 8, 2, 16, stages=1, ahead=True),  # nothing divides anything
    linear.RowsTile(16, 16, 4, 32, stages=2, ahead=False),  # deeper than the rows
    linear.RowsTile(32, 8, 2, 16, stages=3, ahead=False),
]
# tensor cores take no float32, and Triton's interpreter no bfloat16
HALF = {"device": DEVICE, "dtype": torch.float16}


@pytest.mark.parametrize("tile", ROWS_TILES, ids=str)
@pytest.mark.parametrize("rows", [2, 13, 16])
def test_few_rows_are_one_product_with_their_residual(rows, tile):
    X, W, R = (torch.randn(*shape, **HALF) for shape in ((rows, 37), (21, 37), (rows, 21)))
    before = R.clone()
    right = X.double() @ W.double().T
    for found, expected in (
        (linear.rows_linear(X, W, tile=tile), right),
        (linear.rows_linear(X, W, residual=R, tile=tile), right + R.double()),
    ):
        assert_close(found.double(), expected, rtol=2e-3, atol=2e-3)
    assert torch.equal(R, before)


@pytest.mark.parametrize("tile", ROWS_TILES, ids=str)
def test_few_rows_get_the_root_of_what_they_were_made_of(tile):
    X, W, S = (torch.randn(*shape, **HALF) for shape in ((5, 37), (21, 37), (5, 24)))
    S *= torch.arange(1, 6, **HALF)[:, None]
    unnormed = linear.Unnormed(S, 0.3)
    found = linear.rows_linear(X, W, residual=X[:, :21].contiguous(), unnormed=unnormed, tile=tile)
    root = (S.double().square().mean(1, keepdim=True) + 0.3).rsqrt()
    expected = X.double() @ W.double().T * root + X[:, :21].double()
    assert_close(found.double(), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("rows", "deep"), [(2, 40), (16, 1500), (17, 40), (32, 1024)])
def test_the_tile_that_is_chosen_for_few_rows_is_right(rows, deep):
    X, W = torch.randn(rows, deep, **HALF), torch.randn(9, deep, **HALF) / deep**0.5
    assert linear.few_rows(X, W)
    found = linear.rows_linear(X, W)
    assert_close(found.double(), X.double() @ W.double().T, rtol=2e-3, atol=2e-3)


def test_many_rows_deep_weights_and_float32_are_left_to_others():
    W = torch.empty(4, 2048, **HALF)
    assert not linear.few_rows(torch.empty(17, 2048, **HALF), W)
    assert not linear.few_rows(torch.empty(33, 64, **HALF), W[:, :64])
    assert not linear.few_rows(torch.empty(1, 64, **HALF), W[:, :64])
    assert not linear.few_rows(torch.empty(2, 64, device=DEVICE), W[:, :64])
