"""Decoding's attention kernels against plain products; interpreted where there is no GPU."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm
from torch.testing import assert_close

decode = pytest.importorskip("writehead.kernels.decode", reason="Triton is not installed")
pytestmark = pytest.mark.usefixtures("interpreted")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
b, h, m, k, v, d = 3, 6, 37, 16, 32, 21
SCALE = 0.3
NEVER = 10.0**4  # what nobody should see, though it may be read
SMALL = decode.Tile(16, warps=2, stages=2)
PEERS = [  # (b, m) of the measured peers
    (1024, 128),
    (1024, 256),
    (256, 1024),
    (128, 2048),
    (64, 8192),
    (16, 8192),
    (1, 32768),
    (1, 131072),
]

every_g = pytest.mark.parametrize("g", [6, 2, 1])
every_split = pytest.mark.parametrize("splits", [2, 3])  # rows have from none to three tiles


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def integers(*values: int) -> Tensor:
    return torch.tensor(values, device=DEVICE)


def plain(q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    """One row's O [h v] of q [h k] over all of K [g, m, k] and V [g, m, v], as anyone would."""
    Q = q.view(len(K), -1, K.shape[2])  # [g, h / g, k]
    return (torch.softmax(Q @ K.mT * SCALE, dim=2) @ V).flatten()


def memory_case(g: int, beams: int = 1, dtype: torch.dtype = torch.float32):
    """Q [rows × beams, h k], K, V and the lengths of three memories, of which one is empty."""
    Q, K, V = random(b * beams, h * k), random(b, g, m, k), random(b, g, m, v)
    return *(T.to(dtype) for T in (Q, K, V)), integers(m, 0, 33)


def plain_memory(Q: Tensor, K: Tensor, V: Tensor, lengths: Tensor) -> Tensor:
    beams = len(Q) // len(K)
    rows = [(q, i // beams) for i, q in enumerate(Q)]
    return torch.stack([plain(q, K[i, :, : lengths[i]], V[i, :, : lengths[i]]) for q, i in rows])


def attend_memory(Q, K, V, lengths, growing=None, **options) -> Tensor:
    growing = torch.ones_like(Q[:, 0], dtype=torch.long) if growing is None else growing
    return decode.attend_memory(Q, K, V, lengths, growing, heads=h, scale=SCALE, **options)


def assert_right(O: Tensor, right: Tensor) -> None:  # noqa: E741
    assert_close(O, right.to(O.dtype), atol=2e-6, rtol=2e-5)


@every_g
@pytest.mark.parametrize("beams", [1, 3])
def test_a_memory_is_read_up_to_its_length(beams, g):
    case = memory_case(g, beams)
    right = plain_memory(*(T.double() for T in case[:3]), case[3])
    assert not right[beams : 2 * beams].any()
    assert_right(attend_memory(*case, tile=SMALL), right)


@pytest.mark.parametrize("padded", [False, True])
def test_not_even_nan_leaks_out_of_what_lies_past_a_memorys_length(padded):
    Q, K, V, lengths = memory_case(2)
    clean = attend_memory(Q, K, V, lengths, tile=SMALL)
    for i, length in enumerate(lengths.tolist()):
        K[i, :, length:] = V[i, :, length:] = torch.nan
    assert_close(attend_memory(Q, K, V, lengths, tile=SMALL, padded=padded), clean)


def test_a_memory_is_read_while_any_beam_of_its_sentence_grows_and_then_no_more():
    beams = 3
    Q, K, V, _ = memory_case(2, beams)
    lengths = integers(m, 20, 5)
    right = plain_memory(Q.double(), K.double(), V.double(), lengths)
    K[1] = V[1] = torch.nan
    growing = integers(0, 1, 0, 0, 0, 0, 1, 1, 1)

    O = attend_memory(Q, K, V, lengths, growing, tile=SMALL)  # noqa: E741

    assert not O[3:6].any()
    assert_right(O[[1, 6, 7, 8]], right[[1, 6, 7, 8]])


@every_split
@pytest.mark.parametrize("padded", [False, True])
def test_a_memory_in_parts_is_read_as_in_one(padded, splits):
    case = memory_case(2, beams=3)
    whole = attend_memory(*case, tile=SMALL, splits=1)
    assert_close(attend_memory(*case, tile=SMALL, splits=splits, padded=padded), whole)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("beams", "splits"), [(1, 1), (3, 2)])
def test_a_memory_whose_heads_are_neighbours_is_read_as_one_by_heads(beams, splits, early):
    Q, K, V, lengths = memory_case(2, beams)
    tile = decode.Tile(16, warps=4, stages=1, early=early)
    by_position = (T.transpose(1, 2).contiguous().transpose(1, 2) for T in (K, V))
    found = attend_memory(Q, *by_position, lengths, tile=tile, splits=splits)
    assert torch.equal(found, attend_memory(Q, K, V, lengths, tile=tile, splits=splits))


@pytest.mark.parametrize("positions", [16, 32, 64])
def test_tiles_of_any_size_read_a_memory_alike(positions):
    case = memory_case(1)
    tile = decode.Tile(positions, warps=4, stages=1)
    right = plain_memory(*(T.double() for T in case[:3]), case[3])
    assert_right(attend_memory(*case, tile=tile), right)
    assert_right(attend_memory(*case, tile=tile, padded=True), right)


def test_a_memory_may_have_room_for_one_position():
    Q, K, V, _ = memory_case(2)
    O = attend_memory(Q, K[:, :, :1].contiguous(), V[:, :, :1].contiguous(), integers(1, 1, 0))  # noqa: E741
    assert_right(O[:2], V[:2, :, :1].repeat_interleave(3, dim=1).flatten(1))
    assert not O[2].any()


@pytest.mark.parametrize("beams", [1, 3])
def test_queries_from_before_their_norm_read_a_memory_as_those_after_it(beams):
    _, K, V, lengths = memory_case(2)
    X, P = (3 * random(b * beams, d + 3))[:, :d], random(h * k, d)  # rows that lie apart
    epsilon = 0.5  # large, so that it counts
    unnormed = decode.Unnormed(X, epsilon)
    normed = rms_norm(X, (d,), eps=epsilon) @ P.T
    O = attend_memory(X @ P.T, K, V, lengths, tile=SMALL, unnormed=unnormed)  # noqa: E741
    assert_close(O, attend_memory(normed, K, V, lengths, tile=SMALL), atol=1e-5, rtol=1e-4)


def cache_case(g: int, size: int = m, dtype: torch.dtype = torch.float32):
    """QKV [rows, h k + g k + g v] of a new position, and the cache before it."""
    QKV, K, V = random(b, h * k + g * (k + v)), random(b, g, size, k), random(b, g, size, v)
    return tuple(T.to(dtype) for T in (QKV, K, V))


def split(QKV: Tensor, g: int) -> tuple[Tensor, Tensor, Tensor]:
    """q [rows, h k], and the new K [rows, g, k] and V [rows, g, v]."""
    q, new_k, new_v = torch.split(QKV, [h * k, g * k, g * v], dim=1)
    return q, new_k.unflatten(1, (g, k)), new_v.unflatten(1, (g, v))


def plain_append(QKV, K, V, lengths, ancestors=None) -> tuple[Tensor, Tensor, Tensor]:
    """O, and the cache after it: one row, and one slot of it, at a time."""
    g, size = K.shape[1:3]
    q, new_k, new_v = split(QKV, g)
    after_k, after_v = K.clone(), V.clone()
    O = []  # noqa: E741
    for row, length in enumerate(lengths.tolist()):
        slot = length % size
        seen = [s for s in range(min(length, size)) if s != slot]
        holders = [row if ancestors is None else int(ancestors[row, s]) for s in seen]
        read_k, read_v = (
            torch.stack([T[i, :, s] for i, s in zip(holders, seen, strict=True)] + [new[row]], 1)
            for T, new in ((K, new_k), (V, new_v))
        )
        O.append(plain(q[row], read_k, read_v))
        after_k[row, :, slot], after_v[row, :, slot] = new_k[row], new_v[row]
    return torch.stack(O), after_k, after_v


def append(QKV, K, V, lengths, growing=None, ancestors=None, **options) -> Tensor:
    growing = torch.ones_like(lengths) if growing is None else growing
    return decode.append_and_attend(
        QKV, K, V, lengths, growing, ancestors, heads=h, scale=SCALE, **options
    )


def assert_appends(QKV, K, V, lengths, ancestors=None, **options) -> None:
    """The result and the whole cache afterwards are those of plain products."""
    before = lengths.clone()
    doubles = (T.double() for T in (QKV, K, V))
    O, *caches = plain_append(*doubles, lengths, ancestors)  # noqa: E741
    assert_right(append(QKV, K, V, lengths, ancestors=ancestors, tile=SMALL, **options), O)
    for T, right in zip((K, V), caches, strict=True):
        assert_close(T, right.to(T.dtype), atol=0, rtol=0)
    assert torch.equal(lengths, before)


@every_g
def test_a_new_position_reads_itself_and_all_before_it_and_is_written_behind_them(g):
    assert_appends(*cache_case(g), integers(0, m - 1, 20))


@pytest.mark.parametrize("padded", [False, True])
def test_not_even_nan_leaks_out_of_slots_that_were_never_written(padded):
    QKV, K, V = cache_case(2)
    lengths = integers(0, 33, 20)
    clean = append(QKV, K.clone(), V.clone(), lengths, tile=SMALL)
    for i, length in enumerate(lengths.tolist()):
        K[i, :, length:] = V[i, :, length:] = torch.nan
    assert_close(append(QKV, K, V, lengths, tile=SMALL, padded=padded), clean)


@pytest.mark.parametrize("size", [11, 1])
@every_g
def test_in_a_ring_a_new_position_takes_the_slot_of_one_that_is_not_seen_any_more(g, size):
    QKV, K, V = cache_case(g, size)
    lengths = integers(size, 3 * size - 1, size + 4)
    for row, length in enumerate(lengths.tolist()):
        K[row, :, length % size] = V[row, :, length % size] = NEVER
    assert_appends(QKV, K, V, lengths)


@pytest.mark.parametrize("size", [m, 11])
def test_positions_are_read_in_the_rows_that_hold_them(size):
    ancestors = torch.randint(b, (b, size), device=DEVICE)
    ancestors[:, 5] = integers(2, 0, 1)
    assert_appends(*cache_case(2, size), integers(19, 19, 19), ancestors)


@pytest.mark.parametrize("splits", [1, 2])
def test_a_row_that_does_not_grow_reads_and_writes_nothing(splits):
    QKV, K, V = cache_case(2)
    K[1] = V[1] = torch.nan
    before = K.clone(), V.clone()
    lengths, growing = integers(4, 17, 30), integers(1, 0, 1)
    O = append(QKV, K, V, lengths, growing, tile=SMALL, splits=splits)  # noqa: E741
    assert O[[0, 2]].isfinite().all()
    for T, was, new in zip((K, V), before, split(QKV, 2)[1:], strict=True):
        for row in (0, 2):
            was[row, :, lengths[row]] = new[row]
        assert_close(T, was, atol=0, rtol=0, equal_nan=True)


@every_split
@pytest.mark.parametrize("size", [m, 11])
def test_a_cache_in_parts_is_read_as_in_one(size, splits):
    ancestors = torch.randint(b, (b, size), device=DEVICE)
    assert_appends(*cache_case(2, size), integers(33, 33, 33), ancestors, splits=splits)
    assert_appends(*cache_case(1, size), integers(0, size - 1, 5), splits=splits)


def test_a_padded_cache_gives_the_same_whatever_its_slots_hold():
    for size in (m, 11):
        lengths = integers(0, 9, size)
        assert_appends(*cache_case(2, size), lengths, padded=True)
        assert_appends(*cache_case(2, size), lengths, padded=True, splits=3)


@pytest.mark.parametrize("positions", [16, 32, 64])
def test_tiles_of_any_size_read_a_cache_alike(positions):
    QKV, K, V = cache_case(1)
    lengths = integers(m - 1, 16, 31)
    O, *_ = plain_append(QKV.double(), K.double(), V.double(), lengths)  # noqa: E741
    tile = decode.Tile(positions, warps=1, stages=3)
    assert_right(append(QKV, K, V, lengths, tile=tile), O)


def test_a_position_from_before_its_norm_is_read_and_written_as_after_it():
    g, epsilon = 2, 0.5
    _, K, V = cache_case(g)
    X, P = (3 * random(b, d + 3))[:, :d], random(h * k + g * (k + v), d)
    lengths = integers(0, 30, 20)
    right = K.clone(), V.clone()
    O = append(rms_norm(X, (d,), eps=epsilon) @ P.T, *right, lengths, tile=SMALL)  # noqa: E741

    unnormed = decode.Unnormed(X, epsilon)
    found = append(X @ P.T, K, V, lengths, tile=SMALL, unnormed=unnormed)

    for ours, theirs in zip((found, K, V), (O, *right), strict=True):
        assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_projections_are_read_where_they_lie_in_a_wider_product():
    QKV, K, V = cache_case(2)
    wide = random(b, QKV.shape[1] + 5)
    wide[:, :-5] = QKV
    assert_appends(wide[:, :-5], K, V, integers(3, 0, 20))


def test_low_precision_errs_at_most_twice_as_much_as_plain_pytorch():
    Q, K, V, lengths = memory_case(2, 3, torch.float16)
    exact = plain_memory(Q.double(), K.double(), V.double(), lengths)
    O = attend_memory(Q, K, V, lengths, tile=SMALL, splits=2)  # noqa: E741
    assert O.dtype == torch.float16
    error, allowed = (O - exact).abs(), (plain_memory(Q, K, V, lengths) - exact).abs()
    assert error.max() <= 2 * allowed.max()
    assert error.mean() <= 2 * allowed.mean()


@pytest.mark.parametrize("g", [8, 1])
@pytest.mark.parametrize(("rows", "positions"), PEERS)
def test_tiles_and_parts_suit_the_shapes_that_peers_were_measured_at(rows, positions, g):
    for width, itemsize in ((16, 2), (128, 2), (256, 4)):
        tile = decode.choose_tile(width, itemsize, rows * g, positions)
        splits = decode.choose_splits(rows * g, positions, tile)
        assert tile.positions >= 16
        assert tile.positions & (tile.positions - 1) == 0
        assert splits >= 1
        # parts fill the chip and no more, and each has something to read
        assert splits == 1 or rows * g * splits <= decode.FEW
        assert splits == 1 or splits * tile.positions <= positions
        assert splits > 1 or rows * g > decode.FEW // 2


@pytest.mark.parametrize(("width", "itemsize"), [(128, 2), (64, 4), (256, 2), (128, 4)])
def test_of_few_programs_that_fill_the_chip_a_multiprocessor_has_room_for_one(width, itemsize):
    whole = 227 << 10  # bytes of shared memory on an H200
    for programs, positions in ((1, 32768), (4, 8448), (16, 2048), (100, 513), (128, 32768)):
        tile = decode.choose_tile(width, itemsize, programs, positions, whole)
        assert decode.choose_splits(programs, positions, tile) == min(132 // programs, 128)
        taken = (tile.stages - 1) * 2 * tile.positions * width * itemsize
        assert whole < 2 * taken <= 2 * whole


def test_no_tile_is_so_large_that_fewer_programs_read_a_long_memory():
    for width, itemsize in ((16, 2), (64, 2), (96, 4), (128, 2), (160, 2), (192, 2), (256, 4)):
        for programs in (1, 4, 8, 16, 32, 64):
            for positions in (576, 960, 1024, 2048, 8192, 21760, 32768):
                tile = decode.choose_tile(width, itemsize, programs, positions)
                splits = decode.choose_splits(programs, positions, tile)
                small = replace(tile, positions=decode._count(16384, width * itemsize))
                assert splits == decode.choose_splits(programs, positions, small)


@pytest.mark.parametrize("room", [48 << 10, 99 << 10, 227 << 10])
def test_where_shared_memory_is_small_a_tile_is_so_too(room):
    sizes = ((16, 2, 1, 64), (128, 2, 9, 900), (256, 4, 1, 9000), (128, 2, 512, 9000))
    for width, itemsize, rows, positions in sizes:
        whole = decode.choose_tile(width, itemsize, rows, positions)
        tile = decode.choose_tile(width, itemsize, rows, positions, room)
        kept = (tile.stages - 1) * 2 * tile.positions * width * itemsize
        assert kept <= room or (tile.positions, tile.stages) == (16, 2)
        assert 16 <= tile.positions <= whole.positions
        assert tile.positions & (tile.positions - 1) == 0
        assert 2 <= tile.stages <= whole.stages


def test_every_count_of_rows_and_positions_has_a_tile_and_at_least_one_part():
    for rows in (1, 2, 3, 100, 132, 133, 4000):
        for positions in (1, 15, 16, 64, 513, 4096, 4097):
            tile = decode.choose_tile(k, 2, rows, positions)
            assert 16 <= tile.positions <= 128
            splits = decode.choose_splits(rows, positions, tile)
            assert 1 <= splits <= max(1, positions // tile.positions)
