"""The attention kernels of decoding steps against plain products."""

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm
from torch.testing import assert_close

from helpers import DEVICE, DTYPES, assert_at_most_twice, assert_close_in, integers, randn
from writehead.kernels import decode

b, h, m, k, v, d = 3, 6, 37, 16, 32, 21
SCALE = 0.3
SMALL = decode.Tile(16, warps=2, stages=2)
TILES = [SMALL, decode.Tile(32, 4, 1), decode.Tile(64, 1, 3), decode.Tile(16, 4, 1, early=True)]


def products(Q: Tensor, K: Tensor, V: Tensor, visible: Tensor, scale: float = SCALE) -> Tensor:
    """O [rows, h v] of Q [rows, h k] over K and V [rows, g, m, …], 0 where nothing is visible."""
    rows, g, _, k = K.shape
    logits = Q.view(rows, g, -1, k) @ K.mT * scale
    logits = logits.masked_fill(~visible[:, None, None], -torch.inf)
    return (torch.softmax(logits, dim=3).nan_to_num() @ V).reshape(rows, -1)


class Memory:
    """Queries of several beams over three memories, one of them empty; padding is NaN."""

    def __init__(self, g: int, beams: int = 1, lengths: tuple[int, ...] = (m, 0, 33), m: int = m):
        self.Q, self.K, self.V = randn(b * beams, h * k), randn(b, g, m, k), randn(b, g, m, v)
        self.lengths, self.growing = integers(*lengths), torch.ones_like(self.Q[:, 0]).long()
        visible = torch.arange(m, device=DEVICE) < self.lengths.unsqueeze(1)
        K, V, seen = (T.repeat_interleave(beams, 0) for T in (self.K, self.V, visible))
        self.expected = products(self.Q.double(), K.double(), V.double(), seen)
        for T in (self.K, self.V):
            T.masked_fill_(~visible[:, None, :, None], torch.nan)

    def attend(self, **options) -> Tensor:
        options = {"heads": h, "scale": SCALE, "tile": SMALL} | options
        tensors = self.Q, self.K, self.V, self.lengths, self.growing
        return decode.attend_memory(*tensors, **options)


@pytest.mark.parametrize(
    ("g", "beams", "options"),
    [
        (6, 1, {"splits": 1}),
        (2, 3, {"splits": 1, "padded": True}),
        (1, 3, {"splits": 2}),
        (2, 1, {"splits": 3, "padded": True}),
        *((2, 3, {"splits": splits, "tile": tile}) for splits in (1, 2) for tile in TILES),
    ],
    ids=str,
)
@pytest.mark.parametrize("transposed", [False, True])
def test_attend_memory_equals_plain_products_up_to_each_length(g, beams, options, transposed):
    for case in (Memory(g, beams), Memory(g, beams, lengths=(1, 1, 0), m=1)):
        if transposed:
            case.K, case.V = (
                T.transpose(1, 2).contiguous().transpose(1, 2) for T in (case.K, case.V)
            )
        assert_close_in(torch.float32, case.attend(**options), case.expected)


def test_a_memory_is_read_while_any_beam_of_its_sentence_grows():
    case = Memory(2, 3, lengths=(m, 20, 5))
    case.K[1] = case.V[1] = torch.nan
    case.growing = integers(0, 1, 0, 0, 0, 0, 1, 1, 1)
    O, grows = case.attend(), [1, 6, 7, 8]  # noqa: E741
    assert not O[3:6].any()
    assert_close_in(torch.float32, O[grows], case.expected[grows])


class Cache:
    """Projections of a new position of each row and the cache before it, unwritten slots NaN."""

    def __init__(self, g: int, lengths: tuple[int, ...], size: int = m):
        # a slice of a wider product
        self.QKV, self.lengths = randn(b, h * k + g * (k + v) + 5)[:, :-5], integers(*lengths)
        self.K, self.V = randn(b, g, size, k), randn(b, g, size, v)
        self.growing, self.ancestors = torch.ones_like(self.lengths), None
        slots = torch.arange(size, device=DEVICE)
        written = slots < self.lengths.clamp(max=size).unsqueeze(1)
        for T in (self.K, self.V):
            T.masked_fill_(~written[:, None, :, None], torch.nan)

    def append(self, **options) -> Tensor:
        options = {"heads": h, "scale": SCALE, "tile": SMALL} | options
        tensors = self.QKV, self.K, self.V, self.lengths, self.growing, self.ancestors
        return decode.append_and_attend(*tensors, **options)

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """O, and the cache afterwards: row by row and slot by slot."""
        g, size = self.K.shape[1:3]
        Q, *new = torch.split(self.QKV, [h * k, g * k, g * v], dim=1)
        new = [T.unflatten(1, (g, -1)) for T in new]
        K, V, O = self.K.clone(), self.V.clone(), []  # noqa: E741
        for row in self.growing.nonzero()[:, 0].tolist():
            length = int(self.lengths[row])
            slots = [s for s in range(min(length, size)) if s != length % size]
            holders = [
                row if self.ancestors is None else int(self.ancestors[row, s]) for s in slots
            ]
            pairs = list(zip(holders, slots, strict=True))
            held = [
                torch.stack([*(T[i, :, s] for i, s in pairs), own[row]], dim=1)[None].double()
                for T, own in zip((self.K, self.V), new, strict=True)
            ]
            visible = torch.ones(1, len(slots) + 1, dtype=torch.bool, device=DEVICE)
            O.append(products(Q[row : row + 1].double(), *held, visible))
            for T, own in zip((K, V), new, strict=True):
                T[row, :, length % size] = own[row]
        return torch.cat(O), K, V

    def check(self, **options) -> None:
        O, *after = self.expected()  # noqa: E741
        lengths = self.lengths.tolist()
        assert_close_in(torch.float32, self.append(**options)[self.growing == 1], O)
        for T, expected in zip((self.K, self.V), after, strict=True):
            assert_close(T, expected, atol=0, rtol=0, equal_nan=True)  # copied
        assert self.lengths.tolist() == lengths


@pytest.mark.parametrize(("g", "splits", "padded"), [(6, 1, False), (2, 3, True), (1, 2, False)])
@pytest.mark.parametrize("size", [m, 11, 1])
def test_append_and_attend_equals_a_loop_over_rows(size, g, splits, padded):
    # past its size the cache is a ring, whose oldest slot is overwritten without being read
    for lengths in ((0, size - 1, min(20, size)), (size, 3 * size - 1, size + 4)):
        Cache(g, lengths, size).check(splits=splits, padded=padded)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("size", [m, 11])
@pytest.mark.parametrize("splits", [1, 3])
def test_append_and_attend_follows_ancestors_and_skips_rows_that_ended(splits, size, tile):
    case = Cache(2, (33, 33, 33), size)
    case.ancestors = torch.randint(b, (b, size), device=DEVICE)
    case.ancestors[:, 5] = integers(2, 0, 1)
    case.check(tile=tile, splits=splits)
    case = Cache(2, (4, 17, 30), size)
    case.growing = integers(1, 0, 1)
    case.check(tile=tile, splits=splits)


@pytest.mark.parametrize("beams", [1, 3])
def test_a_deferred_norm_is_applied_to_queries_and_new_positions(beams):
    X, epsilon = (3 * randn(b * beams, d + 3))[:, :d], 0.5  # rows that are not contiguous
    P, case = randn(h * k, d), Memory(2, beams)
    case.Q = rms_norm(X, (d,), eps=epsilon) @ P.T
    expected = case.attend()
    case.Q = X @ P.T
    unnormed = decode.Unnormed(X, epsilon)
    assert_close_in(torch.float32, case.attend(unnormed=unnormed), expected, ulps=64)

    X, P, case = X[:b], randn(h * k + 2 * (k + v), d), Cache(2, (0, 30, 20))
    case.QKV = rms_norm(X, (d,), eps=epsilon) @ P.T
    expected = case.expected()
    case.QKV = X @ P.T
    results = case.append(unnormed=decode.Unnormed(X, epsilon)), case.K, case.V
    for ours, theirs in zip(results, expected, strict=True):
        written = theirs.isfinite()
        assert_close_in(torch.float32, ours[written], theirs[written], ulps=64)


def sized(small: tuple[int, ...], *large: tuple[int, ...]) -> list:
    """Sizes for every device, and sizes for a GPU only."""
    return [small, *(pytest.param(*sizes, marks=pytest.mark.gpu) for sizes in large)]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("rows", "beams", "g", "m", "k", "v"),
    sized(
        (3, 3, 2, 37, 16, 32),
        *((300, 1, 8, 100, 128, 128), (300, 1, 1, 128, 128, 128), (37, 4, 1, 128, 64, 128)),
        *((5, 4, 2, 1000, 128, 32), (1, 1, 1, 9000, 128, 128), (1, 1, 8, 3000, 16, 256)),
    ),
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attend_memory_errs_at_most_twice_as_much_as_plain_pytorch(
    dtype, rows, beams, g, m, k, v, padded
):
    h, scale = 8, k**-0.5
    Q, K, V = (
        randn(*shape, dtype=dtype)
        for shape in ((rows * beams, h * k), (rows, g, m, k), (rows, g, m, v))
    )
    lengths = torch.randint(1, m + 1, (rows,), device=DEVICE)
    growing = torch.ones(rows * beams, dtype=torch.long, device=DEVICE)
    options = {"heads": h, "scale": scale, "padded": padded}
    O = decode.attend_memory(Q, K, V, lengths, growing, **options)  # noqa: E741
    visible = torch.arange(m, device=DEVICE) < lengths.unsqueeze(1)
    many = [T.repeat_interleave(beams, dim=0) for T in (K, V, visible)]
    exact = products(Q.double(), *(T.double() for T in many[:2]), many[2], scale)
    assert_at_most_twice(O, products(Q, *many, scale), exact)


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize(
    ("rows", "g", "size", "k", "v"),
    sized(
        (3, 2, 37, 16, 32),
        *((300, 8, 100, 128, 128), (300, 1, 128, 128, 64), (1, 1, 5000, 128, 128)),
        (1, 8, 900, 32, 64),
    ),
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_append_and_attend_errs_at_most_twice_as_much_as_plain_pytorch(
    dtype, rows, g, size, k, v, ring
):
    h, scale = 8, k**-0.5
    QKV = randn(rows, h * k + g * (k + v), dtype=dtype)
    K, V = randn(rows, g, size, k, dtype=dtype), randn(rows, g, size, v, dtype=dtype)
    lengths = torch.randint(size, (rows,), device=DEVICE) + (3 * size if ring else 0)
    O = decode.append_and_attend(  # noqa: E741
        QKV, K, V, lengths, torch.ones_like(lengths), None, heads=h, scale=scale
    )
    # afterwards the cache holds every position that the query sees
    visible = torch.arange(size, device=DEVICE) <= lengths.unsqueeze(1)
    q = QKV[:, : h * k]
    exact = products(q.double(), K.double(), V.double(), visible, scale)
    assert_at_most_twice(O, products(q, K, V, visible, scale), exact)


@pytest.mark.parametrize("shared_memory", [48 << 10, 227 << 10])
@pytest.mark.parametrize("width", [16, 128, 256])
def test_tiles_fit_the_shared_memory_and_splits_are_never_empty(width, shared_memory):
    cases = product((2, 4), (1, 16, 100, 132, 133, 8192), (1, 64, 513, 4097, 32768))
    for itemsize, programs, positions in cases:
        tile = decode.choose_tile(width, itemsize, programs, positions, shared_memory)
        used = (tile.stages - 1) * 2 * tile.positions * width * itemsize
        assert used <= shared_memory or (tile.positions, tile.stages) == (16, 2)
        splits = decode.choose_splits(programs, positions, tile)
        assert 1 <= splits <= max(1, positions // tile.positions)
