"""The cache against a list of positions per row: it remembers whatever it accepts."""

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


def new_cache(rows: int, capacity: int, window: int | None = None, **options: object) -> KVCache:
    sizes = AttentionConfig(d, h, g, k, v, window=window)
    shape = {"layers": layers, "rows": rows, "capacity": capacity}
    return KVCache(sizes, **shape, **options, dtype=torch.float64)


def written(rows: int, n: int) -> tuple[Tensor, ...]:
    """Q [layers, rows, h, n, k], K [layers, rows, g, n, k] and V [layers, rows, g, n, v]."""
    sizes = ((h, n, k), (g, n, k), (g, n, v))
    return tuple(random(layers, rows, *size) for size in sizes)


def write(cache: KVCache, Q: Tensor, K: Tensor, V: Tensor, counts: Tensor | None = None) -> Tensor:
    """What each layer's queries read as K and V are appended: O [layers, rows, h, n, v]."""
    reservation = cache.reserve(Q.shape[3], counts)
    read = [reservation.layer(i).append(K[i], V[i]) for i in range(layers)]
    if cache.padded and Q.shape[3] == 1:  # no shape changes from step to step
        assert read[0][0].shape[2] == cache.size
    O = [attend(Q[i], *memory, scale=SCALE) for i, memory in enumerate(read)]  # noqa: E741
    cache.advance(reservation)
    return torch.stack(O)


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
    """Any sequence of appends, reorderings and one expansion."""

    capacity = 19

    @initialize(
        window=st.sampled_from([None, 1, 4, 30]),
        padded=st.booleans(),
        seed=st.integers(0, 999),
    )
    def start(self, window, padded, seed):
        torch.manual_seed(seed)
        self.cache = new_cache(2, self.capacity, window, padded=padded)
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

    @precondition(lambda self: self.beam == 1)
    @rule(n=st.integers(1, 7), data=st.data())
    def append_unevenly(self, n, data):
        self.write(n, data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2)))

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
TestAnySequence.settings = settings(max_examples=80, stateful_step_count=12, deadline=None)


def test_rows_that_share_a_memory_grow_by_equal_counts():
    with pytest.raises(CacheError, match="share K and V"):
        new_cache(2, 40, 4).expand(2).reserve(2, torch.tensor([2, 0, 0, 0]))


@pytest.mark.parametrize(("window", "size"), [(None, 13), (4, 4), (30, 13)])
def test_bytes_are_those_of_the_positions_that_a_cache_can_hold(window, size):
    assert new_cache(2, 13, window).nbytes == layers * 2 * g * size * (k + v) * 8
