"""Packed attention against plain PyTorch, with and without torch.compile."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers import DEVICE, DTYPES, assert_at_most_twice, assert_close_in, randn
from writehead.errors import BackendError
from writehead.ops import packed_attention as packed
from writehead.ops.attention import attend
from writehead.ops.heads import Heads
from writehead.ops.visibility import Visibility

SCALE = 0.11
if DEVICE == "cuda":
    b, h, n, m, k, v = 5, 8, 200, 251, 128, 128
    HALF, COMPILER = torch.bfloat16, "inductor"
else:
    b, h, n, m, k, v = 2, 4, 21, 35, 16, 32
    HALF, COMPILER = torch.float16, "aot_eager"
ULPS = {torch.float16: 2, torch.bfloat16: 2, torch.float32: 16}


@pytest.fixture(autouse=True)
def _small_tiles_in_the_interpreter(monkeypatch):
    torch.compiler.reset()
    if DEVICE == "cpu":
        for name in ("TILES", "TUNED_TILES"):
            tiles = getattr(packed, name).items()
            small = {key: replace(tile, rows=32, memory=16, heads=2) for key, tile in tiles}
            monkeypatch.setattr(packed, name, small)


def packed_rows(size: int) -> Tensor:
    """Segments [b, size]: short sentences, then padding; the last row is almost all padding."""
    ends = torch.randint(1, size // 4, (b, size), device=DEVICE).cumsum(1)
    index = torch.arange(size, device=DEVICE).expand(b, size)
    segments = torch.searchsorted(ends, index.contiguous(), right=True) + 1
    segments[:, -size // 12 :] = 0
    segments[-1, 4:] = 0
    return segments


def see(queries: Tensor, memory: Tensor | None = None, **limits: object) -> Visibility:
    """The visibility of packed rows, given the segments of queries and memory."""
    memory = queries if memory is None else memory
    return Visibility(query_segments=queries, memory_segments=memory, **limits)


KINDS = {
    "self": lambda: see(packed_rows(n)),
    "causal": lambda: see(packed_rows(n), causal=True),
    "window": lambda: see(packed_rows(n), window=6),
    "causal window": lambda: see(packed_rows(n), causal=True, window=n // 5),
    "cross": lambda: see(packed_rows(n), packed_rows(m)),
    "causal cross": lambda: see(packed_rows(m), packed_rows(n), causal=True, window=9),
    "one position": lambda: see(packed_rows(n), torch.ones_like(packed_rows(n)[:, :1])),
    "scattered": lambda: see(*torch.randint(0, 4, (2, b, n), device=DEVICE)),
    "any number": lambda: see(
        torch.tensor([0, 10**9, -7, 3 * n], device=DEVICE)[torch.randint(0, 4, (b, n))]
    ),
}


def make(g, visibility, *, h=h, k=k, v=v, dtype=torch.float32, noisy=False):
    """Q, K, V, the gradient of O, the visibility, and noise or None."""
    n, m = visibility.query_segments.shape[1], visibility.memory_segments.shape[1]
    shapes = (h, n, k), (g, m, k), (g, m, v), (h, n, v)
    *QKV, dO = (randn(b, *shape, dtype=dtype) for shape in shapes)
    noise = None
    if noisy:  # one write-head drops everything
        noise = (torch.rand(b, g, m, device=DEVICE) >= 0.2) * 1.25
        noise[0, -1] = 0.0
    return *(T.requires_grad_() for T in QKV), dO, visibility, noise


def results(work, Q, K, V, dO, visibility, noise=None) -> list[Tensor]:
    """O, dQ, dK and dV."""
    O = work(Q, K, V, visibility, SCALE, noise)  # noqa: E741
    return [O.detach(), *torch.autograd.grad(O, (Q, K, V), dO)]


def plain(Q, K, V, visibility, scale, noise=None) -> Tensor:
    """Plain PyTorch; scaling the values of a position scales its weights."""
    V = V if noise is None else V * noise.unsqueeze(3).to(V.dtype)
    return attend(Q, K, V, visibility, scale=scale, implementation="eager")


def check(ours: list[Tensor], Q, K, V, dO, visibility, noise=None) -> None:
    """The error of each result is at most twice that of plain PyTorch in the same dtype."""
    doubles = (T.detach().double().requires_grad_() for T in (Q, K, V))
    exact = results(plain, *doubles, dO.double(), visibility, noise)
    theirs = results(plain, Q, K, V, dO, visibility, noise)
    for case in zip(ours, theirs, exact, strict=True):
        assert_at_most_twice(*case)


def assert_all_close(ours, expected) -> None:
    for one, other in zip(ours, expected, strict=True):
        assert_close_in(other.dtype, one, other, ulps=ULPS[other.dtype])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {"noisy": kind != "self"}) for kind in KINDS),
        *(("causal", {"g": g, "noisy": True, "dtype": kept}) for g in (h, 1) for kept in DTYPES),
        # any number and depth of heads
        *(("causal", {"h": 6, "g": g, "dtype": HALF}) for g in (1, 2)),
        *(("causal", {"h": h, "g": 1, "dtype": HALF}) for h in (1, 3)),
        *(("causal", {"k": k, "v": v, "dtype": HALF}) for k, v in ((64, 16), (16, 64), (16, 256))),
        *(
            pytest.param(kind, options, marks=pytest.mark.gpu)
            for kind, options in (
                # in 16 bits, only plain PyTorch has a gradient of exactly 0 for one position
                *((kind, {"dtype": HALF}) for kind in KINDS if kind != "one position"),
                *(("causal", {"k": 256, "v": 256, "dtype": one}) for one in (HALF, torch.float32)),
            )
        ),
    ],
    ids=str,
)
def test_packed_attention_errs_at_most_twice_as_much_as_plain_pytorch(kind, options):
    case = make(visibility=KINDS[kind](), **{"g": 2} | options)
    assert packed.why_not(*case[:3], case[4]) is None
    ours = results(packed.attend, *case)
    check(ours, *case)
    assert all(T.transpose(1, 2).is_contiguous() for T in ours)  # the layout of projections
    if DEVICE == "cuda":  # without atomic sums, results are deterministic
        again = results(packed.attend, *case)
        assert all(torch.equal(*pair) for pair in zip(ours, again, strict=True))


def test_padding_is_neither_read_nor_given_gradients():
    rows = packed_rows(n)
    rows[-1] = 0
    case = make(2, see(rows, causal=True))
    clean = results(packed.attend, *case)
    with torch.no_grad():
        for T in case[:4]:
            T[rows.eq(0)[:, None].expand(T.shape[:3])] = torch.nan
    ours = results(packed.attend, *case)
    assert_all_close(ours, clean)
    for T in ours:
        assert not T[rows.eq(0)[:, None].expand(T.shape[:3])].any()


def test_inputs_of_any_layout_give_the_same_results():
    Q, K, V, dO, *rest = make(2, KINDS["causal"](), noisy=True)
    rest[1] = rest[1].double().mT.contiguous().mT
    Q, K, V = (T.detach().mT.contiguous().mT.requires_grad_() for T in (Q, K, V))
    one = torch.ones((), device=DEVICE).expand_as(dO)  # the gradient of a sum
    for gradient in (dO.mT.contiguous().mT, one):
        check(results(packed.attend, Q, K, V, gradient, *rest), Q, K, V, gradient, *rest)


def fused_case(heads: Heads, *, noisy: bool = True, dtype: torch.dtype = torch.float32) -> tuple:
    """QKV, the gradient of O, the visibility, and noise or None."""
    *_, visibility, noise = make(heads.g, KINDS["causal"](), noisy=noisy)
    QKV = randn(b, n, sum(heads.widths), dtype=dtype).requires_grad_()
    return QKV, randn(b, heads.h, n, heads.v, dtype=dtype), visibility, noise


def attend_fused(QKV: Tensor, heads: Heads, visibility: Visibility, **options: object) -> Tensor:
    return attend(*heads.split(QKV), visibility, fused=QKV, **options)


def fused_results(heads: Heads, QKV, dO, visibility, noise, work=attend_fused) -> list[Tensor]:
    """O and dQKV."""
    O = work(QKV, heads, visibility, scale=SCALE, noise=noise, implementation="packed")  # noqa: E741
    return [O.detach(), *torch.autograd.grad(O, QKV, dO)]


@pytest.mark.parametrize(
    ("heads", "order", "noisy"),
    [
        (Heads(h, h, 16, 16), (0, 1, 2), True),
        (Heads(h, 1, k, 16), (0, 1, 2), False),
        *((Heads(h, 2, 16, 32), order, True) for order in ((1, 0, 2), (0, 2, 1))),
    ],
    ids=str,
)
def test_a_fused_projection_of_any_layout_equals_its_parts(heads, order, noisy):
    QKV, dO, visibility, noise = fused_case(heads, noisy=noisy)
    parts = [T.detach().requires_grad_() for T in heads.split(QKV)]
    O, *gradients = results(packed.attend, *parts, dO, visibility, noise)  # noqa: E741
    dQKV = torch.cat([T.transpose(1, 2).flatten(2) for T in gradients], dim=2)
    QKV = QKV.detach().permute(order).contiguous().permute([order.index(i) for i in range(3)])
    ours = fused_results(heads, QKV.requires_grad_(), dO, visibility, noise)
    assert_all_close(ours, [O, dQKV])
    assert ours[1].is_contiguous()


@pytest.mark.parametrize(("kind", "noisy"), [("causal", True), ("cross", False), ("fused", True)])
def test_compiled_attention_is_one_graph_with_the_same_results(kind, noisy, monkeypatch):
    if DEVICE == "cpu":  # torch.compile cannot trace the interpreter
        monkeypatch.setattr(packed, "why_not", lambda *given: None)
    options = {"backend": COMPILER, "fullgraph": True}
    if kind == "fused":
        heads = Heads(h, 2, 16, 32)
        case = fused_case(heads, noisy=noisy, dtype=HALF)
        ours = fused_results(heads, *case, work=torch.compile(attend_fused, **options))
        assert_all_close(ours, fused_results(heads, *case))
        return
    case = make(2, KINDS[kind](), dtype=HALF, noisy=noisy)

    def work(Q, K, V, visibility, scale, noise):
        return attend(Q, K, V, visibility, scale=scale, noise=noise)

    assert_all_close(results(torch.compile(work, **options), *case), results(packed.attend, *case))


def test_auto_selects_the_packed_kernels_for_packed_rows_only():
    heads = Heads(h, 2, 16, 32)
    QKV, _, visibility, noise = fused_case(heads)
    for visible, is_packed in ((visibility, True), (Visibility(causal=True), False)):
        for O in (  # noqa: E741
            attend(*heads.split(QKV), visible, scale=SCALE, noise=noise),
            attend_fused(QKV, heads, visible, scale=SCALE, noise=noise),
        ):
            # only the packed kernels write [b, n, h, v]
            assert O.transpose(1, 2).is_contiguous() == is_packed


@pytest.mark.gpu
def test_tensors_of_more_than_int32_elements():
    if torch.cuda.get_device_properties(0).total_memory < 4e10:
        pytest.skip("needs 20 GB of device memory")
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
    queries=table(5),
    memory=table(7),
    ordered=st.booleans(),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 8) | st.just(10**12),
)
def test_spans_cover_all_visible_positions_and_no_others_if_segments_are_sorted(
    queries, memory, ordered, causal, window
):
    if ordered:
        queries, memory = queries.sort().values, memory.sort().values
    visibility = see(queries, memory, causal=causal, window=window)
    visible = visibility.mask(5, 7, queries.device)[:, 0]  # [2, 5, 7]
    tables = packed.find_spans(visibility)
    for spans, seen in zip(tables, (visible, visible.mT), strict=True):
        _, first, end = spans.unsqueeze(3).unbind(1)
        index = torch.arange(seen.shape[2])
        within = (first <= index) & (index < end)
        assert torch.equal(within, seen) if ordered else not (seen & ~within).any()


ones = torch.ones(b, n, dtype=torch.long)


@pytest.mark.parametrize(
    ("words", "sizes", "limits"),
    [
        ("need segments", {}, {"query_segments": None, "memory_segments": None}),
        ("do not support query_positions", {}, {"query_positions": ones}),
        ("do not support lengths", {}, {"lengths": ones[:, 0]}),
        ("at least 16 queries per row, not 15", {}, {"query_segments": ones[:, :15]}),
        ("k=24 and v=", {"k": 24}, {}),
        ("v=8 must be powers", {"v": 8}, {}),
        ("v=512 must be powers", {"v": 512}, {}),
        ("torch.float64", {"dtype": torch.float64}, {}),
        pytest.param(
            *("bfloat16 products", {"dtype": torch.bfloat16}, {}),
            marks=pytest.mark.skipif(DEVICE == "cuda", reason="the GPU multiplies bfloat16"),
        ),
    ],
)
def test_unsupported_inputs_are_explained(words, sizes, limits):
    visibility = see(limits.get("query_segments", ones) if "15" in words else ones, ones)
    Q, K, V, *_ = make(2, visibility, **sizes)
    assert words in packed.why_not(Q, K, V, replace(visibility, **limits))


def test_a_missing_gpu_is_explained(monkeypatch):
    Q, K, V, _, visibility, _ = make(2, see(ones))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BackendError, match=r"'packed' .* need a GPU and Triton"):
        attend(Q.cpu(), K.cpu(), V.cpu(), visibility, scale=SCALE, implementation="packed")
