"""Products by cuBLASLt: all algorithms agree to the bit, and with PyTorch."""

import pytest
import torch

from helpers import assert_close_in, randn

cublas = pytest.importorskip("writehead.kernels.cublas", reason="Triton is not installed")
pytestmark = pytest.mark.gpu

SIZES = [
    *((1024, 5440, 1024), (1024, 1024, 5440), (1024, 32768, 1024), (16384, 1280, 1024)),
    *((37, 1280, 1024), (300, 72, 64)),
    (128, 1024, 5440),  # may use split-K
]


def operands(rows: int, columns: int, depth: int, dtype: torch.dtype = torch.bfloat16):
    return randn(rows, depth, dtype=dtype), randn(columns, depth, dtype=dtype) / depth**0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_every_algorithm_gives_the_same_result_also_in_a_graph(size, relu, dtype):
    X, W = operands(*size, dtype)
    with cublas.trying():
        first = cublas.product(X, W, relu=relu)
    exact = X.double() @ W.double().t()
    assert_close_in(dtype, first, exact.relu() if relu else exact, ulps=1)
    plan = next(reversed(cublas._planner(X.device)._plans.values()))
    for which in range(len(plan.proposals)):
        Y = torch.full_like(first, torch.nan)
        plan.run(X, W, Y, which)
        assert torch.equal(Y, first), plan.name(which)  # the choice changes no result

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        Y = cublas.product(X, W, relu=relu)
    Y.fill_(torch.nan)
    graph.replay()
    assert torch.equal(Y, first)


def test_small_products_are_timed_on_request_and_never_during_capture():
    X, W = operands(256, 520, 512)
    assert cublas.product(X, W) is None
    with cublas.trying(), torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert cublas.product(X + X, W) is None
    with cublas.trying():
        assert cublas.product(X, W) is not None
    assert cublas.product(X, W) is not None


def test_products_accumulate_into_the_output_also_after_eviction(monkeypatch):
    monkeypatch.setattr(cublas, "MOST_PLANS", 2)  # so that plans are evicted and remade
    for rows in (512, 504, 496, 512):
        (X, W), Y = operands(rows, 128, 256), randn(rows, 128, dtype=torch.bfloat16)
        exact = torch.addmm(Y.double(), X.double(), W.double().t())
        with cublas.trying():
            assert cublas.product(X, W, out=Y, adds=True) is Y
        assert_close_in(torch.bfloat16, Y, exact, ulps=1)


def test_rows_may_be_strided_and_unsupported_products_are_left_to_pytorch():
    wide, out = randn(64, 768, dtype=torch.bfloat16), randn(64, 384, dtype=torch.bfloat16)
    W = randn(128, 256, dtype=torch.bfloat16)
    with cublas.trying():
        assert cublas.product(wide[:, 256:512], W, out=out[:, 128:256]) is not None
        exact = wide[:, 256:512].double() @ W.double().t()
        assert_close_in(torch.bfloat16, out[:, 128:256], exact, ulps=1)
        assert cublas.product(wide[:, 1:257], W) is None  # not aligned
        assert cublas.product(randn(4, 256), W.float()) is None
        assert cublas.product(wide[:0, :256], W) is None
