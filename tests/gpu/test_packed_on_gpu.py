"""The packed kernels on a CUDA device: against plain products, compiled, and captured."""

import pytest
import torch
import torch._inductor.config
from torch import Tensor
from torch.testing import assert_close

from writehead.config import AttentionConfig
from writehead.kernels import Visibility, attend, eager, packed
from writehead.kernels.attend import attend_fused
from writehead.kernels.heads import Heads
from writehead.model import Attention
from writehead.model.attention import WholePast

pytestmark = pytest.mark.gpu

b, h, n, m = 5, 8, 200, 251
SCALE = 0.11
Case = tuple[Tensor, Tensor, Tensor, Tensor, Visibility]


@pytest.fixture(autouse=True)
def _seeded_exact_float32_and_nothing_compiled_before():
    torch.manual_seed(0)
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


def make_noise(g: int, m: int) -> Tensor:
    """[b, g, m]: nothing or 1.25; all of one write-head's is nothing."""
    noise = (torch.rand(b, g, m, device="cuda") >= 0.2) * 1.25
    noise[0, -1] = 0.0
    return noise


def results(work, Q: Tensor, K: Tensor, V: Tensor, dO: Tensor, visibility: Visibility, *noise):
    """O, dQ, dK and dV."""
    O = work(Q, K, V, visibility, SCALE, *noise)  # noqa: E741
    return [O.detach(), *torch.autograd.grad(O, (Q, K, V), dO)]


def plain(Q: Tensor, K: Tensor, V: Tensor, visibility: Visibility, scale: float, *noise) -> Tensor:
    """By plain products; noise on a position's values is noise on its weights."""
    for factors in noise:
        V = V * factors.unsqueeze(3).to(V.dtype)
    return eager.attend(Q, K, V, visibility, scale)


def exact(Q: Tensor, K: Tensor, V: Tensor, dO: Tensor, visibility: Visibility, *noise):
    QKV = (T.detach().double().requires_grad_() for T in (Q, K, V))
    return results(plain, *QKV, dO.double(), visibility, *noise)


def assert_errs_at_most_twice_as_much(found: list[Tensor], case: Case, *noise: Tensor) -> None:
    right = exact(*case, *noise)
    for ours, theirs, true in zip(found, results(plain, *case, *noise), right, strict=True):
        assert ours.dtype == theirs.dtype
        error, allowed = (ours - true).abs(), (theirs - true).abs()
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("g", [8, 2, 1])
@every_kind
def test_noise_on_the_weights_errs_at_most_twice_as_much_as_plain_pytorch(kind, g, dtype):
    case = make(g, kind, dtype)
    noise = make_noise(g, case[1].shape[2])
    found = results(packed.attend, *case, noise)
    assert_errs_at_most_twice_as_much(found, case, noise)
    for ours, again in zip(found, results(packed.attend, *case, noise), strict=True):
        assert torch.equal(ours, again)


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
    P = (torch.randn(48, (h + 2 * g) * k, device="cuda") / 48**0.5).requires_grad_()

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


def make_wide(heads: Heads, dtype: torch.dtype) -> tuple[Tensor, Tensor, Visibility]:
    """QKV that wants a gradient, the gradient that O will get, and who sees whom."""
    segments = packed_rows(n)
    visibility = Visibility(causal=True, query_segments=segments, memory_segments=segments)
    QKV = torch.randn(b, n, sum(heads.widths), device="cuda").to(dtype).requires_grad_()
    dO = torch.randn(b, n, heads.h, heads.v, device="cuda").to(dtype).transpose(1, 2)
    return QKV, dO, visibility


def wide_results(work, QKV: Tensor, dO: Tensor, *rest) -> list[Tensor]:
    """O and dQKV."""
    O = work(QKV, *rest)  # noqa: E741
    return [O.detach(), *torch.autograd.grad(O, QKV, dO)]


every_heads = pytest.mark.parametrize(
    "heads", [Heads(8, 8, 128, 128), Heads(8, 2, 64, 128), Heads(8, 1, 128, 16)], ids=str
)


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@every_heads
def test_one_wide_product_gives_what_its_parts_give_bit_for_bit(heads, dtype, noisy):
    QKV, dO, visibility = make_wide(heads, dtype)
    noise = [make_noise(heads.g, n)] if noisy else []

    O, dQKV = wide_results(packed.attend_fused, QKV, dO, heads, visibility, SCALE, *noise)  # noqa: E741

    apart = [T.detach().requires_grad_() for T in heads.split(QKV)]
    right, *gradients = results(packed.attend, *apart, dO, visibility, *noise)
    assert torch.equal(O, right)
    assert torch.equal(dQKV, torch.cat([T.transpose(1, 2).flatten(2) for T in gradients], dim=2))


@pytest.mark.parametrize("noisy", [False, True])
@every_heads
def test_a_wide_product_compiles_to_one_graph_and_gives_the_same(heads, noisy):
    QKV, dO, visibility = make_wide(heads, torch.bfloat16)
    noise = make_noise(heads.g, n) if noisy else None

    def work(QKV, noise):
        return attend_fused(QKV, heads, visibility, scale=SCALE, noise=noise)

    found = wide_results(torch.compile(work, fullgraph=True), QKV, dO, noise)

    for ours, right in zip(found, wide_results(work, QKV, dO, noise), strict=True):
        assert torch.equal(ours, right)


@pytest.mark.parametrize("g", [8, 1])
def test_a_compiled_layer_in_training_is_near_the_plain_one_with_the_same_noise(g):
    layer = Attention(AttentionConfig(96, h, g, 64, 64), dropout=0.3).cuda()
    X, dY = torch.randn(2, b, n, 96, device="cuda")
    X.requires_grad_()
    segments = packed_rows(n)
    visibility = Visibility(causal=True, query_segments=segments, memory_segments=segments)

    def work(X):
        with torch.autocast("cuda", torch.bfloat16):
            Y = layer(X, WholePast(visibility))
            return Y + layer.read(X, layer.memorize(X, visibility))

    def of(work, backend: str) -> list[Tensor]:
        layer.backend = backend
        torch.manual_seed(5)
        Y = work(X)
        return [Y.detach(), *torch.autograd.grad(Y, (X, *layer.parameters()), dY.to(Y.dtype))]

    # the compiler's own random numbers would be others
    with torch._inductor.config.patch(fallback_random=True):
        found = of(torch.compile(work, fullgraph=True), "auto")

    for ours, right in zip(found, of(work, "eager"), strict=True):
        assert (ours - right).norm() <= 0.03 * right.norm()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_wide_product_captured_once_follows_other_rows_and_other_noise(compiled):
    heads = Heads(8, 1, 128, 128)
    first, second = ((*make_wide(heads, torch.bfloat16), make_noise(heads.g, n)) for _ in range(2))

    def work(QKV, visibility, noise):
        return packed.attend_fused(QKV, heads, visibility, SCALE, noise)

    captured = torch.compile(work, fullgraph=True) if compiled else work
    replayed = capture(lambda case: wide_results(captured, *case), first, second)

    for ours, right in zip(replayed, wide_results(work, *second), strict=True):
        assert torch.equal(ours, right)


@pytest.mark.parametrize("compiled", [False, True])
def test_captured_once_it_follows_other_rows_packed_otherwise(compiled):
    first, second = (make(1, "cross", torch.bfloat16) for _ in range(2))
    work = torch.compile(packed.attend, fullgraph=True) if compiled else packed.attend
    replayed = capture(lambda case: results(work, *case), first, second)

    for ours, right in zip(replayed, results(packed.attend, *second), strict=True):
        assert torch.equal(ours, right)


def capture(work, first: tuple, second: tuple) -> list[Tensor]:
    """What a graph of work(first) makes of it once it holds the values of `second`."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            work(first)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=aside):
        found = work(first)
    with torch.no_grad():
        for place, value in zip(tensors_of(first), tensors_of(second), strict=True):
            place.copy_(value)
    graph.replay()
    return found


def tensors_of(case: tuple) -> list[Tensor]:
    """All tensors of a case, with the segments of its visibility."""
    seeing = [given for given in case if isinstance(given, Visibility)]
    segments = [T for one in seeing for T in (one.query_segments, one.memory_segments)]
    return [given for given in (*case, *segments) if isinstance(given, Tensor)]


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
