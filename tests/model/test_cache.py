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
from writehead.errors import CacheFull
from writehead.model import DecoderState, KVCache
from writehead.ops.decode_attention import decode_attention
from writehead.ops.heads import Heads

layers, h, g, k, v, d = 2, 6, 2, 3, 5, 17
HEADS, SCALE = Heads(h, g, k, v), 0.7


def new_cache(rows: int, capacity: int, window: int | None = None, **options: object) -> KVCache:
    sizes = AttentionConfig(d, h, g, k, v, window=window)
    shape = {"layers": layers, "rows": rows, "capacity": capacity}
    return KVCache(sizes, **shape, **options, dtype=torch.float64)


def write(cache: KVCache, QKV: Tensor, counts: Tensor | None = None) -> Tensor:
    """Appends QKV [layers, rows, n, columns]: O [layers, rows, n, h, v]."""
    n = QKV.shape[2]
    cache.reserve(n, counts)
    O = [  # noqa: E741
        decode_attention(QKV[i], layer, HEADS, scale=SCALE)
        for i, layer in enumerate(cache.layers(counts=counts))
    ]
    cache.advance(n, counts)
    return torch.stack(O).unflatten(3, (h, v))


class History:
    """The naive cache: each row is a list of the K [layers, g, k] and V [layers, g, v] written."""

    def __init__(self, rows: int, window: int | None) -> None:
        self.rows: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(rows)]
        self.window = window

    def read(self, row: int, Q: Tensor) -> Tensor:
        """What Q [layers, h, k] at the row's last position reads: [layers, h, v]."""
        seen = self.rows[row] if self.window is None else self.rows[row][-self.window :]
        K = torch.stack([K for K, _ in seen], dim=2).repeat_interleave(h // g, dim=1)
        V = torch.stack([V for _, V in seen], dim=2).repeat_interleave(h // g, dim=1)
        weights = torch.softmax(SCALE * torch.einsum("lhk,lhmk->lhm", Q, K), dim=-1)
        return torch.einsum("lhm,lhmv->lhv", weights, V)


class Caches(RuleBasedStateMachine):
    """Any sequence of appends, reorderings, rows that stop, and one expansion."""

    capacity = 11

    @initialize(
        window=st.sampled_from([None, 1, 4, 30]), padded=st.booleans(), seed=st.integers(0, 999)
    )
    def start(self, window, padded, seed):
        torch.manual_seed(seed)
        self.cache = new_cache(2, self.capacity, window, padded=padded)
        self.history = History(2, window)
        self.beam, self.live = 1, [True, True]

    def write(self, n: int, counts: list[int] | None = None) -> None:
        rows = self.history.rows
        real = [count * self.live[i] for i, count in enumerate(counts or [n] * len(rows))]
        given = None if counts is None else torch.tensor(counts)
        if max(len(row) + count for row, count in zip(rows, real, strict=True)) > self.capacity:
            with pytest.raises(CacheFull):
                self.cache.reserve(n, given)
            return
        QKV = random(layers, len(rows), n, sum(HEADS.widths))
        O = write(self.cache, QKV, given)  # noqa: E741
        for row, count in enumerate(real):
            for i in range(count):
                q, k_new, v_new = QKV[:, row, i].split(HEADS.widths, dim=1)
                rows[row].append((k_new.unflatten(1, (g, k)), v_new.unflatten(1, (g, v))))
                expected = self.history.read(row, q.unflatten(1, (h, k)))
                assert_close(O[:, row, i], expected)
        assert self.cache.lengths.tolist() == [len(row) for row in rows]

    @rule(n=st.integers(1, 7))
    def append(self, n):
        self.write(n if self.beam == 1 else 1)  # beams grow by one position

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
        self.cache.reorder(torch.tensor(parents))
        self.history.rows = [list(self.history.rows[parent]) for parent in parents]

    @precondition(lambda self: self.beam == 1)
    @rule(beam=st.integers(2, 3))
    def expand(self, beam):
        self.cache = self.cache.expand(beam)
        self.history.rows = [list(row) for row in self.history.rows for _ in range(beam)]
        self.beam, self.live = beam, [live for live in self.live for _ in range(beam)]

    @rule()
    def stop_the_first_sentence(self):
        self.live = [False] * self.beam + [True] * self.beam
        DecoderState(self.cache, None, self.cache.lengths).stop(~torch.tensor(self.live))


TestAnySequence = Caches.TestCase
TestAnySequence.settings = settings(max_examples=80, stateful_step_count=12, deadline=None)
