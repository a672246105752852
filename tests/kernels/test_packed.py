"""The packed kernels against plain products, in Triton's interpreter where there is no GPU."""

import os
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from writehead.config import AttentionConfig
from writehead.errors import BackendError
from writehead.kernels import Visibility, attend, eager, packed
from writehead.kernels.attend import BACKENDS, attend_fused
from writehead.kernels.heads import Heads
from writehead.model import Attention
from writehead.model.attention import WholePast

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETER = {} if DEVICE == "cuda" else {"TRITON_INTERPRET": "1"}

# Triton decides when it is imported; for other tests the variable stays as it was
with mock.patch.dict(os.environ, INTERPRETER):
    pytest.importorskip("writehead.kernels.packed_kernels", reason="Triton is not installed")

b, h, n, m = 2, 4, 21, 35
k, v = 16, 32
SCALE = 0.3
TARGET = torch.tensor([[1] * 5 + [2] * 12 + [3] * 2 + [0] * 2, [1] * 4 + [0] * 17])
SOURCE = torch.tensor([[1] * 8 + [2] * 5 + [3] * 20 + [0] * 2, [1] * 7 + [0] * 28])


@pytest.fixture(autouse=True)
def _small_tiles_in_the_interpreter(monkeypatch):
    for name, value in INTERPRETER.items():
        monkeypatch.setenv(name, value)
    if DEVICE == "cpu":
        small = {kind: replace(tile, rows=16, memory=16) for kind, tile in packed.TILES.items()}
        monkeypatch.setattr(packed, "TILES", small)


def segments(reading: Tensor, held: Tensor, **limits: object) -> Visibility:
    reading, held = reading.to(DEVICE), held.to(DEVICE)
    return Visibility(query_segments=reading, memory_segments=held, **limits)


def inputs(g: int, *, h=h, n=n, m=n, k=k, v=v, dtype=torch.float32):
    """Q, K and V that want gradients, and the gradient that O will get."""
    shapes = (h, n, k), (g, m, k), (g, m, v), (h, n, v)
    *QKV, dO = (torch.randn(b, *shape, device=DEVICE, dtype=dtype) for shape in shapes)
    return *(T.requires_grad_() for T in QKV), dO


def make_noise(g: int, m: int = n) -> Tensor:
    """[b, g, m]: nothing or 1.25; all of one write-head's is nothing."""
    noise = (torch.rand(b, g, m, device=DEVICE) >= 0.2).float() * 1.25
    noise[0, -1] = 0.0
    return noise


def results(Q, K, V, dO, visibility, noise=None) -> list[Tensor]:
    """O, dQ, dK and dV."""
    O = packed.attend(Q, K, V, visibility, SCALE, noise)  # noqa: E741
    return [O.detach(), *torch.autograd.grad(O, (Q, K, V), dO)]


def plain_results(Q, K, V, dO, visibility, noise=None) -> list[Tensor]:
    """The same by plain products; noise on a position's values is noise on its weights."""
    noisy = V if noise is None else V * noise.unsqueeze(3).to(V.dtype)
    O = eager.attend(Q, K, noisy, visibility, SCALE)  # noqa: E741
    return [O.detach(), *torch.autograd.grad(O, (Q, K, V), dO)]


def expected(Q, K, V, dO, visibility, noise=None) -> list[Tensor]:
    """The same by plain products in float64."""
    QKV = (T.detach().double().requires_grad_() for T in (Q, K, V))
    return plain_results(*QKV, dO.double(), visibility, noise)


def assert_equal_plain_products(*case) -> None:
    for ours, right in zip(results(*case), expected(*case), strict=True):
        assert_close(ours, right.to(ours.dtype), atol=2e-6, rtol=2e-5)


every_order = pytest.mark.parametrize(
    ("causal", "window"), [(False, None), (True, None), (False, 6), (True, 3)]
)


@pytest.mark.parametrize("g", [4, 2, 1])
@every_order
def test_self_attention_and_its_gradients_equal_plain_products(causal, window, g):
    visibility = segments(TARGET, TARGET, causal=causal, window=window)
    assert_equal_plain_products(*inputs(g), visibility)


@pytest.mark.parametrize("g", [4, 2, 1])
def test_cross_attention_and_its_gradients_equal_plain_products(g):
    assert_equal_plain_products(*inputs(g, m=m), segments(TARGET, SOURCE))
    assert_equal_plain_products(*inputs(g, n=m, m=n), segments(SOURCE, TARGET))


@pytest.mark.parametrize("g", [4, 2, 1])
@every_order
def test_noise_on_the_weights_of_self_attention_equals_plain_products(causal, window, g):
    visibility = segments(TARGET, TARGET, causal=causal, window=window)
    assert_equal_plain_products(*inputs(g), visibility, make_noise(g))


@pytest.mark.parametrize("g", [4, 2, 1])
def test_noise_on_the_weights_of_cross_attention_equals_plain_products(g):
    assert_equal_plain_products(*inputs(g, m=m), segments(TARGET, SOURCE), make_noise(g, m))
    assert_equal_plain_products(*inputs(g, n=m, m=n), segments(SOURCE, TARGET), make_noise(g))


@pytest.mark.parametrize("backend", ["packed", "eager"])
def test_noise_is_rounded_once_with_the_values(backend):
    Q, K, V, _ = inputs(2, dtype=torch.float16)
    noise = make_noise(2) / 1.25 / 0.9  # which no half can hold
    alone = segments(TARGET, TARGET, causal=True, window=1)  # a query sees itself
    O = attend(Q, K, V, alone, scale=SCALE, noise=noise, backend=backend)  # noqa: E741
    right = (V.double() * noise.unsqueeze(3)).half().repeat_interleave(h // 2, dim=1)
    is_text = (TARGET != 0).to(DEVICE)
    assert torch.equal(O, right * is_text[:, None, :, None])


def test_noise_of_any_layout_and_precision_is_read_right():
    noise = make_noise(2)
    turned = noise.double().mT.contiguous().mT
    case = *inputs(2), segments(TARGET, TARGET)
    for ours, right in zip(results(*case, turned), results(*case, noise), strict=True):
        assert torch.equal(ours, right)


@pytest.mark.parametrize("n", [m, 16])
def test_cross_attention_may_be_causal_and_have_a_window(n):
    visibility = segments(SOURCE[:, :n], SOURCE[:, :-3], causal=True, window=9)
    assert_equal_plain_products(*inputs(2, n=n, m=m - 3), visibility)


@pytest.mark.parametrize(("h", "g"), [(6, 1), (6, 2), (1, 1)])
def test_heads_need_not_be_a_power_of_two(h, g):
    assert_equal_plain_products(*inputs(g, h=h), segments(TARGET, TARGET, causal=True))


@pytest.mark.parametrize(("k", "v"), [(64, 16), (16, 64)])
def test_keys_and_values_may_differ_in_depth(k, v):
    assert_equal_plain_products(*inputs(2, k=k, v=v), segments(TARGET, TARGET, causal=True))


@pytest.mark.parametrize(("rows", "memory"), [(16, 32), (32, 16), (64, 64)])
def test_every_shape_of_tile_gives_the_same(rows, memory, monkeypatch):
    tiles = {
        kind: replace(tile, rows=rows, memory=memory, shared=2)
        for kind, tile in packed.TILES.items()
    }
    monkeypatch.setattr(packed, "TILES", tiles)
    assert_equal_plain_products(*inputs(1, m=m), segments(TARGET, SOURCE))


def test_segments_in_any_order_and_of_any_number_equal_plain_products():
    scattered = torch.randint(0, 4, (b, n))
    assert_equal_plain_products(*inputs(2), segments(scattered, scattered.flip(1)))
    far = torch.tensor([0, 10**9, -7, 3 * n])[scattered]
    assert_equal_plain_products(*inputs(2), segments(far, far, causal=True))


def test_what_is_all_that_a_query_sees_has_no_gradient_of_its_logit():
    alone = torch.arange(1, n + 1).expand(b, n)  # each position is a segment
    _, dQ, dK, dV = results(*inputs(2), segments(alone, alone))
    if DEVICE == "cpu":
        assert not dQ.any()
        assert not dK.any()
    else:  # two sums of the same numbers, each in its own order
        assert max(dQ.abs().max(), dK.abs().max()) < 1e-5
    assert dV.any()


def test_padding_reads_zeros_and_no_gradient_reaches_it():
    rows = torch.stack([TARGET[0], torch.zeros_like(TARGET[0])])
    O, *gradients = results(*inputs(2), segments(rows, rows, causal=True))  # noqa: E741
    for T in (O, *gradients):
        padding = rows.eq(0).to(DEVICE)[:, None].expand(T.shape[:3])
        assert not T[padding].any()
        assert T[~padding].any()


def test_not_even_nan_leaks_out_of_padding():
    visibility = segments(TARGET, TARGET)
    case = inputs(2)
    clean = results(*case, visibility)
    with torch.no_grad():
        for T in case:
            T[TARGET.eq(0).to(DEVICE)[:, None].expand(T.shape[:3])] = torch.nan
    for ours, right in zip(results(*case, visibility), clean, strict=True):
        assert torch.equal(ours, right)


def test_slices_of_one_wide_product_are_read_where_they_lie():
    visibility = segments(TARGET, TARGET, causal=True)
    wide = torch.randn(b, n, (h + 2) * k + 2 * v, device=DEVICE)
    parts = torch.split(wide, [h * k, 2 * k, 2 * v], dim=2)
    Q, K, V = (
        T.unflatten(2, (heads, -1)).transpose(1, 2).requires_grad_()
        for T, heads in zip(parts, (h, 2, 2), strict=True)
    )
    dO = torch.randn(b, h, v, n, device=DEVICE).transpose(2, 3)
    assert not any(T.is_contiguous() for T in (Q, K, V, dO))
    assert_equal_plain_products(Q, K, V, dO, visibility)
    assert_equal_plain_products(Q, K, V, torch.ones((), device=DEVICE).expand_as(dO), visibility)


def test_depth_that_is_not_contiguous_is_copied():
    visibility = segments(TARGET, TARGET)
    *QKV, dO = inputs(2)
    turned = (T.detach().mT.contiguous().mT.requires_grad_() for T in QKV)
    assert_equal_plain_products(*turned, dO, visibility)


def test_results_lie_in_memory_as_projections_do():
    for T in results(*inputs(2), segments(TARGET, TARGET)):
        assert T.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("noisy", [False, True])
def test_low_precision_errs_at_most_twice_as_much_as_plain_pytorch(noisy):
    noise = make_noise(2) if noisy else None
    visibility = segments(TARGET, TARGET, causal=True)
    case = inputs(2, dtype=torch.float16)
    plain = plain_results(*case, visibility, noise)
    for ours, theirs, right in zip(
        results(*case, visibility, noise), plain, expected(*case, visibility, noise), strict=True
    ):
        assert ours.dtype == torch.float16
        error, allowed = (ours - right).abs(), (theirs - right).abs()
        assert error.max() <= 2 * allowed.max()
        assert error.mean() <= 2 * allowed.mean()


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize(
    "heads", [Heads(4, 4, 16, 16), Heads(4, 2, 16, 32), Heads(4, 1, 64, 16)], ids=str
)
def test_one_wide_product_gives_what_its_parts_give_bit_for_bit(heads, noisy):
    visibility = segments(TARGET, TARGET, causal=True, window=8)
    noise = make_noise(heads.g) if noisy else None
    QKV = torch.randn(b, n, sum(heads.widths), device=DEVICE, requires_grad=True)
    dO = torch.randn(b, n, heads.h, heads.v, device=DEVICE).transpose(1, 2)

    O = packed.attend_fused(QKV, heads, visibility, SCALE, noise)  # noqa: E741
    (dQKV,) = torch.autograd.grad(O, QKV, dO)

    apart = [T.detach().requires_grad_() for T in heads.split(QKV)]
    right, *gradients = results(*apart, dO, visibility, noise)
    assert torch.equal(O, right)
    assert torch.equal(dQKV, torch.cat([T.transpose(1, 2).flatten(2) for T in gradients], dim=2))
    assert dQKV.is_contiguous()


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 2, 1)], ids=["rows last", "depth not last"])
def test_a_wide_product_may_lie_in_memory_in_any_order(order):
    visibility, heads = segments(TARGET, TARGET), Heads(4, 2, 16, 32)
    QKV = torch.randn(b, n, sum(heads.widths), device=DEVICE)
    dO = torch.randn(b, heads.h, n, heads.v, device=DEVICE)

    def of(wide: Tensor) -> tuple[Tensor, Tensor]:
        wide = wide.detach().requires_grad_()
        O = packed.attend_fused(wide, heads, visibility, SCALE)  # noqa: E741
        return O.detach(), *torch.autograd.grad(O, wide, dO)

    back = [order.index(axis) for axis in range(3)]
    turned = QKV.permute(order).contiguous().permute(back)
    assert not turned.is_contiguous()
    for ours, right in zip(of(turned), of(QKV), strict=True):
        assert torch.equal(ours, right)


def test_a_compiler_sees_one_graph_of_a_wide_product_and_gives_the_same(monkeypatch):
    # compiled on a CPU they would be refused, since there a compiler cannot ask for the interpreter
    monkeypatch.setattr(packed, "supports", lambda Q, K, V, visibility: None)
    visibility, heads = segments(TARGET, TARGET, causal=True), Heads(4, 2, 16, 32)
    X = torch.randn(b, n, 12, device=DEVICE, requires_grad=True)
    P = torch.randn(12, sum(heads.widths), device=DEVICE, requires_grad=True)
    dO = torch.randn(b, heads.h, n, heads.v, device=DEVICE)

    def work(X, P, noise):
        return attend_fused(X @ P, heads, visibility, scale=SCALE, noise=noise)

    def of(work, noise) -> list[Tensor]:
        O = work(X, P, noise)  # noqa: E741
        return [O.detach(), *torch.autograd.grad(O, (X, P), dO)]

    compiled = torch.compile(work, backend="aot_eager", fullgraph=True)
    for noise in (None, make_noise(2)):
        for ours, right in zip(of(compiled, noise), of(work, noise), strict=True):
            assert torch.equal(ours, right)


def test_a_compiler_sees_one_graph_and_gives_the_same():
    visibility = segments(TARGET, TARGET, causal=True)
    *QKV, dO = inputs(2)
    compiled = torch.compile(packed.attend, backend="aot_eager", fullgraph=True)

    O = compiled(*QKV, visibility, SCALE)  # noqa: E741

    found = [O.detach(), *torch.autograd.grad(O, QKV, dO)]
    for ours, right in zip(found, results(*QKV, dO, visibility), strict=True):
        assert torch.equal(ours, right)
        assert ours.stride() == right.stride()


@pytest.mark.parametrize("noisy", [False, True])
def test_the_operations_are_what_they_say_to_pytorch(noisy):
    noise = make_noise(2) if noisy else None
    *QKV, dO = inputs(2)
    wide = torch.randn(b, n, (h + 2) * k + 2 * v, device=DEVICE, requires_grad=True)
    rest = (noise, *packed.ranges(segments(TARGET, TARGET, causal=True), n, n), SCALE, True, 0)
    for forward, backward, arguments in (
        (packed._forward, packed._backward, (*QKV, *rest)),
        (packed._fused_forward, packed._fused_backward, (wide, *rest, [h, 2, k, v])),
    ):
        checks = ("test_schema", "test_faketensor", "test_autograd_registration")
        torch.library.opcheck(forward, arguments, test_utils=checks)
        with torch.no_grad():
            output = forward(*arguments)
            still = [T.detach() if isinstance(T, Tensor) else T for T in arguments]
            torch.library.opcheck(backward, (dO, *output, *still), test_utils=checks[:2])


def test_auto_takes_the_packed_kernels_for_packed_rows_and_only_then():
    *QKV, _ = inputs(2)
    visibility = segments(TARGET, TARGET)
    assert next(iter(BACKENDS)) == "packed"
    assert torch.equal(
        attend(*QKV, visibility, scale=SCALE),
        attend(*QKV, visibility, scale=SCALE, backend="packed"),
    )
    attend(*QKV, Visibility(causal=True), scale=SCALE)


def test_a_wide_product_takes_the_packed_kernels_where_they_can_and_else_its_parts(monkeypatch):
    heads, noise = Heads(4, 2, 16, 32), make_noise(2)
    QKV = torch.randn(b, n, sum(heads.widths), device=DEVICE)
    fused = mock.Mock(wraps=packed.attend_fused)
    monkeypatch.setattr(packed, "attend_fused", fused)
    for visibility in (segments(TARGET, TARGET, causal=True), Visibility(causal=True)):
        assert torch.equal(
            attend_fused(QKV, heads, visibility, scale=SCALE, noise=noise),
            attend(*heads.split(QKV), visibility, scale=SCALE, noise=noise),
        )
    fused.assert_called_once()


@pytest.mark.parametrize("g", [4, 2, 1])
def test_a_layer_in_training_drops_the_same_positions_with_every_backend(g):
    visibility = segments(TARGET, TARGET, causal=True)
    X = torch.randn(b, n, 24, device=DEVICE, requires_grad=True)
    dY = torch.randn(b, n, 24, device=DEVICE)
    layer = Attention(AttentionConfig(24, h, g, k, v), dropout=0.3).to(DEVICE)

    def of(backend: str) -> list[Tensor]:
        layer.backend = backend
        torch.manual_seed(5)
        Y = layer(X, WholePast(visibility))
        Y = Y + layer.read(X, layer.memorize(X, visibility))
        return [Y.detach(), *torch.autograd.grad(Y, (X, *layer.parameters()), dY)]

    for ours, right in zip(of("packed"), of("eager"), strict=True):
        assert_close(ours, right, atol=2e-4, rtol=2e-4)


def number_table(rows: int, columns: int) -> st.SearchStrategy[Tensor]:
    row = st.lists(st.integers(0, 3), min_size=columns, max_size=columns)
    return st.lists(row, min_size=rows, max_size=rows).map(torch.tensor)


@given(
    reading=number_table(2, 5),
    held=number_table(2, 7),
    ordered=st.booleans(),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 8) | st.just(10**12),
)
def test_ranges_hold_all_that_is_visible_and_no_more_where_segments_are_whole(
    reading, held, ordered, causal, window
):
    if ordered:
        reading, held = reading.sort().values, held.sort().values
    visibility = Visibility(causal, window, query_segments=reading, memory_segments=held)
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
    ("sentence", "sizes", "limits"),
    [
        ("have no segments", {}, {"query_segments": None, "memory_segments": None}),
        ("positions in their order", {}, {"query_positions": ones}),
        ("positions in their order", {}, {"memory_positions": ones}),
        ("here lengths are given", {}, {"lengths": ones[:, 0]}),
        ("there are 15 queries a row", {"n": 15}, {}),
        ("k to be a power of two from 16 to 256; it is 24", {"k": 24}, {}),
        ("v to be a power of two from 16 to 256; it is 8", {"v": 8}, {}),
        ("v to be a power of two from 16 to 256; it is 512", {"v": 512}, {}),
        ("these are torch.float64", {"dtype": torch.float64}, {}),
    ],
)
def test_the_packed_kernels_say_why_they_cannot(sentence, sizes, limits):
    Q, K, V, _ = inputs(2, m=n, **sizes)
    visibility = replace(segments(TARGET[:, : Q.shape[2]], TARGET), **limits)
    assert sentence in packed.supports(Q, K, V, visibility)


def test_without_a_gpu_or_triton_they_say_so(monkeypatch):
    Q, K, V, _ = inputs(2)
    visibility = segments(TARGET, TARGET)
    monkeypatch.setattr(packed, "has_triton", lambda: False)
    assert "need Triton" in packed.supports(Q, K, V, visibility)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    Q, K, V = (T.detach().cpu() for T in (Q, K, V))
    visibility = Visibility(query_segments=TARGET, memory_segments=TARGET)
    with pytest.raises(BackendError, match="'packed' cannot: the packed kernels work on a GPU"):
        attend(Q, K, V, visibility, scale=SCALE, backend="packed")


@pytest.mark.skipif(DEVICE == "cuda", reason="there is a GPU, which does")
def test_the_interpreter_does_not_do_bfloat16():
    Q, K, V, _ = inputs(2, dtype=torch.bfloat16)
    assert "bfloat16 wrong" in packed.supports(Q, K, V, segments(TARGET, TARGET))
