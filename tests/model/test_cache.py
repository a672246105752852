"""The cache against a list of positions a row: whatever it accepts, it remembers rightly."""

import itertools

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import Tensor
from torch.testing import assert_close

from helpers import random
from writehead.config import AttentionConfig
from writehead.errors import CacheError, CacheFull
from writehead.kernels import attend
from writehead.model import KVCache

layers, h, g, k, v, d = 2, 6, 2, 3, 5, 17
SCALE = 0.7

every_window = pytest.mark.parametrize("window", [None, 1, 4, 30])


def new_cache(
    rows: int,
    capacity: int,
    window: int | None = None,
    *,
    rewindable: int = 0,
    padded: bool = False,
) -> KVCache:
    return KVCache(
        AttentionConfig(d, h, g, k, v, window=window),
        layers=layers,
        rows=rows,
        capacity=capacity,
        rewindable=rewindable,
        padded=padded,
        dtype=torch.float64,
    )


def written(rows: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Q [layers, rows, h, n, k], K [layers, rows, g, n, k] and V [layers, rows, g, n, v]."""
    return (
        random(layers, rows, h, n, k),
        random(layers, rows, g, n, k),
        random(layers, rows, g, n, v),
    )


def write(cache: KVCache, Q: Tensor, K: Tensor, V: Tensor, counts: Tensor | None = None) -> Tensor:
    """What each layer's queries read as K and V are appended: O [layers, rows, h, n, v]."""
    reservation = cache.reserve(Q.shape[3], counts)
    pasts = [reservation.layer(i) for i in range(layers)]
    O = [  # noqa: E741
        attend(Q[i], *past.append(K[i], V[i]), scale=SCALE) for i, past in enumerate(pasts)
    ]
    cache.advance(reservation)
    return torch.stack(O)


def write_in_pieces(cache: KVCache, Q: Tensor, K: Tensor, V: Tensor, *sizes: int) -> Tensor:
    pieces = zip(*(T.split(sizes, dim=3) for T in (Q, K, V)), strict=True)
    return torch.cat([write(cache, *piece) for piece in pieces], dim=3)


class History:
    """The naive cache: each row is a Python list of its positions' K and V."""

    def __init__(self, rows: int, window: int | None) -> None:
        self.rows: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(rows)]
        self.window = window

    def append(self, row: int, K: Tensor, V: Tensor) -> None:
        """K [layers, g, k] and V [layers, g, v] of one more position."""
        self.rows[row].append((K, V))

    def read(self, row: int, Q: Tensor) -> Tensor:
        """What Q [layers, h, k] at the row's last position reads: [layers, h, v]."""
        seen = self.rows[row] if self.window is None else self.rows[row][-self.window :]
        K = torch.stack([K for K, _ in seen], dim=2).repeat_interleave(h // g, dim=1)
        V = torch.stack([V for _, V in seen], dim=2).repeat_interleave(h // g, dim=1)
        weights = torch.softmax(SCALE * torch.einsum("lhk,lhmk->lhm", Q, K), dim=-1)
        return torch.einsum("lhm,lhmv->lhv", weights, V)


class Caches(RuleBasedStateMachine):
    """Any sequence of appends, rewinds, reorderings and one expansion."""

    capacity = 19

    @initialize(
        window=st.sampled_from([None, 1, 4, 30]),
        rewindable=st.sampled_from([0, 3]),
        padded=st.booleans(),
        seed=st.integers(0, 999),
    )
    def start(self, window, rewindable, padded, seed):
        torch.manual_seed(seed)
        self.cache = new_cache(2, self.capacity, window, rewindable=rewindable, padded=padded)
        self.history = History(2, window)
        self.beam = 1

    def write(self, n: int, counts: list[int] | None) -> None:
        rows = self.history.rows
        real = counts or [n] * len(rows)
        Q, K, V = written(len(rows), n)
        given = None if counts is None else torch.tensor(counts)
        if max(len(row) + count for row, count in zip(rows, real, strict=True)) > self.capacity:
            with pytest.raises(CacheFull):
                self.cache.reserve(n, given)
            return
        O = write(self.cache, Q, K, V, given)  # noqa: E741
        for row, count in enumerate(real):
            for i in range(count):
                self.history.append(row, K[:, row, :, i], V[:, row, :, i])
                assert_close(O[:, row, :, i], self.history.read(row, Q[:, row, :, i]))
        assert self.cache.lengths.tolist() == [len(row) for row in rows]

    @rule(n=st.integers(1, 7))
    def append(self, n):
        self.write(n, None)

    @rule(n=st.integers(1, 7), data=st.data())
    def append_unevenly(self, n, data):
        sentences = len(self.history.rows) // self.beam
        counts = data.draw(st.lists(st.integers(0, n), min_size=sentences, max_size=sentences))
        self.write(n, [count for count in counts for _ in range(self.beam)])

    @precondition(lambda self: not self.cache.is_ring)
    @rule(n=st.integers(1, 4), data=st.data())
    def append_to_each_beam_unevenly(self, n, data):
        rows = len(self.history.rows)
        self.write(n, data.draw(st.lists(st.integers(0, n), min_size=rows, max_size=rows)))

    @rule(r=st.integers(0, 5))
    def rewind(self, r):
        try:
            self.cache.rewind(r)
        except CacheError:
            return  # nothing may have changed, as the next read will tell
        self.history.rows = [row[: len(row) - r] for row in self.history.rows]

    @precondition(lambda self: self.beam > 1)
    @rule(data=st.data())
    def reorder(self, data):
        beam, rows = self.beam, len(self.history.rows)
        chosen = data.draw(st.lists(st.integers(0, beam - 1), min_size=rows, max_size=rows))
        parents = [row // beam * beam + choice for row, choice in enumerate(chosen)]
        lengths = [len(row) for row in self.history.rows]
        if [lengths[parent] for parent in parents] != lengths:
            with pytest.raises(CacheError, match="rows of different lengths"):
                self.cache.reorder(torch.tensor(parents))
            return
        self.cache.reorder(torch.tensor(parents))
        self.history.rows = [list(self.history.rows[parent]) for parent in parents]

    @precondition(lambda self: self.beam == 1)
    @rule(beam=st.integers(2, 3))
    def expand(self, beam):
        self.cache = self.cache.expand(beam)
        self.history.rows = [list(row) for row in self.history.rows for _ in range(beam)]
        self.beam = beam


TestAnySequence = Caches.TestCase
TestAnySequence.settings = settings(max_examples=100, stateful_step_count=12, deadline=None)


@every_window
@pytest.mark.parametrize("sizes", [(1,) * 11, (11,), (3, 8), (5, 1, 5)])
def test_pieces_of_any_size_read_what_single_positions_do(sizes, window):
    Q, K, V = written(2, 11)
    history = History(2, window)

    O = write_in_pieces(new_cache(2, 11, window), Q, K, V, *sizes)  # noqa: E741

    for row, i in itertools.product(range(2), range(11)):
        history.append(row, K[:, row, :, i], V[:, row, :, i])
        assert_close(O[:, row, :, i], history.read(row, Q[:, row, :, i]))


@every_window
@pytest.mark.parametrize("rewindable", [0, 3])
def test_padded_reads_have_one_shape_and_the_same_results(rewindable, window):
    Q, K, V = written(2, 11)
    grown = new_cache(2, 13, window, rewindable=rewindable)
    padded = new_cache(2, 13, window, rewindable=rewindable, padded=True)
    shapes = set()
    for i in range(11):
        reservation = padded.reserve(1)
        column = slice(i, i + 1)
        memory = reservation.layer(1).append(K[1, :, :, column], V[1, :, :, column])
        shapes.add(tuple(memory[0].shape))
        O = attend(Q[1, :, :, column], *memory, scale=SCALE)  # noqa: E741
        padded.advance(reservation)
        assert_close(O, write(grown, *(T[:, :, :, column] for T in (Q, K, V)))[1])

    assert shapes == {(2, g, padded.size, k)}


def test_without_padding_a_read_is_as_long_as_what_was_written():
    cache = new_cache(2, 13)
    _, K, V = written(2, 3)
    memory, _, _ = cache.reserve(3).layer(0).append(K[0], V[0])
    assert memory.shape[2] == 3


@every_window
def test_rewound_and_redone_is_never_rewound(window):
    Q, K, V = written(2, 11)
    expected = write_in_pieces(new_cache(2, 11, window), Q, K, V, *(1,) * 11)

    cache = new_cache(2, 11, window, rewindable=3)
    write_in_pieces(cache, *(T[:, :, :, :8] for T in (Q, K, V)), *(1,) * 8)
    write(cache, *(-T[:, :, :, 8:10] for T in (Q, K, V)))
    cache.rewind(2)
    cache.rewind(1)
    redone = write_in_pieces(cache, *(T[:, :, :, 7:] for T in (Q, K, V)), 1, 2, 1)

    assert_close(redone, expected[:, :, :, 7:])


def test_a_ring_rewinds_again_once_it_has_been_rewritten():
    cache = new_cache(2, 40, 4, rewindable=3)
    write(cache, *written(2, 20))
    for _ in range(3):
        cache.rewind(3)
        write(cache, *written(2, 3))
    assert cache.lengths.tolist() == [20, 20]


def test_a_ring_rewound_past_what_it_keeps_says_so():
    cache = new_cache(2, 40, 4, rewindable=3)
    write(cache, *written(2, 20))
    cache.rewind(2)
    with pytest.raises(CacheError, match=r"ring of 7 keeps 1 more .* start with rewindable=4"):
        cache.rewind(2)
    cache.rewind(1)


def test_a_ring_that_has_not_come_round_rewinds_to_its_beginning():
    cache = new_cache(2, 40, 4)
    write(cache, *written(2, 4))
    cache.rewind(4)
    assert cache.lengths.tolist() == [0, 0]


def test_a_padded_cache_rewinds_any_distance_however_unevenly_it_was_rewritten():
    cache = new_cache(2, 10)
    write(cache, *written(2, 8))
    cache.rewind(4)
    write(cache, *written(2, 4), torch.tensor([4, 3]))
    cache.rewind(7)
    assert cache.lengths.tolist() == [1, 0]


def test_a_row_is_not_rewound_past_its_beginning():
    cache = new_cache(2, 10)
    write(cache, *written(2, 4), torch.tensor([4, 2]))
    with pytest.raises(CacheError, match="3 positions cannot be rewound: a row has only 2"):
        cache.rewind(3)


@every_window
def test_reordering_is_copying_rows_and_copies_none(window):
    rows, Q, K, V = torch.tensor([2, 0, 0, 3]), *written(4, 9)
    cache, copied = new_cache(4, 9, window), new_cache(4, 9, window)
    addresses = cache.K.data_ptr(), cache.V.data_ptr()
    for start in (0, 3, 6):
        piece = [T[:, :, :, start : start + 3] for T in (Q, K, V)]
        O = write_in_pieces(cache, *piece, 1, 2)  # noqa: E741
        assert_close(O, write_in_pieces(copied, *piece, 1, 2))

        before = cache.K.clone()
        cache.reorder(rows)
        assert torch.equal(cache.K, before)
        copied.K.copy_(copied.K[:, rows])
        copied.V.copy_(copied.V[:, rows])

    assert (cache.K.data_ptr(), cache.V.data_ptr()) == addresses
    assert copied.ancestors is None


@pytest.mark.parametrize("window", [None, 4])
def test_expanding_keeps_what_was_written_once_for_all_beams(window):
    cache = new_cache(2, 11, window)
    write(cache, *written(2, 5), torch.tensor([5, 3]))

    wide = cache.expand(3)

    assert wide.lengths.tolist() == [5, 5, 5, 3, 3, 3]
    assert torch.equal(wide.K[:, ::3], cache.K)
    assert not wide.K[:, 1::3].any()
    assert not wide.V[:, 2::3].any()


def test_rows_of_different_lengths_may_not_trade_places():
    cache = new_cache(2, 10)
    write(cache, *written(2, 4), torch.tensor([4, 2]))
    with pytest.raises(CacheError, match="rows of different lengths cannot trade places"):
        cache.reorder(torch.tensor([1, 0]))


def test_rows_that_share_and_have_grown_apart_are_not_rewound_into_what_they_share():
    cache = new_cache(2, 10)
    write(cache, *written(2, 5))
    cache.reorder(torch.tensor([0, 0]))
    write(cache, *written(2, 2), torch.tensor([0, 2]))
    with pytest.raises(CacheError, match="rewind before rows that share K and V grow apart"):
        cache.rewind(1)  # row 0 would write position 4 anew, which row 1 reads there
    assert cache.lengths.tolist() == [5, 7]


def test_rows_that_share_a_ring_grow_together():
    cache = new_cache(1, 20, 4)
    write(cache, *written(1, 6))
    wide = cache.expand(2)
    with pytest.raises(CacheError, match="share a ring"):
        wide.reserve(2, torch.tensor([2, 0]))
    write(wide, *written(2, 2), torch.tensor([2, 2]))


@pytest.mark.parametrize("counts", [None, [11, 11], [11, 5], [0, 2]])
def test_no_slot_of_a_ring_is_given_two_positions(counts):
    cache, new = new_cache(2, 20, 4), torch.arange(11.0).expand(2, g, 11).unsqueeze(-1)
    reservation = cache.reserve(11, counts and torch.tensor(counts))
    past = reservation.layer(0)

    values = past._values(past.K, new.expand(-1, -1, -1, k).double())

    # on a device, writes to one slot come in any order
    for row, (slots, written) in enumerate(zip(reservation.slots, values[:, :, 0, 0], strict=True)):
        pairs = set(zip(slots.tolist(), written.tolist(), strict=True))
        assert len(pairs) == len(set(slots.tolist()))
        if counts is None or counts[row]:
            last = 11 if counts is None else counts[row]
            assert {value for _, value in pairs} == set(range(max(0, last - 4), last))


@every_window
def test_a_cache_is_filled_to_its_capacity_and_no_further(window):
    cache = new_cache(2, 7, window)
    write(cache, *written(2, 6))
    write(cache, *written(2, 1))
    with pytest.raises(CacheFull) as caught:
        cache.reserve(1)
    assert str(caught.value) == "position 7 is past capacity 7; start with max_length=8 or more"
    assert cache.lengths.tolist() == [7, 7]


@every_window
def test_a_piece_that_would_pass_the_capacity_writes_nothing(window):
    cache = new_cache(2, 7, window)
    write(cache, *written(2, 5))
    before = cache.K.clone()
    with pytest.raises(CacheFull, match="position 8 is past capacity 7"):
        cache.reserve(4)
    assert torch.equal(cache.K, before)


@every_window
def test_uneven_rows_fill_a_cache_by_their_own_lengths(window):
    cache, history = new_cache(2, 7, window), History(2, window)
    for counts in ([3, 0], [1, 3], [2, 3], [1, 1]):
        Q, K, V = written(2, 3)
        O = write(cache, Q, K, V, torch.tensor(counts))  # noqa: E741
        for row, count in enumerate(counts):
            for i in range(count):
                history.append(row, K[:, row, :, i], V[:, row, :, i])
                assert_close(O[:, row, :, i], history.read(row, Q[:, row, :, i]))

    assert cache.lengths.tolist() == [7, 7]
    with pytest.raises(CacheFull):
        cache.reserve(3, torch.tensor([0, 1]))
    write(cache, *written(2, 3), torch.tensor([0, 0]))


@pytest.mark.parametrize(
    ("window", "rewindable", "size"),
    [(None, 0, 13), (None, 5, 13), (4, 0, 4), (4, 3, 7), (30, 0, 13), (12, 3, 13)],
)
def test_bytes_are_those_of_the_positions_that_a_cache_can_hold(window, rewindable, size):
    cache = new_cache(2, 13, window, rewindable=rewindable)
    assert cache.nbytes == layers * 2 * g * size * (k + v) * 8
