"""Implementations of `attend` against scalar loops and plain PyTorch."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import DEVICE, assert_at_most_twice, integers, randn, random, sees, slow_attend
from writehead.errors import BackendError, ShapeError
from writehead.ops import attention
from writehead.ops.attention import attend
from writehead.ops.heads import Heads
from writehead.ops.visibility import Visibility

b, n, h, k, v, m = 2, 3, 6, 7, 11, 13
SCALE = 0.3
IMPLEMENTATIONS = ("sdpa", "eager")  # the other implementations are for packed rows

every_implementation = pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, "auto"])
every_kind = pytest.mark.parametrize("g", [h, 2, 1])


def depths(implementation: str) -> tuple[int, int]:
    """k and v, which must be equal for SDPA."""
    return (v, v) if implementation == "sdpa" else (k, v)


def inputs(implementation: str, g: int, *, n: int = n, m: int = m, b: int = b):
    k, v = depths(implementation)
    return random(b, h, n, k), random(b, g, m, k), random(b, g, m, v)


def reference(Q: Tensor, K: Tensor, V: Tensor, visibility: Visibility, noise: Tensor) -> Tensor:
    """`slow_attend` with noise: scaling a position's values scales its weight."""
    return slow_attend(Q, K, V * noise.unsqueeze(3), sees(visibility), SCALE)


LIMITS = [
    Visibility(),
    Visibility(causal=True),
    Visibility(causal=True, window=2),
    Visibility(lengths=torch.tensor([m - 2, 0])),
    Visibility(
        query_segments=torch.tensor([[1, 2, 0], [2, 2, 3]]),
        memory_segments=torch.tensor([[1] * 4 + [2] * 6 + [0] * 3, [1] * 5 + [2] * 8]),
    ),
    Visibility(causal=True, window=5, query_positions=torch.tensor([[9, 15, 12], [1, 2, 3]])),
]
FOURS = torch.tensor([[1, 1, 2, 2], [1, 2, 2, 0]])
# causality plus one of these is not the causal triangle of PyTorch
SQUARE = [
    *({"window": 2}, {"lengths": torch.tensor([4, 2])}),
    {"query_positions": FOURS},
    {"query_segments": FOURS, "memory_segments": FOURS},
]


@every_implementation
@pytest.mark.parametrize(
    ("g", "n", "m", "visibility"),
    [
        *((g, n, m, limits) for g in (h, 2, 1) for limits in LIMITS),
        *((2, n, m, Visibility()) for n, m in ((1, 1), (1, 5), (5, 1), (5, 3))),
        *((2, n, m, Visibility(True)) for n, m in ((1, 1), (1, 5), (5, 1), (4, 4), (5, 3))),
        *((2, 4, 4, Visibility(True, **limit)) for limit in SQUARE),
        *((2, n, m, Visibility(lengths=torch.tensor([m, 5]))) for n in (1, n)),
    ],
)
def test_attend_equals_a_loop_over_scalars(g, n, m, visibility, implementation):
    Q, K, V = inputs(implementation, g, n=n, m=m)
    options, noise = {"scale": SCALE, "implementation": implementation}, random(b, g, m)
    O = attend(Q, K, V, visibility, noise=noise, **options)  # noqa: E741
    assert_close(O, reference(Q, K, V, visibility, noise))
    without_noise = reference(Q, K, V, visibility, torch.ones(b, g, m))
    transposed = (T.mT.contiguous().mT for T in (Q, K, V))
    assert_close(attend(*transposed, visibility, **options), without_noise)


@every_implementation
@every_kind
@pytest.mark.parametrize("visibility", LIMITS)
def test_a_bias_is_added_to_the_logits_of_each_distance(visibility, g, implementation):
    Q, K, V = inputs(implementation, g)
    table, positions = random(h, 9), visibility.query_positions  # distances -4 to 4
    O = attend(Q, K, V, visibility, scale=SCALE, bias=table, implementation=implementation)  # noqa: E741

    def bias(row: int, head: int, i: int, j: int) -> float:
        query = i if positions is None else int(positions[row, i])
        return float(table[head, 4 + max(-4, min(query - j, 4))])

    assert_close(O, slow_attend(Q, K, V, sees(visibility), SCALE, bias))


@every_implementation
@every_kind
def test_attend_on_a_fused_projection_equals_attend_on_its_parts(g, implementation):
    Q, K, V = inputs(implementation, g, n=m)
    QKV = torch.cat([T.transpose(1, 2).flatten(2) for T in (Q, K, V)], dim=2)
    options = {"scale": SCALE, "noise": random(b, g, m), "implementation": implementation}
    visibility = Visibility(causal=True, window=4)
    parts = Heads(h, g, *depths(implementation)).split(QKV)
    O = attend(*parts, visibility, fused=QKV, **options)  # noqa: E741
    assert_close(O, attend(Q, K, V, visibility, **options))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@every_kind
def test_gradients_equal_finite_differences(g, implementation):
    tensors = [T.requires_grad_() for T in inputs(implementation, g, n=2, m=3, b=1)]
    visibility = Visibility(causal=True, query_positions=torch.tensor([[1, 2]]))
    options = {"scale": SCALE, "implementation": implementation}
    assert torch.autograd.gradcheck(lambda *T: attend(*T, visibility, **options), tensors)
    # the second query sees nothing
    segments = torch.tensor([[1, 0]]), torch.tensor([[1, 1, 2]])
    visibility = Visibility(query_segments=segments[0], memory_segments=segments[1])
    tensors.append(random(h, 3).requires_grad_())
    assert torch.autograd.gradcheck(
        lambda *T: attend(*T[:3], visibility, bias=T[3], **options), tensors
    )


def test_invalid_arguments_are_rejected():
    Q, K, V = inputs("eager", 2)
    for noise in (random(b, h, m), random(b, 2, m, 1), torch.ones(b, 2, m, dtype=torch.long)):
        with pytest.raises(ShapeError, match=r"floating-point factors .*\[2, 2, 13\]"):
            attend(Q, K, V, scale=SCALE, noise=noise)
    with pytest.raises(ShapeError, match="noise is on meta and Q on cpu"):
        attend(Q, K, V, scale=SCALE, noise=random(b, 2, m).to("meta"))
    with pytest.raises(ShapeError, match=r"table \[h, 2 limit \+ 1\]"):
        attend(Q, K, V, scale=SCALE, bias=random(h, 4))
    for shape in ((b, n, 77), (n, 78)):
        with pytest.raises(ShapeError, match=r"need \[b, n, 78\]"):
            Heads(h, 2, k, v).split(random(*shape))


def plain(Q: Tensor, K: Tensor, V: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Textbook attention in the precision of its inputs."""
    K, V = (T.repeat_interleave(Q.shape[1] // K.shape[1], dim=1) for T in (K, V))
    logits = (Q @ K.transpose(-1, -2) * scale).masked_fill(~mask, -math.inf)
    return torch.softmax(logits, dim=-1).nan_to_num() @ V


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@every_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("n", [1, 16])
def test_errors_are_at_most_twice_those_of_plain_pytorch(n, dtype, g, implementation):
    m, k = 129, 32
    Q, K, V = 3 * randn(4, h, n, k), randn(4, g, m, k), randn(4, g, m, k)
    Q, K, V = (T.to(dtype) for T in (Q, K, V))
    lengths, positions = integers(m, 100, 3, 0), torch.arange(n, device=DEVICE).repeat(4, 1) + 90
    visibility = Visibility(causal=True, window=89, lengths=lengths, query_positions=positions)
    mask = visibility.mask(n, m, Q.device)
    exact = plain(Q.double(), K.double(), V.double(), mask, k**-0.5)
    tensors = [T.requires_grad_() for T in (Q, K, V)]
    O = attend(*tensors, visibility, scale=k**-0.5, implementation=implementation)  # noqa: E741
    assert_at_most_twice(O, plain(Q, K, V, mask, k**-0.5), exact)
    for dT in torch.autograd.grad(O.float().square().sum(), tensors):
        assert dT.isfinite().all()
        assert not dT[3].any()  # this row sees nothing


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_softmax_of_low_precision_inputs_is_computed_in_float32(dtype, implementation):
    # products of small integers are exact and unit values expose the weights, so the only error
    # left is the rounding of the weights
    Q, K = (torch.randint(-4, 5, (b, 1, 8, 8)) for _ in range(2))
    V = torch.eye(8).expand(b, 1, 8, 8)
    exact = torch.softmax(0.3 * (Q @ K.transpose(-1, -2)).double(), dim=-1)
    O = attend(Q.to(dtype), K.to(dtype), V.to(dtype), scale=0.3, implementation=implementation)  # noqa: E741
    assert_close(O.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)


class LargestResult(TorchDispatchMode):
    """Records the largest number of bytes that the result of any operation occupies."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [T for T in torch.utils._pytree.tree_leaves(out) if isinstance(T, Tensor)]
        self.nbytes = max([self.nbytes, *(T.untyped_storage().nbytes() for T in tensors)])
        return out


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("n", [1, 3])
def test_k_and_v_are_never_repeated_for_read_heads(n, implementation):
    h, g, m, k = 16, 2, 1024, 64
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    shapes = (b, h, n, k), (b, g, m, k), (b, g, m, k)
    Q, K, V = (randn(*shape, dtype=dtype) for shape in shapes)
    visibility = Visibility(lengths=integers(m, 9))
    with LargestResult() as largest:
        attend(Q, K, V, visibility, scale=SCALE, implementation=implementation)
    assert 0 < largest.nbytes < K.nbytes * h // g


def packed_segments(*rows: list[int]) -> Tensor:
    """Returns rows of segments with these lengths; a negative length is padding."""
    numbers = [
        torch.cat([torch.full((abs(size),), i * (size > 0)) for i, size in enumerate(row, 1)])
        for row in rows
    ]
    return torch.stack(numbers)


ROWS = [
    packed_segments([13]),
    packed_segments([-2, 1, 4, -1, 5], [3, 3, 3, 4]),
    packed_segments([1] * 13, [-13], [12, -1]),
]


@every_kind
@pytest.mark.parametrize("limit", [{}, {"causal": True}, {"causal": True, "window": 3}])
@pytest.mark.parametrize("segments", ROWS)
@pytest.mark.parametrize("tokens", [1, 6, 256])
def test_grouped_attention_equals_masked_attention(tokens, segments, limit, g, monkeypatch):
    monkeypatch.setattr(attention, "GROUP_TOKENS", tokens)
    visibility = Visibility(query_segments=segments, memory_segments=segments, **limit)
    QKV, table = inputs("grouped", g, n=m, b=len(segments)), random(h, 9)
    for bias in (None, table):
        options = {"scale": SCALE, "bias": bias}
        O, expected = (  # noqa: E741
            attend(*QKV, visibility, implementation=name, **options)
            for name in ("grouped", "eager")
        )
        assert_close(O, expected)
        assert torch.equal(attend(*QKV, visibility, **options), O)  # chosen by "auto"


def test_grouped_attention_needs_the_same_segments_and_no_gradient():
    Q, K, V = inputs("grouped", 2, n=m)
    segments, named = torch.ones(b, m, dtype=torch.long), {"implementation": "grouped"}
    same = {"query_segments": segments, "memory_segments": segments}
    limits = [
        {},
        same | {"memory_segments": segments.clone()},
        same | {"lengths": torch.tensor([m, 9])},
    ]
    limits.append(same | {"query_positions": torch.arange(m).expand(b, m)})
    for limit in limits:
        with pytest.raises(BackendError, match="grouping works only in inference"):
            attend(Q, K, V, Visibility(**limit), scale=SCALE, **named)
    with pytest.raises(BackendError, match="grouping works only in inference"):
        attend(Q.requires_grad_(), K, V, Visibility(**same), scale=SCALE, **named)


@pytest.mark.parametrize(
    "row", [[1, 2, 1, 2], [1, 1, 2, 1], [1, 0, 1, 2], [-1, -1, 2, 2], [2, 2, 1, 1], [5, 5, 0, 0]]
)
def test_segments_of_any_order_and_number_equal_a_mask(row):
    segments = torch.tensor([row, [2, 2, 1, 1]])
    visibility = Visibility(query_segments=segments, memory_segments=segments)
    QKV = inputs("eager", 2, n=4, m=4)
    expected = attend(*QKV, visibility, scale=SCALE, implementation="eager")
    assert_close(attend(*QKV, visibility, scale=SCALE), expected)


def test_traced_attention_does_not_ask_whether_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(Tensor, "is_cuda", True)  # torch.compile cannot trace the question
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: pytest.fail("asked"))
    segments = packed_segments([13])
    visibility = Visibility(query_segments=segments, memory_segments=segments)
    assert not attention._can_group(*inputs("sdpa", 1, n=m, b=1), visibility, None)


@pytest.mark.skipif(DEVICE == "cuda", reason="only kernels of CPUs round alike in any batch")
def test_results_of_a_segment_are_the_same_in_any_batch():
    lengths = [1, 16, 100, 127, 161, 191, 192, 193, 200, 207, 208, 211, 255, 300, 520]
    QKV = [randn(1, heads, sum(lengths), 64) for heads in (6, 1, 1)]
    segments = packed_segments(lengths)
    options = {"scale": 0.1, "batch_invariant": True, "implementation": "grouped"}

    def attended(segments: Tensor, own: slice) -> Tensor:
        visibility = Visibility(query_segments=segments, memory_segments=segments)
        return attend(*(T[:, :, own] for T in QKV), visibility, **options)

    together, begin = attended(segments, slice(None)), 0
    for length in lengths:
        own = slice(begin, begin + length)
        assert torch.equal(together[:, :, own], attended(segments[:, own].contiguous(), own))
        begin += length
