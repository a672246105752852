"""The backends of `attend` against loops over scalars, the paper's listings and plain PyTorch."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import (
    DEVICE,
    additive,
    assert_at_most_twice,
    integers,
    randn,
    random,
    sees,
    slow_attend,
)
from writehead.errors import BackendError, ConfigError, ShapeError
from writehead.kernels import Visibility, attend
from writehead.kernels.attend import attend_fused
from writehead.kernels.heads import Heads
from writehead.paper.listings import MultiheadAttentionBatched, MultiqueryAttentionBatched

b, n, h, k, v, m, d = 2, 3, 6, 7, 11, 13, 17
SCALE = 0.3
BACKENDS = ("sdpa", "eager")  # test_packed.py has the third

every_backend = pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
every_kind = pytest.mark.parametrize("g", [h, 3, 2, 1])


def depths(backend: str) -> tuple[int, int]:
    """k and v, which must be equal for SDPA."""
    return (v, v) if backend == "sdpa" else (k, v)


def inputs(backend: str, g: int, *, n: int = n, m: int = m, b: int = b):
    k, v = depths(backend)
    return random(b, h, n, k), random(b, g, m, k), random(b, g, m, v)


LIMITS = {
    "everything": Visibility(),
    "causal": Visibility(causal=True),
    "causal at the end": Visibility(
        causal=True, query_positions=torch.arange(m - n, m).repeat(b, 1)
    ),
    "window": Visibility(causal=True, window=2),
    "lengths": Visibility(lengths=torch.tensor([m - 2, 1])),
    "empty row": Visibility(lengths=torch.tensor([0, m])),
    "segments": Visibility(
        query_segments=torch.tensor([[1, 2, 0], [2, 2, 3]]),
        memory_segments=torch.tensor([[1] * 4 + [2] * 6 + [0] * 3, [1] * 5 + [2] * 8]),
    ),
    "ring": Visibility(
        causal=True,
        window=5,
        query_positions=torch.tensor([[15, 16, 17], [1, 2, 3]]),
        memory_positions=torch.tensor([[*range(13, 18), *range(5, 13)], [0, 1, 2, 3] + [-1] * 9]),
    ),
}


@every_backend
@every_kind
@pytest.mark.parametrize("limit", LIMITS)
def test_attend_is_a_loop_over_scalars(limit, g, backend):
    Q, K, V = inputs(backend, g)
    O = attend(Q, K, V, LIMITS[limit], scale=SCALE, backend=backend)  # noqa: E741
    assert_close(O, slow_attend(Q, K, V, sees(LIMITS[limit]), SCALE))


@every_backend
@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 5), (5, 1), (4, 4), (5, 3)])
@pytest.mark.parametrize("causal", [False, True])
def test_attend_is_a_loop_at_the_smallest_sizes_of_any_layout(causal, n, m, backend):
    Q, K, V = (T.mT.contiguous().mT for T in inputs(backend, 2, n=n, m=m))
    visibility = Visibility(causal=causal)
    O = attend(Q, K, V, visibility, scale=SCALE, backend=backend)  # noqa: E741
    assert_close(O, slow_attend(Q, K, V, sees(visibility), SCALE))


@every_backend
@pytest.mark.parametrize("listing", [MultiheadAttentionBatched, MultiqueryAttentionBatched])
def test_attend_is_the_papers_batched_listing(listing, backend):
    k, v = depths(backend)
    g = h if listing is MultiheadAttentionBatched else 1
    X, M = random(b, n, d), random(b, m, d)
    P_q, P_k, P_v, P_o = (random(x, d, width) for x, width in ((h, k), (g, k), (g, v), (h, v)))
    Q, K, V = (torch.einsum("bnd,hdk->bhnk", T, P) for T, P in ((X, P_q), (M, P_k), (M, P_v)))
    lengths = torch.tensor([5, 9])
    O = attend(Q, K, V, Visibility(lengths=lengths), scale=k**-0.5, backend=backend)  # noqa: E741

    mask = additive((torch.arange(m) < lengths.view(b, 1, 1, 1)).expand(b, h, n, m))
    P_k, P_v = (P_k, P_v) if g == h else (P_k[0], P_v[0])
    expected = listing(X, M, mask, P_q * k**-0.5, P_k, P_v, P_o)
    assert_close(torch.einsum("bhnv,hdv->bnd", O, P_o), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@every_kind
@pytest.mark.parametrize("n", [1, n])
def test_a_query_that_sees_nothing_gets_zeros_and_no_nan_flows_back(n, g, backend):
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float64
    tensors = [T.to(DEVICE, dtype).requires_grad_() for T in inputs(backend, g, n=n)]
    O = attend(*tensors, Visibility(lengths=integers(0, 4)), scale=SCALE, backend=backend)  # noqa: E741
    O.float().square().sum().backward()
    assert not O[0].any()
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
def test_ancestors_are_rows_gathered_with_their_noise(g, backend):
    Q, K, V = inputs(backend, g)
    noise, ancestors, lengths = random(b, g, m), torch.randint(b, (b, m)), torch.tensor([m - 1, 4])
    pairs = [(int(ancestors[row, j]), j) for row in range(b) for j in range(m)]
    visibility = Visibility(lengths=lengths, ancestors=ancestors)
    O = attend(Q, K, V, visibility, scale=SCALE, noise=noise, backend=backend)  # noqa: E741

    V = V * noise.unsqueeze(3)  # a factor of a position's values is one of its weight
    K, V = (torch.stack([T[row, :, j] for row, j in pairs], 1) for T in (K, V))
    K, V = (T.unflatten(1, (b, m)).transpose(0, 1) for T in (K, V))
    assert_close(O, slow_attend(Q, K, V, sees(Visibility(lengths=lengths)), SCALE))


@every_backend
@every_kind
@pytest.mark.parametrize("n", [1, n])
def test_rows_of_k_shared_by_beams_are_rows_repeated(n, g, backend):
    beam, lengths, noise = 4, torch.tensor([m, 5]), random(b, g, m)
    Q, _, _ = inputs(backend, g, n=n, b=b * beam)
    _, K, V = inputs(backend, g)
    visibility = Visibility(lengths=lengths)
    O = attend(Q, K, V, visibility, scale=SCALE, noise=noise, backend=backend)  # noqa: E741

    V = V * noise.unsqueeze(3)
    K, V, lengths = (T.repeat_interleave(beam, dim=0) for T in (K, V, lengths))
    assert_close(O, slow_attend(Q, K, V, sees(Visibility(lengths=lengths)), SCALE))


@every_backend
@every_kind
def test_a_fused_projection_gives_what_its_parts_give(g, backend):
    Q, K, V = inputs(backend, g, n=m)
    wide = torch.cat([T.transpose(1, 2).flatten(2) for T in (Q, K, V)], dim=2)
    options = {"scale": SCALE, "noise": random(b, g, m), "backend": backend}
    visibility = Visibility(causal=True, window=4)
    found = attend_fused(wide, Heads(h, g, *depths(backend)), visibility, **options)
    assert_close(found, attend(Q, K, V, visibility, **options))


def test_what_does_not_fit_is_refused():
    Q, K, V = inputs("eager", 2)
    with pytest.raises(BackendError, match=r"'sdpa' cannot: .* need k = v; they are 7 and 11"):
        attend(Q, K, V, scale=SCALE, backend="sdpa")
    with pytest.raises(ConfigError, match="unknown backend 'eagre'; did you mean 'eager'"):
        attend(Q, K, V, scale=SCALE, backend="eagre")
    for noise in (random(b, h, m), random(b, 2, m, 1), torch.ones(b, 2, m, dtype=torch.long)):
        with pytest.raises(ShapeError, match=r"floating-point factors \[2, 2, 13\]"):
            attend(Q, K, V, scale=SCALE, noise=noise)
    with pytest.raises(ShapeError, match="noise is on meta and Q on cpu"):
        attend(Q, K, V, scale=SCALE, noise=random(b, 2, m).to("meta"))
    for shape in ((b, n, 77), (n, 78)):
        with pytest.raises(ShapeError, match=r"need \[b, n, 78\]"):
            attend_fused(random(*shape), Heads(h, 2, k, v), scale=SCALE)


def plain(Q: Tensor, K: Tensor, V: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Textbook attention in the precision of its inputs."""
    K, V = (T.repeat_interleave(Q.shape[1] // K.shape[1], dim=1) for T in (K, V))
    logits = (Q @ K.transpose(-1, -2) * scale).masked_fill(~mask, -math.inf)
    return torch.softmax(logits, dim=-1).nan_to_num() @ V


@pytest.mark.parametrize("backend", BACKENDS)
@every_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("n", [1, 16])
def test_errors_are_at_most_twice_those_of_plain_pytorch(n, dtype, g, backend):
    m, k = 129, 32
    Q, K, V = 3 * randn(4, h, n, k), randn(4, g, m, k), randn(4, g, m, k)
    Q, K, V = (T.to(dtype) for T in (Q, K, V))
    lengths, positions = integers(m, 100, 3, 0), torch.arange(n, device=DEVICE).repeat(4, 1) + 90
    visibility = Visibility(causal=True, window=89, lengths=lengths, query_positions=positions)
    mask = visibility.mask(n, m, Q.device)
    exact = plain(Q.double(), K.double(), V.double(), mask, k**-0.5)
    O = attend(Q, K, V, visibility, scale=k**-0.5, backend=backend)  # noqa: E741
    assert_at_most_twice(O, plain(Q, K, V, mask, k**-0.5), exact)


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

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [T for T in torch.utils._pytree.tree_leaves(out) if isinstance(T, Tensor)]
        self.nbytes = max([self.nbytes, *(T.untyped_storage().nbytes() for T in tensors)])
        return out


def taken(work) -> int:
    """Bytes of the largest result on the way; on a GPU, of all memory taken at once."""
    if DEVICE == "cpu":
        with Largest() as largest:
            work()
        return largest.nbytes
    work()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("g", [2, 1])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("limit", ["everything", "lengths", "causal", "beams"])
def test_k_and_v_are_never_repeated_for_read_heads_or_beams(limit, n, g, backend):
    h, m, k, beams = 16, 1024, 64, 5 if limit == "beams" else 1
    shapes = (b * beams, h, n, k), (b, g, m, k), (b, g, m, k)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    Q, K, V = (randn(*shape, dtype=dtype) for shape in shapes)
    positions = torch.arange(n, device=DEVICE).repeat(b, 1) + 40
    visibility = {
        "everything": Visibility(),
        "causal": Visibility(causal=True, query_positions=positions),
    }.get(limit, Visibility(lengths=integers(m, 9)))
    everything = torch.ones(1, dtype=torch.bool, device=DEVICE)
    assert taken(lambda: plain(Q[:b], K, V, everything, SCALE)) >= K.nbytes * h // g
    got = taken(lambda: attend(Q, K, V, visibility, scale=SCALE, backend=backend))
    assert 0 < got < K.nbytes * beams * h // g
