"""Products by cuBLASLt: each proposal gives the first's result to the bit, and the right one."""

import pytest
import torch
from torch import Tensor

cublas = pytest.importorskip("writehead.kernels.cublas", reason="Triton is not installed")
pytestmark = pytest.mark.gpu

SIZES = [
    (1024, 5440, 1024),
    (1024, 1024, 5440),
    (1024, 32768, 1024),
    (16384, 1280, 1024),
    (37, 1280, 1024),
    (300, 72, 64),
]


@pytest.fixture(autouse=True)
def tried():
    """Has every product tried, as in a step that is to be captured."""
    with cublas.trying():
        yield


def random(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*sizes, device="cuda", dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns", "depth"), SIZES)
def test_every_proposal_gives_the_same_to_the_bit(rows, columns, depth, dtype):
    X, W = random(rows, depth, dtype=dtype), random(columns, depth, dtype=dtype) / depth**0.5
    planner = cublas._planner(X.device)
    for relu in (False, True):
        first = cublas.product(X, W, relu=relu)
        assert first is not None
        right = X.double() @ W.double().t()
        right = right.relu() if relu else right
        torch.testing.assert_close(first.double(), right, atol=2e-2, rtol=1e-2)
        plan = next(reversed(planner._plans.values()))
        assert plan.size.relu == relu
        assert len(plan.proposals) > 1 or rows < 1024  # few rows may be summed in parts
        for which in range(1, len(plan.proposals)):
            Y = torch.full_like(first, torch.nan)
            plan.run(X, W, Y, which)
            assert torch.equal(Y, first), plan.name(which)


def test_a_product_that_the_library_may_sum_in_parts_is_right():
    X, W = random(128, 5440), random(1024, 5440) / 5440**0.5
    Y = cublas.product(X, W)
    right = X.double() @ W.double().t()
    torch.testing.assert_close(Y.double(), right, atol=2e-2, rtol=1e-2)
    assert torch.equal(cublas.product(X, W), Y)


def test_a_product_is_added_to_what_is_there_and_is_tried_without_harm():
    X, W, Y = random(512, 256), random(128, 256) / 16, random(512, 128)
    right = torch.addmm(Y.float(), X.float(), W.float().t())
    assert cublas.product(X, W, out=Y, adds=True) is Y
    torch.testing.assert_close(Y.float(), right, atol=5e-2, rtol=1e-2)


def test_what_was_tried_is_taken_in_a_graph():
    X, W = random(256, 512), random(1024, 512) / 16
    right = cublas.product(X, W, relu=True)
    plan = next(reversed(cublas._planner(X.device)._plans.values()))
    assert plan.chosen is not None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        Y = cublas.product(X, W, relu=True)
    Y.fill_(torch.nan)
    graph.replay()
    assert torch.equal(Y, right)


def test_rows_may_lie_apart_and_what_does_not_fit_is_pytorchs():
    wide, W = random(64, 768), random(128, 256)
    out = random(64, 384)
    assert cublas.product(wide[:, 256:512], W, out=out[:, 128:256]) is not None
    right = wide[:, 256:512].float() @ W.float().t()
    torch.testing.assert_close(out[:, 128:256].float(), right, atol=0.3, rtol=2e-2)
    assert cublas.product(wide[:, 1:257], W) is None  # not where the library supposes it
    assert cublas.product(random(4, 256, dtype=torch.float32), W.float()) is None
    assert cublas.product(wide[:0, :256], W) is None
