"""Attention of decoding steps against loops over rows, heads and positions in float64."""

import dataclasses
from itertools import product

import pytest
import torch
from torch import Tensor

from helpers import (
    DEVICE,
    DTYPES,
    assert_at_most_twice,
    assert_close_in,
    integers,
    randn,
    sees,
    slow_attend,
)
from writehead.errors import BackendError, ConfigError, ShapeError
from writehead.ops.decode_attention import (
    CacheLayer,
    MemoryLayer,
    Shape,
    Tile,
    attend_triton,
    choose_splits,
    choose_tile,
    decode_attention,
)
from writehead.ops.heads import Heads
from writehead.ops.rotary import Rotary, Scaling
from writehead.ops.visibility import Visibility

pytest.importorskip("triton", reason="Triton is not installed")
SCALE = 0.3
MULTI_QUERY, GROUPED, MULTI_HEAD = Heads(6, 1, 16, 32), Heads(6, 2, 32, 16), Heads(3, 3, 16, 16)
PREFETCH = Tile(16, 4, 1, prefetch=True)
WAYS = {
    "reference": None,
    "kernel": {"tile": Tile(16, warps=2, stages=2), "splits": 1},
    "split": {"tile": Tile(32, 4, 3), "splits": 2},
    "prefetch": {"tile": PREFETCH, "splits": 1},
    "prefetch, split": {"tile": PREFETCH, "splits": 3},
}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def turned(x: Tensor, position: int, base: float) -> Tensor:
    """Returns x [k] rotated pair by pair, as complex numbers."""
    half = len(x) // 2
    powers = [base ** (-2 * i / len(x)) * position for i in range(half)]
    spin = torch.polar(torch.ones(half, dtype=torch.float64), torch.tensor(powers).double())
    pairs = torch.complex(x[:half], x[half:]) * spin
    return torch.cat([pairs.real, pairs.imag])


class Steps:
    """A cache with random contents, unused positions NaN in the kernel, and new positions."""

    def __init__(
        self, heads, lengths, *, size=37, beam=1, n=1, dead=(), slots=None, base=None, **limits
    ):
        self.heads, self.base, rows = heads, base, len(lengths) * beam
        listed = list(range(len(lengths))) if slots is None else slots
        live = integers(*(s not in dead for s in range(len(lengths)))).repeat_interleave(beam)
        ancestors = None
        if beam > 1:
            ancestors = torch.randint(beam, (rows, size), device=DEVICE, dtype=torch.int32)
        if "counts" in limits:
            limits["counts"] = integers(*limits["counts"])
        if "limit" in limits:  # of relative positions
            limits["bias"] = randn(heads.h, 2 * limits.pop("limit") + 1, dtype=torch.float32)
        self.cache = CacheLayer(
            *(randn(rows, heads.g, size, depth) for depth in (heads.k, heads.v)),
            *(integers(*lengths).repeat_interleave(beam), live, beam),
            None if slots is None else integers(*slots, dtype=torch.int32),
            ancestors=ancestors,
            **limits,
        )
        # the columns are a slice of a wider product
        columns = sum(heads.widths)
        self.QKV = randn(len(listed) * beam, n, columns + 5)[..., :columns]
        self.rows = [s * beam + j for s in listed for j in range(beam)]  # of the cache

    def attend(self, way: dict | None) -> Tensor:
        rotary = self.base and Rotary.make(100, self.heads.k, self.base, Scaling()).on(
            self.QKV.device
        )
        if way is not None:
            return attend_triton(self.QKV, self.cache, self.heads, SCALE, rotary, **way)
        options = {"scale": SCALE, "rotary": rotary, "implementation": "reference"}
        # on a GPU, SDPA fails unless rows are aligned
        return decode_attention(self.QKV.contiguous(), self.cache, self.heads, **options)

    def new(self, r: int) -> list[Tensor]:
        """Q [n, h, k], K [n, g, k] and V [n, g, v] of row r, rotated."""
        heads, length = self.heads, int(self.cache.lengths[self.rows[r]])
        parts = self.QKV[r].double().cpu().split(heads.widths, dim=1)
        counts = heads.h, heads.g, heads.g
        parts = [T.unflatten(1, (one, -1)) for T, one in zip(parts, counts, strict=True)]
        if self.base is not None:
            for T in parts[:2]:
                for i, head in product(range(T.shape[0]), range(T.shape[1])):
                    T[i, head] = turned(T[i, head].clone(), length + i, self.base)
        return parts

    def count(self, row: int) -> int:
        """How many new positions the row of the cache has."""
        given = self.cache.counts
        return self.QKV.shape[1] if given is None else int(given[row])

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """Computes O [R beam, n, h v] in float64 and the cache after the step, by loops."""
        cache, heads, size = self.cache, self.heads, self.cache.K.shape[2]
        after = cache.K.double().cpu(), cache.V.double().cpu()
        before = [T.clone() for T in after]
        O = torch.zeros(*self.QKV.shape[:2], heads.h, heads.v, dtype=torch.float64)  # noqa: E741
        for r, row in enumerate(self.rows):
            count, length = self.count(row), int(cache.lengths[row])
            if not cache.live[row] or not count:
                continue
            holders = [row] * size
            if cache.ancestors is not None:
                holders = [row - row % cache.beam + j for j in cache.ancestors[row].tolist()]
            Q, *new = (T[:count] for T in self.new(r))
            whole = []  # all K and V of the row, in order; only the window's are still in the cache
            for T, stored, added in zip(before, after, new, strict=True):
                old = [T[holders[p % size], :, p % size] for p in range(length)]
                whole.append(torch.stack([*old, *added], dim=1).unsqueeze(0))
                for i in range(count):
                    stored[row, :, (length + i) % size] = added[i]
            positions = length + torch.arange(count).unsqueeze(0)
            limits = Visibility(causal=True, window=cache.window, query_positions=positions)

            def bias(_, head: int, i: int, j: int, length: int = length) -> float:
                if cache.bias is None:
                    return 0.0
                limit = cache.bias.shape[1] // 2
                return float(cache.bias[head, limit + min(length + i - j, limit)])

            own = slow_attend(Q.transpose(0, 1).unsqueeze(0), *whole, sees(limits), SCALE, bias)
            O[r, :count] = own[0].transpose(0, 1)
        return O.flatten(2), *after

    def check(self, way: dict | None) -> None:
        O, *after = self.expected()  # noqa: E741
        dtype, lengths = self.QKV.dtype, self.cache.lengths.tolist()
        if way is not None:
            hide_unused(self.cache)
        ours = self.attend(way)
        assert ours.shape == O.shape
        for r, row in enumerate(self.rows):
            if self.cache.live[row]:
                own = slice(self.count(row))
                assert_close_in(dtype, ours[r, own], O[r, own])
        for T, expected in zip((self.cache.K, self.cache.V), after, strict=True):
            written = ~T.isnan()
            assert_close_in(dtype, T[written], expected[written.cpu()])
            for row in self.cache.live.nonzero()[:, 0].tolist():
                used = lengths[row] + (self.count(row) if row in self.rows else 0)
                assert written[row, :, :used].all()
        assert self.cache.lengths.tolist() == lengths


def hide_unused(layer: CacheLayer | MemoryLayer) -> None:
    """Unused positions become NaN."""
    unused = torch.arange(layer.K.shape[2], device=DEVICE) >= layer.lengths.unsqueeze(1)
    for T in (layer.K, layer.V):
        T.masked_fill_(unused[:, None, :, None], torch.nan)


RING = {"size": 11, "window": 11}
CASES = [
    # one new position per row
    *((heads, [0, 36, 20, 1, 33], {}) for heads in (MULTI_QUERY, GROUPED, MULTI_HEAD)),
    (MULTI_QUERY, [0, 20, 36], {"padded": True, "base": 100.0}),
    (GROUPED, [0], {"size": 1}),
    # a ring of the window
    *((GROUPED, [m - 1, m, 3 * m - 1, m + 4], {"size": m, "window": m}) for m in (1, 11, 33)),
    (MULTI_QUERY, [0, 55], {**RING, "padded": True, "dead": (1,)}),
    # slots in any order; dead ones repeat
    (GROUPED, [3, 17, 30, 9, 33], {"slots": [4, 1, 0, 0, 2], "dead": (0, 1), "base": 50.0}),
    (GROUPED, [3, 17, 30, 9, 33], {"slots": [4, 1, 0, 0, 2], "dead": (0, 1), "beam": 2}),
    # beams follow their ancestors
    (MULTI_QUERY, [33, 20, 0], {"beam": 3, "dead": (1,)}),
    (GROUPED, [33, 5], {**RING, "beam": 2, "base": 70.0}),
    # several new positions see each other causally, and what they replace in a ring
    *((MULTI_QUERY, [0, 17, 37 - n], {"n": n, "base": 30.0}) for n in (2, 19)),
    (GROUPED, [0, 17, 3], {"n": 5, "slots": [2, 0, 0], "dead": (0,), "padded": True}),
    *((MULTI_QUERY, [0, 9, 40], {**RING, "n": n, "base": 30.0}) for n in (2, 11, 19)),
    (GROUPED, [5, 11, 3], {**RING, "n": 11, "slots": [1, 2, 0], "dead": (0,)}),
    # rows with fewer new positions than others
    (GROUPED, [0, 17, 12], {"n": 1, "counts": [0, 1, 1]}),
    (GROUPED, [0, 17, 12], {"n": 19, "counts": [0, 19, 3]}),
    (GROUPED, [0, 17, 12], {**RING, "n": 19, "counts": [0, 19, 3]}),
    # relative positions
    (GROUPED, [0, 36, 20], {"limit": 9, "padded": True}),
    (MULTI_QUERY, [33, 20, 0], {"beam": 3, "dead": (1,), "limit": 40}),
    (GROUPED, [33, 5], {**RING, "beam": 2, "limit": 7}),
    (GROUPED, [0, 17, 3], {"n": 19, "limit": 1}),
    (MULTI_QUERY, [0, 9, 40], {**RING, "n": 5, "limit": 6}),
]


@every_way
@pytest.mark.parametrize(("heads", "lengths", "options"), CASES)
def test_decode_attention_equals_a_loop(heads, lengths, options, way):
    Steps(heads, lengths, **options).check(way)


class Memory:
    """Queries of several beams over the encoder's memory, in any memory layout."""

    def __init__(
        self, heads, lengths, *, m, beam=1, n=1, dead=(), slots=None, transposed=False, **limits
    ):
        self.heads, count = heads, len(lengths)
        self.listed = list(range(count)) if slots is None else slots
        K, V = (randn(count, heads.g, m, depth) for depth in (heads.k, heads.v))
        if transposed:  # positions before heads, beside other layers
            wide = randn(count, m, 3, heads.g, heads.k + heads.v)[:, :, 1]
            K, V = wide.transpose(1, 2).split([heads.k, heads.v], dim=3)
        live = integers(*(s not in dead for s in range(count))).repeat_interleave(beam)
        listed = None if slots is None else integers(*slots, dtype=torch.int32)
        self.memory = MemoryLayer(K, V, integers(*lengths), live, beam, listed, **limits)
        columns = heads.h * heads.k
        self.Q = randn(len(self.listed) * beam, n, columns + 3)[..., :columns]

    def check(self, way: dict | None) -> None:
        memory, heads = self.memory, self.heads
        rows, n, _ = self.Q.shape
        slots = [slot for slot in self.listed for _ in range(memory.beam)]
        Q = self.Q.double().cpu().view(rows, n, heads.h, heads.k).transpose(1, 2)
        K, V = (T.double().cpu()[slots] for T in (memory.K, memory.V))
        lengths = memory.lengths.tolist()
        O = slow_attend(Q, K, V, lambda row, i, j: j < lengths[slots[row]], SCALE)  # noqa: E741
        if way is None:
            options = {"scale": SCALE, "implementation": "reference"}
            ours = decode_attention(self.Q.contiguous(), memory, heads, **options)
        else:
            hide_unused(memory)
            ours = attend_triton(self.Q, memory, heads, SCALE, **way)
        live = torch.tensor([bool(memory.live[slot * memory.beam]) for slot in slots])
        assert ours.shape == (rows, n, heads.h * heads.v)
        assert_close_in(self.Q.dtype, ours[live.to(DEVICE)], O.transpose(1, 2).flatten(2)[live])


@pytest.mark.parametrize("transposed", [False, True])
@every_way
def test_memory_attention_equals_a_loop(way, transposed):
    options = {"m": 37, "transposed": transposed}
    Memory(MULTI_QUERY, [37, 0, 33], beam=3, **options).check(way)
    Memory(GROUPED, [1, 20, 33], n=4, beam=2, slots=[2, 0, 0], dead=(0,), **options).check(way)
    Memory(MULTI_HEAD, [37, 0, 33], padded=True, **options).check(way)
    Memory(GROUPED, [1, 0], m=1, transposed=transposed).check(way)


def products(Q: Tensor, K: Tensor, V: Tensor, visible: Tensor) -> Tensor:
    """O [rows, 1, h v] of Q [rows, h k] over K and V [rows, g, m, …]."""
    rows, g, _, k = K.shape
    logits = Q.reshape(rows, g, -1, k) @ K.mT * SCALE
    logits = logits.masked_fill(~visible[:, None, None], -torch.inf)
    return (torch.softmax(logits, dim=3) @ V).reshape(rows, 1, -1)


@pytest.mark.parametrize("kind", ["memory", "padded memory", "cache", "ring"])
@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize(
    ("rows", "beam", "g", "m", "k", "v"),
    [
        (3, 3, 2, 37, 16, 32),
        *(
            pytest.param(*sizes, marks=pytest.mark.gpu)
            for sizes in (
                *((300, 1, 8, 100, 128, 128), (300, 1, 1, 128, 128, 64), (37, 4, 1, 128, 64, 128)),
                *((5, 4, 2, 1000, 128, 32), (1, 1, 1, 9000, 128, 128), (1, 1, 8, 3000, 16, 256)),
            )
        ),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_errors_are_at_most_twice_those_of_plain_pytorch(
    dtype, rows, beam, g, m, k, v, implementation, kind
):
    heads, is_memory = Heads(8, g, k, v), "memory" in kind
    rows, beam = (rows, beam) if is_memory else (rows * beam, 1)
    QKV = randn(rows * beam, 1, sum(heads.widths), dtype=dtype)
    Q, K, V = QKV[..., : 8 * k], *(randn(rows, g, m, depth, dtype=dtype) for depth in (k, v))
    used = torch.randint(1, m + 1, (rows,), device=DEVICE) + (3 * m if kind == "ring" else 0)
    live = torch.ones(rows * beam, dtype=torch.long, device=DEVICE)
    options = {"scale": SCALE, "implementation": implementation}
    if is_memory:
        memory = MemoryLayer(K, V, used, live, beam, None, kind == "padded memory")
        O = decode_attention(Q, memory, heads, **options)  # noqa: E741
    else:  # afterwards the cache holds every position that the query sees
        cache = CacheLayer(K, V, used - 1, live, window=m if kind == "ring" else None)
        O = decode_attention(QKV, cache, heads, **options)  # noqa: E741
    visible = torch.arange(m, device=DEVICE) < used.unsqueeze(1)
    many = [T.repeat_interleave(beam, dim=0) for T in (K, V, visible)]
    exact = products(Q.double(), many[0].double(), many[1].double(), many[2])
    assert_at_most_twice(O, products(Q, *many), exact)


def test_an_implementation_that_cannot_run_says_why():
    odd = Heads(6, 2, 5, 7)
    case = Steps(odd, [3, 4], size=9)
    with pytest.raises(BackendError, match="powers of two"):
        decode_attention(case.QKV, case.cache, odd, scale=SCALE, implementation="triton")
    with pytest.raises(ConfigError, match="unknown"):
        decode_attention(case.QKV, case.cache, odd, scale=SCALE, implementation="fast")
    case.check(None)
    assert decode_attention(case.QKV, case.cache, odd, scale=SCALE).isfinite().all()
    wide = Memory(MULTI_QUERY, [3], m=5, n=30)
    with pytest.raises(BackendError, match="180 queries"):
        decode_attention(wide.Q, wide.memory, MULTI_QUERY, scale=SCALE, implementation="triton")
    assert decode_attention(wide.Q, wide.memory, MULTI_QUERY, scale=SCALE).isfinite().all()


def test_shapes_that_do_not_fit_are_refused():
    case = Steps(GROUPED, [3, 4], size=9, beam=2)
    for QKV, changes in (
        (case.QKV[..., 1:], {}),
        (case.QKV[:3], {}),
        (case.QKV, {"slots": integers(0)}),
        (case.QKV, {"ancestors": None}),
        (case.QKV.double(), {}),
        (case.QKV.repeat(2, 1, 1), {}),
        (case.QKV.repeat(1, 2, 1), {}),
    ):
        with pytest.raises(ShapeError):
            cache = dataclasses.replace(case.cache, **changes)
            decode_attention(QKV, cache, GROUPED, scale=SCALE)


@pytest.mark.parametrize("shared_memory", [48 << 10, 227 << 10])
@pytest.mark.parametrize("depth", [16, 128, 256])
def test_tiles_fit_the_shared_memory_and_splits_are_never_empty(depth, shared_memory):
    cases = product((2, 4), (1, 16, 100, 132, 133, 8192), (1, 64, 513, 4097, 32768), (1, 128))
    for itemsize, programs, positions, queries in cases:
        shape = Shape(depth, itemsize, programs, positions, queries)
        tile = choose_tile(shape, shared_memory)
        used = (tile.stages - 1) * 2 * tile.positions * depth * itemsize
        assert used <= shared_memory or (tile.positions, tile.stages) == (16, 2)
        splits = choose_splits(shape, tile)
        assert 1 <= splits <= max(1, positions // tile.positions)
