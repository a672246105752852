"""The attention kernels of decoding steps against plain products."""

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from helpers import DEVICE, DTYPES, assert_at_most_twice, assert_close_in, integers, randn
from writehead.kernels import decode

b, h, m, k, v, d = 3, 6, 37, 16, 32, 21
SCALE = 0.3
SMALL = decode.Tile(16, warps=2, stages=2)
TILES = [SMALL, decode.Tile(32, 4, 1), decode.Tile(64, 1, 3), decode.Tile(16, 4, 1, early=True)]

every_tile = pytest.mark.parametrize("tile", TILES, ids=str)


def products(Q: Tensor, K: Tensor, V: Tensor, visible: Tensor, scale: float = SCALE) -> Tensor:
    """O [rows, h v] of Q [rows, h k] over K and V [rows, g, m, …], 0 where nothing is visible."""
    rows, g, _, k = K.shape
    logits = Q.view(rows, g, -1, k) @ K.mT * scale
    logits = logits.masked_fill(~visible[:, None, None], -torch.inf)
    return (torch.softmax(logits, dim=3).nan_to_num() @ V).reshape(rows, -1)


class Memory:
    """Queries of some beams over three memories, one of them empty; what is padding is NaN."""

    def __init__(self, g: int, beams: int = 1, lengths: tuple[int, ...] = (m, 0, 33), m: int = m):
        self.Q, self.K, self.V = randn(b * beams, h * k), randn(b, g, m, k), randn(b, g, m, v)
        self.lengths, self.growing = integers(*lengths), torch.ones_like(self.Q[:, 0]).long()
        visible = torch.arange(m, device=DEVICE) < self.lengths.unsqueeze(1)
        K, V, seen = (T.repeat_interleave(beams, 0) for T in (self.K, self.V, visible))
        self.right = products(self.Q.double(), K.double(), V.double(), seen)
        for T in (self.K, self.V):
            T.masked_fill_(~visible[:, None, :, None], torch.nan)

    def attend(self, **options) -> Tensor:
        options = {"heads": h, "scale": SCALE, "tile": SMALL} | options
        given = self.Q, self.K, self.V, self.lengths, self.growing
        return decode.attend_memory(*given, **options)


@pytest.mark.parametrize(
    ("g", "beams", "splits", "padded"),
    [(6, 1, 1, False), (2, 3, 1, True), (1, 3, 2, False), (2, 1, 3, True)],
)
def test_a_memory_is_read_up_to_its_length_whatever_is_past_it(g, beams, splits, padded):
    for case in (Memory(g, beams), Memory(g, beams, lengths=(1, 1, 0), m=1)):
        assert_close_in(torch.float32, case.attend(splits=splits, padded=padded), case.right)


@every_tile
@pytest.mark.parametrize("transposed", [False, True])
def test_tiles_of_any_size_read_memories_of_either_layout(transposed, tile):
    case = Memory(2, 3)
    if transposed:
        case.K, case.V = (T.transpose(1, 2).contiguous().transpose(1, 2) for T in (case.K, case.V))
    for splits in (1, 2):
        assert_close_in(torch.float32, case.attend(tile=tile, splits=splits), case.right)


def test_a_memory_is_read_while_any_beam_of_its_sentence_grows():
    case = Memory(2, 3, lengths=(m, 20, 5))
    case.K[1] = case.V[1] = torch.nan
    case.growing = integers(0, 1, 0, 0, 0, 0, 1, 1, 1)
    O, grows = case.attend(), [1, 6, 7, 8]  # noqa: E741
    assert not O[3:6].any()
    assert_close_in(torch.float32, O[grows], case.right[grows])


@pytest.mark.parametrize("beams", [1, 3])
def test_queries_may_come_before_their_norm_when_they_read_a_memory(beams):
    X, P = (3 * randn(b * beams, d + 3))[:, :d], randn(h * k, d)  # rows that are not contiguous
    case = Memory(2, beams)
    case.Q, epsilon = rms_norm(X, (d,), eps=0.5) @ P.T, 0.5  # large enough to matter
    right = case.attend()
    case.Q = X @ P.T
    found = case.attend(unnormed=decode.Unnormed(X, epsilon))
    assert_close_in(torch.float32, found, right, ulps=64)


class Cache:
    """Projections of a new position of each row and the cache before it, unwritten slots NaN."""

    def __init__(self, g: int, lengths: tuple[int, ...], size: int = m):
        # a part of a wider product
        self.QKV, self.lengths = randn(b, h * k + g * (k + v) + 5)[:, :-5], integers(*lengths)
        self.K, self.V = randn(b, g, size, k), randn(b, g, size, v)
        self.growing, self.ancestors = torch.ones_like(self.lengths), None
        slots = torch.arange(size, device=DEVICE)
        written = slots < self.lengths.clamp(max=size).unsqueeze(1)
        for T in (self.K, self.V):
            T.masked_fill_(~written[:, None, :, None], torch.nan)

    def append(self, **options) -> Tensor:
        options = {"heads": h, "scale": SCALE, "tile": SMALL} | options
        given = self.QKV, self.K, self.V, self.lengths, self.growing, self.ancestors
        return decode.append_and_attend(*given, **options)

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """O, and the cache afterwards: row by row and slot by slot."""
        g, size = self.K.shape[1:3]
        q, *new = torch.split(self.QKV, [h * k, g * k, g * v], dim=1)
        new = [T.unflatten(1, (g, -1)) for T in new]
        after, O = (self.K.clone(), self.V.clone()), []  # noqa: E741
        for row, length in enumerate(self.lengths.tolist()):
            slot = length % size
            seen = [s for s in range(min(length, size)) if s != slot]
            holders = [row if self.ancestors is None else int(self.ancestors[row, s]) for s in seen]
            held = [
                torch.stack(
                    [*(T[i, :, s] for i, s in zip(holders, seen, strict=True)), own[row]], 1
                )
                for T, own in zip((self.K, self.V), new, strict=True)
            ]
            visible = torch.ones(1, len(seen) + 1, dtype=torch.bool, device=DEVICE)
            O.append(
                products(q[row : row + 1].double(), *(T[None].double() for T in held), visible)
            )
            for T, own in zip(after, new, strict=True):
                T[row, :, slot] = own[row]
        return torch.cat(O), *after

    def check(self, **options) -> None:
        O, *after = self.expected()  # noqa: E741
        lengths = self.lengths.tolist()
        assert_close_in(torch.float32, self.append(**options), O)
        for T, right in zip((self.K, self.V), after, strict=True):
            torch.testing.assert_close(T, right, atol=0, rtol=0, equal_nan=True)  # copied
        assert self.lengths.tolist() == lengths


@pytest.mark.parametrize(("g", "splits", "padded"), [(6, 1, False), (2, 3, True), (1, 2, False)])
@pytest.mark.parametrize("size", [m, 11, 1])
def test_a_new_position_reads_itself_and_all_before_it_and_is_written(size, g, splits, padded):
    # past the size of the cache it is a ring, whose oldest slot the new position takes unread
    for lengths in ((0, size - 1, min(20, size)), (size, 3 * size - 1, size + 4)):
        Cache(g, lengths, size).check(splits=splits, padded=padded)


@every_tile
@pytest.mark.parametrize("size", [m, 11])
def test_tiles_of_any_size_read_positions_in_the_rows_that_hold_them(size, tile):
    for splits in (1, 3):
        case = Cache(2, (33, 33, 33), size)
        case.ancestors = torch.randint(b, (b, size), device=DEVICE)
        case.ancestors[:, 5] = integers(2, 0, 1)
        case.check(tile=tile, splits=splits)


@pytest.mark.parametrize("splits", [1, 2])
def test_a_row_that_does_not_grow_reads_and_writes_nothing(splits):
    case = Cache(2, (4, 17, 30))
    case.growing = integers(1, 0, 1)
    (right, *after), before = case.expected(), (case.K[1].clone(), case.V[1].clone())
    O = case.append(splits=splits)  # noqa: E741
    assert_close_in(torch.float32, O[[0, 2]], right[[0, 2]])
    for T, was, expected in zip((case.K, case.V), before, after, strict=True):
        expected[1] = was
        torch.testing.assert_close(T, expected, atol=0, rtol=0, equal_nan=True)


def test_a_position_may_come_before_its_norm():
    g, X = 2, (3 * randn(b, d + 3))[:, :d]
    P, case = randn(h * k + g * (k + v), d), Cache(g, (0, 30, 20))
    case.QKV = rms_norm(X, (d,), eps=0.5) @ P.T
    right = case.expected()
    case.QKV = X @ P.T
    found = case.append(unnormed=decode.Unnormed(X, 0.5))
    for ours, theirs in zip((found, case.K, case.V), right, strict=True):
        written = theirs.isfinite()
        assert_close_in(torch.float32, ours[written], theirs[written], ulps=64)


def sized(small: tuple[int, ...], *large: tuple[int, ...]) -> list:
    """Sizes for everywhere, and sizes for a GPU."""
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
def test_reading_a_memory_errs_at_most_twice_as_much_as_plain_pytorch(
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
def test_appending_errs_at_most_twice_as_much_as_plain_pytorch(dtype, rows, g, size, k, v, ring):
    h, scale = 8, k**-0.5
    QKV = randn(rows, h * k + g * (k + v), dtype=dtype)
    K, V = randn(rows, g, size, k, dtype=dtype), randn(rows, g, size, v, dtype=dtype)
    lengths = torch.randint(size, (rows,), device=DEVICE) + (3 * size if ring else 0)
    O = decode.append_and_attend(  # noqa: E741
        QKV, K, V, lengths, torch.ones_like(lengths), None, heads=h, scale=scale
    )
    # the cache as it is afterwards holds what the query sees
    visible = torch.arange(size, device=DEVICE) <= lengths.unsqueeze(1)
    q = QKV[:, : h * k]
    exact = products(q.double(), K.double(), V.double(), visible, scale)
    assert_at_most_twice(O, products(q, K, V, visible, scale), exact)


@pytest.mark.parametrize("room", [48 << 10, 227 << 10])
@pytest.mark.parametrize("width", [16, 128, 256])
def test_tiles_fit_the_shared_memory_and_splits_fill_the_chip(width, room):
    cases = product((2, 4), (1, 16, 100, 132, 133, 8192), (1, 64, 513, 4097, 32768))
    for itemsize, programs, positions in cases:
        tile = decode.choose_tile(width, itemsize, programs, positions, room)
        assert tile.positions in (16, 32, 64, 128)
        kept = (tile.stages - 1) * 2 * tile.positions * width * itemsize
        assert kept <= room or (tile.positions, tile.stages) == (16, 2)
        splits = decode.choose_splits(programs, positions, tile)
        assert 1 <= splits <= max(1, positions // tile.positions)  # each has something to read
        assert splits == 1 or programs * splits <= decode.FEW
        if positions == 32768:
            assert splits == max(1, min(decode.FEW // programs, decode.SPLITS))
