"""The packed kernels against plain products; on a GPU with large sizes, compiled and captured."""

from dataclasses import replace
from itertools import product

import pytest
import torch
import torch._inductor.config
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from helpers import DEVICE, DTYPES, assert_at_most_twice, assert_close_in, randn
from writehead.config import AttentionConfig
from writehead.errors import BackendError
from writehead.kernels import Visibility, attend, eager, packed
from writehead.kernels.attend import attend_fused
from writehead.kernels.heads import Heads
from writehead.model import Attention
from writehead.model.attention import WholePast

SCALE = 0.11
if DEVICE == "cuda":
    b, h, n, m, k, v = 5, 8, 200, 251, 128, 128
    HALF, COMPILER = torch.bfloat16, "inductor"
else:
    b, h, n, m, k, v = 2, 4, 21, 35, 16, 32
    HALF, COMPILER = torch.float16, "aot_eager"
LOW = {torch.float16: 2, torch.bfloat16: 2}  # units in the last place; float32 sums have more


@pytest.fixture(autouse=True)
def _small_tiles_in_the_interpreter(monkeypatch):
    torch.compiler.reset()
    if DEVICE == "cpu":
        small = {
            kind: replace(tile, rows=32, memory=16, shared=2) for kind, tile in packed.TILES.items()
        }
        monkeypatch.setattr(packed, "TILES", small)


def packed_rows(size: int) -> Tensor:
    """[b, size]: short sentences one after another, some padding, a row of nearly nothing else."""
    ends = torch.randint(1, size // 4, (b, size), device=DEVICE).cumsum(1)
    index = torch.arange(size, device=DEVICE).expand(b, size)
    segments = torch.searchsorted(ends, index.contiguous(), right=True) + 1
    segments[:, -size // 12 :] = 0
    segments[-1, 4:] = 0
    return segments


def see(reading: Tensor, held: Tensor | None = None, **limits: object) -> Visibility:
    held = reading if held is None else held
    return Visibility(query_segments=reading, memory_segments=held, **limits)


KINDS = {
    "self": lambda: see(packed_rows(n)),
    "causal": lambda: see(packed_rows(n), causal=True),
    "window": lambda: see(packed_rows(n), window=6),
    "causal window": lambda: see(packed_rows(n), causal=True, window=n // 5),
    "cross": lambda: see(packed_rows(n), packed_rows(m)),
    "causal cross": lambda: see(packed_rows(m), packed_rows(n), causal=True, window=9),
    "scattered": lambda: see(*torch.randint(0, 4, (2, b, n), device=DEVICE)),
    "any number": lambda: see(
        torch.tensor([0, 10**9, -7, 3 * n], device=DEVICE)[torch.randint(0, 4, (b, n))]
    ),
}


def make(g, visibility, *, h=h, k=k, v=v, dtype=torch.float32, noisy=False):
    """Q, K, V, the gradient of O, who sees whom, and noise or None."""
    n, m = visibility.query_segments.shape[1], visibility.memory_segments.shape[1]
    shapes = (h, n, k), (g, m, k), (g, m, v), (h, n, v)
    *QKV, dO = (randn(b, *shape, dtype=dtype) for shape in shapes)
    noise = None
    if noisy:  # all of one write-head's is nothing
        noise = (torch.rand(b, g, m, device=DEVICE) >= 0.2) * 1.25
        noise[0, -1] = 0.0
    return *(T.requires_grad_() for T in QKV), dO, visibility, noise


def results(work, Q, K, V, dO, visibility, noise=None) -> list[Tensor]:
    """O, dQ, dK and dV."""
    O = work(Q, K, V, visibility, SCALE, noise)  # noqa: E741
    return [O.detach(), *torch.autograd.grad(O, (Q, K, V), dO)]


def plain(Q, K, V, visibility, scale, noise=None) -> Tensor:
    """By plain products; noise on a position's values is noise on its weights."""
    V = V if noise is None else V * noise.unsqueeze(3).to(V.dtype)
    return eager.attend(Q, K, V, visibility, scale)


def check(found: list[Tensor], Q, K, V, dO, visibility, noise=None) -> None:
    """Each result errs at most twice as much as that of plain products in the same dtype."""
    doubles = (T.detach().double().requires_grad_() for T in (Q, K, V))
    exact = results(plain, *doubles, dO.double(), visibility, noise)
    theirs = results(plain, Q, K, V, dO, visibility, noise)
    for case in zip(found, theirs, exact, strict=True):
        assert_at_most_twice(*case)


def assert_all_close(found, right) -> None:
    for ours, theirs in zip(found, right, strict=True):
        assert_close_in(theirs.dtype, ours, theirs, ulps=LOW.get(theirs.dtype, 16))


@pytest.mark.parametrize(("g", "noisy"), [(h, True), (2, False), (1, True)])
@pytest.mark.parametrize(
    ("dtype", "kind"),
    # in the interpreter one kind is enough for float16
    [pair for pair in product(DTYPES, KINDS) if DEVICE == "cuda" or HALF not in pair]
    + [(HALF, "causal")] * (DEVICE == "cpu"),
    ids=str,
)
def test_packed_attention_errs_at_most_twice_as_much_as_plain_pytorch(dtype, kind, g, noisy):
    case = make(g, KINDS[kind](), dtype=dtype, noisy=noisy)
    assert packed.supports(*case[:3], case[4]) is None
    found = results(packed.attend, *case)
    check(found, *case)
    assert all(T.transpose(1, 2).is_contiguous() for T in found)  # as projections are
    if DEVICE == "cuda":  # nothing is added atomically, so results repeat
        again = results(packed.attend, *case)
        assert all(torch.equal(*pair) for pair in zip(found, again, strict=True))


@pytest.mark.parametrize(
    "sizes",
    [
        *({"h": 6, "g": 1}, {"h": 6, "g": 2}, {"h": 3, "g": 1}, {"h": 1, "g": 1}),
        *({"k": 64, "v": 16}, {"k": 16, "v": 64}, {"k": 16, "v": 256}),
        pytest.param({"k": 256, "v": 256, "dtype": torch.float32}, marks=pytest.mark.gpu),
        pytest.param({"k": 256, "v": 256, "dtype": torch.bfloat16}, marks=pytest.mark.gpu),
    ],
    ids=str,
)
def test_heads_of_any_number_and_depth_have_a_tile(sizes):
    case = make(**{"g": 2, "visibility": KINDS["causal"](), "dtype": HALF} | sizes)
    check(results(packed.attend, *case), *case)


@pytest.mark.parametrize("backend", ["packed", "eager"])
def test_noise_is_rounded_once_with_the_values(backend):
    visibility = see(packed_rows(n), causal=True, window=1)  # a query sees itself
    Q, K, V, _, _, noise = make(2, visibility, dtype=torch.float16, noisy=True)
    noise = noise / 1.25 / 0.9  # which no half can hold
    O = attend(Q, K, V, visibility, scale=SCALE, noise=noise, backend=backend)  # noqa: E741
    right = (V.double() * noise.unsqueeze(3)).repeat_interleave(h // 2, dim=1)
    right *= (visibility.query_segments != 0)[:, None, :, None]
    half_a_unit = 0.51 * torch.finfo(torch.float16).eps
    assert_close(O.double(), right, rtol=half_a_unit, atol=1e-7)


def test_nothing_is_read_from_padding_and_no_gradient_reaches_it():
    rows = packed_rows(n)
    rows[-1] = 0
    case = make(2, see(rows, causal=True))
    clean = results(packed.attend, *case)
    with torch.no_grad():
        for T in case[:4]:
            T[rows.eq(0)[:, None].expand(T.shape[:3])] = torch.nan
    found = results(packed.attend, *case)
    assert_all_close(found, clean)
    for T in found:
        assert not T[rows.eq(0)[:, None].expand(T.shape[:3])].any()


def test_inputs_of_any_layout_are_read_right():
    Q, K, V, dO, *rest = make(2, KINDS["causal"](), noisy=True)
    right = results(packed.attend, Q, K, V, dO, *rest)
    turned = [T.detach().mT.contiguous().mT.requires_grad_() for T in (Q, K, V)]
    rest[1] = rest[1].double().mT.contiguous().mT
    assert_all_close(results(packed.attend, *turned, dO.mT.contiguous().mT, *rest), right)
    one = torch.ones((), device=DEVICE).expand_as(dO)  # the gradient of a sum
    check(results(packed.attend, Q, K, V, one, *rest), Q, K, V, one, *rest)


def wide_case(heads: Heads, *, noisy: bool = True, dtype: torch.dtype = torch.float32) -> tuple:
    """QKV, the gradient of O, who sees whom, and noise or None."""
    *_, visibility, noise = make(heads.g, KINDS["causal"](), noisy=noisy)
    QKV = randn(b, n, sum(heads.widths), dtype=dtype).requires_grad_()
    return QKV, randn(b, heads.h, n, heads.v, dtype=dtype), visibility, noise


def wide_results(heads: Heads, QKV, dO, visibility, noise, work=attend_fused) -> list[Tensor]:
    """O and dQKV."""
    O = work(QKV, heads, visibility, scale=SCALE, noise=noise, backend="packed")  # noqa: E741
    return [O.detach(), *torch.autograd.grad(O, QKV, dO)]


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize(
    "heads", [Heads(h, h, 16, 16), Heads(h, 2, 16, 32), Heads(h, 1, k, 16)], ids=str
)
def test_a_fused_projection_gives_what_its_parts_give(heads, noisy):
    QKV, dO, visibility, noise = case = wide_case(heads, noisy=noisy)
    parts = [T.detach().requires_grad_() for T in heads.split(QKV)]
    right, *gradients = results(packed.attend, *parts, dO, visibility, noise)
    expected = [right, torch.cat([T.transpose(1, 2).flatten(2) for T in gradients], dim=2)]
    O, dQKV = wide_results(heads, *case)  # noqa: E741
    assert dQKV.is_contiguous()
    assert_all_close([O, dQKV], expected)
    for order in ((1, 0, 2), (0, 2, 1)) if heads.g == 2 else ():  # rows last, depth not last
        turned = QKV.permute(order).contiguous().permute([order.index(axis) for axis in range(3)])
        turned = turned.detach().requires_grad_()
        assert_all_close(wide_results(heads, turned, *case[1:]), expected)


@pytest.mark.parametrize(("kind", "noisy"), [("causal", True), ("cross", False), ("fused", True)])
def test_a_compiler_sees_one_graph_and_gives_the_same(kind, noisy, monkeypatch):
    # compiled on a CPU they would be refused, since there a compiler cannot ask for the interpreter
    if DEVICE == "cpu":
        monkeypatch.setattr(packed, "supports", lambda Q, K, V, visibility: None)
    options = {"backend": COMPILER, "fullgraph": True}
    if kind == "fused":
        heads = Heads(h, 2, 16, 32)
        case = wide_case(heads, noisy=noisy, dtype=HALF)
        found = wide_results(heads, *case, work=torch.compile(attend_fused, **options))
        assert_all_close(found, wide_results(heads, *case))
        return
    case = make(2, KINDS[kind](), dtype=HALF, noisy=noisy)

    def work(Q, K, V, visibility, scale, noise):
        return attend(Q, K, V, visibility, scale=scale, noise=noise)

    assert_all_close(results(torch.compile(work, **options), *case), results(packed.attend, *case))


@pytest.mark.parametrize("noisy", [False, True])
def test_the_operations_are_what_they_say_to_pytorch(noisy):
    Q, K, V, dO, visibility, noise = make(2, KINDS["causal"](), noisy=noisy)
    wide = randn(b, n, (h + 2) * k + 2 * v).requires_grad_()
    noise = noise if noise is None else noise.float()
    rest = (noise, *packed.ranges(visibility, n, n), SCALE, True, 0)
    for name, arguments in (("", (Q, K, V, *rest)), ("fused_", (wide, *rest, [h, 2, k, v]))):
        forward, backward = (
            getattr(torch.ops.writehead, f"packed_{name}{way}").default
            for way in ("forward", "backward")
        )
        checks = ("test_schema", "test_faketensor", "test_autograd_registration")
        torch.library.opcheck(forward, arguments, test_utils=checks)
        with torch.no_grad():
            output = forward(*arguments)
            still = [T.detach() if isinstance(T, Tensor) else T for T in arguments]
            torch.library.opcheck(backward, (dO, *output, *still), test_utils=checks[:2])


def test_auto_takes_the_packed_kernels_for_packed_rows_and_only_then():
    heads = Heads(h, 2, 16, 32)
    QKV, _, visibility, noise = wide_case(heads)
    for visible, is_packed in ((visibility, True), (Visibility(causal=True), False)):
        for O in (  # noqa: E741
            attend(*heads.split(QKV), visible, scale=SCALE, noise=noise),
            attend_fused(QKV, heads, visible, scale=SCALE, noise=noise),
        ):
            # only the packed kernels write [b, n, h, v]
            assert O.transpose(1, 2).is_contiguous() == is_packed


@pytest.mark.parametrize("g", [h, 2, 1])
def test_a_layer_in_training_drops_the_same_positions_with_every_backend(g):
    visibility, X = see(packed_rows(n), causal=True), randn(b, n, 24).requires_grad_()
    dY = randn(b, n, 24)
    layer = Attention(AttentionConfig(24, h, g, k, v), dropout=0.3).to(DEVICE)

    def work(X):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            Y = layer(X, WholePast(visibility))
            return Y + layer.read(X, layer.memorize(X, visibility))

    def of(work, backend: str) -> list[Tensor]:
        layer.backend = backend
        torch.manual_seed(5)
        Y = work(X)
        return [Y.detach(), *torch.autograd.grad(Y, (X, *layer.parameters()), dY.to(Y.dtype))]

    right = of(work, "eager")
    # the compiler's own random numbers would be others
    with torch._inductor.config.patch(fallback_random=True):
        compiled = torch.compile(work, fullgraph=True) if DEVICE == "cuda" else work
        for ours, theirs in zip(of(compiled, "packed"), right, strict=True):
            tolerance = 0.03 if DEVICE == "cuda" else 1e-5
            assert (ours - theirs).norm() <= tolerance * theirs.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_captured_graph_follows_other_rows_and_other_noise(compiled):
    first, second = (make(1, KINDS["cross"](), dtype=HALF, noisy=True) for _ in range(2))
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

    def tensors(Q, K, V, dO, visibility, noise) -> list[Tensor]:
        return [Q, K, V, dO, visibility.query_segments, visibility.memory_segments, noise]

    with torch.no_grad():
        for place, value in zip(tensors(*first), tensors(*second), strict=True):
            place.copy_(value)
    graph.replay()
    assert_all_close(found, results(packed.attend, *second))


@pytest.mark.gpu
def test_tensors_past_the_reach_of_int32_are_read_and_written():
    if torch.cuda.get_device_properties(0).total_memory < 4e10:
        pytest.skip("takes 20 GB of the device's memory")
    rows, heads, size, k = 17, 256, 4096, 128
    segments = (torch.arange(size, device="cuda") // 100 + 1).repeat(rows, 1)
    Q = torch.randn(rows, size, heads, k, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    K, V = torch.randn(2, rows, 1, size, k, device="cuda", dtype=torch.bfloat16)
    dO = torch.ones((), device="cuda", dtype=torch.bfloat16).expand_as(Q)
    assert Q.numel() > 2**31

    def of(some: slice) -> list[Tensor]:
        tensors = (T[some].detach().requires_grad_() for T in (Q, K, V))
        return results(packed.attend, *tensors, dO[some], see(segments[some]))

    last = of(slice(rows - 1, rows))
    assert_all_close([T[-1:] for T in of(slice(rows))], last)


def table(columns: int) -> st.SearchStrategy[Tensor]:
    rows = st.lists(st.integers(0, 3), min_size=2 * columns, max_size=2 * columns)
    return rows.map(lambda flat: torch.tensor(flat).view(2, columns))


@given(
    reading=table(5),
    held=table(7),
    ordered=st.booleans(),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 8) | st.just(10**12),
)
def test_ranges_hold_all_that_is_visible_and_no_more_where_segments_are_whole(
    reading, held, ordered, causal, window
):
    if ordered:
        reading, held = reading.sort().values, held.sort().values
    visibility = see(reading, held, causal=causal, window=window)
    visible = visibility.mask(5, 7, reading.device)[:, 0]  # [2, 5, 7]
    queries, memory = packed.ranges(visibility, 5, 7)
    for (_, first, last), seen in ((queries.unbind(1), visible), (memory.unbind(1), visible.mT)):
        index = torch.arange(seen.shape[2])
        within = (first.unsqueeze(2) <= index) & (index < last.unsqueeze(2))
        assert not (seen & ~within).any()
        if ordered:
            assert torch.equal(within, seen)
        # the last tile's own bounds must not widen by those that see nothing
        empty = ~within.any(2)
        assert (first[empty] == seen.shape[2]).all()
        assert (last[empty] == 0).all()


ones = torch.ones(b, n, dtype=torch.long)


@pytest.mark.parametrize(
    ("words", "sizes", "limits"),
    [
        ("have no segments", {}, {"query_segments": None, "memory_segments": None}),
        ("positions in their order", {}, {"query_positions": ones}),
        ("positions in their order", {}, {"memory_positions": ones}),
        ("lengths are given", {}, {"lengths": ones[:, 0]}),
        ("there are 15 queries", {}, {"query_segments": ones[:, :15]}),
        ("k to be a power of two from 16 to 256; it is 24", {"k": 24}, {}),
        ("v to be a power of two from 16 to 256; it is 8", {"v": 8}, {}),
        ("v to be a power of two from 16 to 256; it is 512", {"v": 512}, {}),
        ("torch.float64", {"dtype": torch.float64}, {}),
    ],
)
def test_the_packed_kernels_say_why_they_cannot(words, sizes, limits):
    visibility = see(limits.get("query_segments", ones) if "15" in words else ones, ones)
    Q, K, V, *_ = make(2, visibility, **sizes)
    assert words in packed.supports(Q, K, V, replace(visibility, **limits))


def test_without_a_gpu_or_triton_they_say_so(monkeypatch):
    Q, K, V, _, visibility, _ = make(2, see(ones))
    if DEVICE == "cpu":
        low = (T.bfloat16() for T in (Q, K, V))
        assert "bfloat16 wrong" in packed.supports(*low, visibility)
    monkeypatch.setattr(packed, "has_triton", lambda: False)
    assert "need Triton" in packed.supports(Q, K, V, visibility)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    Q, K, V = (T.detach().cpu() for T in (Q, K, V))
    with pytest.raises(BackendError, match="'packed' cannot: the packed kernels work on a GPU"):
        attend(Q, K, V, visibility, scale=SCALE, backend="packed")
