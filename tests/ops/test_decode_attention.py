"""Attention of decoding steps against loops over rows, heads and positions in float64."""

import dataclasses
import math
from itertools import product

import pytest
import torch
from torch import Tensor

from helpers import DEVICE, DTYPES, assert_at_most_twice, assert_close_in, integers, randn
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
from writehead.ops.rotary import Rotary

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.usefixtures("interpreted")
SCALE = 0.3
MULTI_QUERY, GROUPED, MULTI_HEAD = Heads(6, 1, 16, 32), Heads(6, 2, 32, 16), Heads(3, 3, 16, 16)
SMALL = Tile(16, warps=2, stages=2)
PREFETCH = Tile(16, 4, 1, prefetch=True)
# None: the reference
WAYS = [
    None,
    {"tile": SMALL, "splits": 1},
    {"tile": Tile(32, 4, 3), "splits": 2},
    {"tile": PREFETCH, "splits": 1},
    {"tile": PREFETCH, "splits": 3},
]


def ids(way: object) -> str:
    return "reference" if way is None else str(way)


def softmax_mean(q: Tensor, K: list[Tensor], V: list[Tensor]) -> Tensor:
    """Returns the mean of vectors V, weighted by the softmax of q's products with vectors K."""
    if not K:
        return torch.zeros(1, dtype=torch.float64)
    exps = [math.exp(SCALE * float(q @ one)) for one in K]
    return sum(w * one for w, one in zip(exps, V, strict=True)) / sum(exps)


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
        self, heads, lengths, *, size, beam=1, n=1, dead=(), slots=None, base=None, **limits
    ):
        self.heads, self.base, rows = heads, base, len(lengths) * beam
        listed = list(range(len(lengths))) if slots is None else slots
        live = integers(*(s not in dead for s in range(len(lengths)))).repeat_interleave(beam)
        ancestors = None
        if beam > 1:
            ancestors = torch.randint(beam, (rows, size), device=DEVICE, dtype=torch.int32)
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
        rotary = self.base and Rotary.make(100, self.heads.k, self.base, device=DEVICE)
        if way is not None:
            return attend_triton(self.QKV, self.cache, self.heads, SCALE, rotary, **way)
        options = {"scale": SCALE, "rotary": rotary, "implementation": "reference"}
        return decode_attention(self.QKV, self.cache, self.heads, **options)

    def hide_unused(self) -> None:
        """Unused positions become NaN."""
        size = self.cache.K.shape[2]
        unused = torch.arange(size, device=DEVICE) >= self.cache.lengths.unsqueeze(1)
        for T in (self.cache.K, self.cache.V):
            T.masked_fill_(unused[:, None, :, None], torch.nan)

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

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """Computes O [R beam, n, h v] in float64 and the cache after the step, by loops."""
        cache, heads = self.cache, self.heads
        K, V = cache.K.double().cpu(), cache.V.double().cpu()
        after = K.clone(), V.clone()
        n, size, group = self.QKV.shape[1], K.shape[2], heads.h // heads.g
        O = torch.zeros(len(self.rows), n, heads.h, heads.v, dtype=torch.float64)  # noqa: E741
        for r, row in enumerate(self.rows):
            if not cache.live[row]:
                continue
            length, (Q, *new) = int(cache.lengths[row]), self.new(r)
            holders = [row] * size
            if cache.ancestors is not None:
                holders = [row - row % cache.beam + j for j in cache.ancestors[row].tolist()]
            for i, head in product(range(n), range(heads.g)):
                last = length + i
                seen_K, seen_V = [], []
                for p in range(max(0, last + 1 - (cache.window or last + 1)), last + 1):
                    at = holders[p % size], head, p % size
                    is_new = p >= length
                    seen_K.append(new[0][p - length, head] if is_new else K[at])
                    seen_V.append(new[1][p - length, head] if is_new else V[at])
                for read in range(head * group, (head + 1) * group):
                    O[r, i, read] = softmax_mean(Q[i, read], seen_K, seen_V)
            for T, stored in zip(new, after, strict=True):
                for i in range(n):
                    stored[row, :, (length + i) % size] = T[i]
        return O.flatten(2), *after

    def check(self, way: dict | None) -> None:
        O, *after = self.expected()  # noqa: E741
        dtype, lengths = self.QKV.dtype, self.cache.lengths.tolist()
        if way is not None:
            self.hide_unused()
        ours, live = self.attend(way), self.cache.live[self.rows] == 1
        assert ours.shape == O.shape
        assert_close_in(dtype, ours[live], O[live.cpu()])
        for T, expected in zip((self.cache.K, self.cache.V), after, strict=True):
            written = ~T.isnan()
            assert_close_in(dtype, T[written], expected[written.cpu()])
            for row in self.cache.live.nonzero()[:, 0].tolist():
                used = lengths[row] + (self.QKV.shape[1] if row in self.rows else 0)
                assert written[row, :, :used].all()
        assert self.cache.lengths.tolist() == lengths


@pytest.mark.parametrize("way", WAYS, ids=ids)
@pytest.mark.parametrize("heads", [MULTI_QUERY, GROUPED, MULTI_HEAD], ids=str)
def test_one_new_position_per_row_equals_a_loop(heads, way):
    Steps(heads, [0, 36, 20, 1, 33], size=37).check(way)
    Steps(heads, [0, 20, 36], size=37, padded=True, base=100.0).check(way)
    Steps(heads, [0], size=1).check(way)


@pytest.mark.parametrize("way", WAYS, ids=ids)
@pytest.mark.parametrize("size", [1, 11, 33])
def test_a_ring_keeps_the_window(size, way):
    lengths = [size - 1, size, 3 * size - 1, size + 4]
    Steps(GROUPED, lengths, size=size, window=size, dead=(1,)).check(way)
    Steps(MULTI_QUERY, [0, 5 * size], size=size, window=size, padded=True).check(way)


@pytest.mark.parametrize("way", WAYS, ids=ids)
def test_slots_come_in_any_order_and_dead_ones_repeat(way):
    lengths = [3, 17, 30, 9, 33]
    for beam, base in ((1, 50.0), (2, None)):
        slots = [4, 1, 0, 0, 2]
        options = {"size": 37, "beam": beam, "base": base, "dead": (0, 1)}
        Steps(GROUPED, lengths, slots=slots, **options).check(way)


@pytest.mark.parametrize("way", WAYS, ids=ids)
@pytest.mark.parametrize("heads", [MULTI_QUERY, GROUPED], ids=str)
def test_beams_follow_their_ancestors(heads, way):
    Steps(heads, [33, 20, 0], size=37, beam=3, dead=(1,)).check(way)
    Steps(heads, [33, 5], size=11, window=11, beam=2, base=70.0).check(way)


@pytest.mark.parametrize("way", WAYS, ids=ids)
@pytest.mark.parametrize("n", [2, 5, 19])
def test_several_new_positions_see_each_other_causally(n, way):
    Steps(MULTI_QUERY, [0, 17, 37 - n], size=37, n=n, base=30.0).check(way)
    Steps(GROUPED, [0, 17, 3], size=37, n=n, slots=[2, 0, 0], dead=(0,), padded=True).check(way)


@pytest.mark.parametrize("way", WAYS, ids=ids)
@pytest.mark.parametrize("n", [2, 11, 19])
def test_several_new_positions_of_a_ring_see_what_they_replace(n, way):
    Steps(MULTI_QUERY, [0, 9, 40], size=11, window=11, n=n, base=30.0).check(way)
    Steps(GROUPED, [5, 11, 3], size=11, window=11, n=n, slots=[1, 2, 0], dead=(0,)).check(way)


@pytest.mark.parametrize("way", WAYS, ids=ids)
@pytest.mark.parametrize("window", [None, 11])
def test_rows_may_write_fewer_positions_than_others(window, way):
    lengths, counts = [0, 17, 12], [0, 19, 3]
    for n in (1, 19):
        options = {"size": window or 37, "window": window}
        case = Steps(GROUPED, lengths, n=n, **options)
        O, *_ = case.expected()  # noqa: E741
        before = case.cache.K.clone()
        limits = [min(n, count) for count in counts]
        case.cache = dataclasses.replace(case.cache, counts=integers(*limits))
        ours = case.attend(way)
        for row, count in enumerate(limits):
            assert_close_in(torch.float32, ours[row, :count], O[row, :count])
            if count:  # as if the row had no more
                alone = Steps(GROUPED, [lengths[row]], n=count, **options)
                alone.QKV = case.QKV[row : row + 1, :count]
                alone.cache.K.copy_(before[row : row + 1])
                expected = alone.expected()[1]
                assert_close_in(torch.float32, case.cache.K[row], expected[0])
            else:
                assert torch.equal(case.cache.K[row], before[row])


def test_the_reference_reads_no_further_than_the_bound():
    for beam in (1, 3):
        case = Steps(GROUPED, [3, 9, 6], size=37, beam=beam)
        O, *_ = case.expected()  # noqa: E741
        case.cache = dataclasses.replace(case.cache, bound=9)
        for T in (case.cache.K, case.cache.V):
            T[:, :, 10:] = torch.nan
        assert_close_in(torch.float32, case.attend(None), O)


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
        Q = self.Q.double().cpu().view(rows, n, heads.h, heads.k)
        K, V = memory.K.double().cpu(), memory.V.double().cpu()
        O = torch.zeros(rows, n, heads.h, heads.v, dtype=torch.float64)  # noqa: E741
        for r, i, read in product(range(rows), range(n), range(heads.h)):
            slot, write = self.listed[r // memory.beam], read // (heads.h // heads.g)
            seen = range(int(memory.lengths[slot]))
            seen_K, seen_V = ([T[slot, write, p] for p in seen] for T in (K, V))
            O[r, i, read] = softmax_mean(Q[r, i, read], seen_K, seen_V)
        if way is None:
            ours = decode_attention(self.Q, memory, heads, scale=SCALE, implementation="reference")
        else:
            m = memory.K.shape[2]
            unused = torch.arange(m, device=DEVICE) >= memory.lengths.unsqueeze(1)
            for T in (memory.K, memory.V):
                T.masked_fill_(unused[:, None, :, None], torch.nan)
            ours = attend_triton(self.Q, memory, heads, SCALE, **way)
        live = torch.tensor([bool(memory.live[s * memory.beam]) for s in self.listed])
        live = live.repeat_interleave(memory.beam)
        assert ours.shape == (rows, n, heads.h * heads.v)
        assert_close_in(self.Q.dtype, ours[live.to(DEVICE)], O.flatten(2)[live])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("way", WAYS, ids=ids)
def test_memory_attention_equals_a_loop(way, transposed):
    options = {"m": 37, "transposed": transposed}
    Memory(MULTI_QUERY, [37, 0, 33], beam=3, **options).check(way)
    Memory(GROUPED, [1, 20, 33], n=4, beam=2, slots=[2, 0, 0], dead=(0,), **options).check(way)
    Memory(MULTI_HEAD, [37, 0, 33], padded=True, **options).check(way)
    Memory(GROUPED, [1, 0], m=1, transposed=transposed).check(way)


def test_memory_attention_reads_no_further_than_the_bound():
    case = Memory(GROUPED, [5, 2, 0], m=37, beam=2)
    for T in (case.memory.K, case.memory.V):
        T[:, :, 5:] = torch.nan
    case.memory = dataclasses.replace(case.memory, bound=5)
    case.check(None)


def products(Q: Tensor, K: Tensor, V: Tensor, visible: Tensor) -> Tensor:
    """O [rows, 1, h v] of Q [rows, h k] over K and V [rows, g, m, …]."""
    rows, g, _, k = K.shape
    logits = Q.reshape(rows, g, -1, k) @ K.mT * SCALE
    logits = logits.masked_fill(~visible[:, None, None], -torch.inf)
    return (torch.softmax(logits, dim=3) @ V).reshape(rows, 1, -1)


def sized(small: tuple[int, ...], *large: tuple[int, ...]) -> list:
    """Sizes for every device, and sizes for a GPU only."""
    return [small, *(pytest.param(*sizes, marks=pytest.mark.gpu) for sizes in large)]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize(
    ("rows", "beam", "g", "m", "k", "v"),
    sized(
        (3, 3, 2, 37, 16, 32),
        *((300, 1, 8, 100, 128, 128), (300, 1, 1, 128, 128, 128), (37, 4, 1, 128, 64, 128)),
        *((5, 4, 2, 1000, 128, 32), (1, 1, 1, 9000, 128, 128), (1, 1, 8, 3000, 16, 256)),
    ),
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_memory_attention_errs_at_most_twice_as_much_as_plain_pytorch(
    dtype, rows, beam, g, m, k, v, implementation, padded
):
    heads = Heads(8, g, k, v)
    Q = randn(rows * beam, 1, 8 * k, dtype=dtype)
    K, V = randn(rows, g, m, k, dtype=dtype), randn(rows, g, m, v, dtype=dtype)
    lengths = torch.randint(1, m + 1, (rows,), device=DEVICE)
    live = torch.ones(rows * beam, dtype=torch.long, device=DEVICE)
    memory = MemoryLayer(K, V, lengths, live, beam, None, padded)
    O = decode_attention(Q, memory, heads, scale=SCALE, implementation=implementation)  # noqa: E741
    visible = torch.arange(m, device=DEVICE) < lengths.unsqueeze(1)
    many = [T.repeat_interleave(beam, dim=0) for T in (K, V, visible)]
    exact = products(Q.double(), many[0].double(), many[1].double(), many[2])
    assert_at_most_twice(O, products(Q, *many), exact)


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize(
    ("rows", "g", "size", "k", "v"),
    sized(
        (3, 2, 37, 16, 32),
        *((300, 8, 100, 128, 128), (300, 1, 128, 128, 64), (1, 1, 5000, 128, 128)),
        (1, 8, 900, 32, 64),
    ),
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode_attention_errs_at_most_twice_as_much_as_plain_pytorch(
    dtype, rows, g, size, k, v, implementation, window
):
    heads = Heads(8, g, k, v)
    QKV = randn(rows, 1, sum(heads.widths), dtype=dtype)
    K, V = randn(rows, g, size, k, dtype=dtype), randn(rows, g, size, v, dtype=dtype)
    lengths = torch.randint(size, (rows,), device=DEVICE) + (3 * size if window else 0)
    live = torch.ones_like(lengths)
    cache = CacheLayer(K, V, lengths, live, window=size if window else None)
    O = decode_attention(QKV, cache, heads, scale=SCALE, implementation=implementation)  # noqa: E741
    # afterwards the cache holds every position that the query sees
    visible = torch.arange(size, device=DEVICE) <= lengths.unsqueeze(1)
    q = QKV[:, 0, : 8 * k]
    exact = products(q.double(), K.double(), V.double(), visible)
    assert_at_most_twice(O, products(q, K, V, visible), exact)


def test_an_implementation_that_cannot_run_says_why():
    odd = Heads(6, 2, 5, 7)
    case = Steps(odd, [3, 4], size=9)
    with pytest.raises(BackendError, match="powers of two"):
        decode_attention(case.QKV, case.cache, odd, scale=SCALE, implementation="triton")
    with pytest.raises(ConfigError, match="even"):
        Rotary.make(4, 7, 100.0)
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
