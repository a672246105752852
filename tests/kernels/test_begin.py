"""The state of a search before its first step, whatever an earlier batch left in it."""

import pytest
import torch
from torch import Tensor

from helpers import DEVICE
from writehead.kernels import beams, begin, choose

STALE = 77


def stale(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.full(shape, STALE, dtype=dtype, device=DEVICE)


class Search:
    """The buffers of a search of b sentences, begun with `told` [4, b]."""

    def __init__(self, b: int, beam: int, told: Tensor) -> None:
        rows, shape = b * beam, (b, beam)
        self.limits = choose.Limits(stale(1), stale(b, 3), stale(b), stale(b), stale(1))
        self.rows = choose.Rows(*(stale(rows, dtype=torch.long) for _ in range(3)))
        self.log_p = stale(rows if beam == 1 else 0, dtype=torch.float32)
        self.live, *scores = (stale(*shape, dtype=torch.float32) for _ in range(3))
        rest = stale(*shape), stale(*shape, dtype=torch.long), stale(*shape), stale(*shape)
        self.pool = beams.Pool(*scores, *rest)
        begin.begin_search(told, self.limits, self.rows, self.log_p, self.live, self.pool)


@pytest.mark.parametrize(("b", "beam"), [(1, 1), (300, 1), (3, 2), (90, 5), (2, 300)])
def test_every_sentence_begins_with_its_own_limits(b, beam):
    told = torch.randint(1, 1000, (4, b), device=DEVICE)
    first, forced, most, length = told.tolist()
    search = Search(b, beam, told)
    limits, rows, pool = search.limits, search.rows, search.pool
    assert limits.clock.tolist() == [0]
    assert limits.prefix_lengths.tolist() == forced
    assert limits.max_lengths.tolist() == most
    assert rows.tokens.tolist() == [token for token in first for _ in range(beam)]
    assert rows.lengths.tolist() == [one for one in length for _ in range(beam)]
    assert rows.growing.tolist() == [1] * (b * beam)
    assert not search.log_p.any()
    # only the first beam may continue, and no hypothesis has ended
    assert search.live.tolist() == [[0.0] + [-torch.inf] * (beam - 1)] * b
    assert (torch.cat([pool.scores, pool.log_p]) == -torch.inf).all()
    assert not pool.steps.any()
    # the rest is left alone
    for T in (limits.prefix, limits.min_length, pool.rows, pool.tokens, pool.ended):
        assert (T == STALE).all()


def test_rows_without_a_sentence_do_not_grow_and_no_sentence_begins_twice():
    told = torch.zeros(4, 6, dtype=torch.long, device=DEVICE)
    told[:, :4] = 9
    assert Search(6, 2, told).rows.growing.tolist() == [1] * 8 + [0] * 4
    assert not Search(6, 2, told).rows.growing.any()
