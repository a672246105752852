"""The packed kernels on a CUDA device: against plain products, compiled, and captured."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from writehead.kernels import Visibility, attend, eager, packed

pytestmark = pytest.mark.gpu

b, h, n, m = 5, 8, 200, 251
SCALE = 0.11
Case = tuple[Tensor, Tensor, Tensor, Tensor, Visibility]


@pytest.fixture(autouse=True)
def _exact_float32_and_nothing_compiled_before():
    torch.compiler.reset()
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def packed_rows(size: int) -> Tensor:
    """[b, size]: sentences of 1 to 60 tokens one after another, some padding, a row of it alone."""
    lengths = torch.randint(1, 60, (b, size), device="cuda")
    ends = lengths.cumsum(1)
    index = torch.arange(size, device="cuda").expand(b, size)
    segments = torch.searchsorted(ends, index.contiguous(), right=True) + 1
    segments[:, -7:] = 0
    segments[-1] = 0
    return segments


def make(g: int, kind: str, dtype: torch.dtype, k: int = 128, v: int = 128, h: int = h) -> Case:
    """Q, K and V that want gradients, the gradient that O will get, and who sees whom."""
    reading = packed_rows(n)
    held = packed_rows(m) if kind == "cross" else reading
    shapes = (h, n, k), (g, held.shape[1], k), (g, held.shape[1], v), (h, n, v)
    Q, K, V, dO = (torch.randn(b, *shape, device="cuda").to(dtype) for shape in shapes)
    visibility = Visibility(
        causal=kind in ("causal", "window"),
        window=40 if kind == "window" else None,
        query_segments=reading,
        memory_segments=held,
    )
    return Q.requires_grad_(), K.requires_grad_(), V.requires_grad_(), dO, visibility


def results(work, Q: Tensor, K: Tensor, V: Tensor, dO: Tensor, visibility: Visibility):
    """O, dQ, dK and dV."""
    O = work(Q, K, V, visibility, SCALE)  # noqa: E741
    return [O.detach(), *torch.autograd.grad(O, (Q, K, V), dO)]


def exact(Q: Tensor, K: Tensor, V: Tensor, dO: Tensor, visibility: Visibility) -> list[Tensor]:
    QKV = (T.detach().double().requires_grad_() for T in (Q, K, V))
    return results(eager.attend, *QKV, dO.double(), visibility)


def assert_errs_at_most_twice_as_much(found: list[Tensor], case: Case) -> None:
    right = exact(*case)
    for ours, plain, true in zip(found, results(eager.attend, *case), right, strict=True):
        assert ours.dtype == plain.dtype
        error, allowed = (ours - true).abs(), (plain - true).abs()
        # where plain PyTorch happens to be exact, some units in float32's last place are allowed
        assert error.max() <= 2 * allowed.max() + 2e-6
        assert error.mean() <= 2 * allowed.mean() + 2e-7


every_kind = pytest.mark.parametrize("kind", ["self", "causal", "window", "cross"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("g", [8, 2, 1])
@every_kind
def test_packed_attention_errs_at_most_twice_as_much_as_plain_pytorch(kind, g, dtype):
    case = make(g, kind, dtype)
    assert packed.supports(*case[:3], case[4]) is None
    assert_errs_at_most_twice_as_much(results(packed.attend, *case), case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("k", "v"), [(16, 16), (32, 64), (64, 16), (256, 256), (16, 256)])
def test_every_depth_has_a_tile_that_runs(k, v, dtype):
    case = make(2, "causal", dtype, k, v)
    assert_errs_at_most_twice_as_much(results(packed.attend, *case), case)


@pytest.mark.parametrize("heads", [3, 6, 12])
def test_groups_that_are_no_power_of_two_run(heads):
    case = make(1, "causal", torch.bfloat16, h=heads)
    assert_errs_at_most_twice_as_much(results(packed.attend, *case), case)


@every_kind
def test_results_repeat_bit_for_bit(kind):
    case = make(1, kind, torch.bfloat16)
    for one, other in zip(*(results(packed.attend, *case) for _ in range(2)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("g", "kind"), [(8, "self"), (1, "causal"), (1, "window"), (2, "cross")])
def test_compiled_it_is_one_graph_and_gives_the_same(g, kind):
    case = make(g, kind, torch.bfloat16)

    def work(Q, K, V, visibility, scale):
        return attend(Q, K, V, visibility, scale=scale)

    found = results(torch.compile(work, fullgraph=True), *case)

    for ours, right in zip(found, results(packed.attend, *case), strict=True):
        assert torch.equal(ours, right)


def test_slices_of_one_wide_product_compile_and_give_the_same():
    g, k = 2, 64
    segments = packed_rows(n)
    visibility = Visibility(causal=True, query_segments=segments, memory_segments=segments)
    X = torch.randn(b, n, 48, device="cuda", requires_grad=True)
    P = torch.randn(48, (h + 2 * g) * k, device="cuda", requires_grad=True)

    def work(X, P, backend):
        with torch.autocast("cuda", torch.bfloat16):
            parts = torch.split(X @ P, [h * k, g * k, g * k], dim=2)
            Q, K, V = (T.unflatten(2, (-1, k)).transpose(1, 2) for T in parts)
            O = attend(Q, K, V, visibility, scale=SCALE, backend=backend)  # noqa: E741
            return O.transpose(1, 2).flatten(2)

    compiled = torch.compile(work, fullgraph=True)(X, P, "packed")
    dY = torch.randn_like(compiled)

    assert compiled.dtype == torch.bfloat16
    plain = work(X, P, "eager")
    assert_close(compiled, plain, atol=0.02, rtol=0.02)
    ours, right = (torch.autograd.grad(Y, (X, P), dY) for Y in (compiled, plain))
    for found, expected in zip(ours, right, strict=True):
        assert (found - expected).norm() <= 0.02 * expected.norm()


@pytest.mark.parametrize("compiled", [False, True])
def test_captured_once_it_follows_other_rows_packed_otherwise(compiled):
    first, second = (make(1, "cross", torch.bfloat16) for _ in range(2))
    work = torch.compile(packed.attend, fullgraph=True) if compiled else packed.attend
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            results(work, *first)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=aside):
        found = results(work, *first)

    held, new = ((*case[:4], *segments_of(case)) for case in (first, second))
    with torch.no_grad():
        for place, value in zip(held, new, strict=True):
            place.copy_(value)
    graph.replay()

    for ours, right in zip(found, results(packed.attend, *second), strict=True):
        assert torch.equal(ours, right)


def segments_of(case: Case) -> tuple[Tensor, Tensor]:
    visibility = case[4]
    assert visibility.query_segments is not None
    assert visibility.memory_segments is not None
    return visibility.query_segments, visibility.memory_segments


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < 4e10,
    reason="takes 20 GB of the device's memory",
)
def test_tensors_past_the_reach_of_int32_are_read_and_written():
    rows, heads, size, k = 17, 256, 4096, 128
    segments = (torch.arange(size, device="cuda") // 100 + 1).repeat(rows, 1)
    Q = torch.randn(rows, size, heads, k, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    K, V = torch.randn(2, rows, 1, size, k, device="cuda", dtype=torch.bfloat16)
    dO = torch.ones((), device="cuda", dtype=torch.bfloat16).expand_as(Q)
    assert Q.numel() > 2**31

    def of(some: slice) -> list[Tensor]:
        tensors = (T[some].detach().requires_grad_() for T in (Q, K, V))
        visibility = Visibility(query_segments=segments[some], memory_segments=segments[some])
        return results(packed.attend, *tensors, dO[some], visibility)

    last = of(slice(rows - 1, rows))
    for whole, alone in zip(of(slice(rows)), last, strict=True):
        assert torch.equal(whole[-1:], alone)
