"""Every backend of `attend` against loops over scalars and against the paper's listings."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import additive, random, sees, slow_attend
from writehead.errors import BackendError, ConfigError, ShapeError
from writehead.kernels import Visibility, attend
from writehead.kernels.attend import attend_fused
from writehead.kernels.heads import Heads
from writehead.paper.listings import MultiheadAttentionBatched, MultiqueryAttentionBatched

b, n, h, k, v, m, d = 2, 3, 6, 7, 11, 13, 17
SCALE = 0.3
BACKENDS = ("sdpa", "eager")  # the others need a GPU, and have their tests there

every_backend = pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
every_kind = pytest.mark.parametrize("g", [h, 3, 2, 1])


def depths(backend: str) -> tuple[int, int]:
    """k and v; only the fused kernels must have them equal."""
    return (v, v) if backend == "sdpa" else (k, v)


def inputs(backend: str, g: int, *, n: int = n, m: int = m, b: int = b):
    k, v = depths(backend)
    return random(b, h, n, k), random(b, g, m, k), random(b, g, m, v)


def limits() -> dict[str, Visibility]:
    return {
        "everything": Visibility(),
        "causal": Visibility(causal=True),
        "causal_at_the_end": Visibility(
            causal=True, query_positions=torch.arange(m - n, m).repeat(b, 1)
        ),
        "window": Visibility(causal=True, window=2),
        "window_of_one": Visibility(causal=True, window=1),
        "window_past_the_memory": Visibility(causal=True, window=m + 1),
        "lengths": Visibility(lengths=torch.tensor([m - 2, 1])),
        "nothing_in_a_row": Visibility(lengths=torch.tensor([0, m])),
        "segments": Visibility(
            query_segments=torch.tensor([[1, 2, 0], [2, 2, 3]]),
            memory_segments=torch.tensor([[1] * 4 + [2] * 6 + [0] * 3, [1] * 5 + [2] * 8]),
        ),
        "a_ring": Visibility(
            causal=True,
            window=5,
            query_positions=torch.tensor([[15, 16, 17], [1, 2, 3]]),
            memory_positions=torch.tensor(
                [[*range(13, 18), *range(5, 13)], [0, 1, 2, 3] + [-1] * 9]
            ),
        ),
    }


@every_backend
@every_kind
@pytest.mark.parametrize("limit", limits())
def test_attend_is_a_loop_over_scalars(limit, g, backend):
    Q, K, V = inputs(backend, g)
    visibility = limits()[limit]

    O = attend(Q, K, V, visibility, scale=SCALE, backend=backend)  # noqa: E741

    assert_close(O, slow_attend(Q, K, V, sees(visibility), SCALE))


@every_backend
@every_kind
@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 5), (5, 1), (4, 4), (5, 3)])
@pytest.mark.parametrize("causal", [False, True])
def test_attend_is_a_loop_at_the_smallest_sizes(n, m, causal, g, backend):
    Q, K, V = inputs(backend, g, n=n, m=m)
    visibility = Visibility(causal=causal)

    O = attend(Q, K, V, visibility, scale=SCALE, backend=backend)  # noqa: E741

    assert_close(O, slow_attend(Q, K, V, sees(visibility), SCALE))


@given(
    backend=st.sampled_from([*BACKENDS]),
    g=st.sampled_from([1, 2, 3, 6]),
    n=st.integers(1, 4),
    m=st.integers(1, 6),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 7),
    lengths=st.none() | st.tuples(st.integers(0, 6), st.integers(0, 6)),
    seed=st.integers(0, 99),
)
def test_attend_is_a_loop_under_any_limits_together(
    backend, g, n, m, causal, window, lengths, seed
):
    torch.manual_seed(seed)
    Q, K, V = inputs(backend, g, n=n, m=m)
    visibility = Visibility(causal, window, lengths=lengths and torch.tensor(lengths))

    O = attend(Q, K, V, visibility, scale=SCALE, backend=backend)  # noqa: E741

    assert_close(O, slow_attend(Q, K, V, sees(visibility), SCALE))


@every_backend
def test_multihead_is_the_papers_batched_listing(backend):
    k, v = depths(backend)
    X, M = random(b, n, d), random(b, m, d)
    P_q, P_k, P_v, P_o = (random(h, d, depth) for depth in (k, k, v, v))
    Q, K, V = (torch.einsum("bnd,hdk->bhnk", T, P) for T, P in ((X, P_q), (M, P_k), (M, P_v)))
    visible = torch.arange(m) < torch.tensor([5, 9]).view(b, 1, 1, 1)

    O = attend(  # noqa: E741
        Q, K, V, Visibility(lengths=torch.tensor([5, 9])), scale=k**-0.5, backend=backend
    )

    mask = additive(visible.expand(b, h, n, m))
    expected = MultiheadAttentionBatched(X, M, mask, P_q * k**-0.5, P_k, P_v, P_o)
    assert_close(torch.einsum("bhnv,hdv->bnd", O, P_o), expected)


@every_backend
def test_multiquery_is_the_papers_batched_listing(backend):
    k, v = depths(backend)
    X, M = random(b, n, d), random(b, m, d)
    P_q, P_o = random(h, d, k), random(h, d, v)
    P_k, P_v = random(d, k), random(d, v)
    Q = torch.einsum("bnd,hdk->bhnk", X, P_q)
    visible = torch.arange(m) < torch.tensor([5, 9]).view(b, 1, 1, 1)

    O = attend(  # noqa: E741
        Q,
        (M @ P_k).unsqueeze(1),
        (M @ P_v).unsqueeze(1),
        Visibility(lengths=torch.tensor([5, 9])),
        scale=k**-0.5,
        backend=backend,
    )

    mask = additive(visible.expand(b, h, n, m))
    expected = MultiqueryAttentionBatched(X, M, mask, P_q * k**-0.5, P_k, P_v, P_o)
    assert_close(torch.einsum("bhnv,hdv->bnd", O, P_o), expected)


@every_backend
@every_kind
def test_transposed_inputs_give_what_contiguous_ones_do(g, backend):
    Q, K, V = inputs(backend, g)
    strided = [T.transpose(1, 2).contiguous().transpose(1, 2) for T in (Q, K, V)]
    assert not strided[0].is_contiguous()

    O = attend(*strided, Visibility(causal=True), scale=SCALE, backend=backend)  # noqa: E741

    assert_close(O, attend(Q, K, V, Visibility(causal=True), scale=SCALE, backend=backend))


def test_the_fused_kernels_say_why_they_cannot():
    Q, K, V = inputs("eager", 1)
    with pytest.raises(BackendError, match=r"'sdpa' cannot: .* need k = v; they are 7 and 11"):
        attend(Q, K, V, scale=SCALE, backend="sdpa")


def test_an_unknown_backend_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="unknown backend 'eagre'; did you mean 'eager'"):
        attend(*inputs("eager", 1), scale=SCALE, backend="eagre")


@every_backend
@every_kind
@pytest.mark.parametrize("n", [1, n])
def test_a_query_that_sees_nothing_gets_zeros_and_no_nan_flows_back(n, g, backend):
    tensors = [T.requires_grad_() for T in inputs(backend, g, n=n)]
    visibility = Visibility(lengths=torch.tensor([0, 4]))

    O = attend(*tensors, visibility, scale=SCALE, backend=backend)  # noqa: E741
    O.square().sum().backward()

    assert torch.equal(O[0], torch.zeros_like(O[0]))
    for T in tensors:
        assert torch.isfinite(T.grad).all()
        assert not T.grad[0].any()
        assert T.grad[1].any()


@pytest.mark.parametrize("backend", BACKENDS)
@every_kind
def test_gradients_are_the_derivatives(g, backend):
    tensors = [T.requires_grad_() for T in inputs(backend, g, n=2, m=3, b=1)]
    visibility = Visibility(causal=True, query_positions=torch.tensor([[1, 2]]))

    assert torch.autograd.gradcheck(
        lambda *T: attend(*T, visibility, scale=SCALE, backend=backend), tensors
    )


@every_backend
@every_kind
def test_ancestors_are_rows_copied(g, backend):
    Q, K, V = inputs(backend, g)
    ancestors = torch.randint(b, (b, m))
    lengths = torch.tensor([m - 1, 4])

    O = attend(  # noqa: E741
        Q, K, V, Visibility(lengths=lengths, ancestors=ancestors), scale=SCALE, backend=backend
    )

    copied_K, copied_V = torch.empty_like(K), torch.empty_like(V)
    for row in range(b):
        for j in range(m):
            copied_K[row, :, j] = K[ancestors[row, j], :, j]
            copied_V[row, :, j] = V[ancestors[row, j], :, j]
    copied = sees(Visibility(lengths=lengths))
    assert_close(O, slow_attend(Q, copied_K, copied_V, copied, SCALE))


@every_backend
@every_kind
@pytest.mark.parametrize("n", [1, n])
def test_rows_of_k_shared_by_beams_are_rows_repeated(n, g, backend):
    beam = 4
    Q, _, _ = inputs(backend, g, n=n, b=b * beam)
    _, K, V = inputs(backend, g)
    lengths = torch.tensor([m, 5])

    O = attend(Q, K, V, Visibility(lengths=lengths), scale=SCALE, backend=backend)  # noqa: E741

    K, V, lengths = (T.repeat_interleave(beam, dim=0) for T in (K, V, lengths))
    assert_close(O, slow_attend(Q, K, V, sees(Visibility(lengths=lengths)), SCALE))


@every_backend
@every_kind
def test_noise_multiplies_each_weight_after_the_softmax(g, backend):
    beam = 4
    Q, _, _ = inputs(backend, g, b=b * beam)
    _, K, V = inputs(backend, g)
    noise = random(b, g, m)

    O = attend(Q, K, V, scale=SCALE, noise=noise, backend=backend)  # noqa: E741

    K, V, noise = (
        T.repeat_interleave(beam, dim=0).repeat_interleave(h // g, dim=1) for T in (K, V, noise)
    )
    weights = torch.softmax(torch.einsum("bhnk,bhmk->bhnm", Q, K) * SCALE, dim=3)
    assert_close(O, torch.einsum("bhnm,bhm,bhmv->bhnv", weights, noise, V))


@every_backend
def test_noise_belongs_to_the_rows_of_k_that_ancestors_point_to(backend):
    Q, K, V = inputs(backend, 2)
    noise, visibility = random(b, 2, m), Visibility(ancestors=torch.randint(b, (b, m)))
    assert_close(
        attend(Q, K, V, visibility, scale=SCALE, noise=noise, backend=backend),
        attend(Q, K, V * noise.unsqueeze(3), visibility, scale=SCALE, backend=backend),
    )


@every_backend
@every_kind
@pytest.mark.parametrize("noisy", [False, True])
def test_one_wide_product_gives_what_its_parts_give(noisy, g, backend):
    heads = Heads(h, g, *depths(backend))
    Q, K, V = inputs(backend, g, n=m)
    wide = torch.cat([T.transpose(1, 2).flatten(2) for T in (Q, K, V)], dim=2)
    noise, visibility = random(b, g, m) if noisy else None, Visibility(causal=True, window=4)
    assert_close(
        attend_fused(wide, heads, visibility, scale=SCALE, noise=noise, backend=backend),
        attend(Q, K, V, visibility, scale=SCALE, noise=noise, backend=backend),
    )


def test_noise_and_wide_products_that_do_not_fit_are_refused():
    Q, K, V = inputs("eager", 2)
    for noise in (random(b, h, m), random(b, 2, m, 1), torch.ones(b, 2, m, dtype=torch.long)):
        with pytest.raises(ShapeError, match=r"floating-point factors \[2, 2, 13\]"):
            attend(Q, K, V, scale=SCALE, noise=noise)
    with pytest.raises(ShapeError, match="noise is on meta and Q on cpu"):
        attend(Q, K, V, scale=SCALE, noise=random(b, 2, m).to("meta"))
    for shape in ((b, n, 77), (n, 78)):
        with pytest.raises(ShapeError, match=r"need \[b, n, 78\], which is h k \+ g k \+ g v"):
            attend_fused(random(*shape), Heads(h, 2, k, v), scale=SCALE)


def plain(Q, K, V, mask, scale):
    """Attention as anyone would write it, in the inputs' own precision."""
    repeats = Q.shape[1] // K.shape[1]
    K, V = (T.repeat_interleave(repeats, dim=1) for T in (K, V))
    logits = (Q @ K.transpose(-1, -2) * scale).masked_fill(~mask, -math.inf)
    return torch.softmax(logits, dim=-1) @ V


@pytest.mark.parametrize("backend", BACKENDS)
@every_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [1, 16])
def test_low_precision_errs_at_most_twice_as_much_as_plain_pytorch(n, dtype, g, backend):
    m, k = 128, 32
    Q, K, V = random(4, h, n, k), random(4, g, m, k), random(4, g, m, k)
    Q, K, V = (T.to(dtype) for T in (Q * 3, K, V))
    visibility = Visibility(lengths=torch.tensor([m, 100, 3, 50]))
    mask = visibility.mask(n, m, Q.device)
    exact = plain(Q.float(), K.float(), V.float(), mask, k**-0.5)

    O = attend(Q, K, V, visibility, scale=k**-0.5, backend=backend)  # noqa: E741

    assert O.dtype == dtype
    allowed = (plain(Q, K, V, mask, k**-0.5).float() - exact).abs()
    error = (O.float() - exact).abs()
    assert error.max() <= 2 * allowed.max()
    assert error.mean() <= 2 * allowed.mean()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_softmax_of_low_precision_is_taken_in_float32(dtype, backend):
    # products of small integers are exact, and values that are units show the weights themselves,
    # so that only the rounding of the weights is left
    Q, K = (torch.randint(-4, 5, (b, 1, 8, 8)) for _ in range(2))
    V = torch.eye(8).expand(b, 1, 8, 8)
    exact = torch.softmax(0.3 * (Q @ K.transpose(-1, -2)).double(), dim=-1)

    O = attend(Q.to(dtype), K.to(dtype), V.to(dtype), scale=0.3, backend=backend)  # noqa: E741

    assert_close(O.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)


class Largest(TorchDispatchMode):
    """Remembers the most bytes that any operation's result occupies."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for T in torch.utils._pytree.tree_leaves(out):
            if isinstance(T, torch.Tensor):
                self.nbytes = max(self.nbytes, T.untyped_storage().nbytes())
        return out


def test_plain_pytorch_is_seen_to_repeat_k_and_v():
    m, k = 64, 16
    Q, K, V = random(b, h, 1, k), random(b, 1, m, k), random(b, 1, m, k)

    with Largest() as largest:
        plain(Q, K, V, torch.ones(1, dtype=torch.bool), SCALE)

    assert largest.nbytes == b * h * m * k * K.itemsize


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("g", [3, 2, 1])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("limit", ["everything", "lengths", "causal"])
def test_k_and_v_are_never_repeated_for_their_read_heads(limit, n, g, backend):
    m, k = 64, 16
    Q, K, V = (random(b, heads, size, k) for heads, size in ((h, n), (g, m), (g, m)))
    visibility = {
        "everything": Visibility(),
        "lengths": Visibility(lengths=torch.tensor([m, 9])),
        "causal": Visibility(causal=True, query_positions=torch.arange(n).repeat(b, 1) + 40),
    }[limit]

    with Largest() as largest:
        attend(Q, K, V, visibility, scale=SCALE, backend=backend)

    assert 0 < largest.nbytes < b * h * m * k * K.itemsize


@pytest.mark.parametrize("backend", BACKENDS)
def test_k_and_v_are_never_repeated_for_their_beams(backend):
    beam, m, k = 5, 64, 16
    Q, K, V = random(b * beam, 2, 1, k), random(b, 1, m, k), random(b, 1, m, k)

    with Largest() as largest:
        attend(Q, K, V, Visibility(lengths=torch.tensor([m, 9])), scale=SCALE, backend=backend)

    assert 0 < largest.nbytes < b * beam * m * k * K.itemsize
