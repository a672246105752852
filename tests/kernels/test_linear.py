"""Products of one row, of a few rows and by tiles against PyTorch."""

import pytest
import torch
from torch import nn

from helpers import DEVICE, assert_at_most_twice, assert_close_in, randn
from writehead.kernels import cublas, linear, tiles

columns, depth = 21, 37
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
FEW_ROWS_SIZES = [(2, 9, 40), (16, 9, 1500), (17, 9, 40), (32, 9, 1024)]
HALVES = [F16, BF16][: 1 + (DEVICE == "cuda")]  # not float32, for tensor cores
ROW_TILES = [
    linear.Tile(8, 16, warps=2),  # neither divides its size
    linear.Tile(4, 64, warps=1),  # deeper than the row
    linear.Tile(32, 32, warps=4),  # wider than the result
    None,  # chosen by `row_linear`
]
ROWS_TILES = [
    linear.RowsTile(16, 8, 2, 16, stages=1, ahead=True),  # nothing divides anything
    linear.RowsTile(16, 16, 4, 32, stages=2, ahead=False),  # deeper than the rows
    linear.RowsTile(32, 8, 2, 16, stages=3, ahead=False),
]
SHAPES = [
    tiles.TileShape(16, 16, 32, warps=4, stages=2),
    tiles.TileShape(64, 32, 64, warps=4, stages=3, early=128),  # deeper than some weights
]


@pytest.mark.parametrize("tile", ROW_TILES, ids=str)
@pytest.mark.parametrize(
    "options", ["", "norm bias", "norm bias relu", "bias residual", "scale bias residual beside"]
)
def test_row_linear_equals_pytorch_with_all_options(options, tile):
    X, P, wide = randn(1, depth), nn.Linear(depth, columns, device=DEVICE), randn(1, 50)
    P, norm = P.requires_grad_(False), nn.RMSNorm(depth, eps=0.3, device=DEVICE)
    norm.requires_grad_(False).weight.normal_()
    width = 13 if "beside" in options else columns
    R, S = wide[:, :width], wide[:, 20 : 20 + columns - width]
    expected = (norm(X) if "norm" in options else X) @ P.weight.T
    expected = expected * (0.3 if "scale" in options else 1.0)
    expected = expected + (P.bias if "bias" in options else 0.0)
    expected = expected.relu() if "relu" in options else expected
    expected = expected + (torch.cat([R, S], dim=1) if "residual" in options else 0.0)
    values = {"bias": P.bias, "norm": linear.Norm(norm.weight, 0.3), "relu": True, "scale": 0.3}
    values |= {"residual": R, "beside": S}
    chosen = {name: values[name] for name in options.split()}
    before = wide.clone()
    assert_close_in(torch.float32, linear.row_linear(X, P.weight, tile=tile, **chosen), expected)
    assert torch.equal(wide, before)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    ("wide", "deep"),
    [(21, 37), *((5, deep) for deep in (1, 16, 1024, 1100, 5000))]
    + [pytest.param(*size, marks=pytest.mark.gpu) for size in ((1024, 1024), (999, 4100))],
)
def test_row_linear_errs_at_most_twice_as_much_as_plain_pytorch(wide, deep, dtype):
    X, W, gain = randn(1, deep, dtype=dtype), randn(wide, deep, dtype=dtype), randn(deep).to(dtype)
    norm = nn.functional.rms_norm
    exact = norm(X.double(), (deep,), gain.double(), 1e-6) @ W.double().T
    plain = norm(X, (deep,), gain, 1e-6) @ W.T
    for passing in (False, True):
        Y = linear.row_linear(X, W, norm=linear.Norm(gain, 1e-6), passing=passing)
        assert_at_most_twice(Y, plain, exact)


@pytest.mark.parametrize(
    ("rows", "wide", "deep", "dtype", "tile"),
    [
        *((rows, columns, depth, F16, tile) for rows in (2, 13, 16) for tile in ROWS_TILES),
        *((*size, dtype, None) for size in FEW_ROWS_SIZES for dtype in HALVES),
        pytest.param(16, 999, 5440, BF16, None, marks=pytest.mark.gpu),
        pytest.param(16, 1280, 900, F16, None, marks=pytest.mark.gpu),
    ],
    ids=str,
)
def test_rows_linear_errs_at_most_twice_as_much_as_plain_pytorch(rows, wide, deep, dtype, tile):
    X, W, R = randn(rows, deep), randn(wide, deep) / deep**0.5, randn(rows, wide)
    X, W, R, S = (T.to(dtype) for T in (X, W, R, randn(rows, 24)))
    S *= torch.arange(1, rows + 1, device=DEVICE).to(dtype)[:, None]
    root = (S.double().square().mean(1, keepdim=True) + 0.3).rsqrt()
    assert linear.few_rows(X, W)
    before, exact = R.clone(), X.double() @ W.double().T
    assert_at_most_twice(linear.rows_linear(X, W, tile=tile), X @ W.T, exact)
    unnormed = linear.Unnormed(S, 0.3)  # the norm is deferred until after the product
    Y = linear.rows_linear(X, W, residual=R, unnormed=unnormed, tile=tile)
    assert_at_most_twice(Y, X @ W.T * root.to(dtype) + R, exact * root + R)
    assert torch.equal(R, before)


@pytest.mark.parametrize(
    ("rows", "wide", "deep", "dtype", "shape"),
    [
        *((*size, F32, s) for size in ((64, 32, 64), (37, 21, 40), (1, 70, 200)) for s in SHAPES),
        *(
            pytest.param(*size, dtype, None, marks=pytest.mark.gpu)
            for size in ((33, 1280, 1024), (40, 1000, 512), (128, 1024, 1024), (256, 70, 960))
            for dtype in (BF16, F16)
        ),
    ],
    ids=str,
)
def test_tiled_linear_errs_at_most_twice_as_much_as_plain_pytorch(rows, wide, deep, dtype, shape):
    X, W = randn(rows, deep, dtype=dtype), randn(wide, deep) / deep**0.5
    W, R = W.to(dtype), randn(rows, wide + 10, dtype=dtype)[:, 5:-5]
    shape = tiles.choose_shape(X, W) if shape is None else shape
    before, exact = R.clone(), X.double() @ W.double().T
    assert_at_most_twice(tiles.tiled_linear(X, W, shape), X @ W.T, exact)
    for added in ({"residual": R}, {"residual": R[:, :13], "beside": R[:, 13:]}):
        Y = tiles.tiled_linear(X, W, shape, **added)
        assert_at_most_twice(Y, X @ W.T + R, exact + R)
    assert torch.equal(R, before)


@pytest.mark.skipif(DEVICE == "cuda", reason="tests/gpu has these products")
def test_cublas_declines_products_on_a_cpu():
    with cublas.trying():
        assert cublas.product(randn(4, 8, dtype=BF16), randn(16, 8, dtype=BF16)) is None
