"""Products by tiles against PyTorch; interpreted where there is no GPU."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

tiles = pytest.importorskip("writehead.kernels.tiles", reason="Triton is not installed")
pytestmark = pytest.mark.usefixtures("interpreted")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [
    tiles.TileShape(16, 16, 32, warps=4, stages=2),
    tiles.TileShape(64, 32, 64, warps=4, stages=3, early=128),  # deeper than some weights
]


def operands(rows: int, columns: int, depth: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, depth, device=DEVICE), torch.randn(columns, depth, device=DEVICE)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("rows", "columns", "depth"), [(64, 32, 64), (37, 21, 40), (1, 70, 200)])
def test_tiles_are_the_product_also_past_their_edges(rows, columns, depth, shape):
    X, W = operands(rows, columns, depth)
    assert_close(tiles.tiled_linear(X, W, shape), X @ W.t(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_residual_is_added_and_stays_as_it_is(shape):
    X, W = operands(37, 21, 40)
    residual = torch.randn(37, 21, device=DEVICE)
    before = residual.clone()
    found = tiles.tiled_linear(X, W, shape, residual=residual)
    assert_close(found, residual + X @ W.t(), atol=1e-4, rtol=1e-4)
    assert torch.equal(residual, before)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_past_the_residual_what_stands_beside_it_is_added(shape):
    X, W = operands(37, 21, 40)
    wide = torch.randn(37, 50, device=DEVICE)
    R, S = wide[:, 3:16], wide[:, 20:28]
    found = tiles.tiled_linear(X, W, shape, residual=R, beside=S)
    assert_close(found, torch.cat([R, S], dim=1) + X @ W.t(), atol=1e-4, rtol=1e-4)


def test_tiles_are_for_halves_on_a_hopper_gpu_and_for_some_dozens_of_rows(monkeypatch):
    def shape(
        rows: int, depth: int, dtype: torch.dtype = torch.bfloat16, columns: int = 64
    ) -> object:
        X, W = (torch.empty(size, depth, dtype=dtype, device="meta") for size in (rows, columns))
        return tiles.choose_shape(X, W)

    assert shape(128, 1024) is None  # nothing is known of this device
    monkeypatch.setattr(tiles, "chained", lambda T: {"launch_pdl": True})
    assert shape(128, 1024) is not None
    assert shape(128, 1024, torch.float32) is None
    assert shape(128, 5440) is None
    assert shape(128, 1024, columns=3072) is None
    assert shape(32, 1024) is None
    assert shape(257, 1024) is None
