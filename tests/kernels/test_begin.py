"""The state of a search before its first step, whatever an earlier batch left in its buffers."""

import pytest
import torch
from torch import Tensor

from helpers import DEVICE
from writehead.kernels import beams, begin, choose

STALE = 77


def stale(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.full(shape, STALE, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize(("b", "beam"), [(1, 1), (300, 1), (3, 2), (90, 5), (2, 300)])
def test_every_sentence_starts_with_its_own_limits(b, beam):
    state = torch.randint(1, 1000, (4, b), device=DEVICE)
    first, prefix_lengths, max_lengths, lengths = state.tolist()
    limits = choose.Limits(stale(1), stale(b, 3), stale(b), stale(b), stale(1))
    rows = choose.Rows(*(stale(b * beam, dtype=torch.long) for _ in range(3)))
    log_p = stale(b if beam == 1 else 0, dtype=torch.float32)
    live, *scores = (stale(b, beam, dtype=torch.float32) for _ in range(3))
    pool = beams.Pool(
        *scores,
        *(stale(b, beam, dtype=t) for t in (torch.int32, torch.long)),
        *(stale(b, beam) for _ in range(2)),
    )
    buffers = state, limits, rows, log_p, live, pool
    begin.begin_search(*buffers)
    assert limits.clock.tolist() == [0]
    assert limits.prefix_lengths.tolist() == prefix_lengths
    assert limits.max_lengths.tolist() == max_lengths
    assert rows.tokens.tolist() == [token for token in first for _ in range(beam)]
    assert rows.lengths.tolist() == [length for length in lengths for _ in range(beam)]
    assert rows.growing.all()
    assert not log_p.any()
    # only the first beam may continue, and no hypothesis has ended
    assert live.tolist() == [[0.0] + [-torch.inf] * (beam - 1)] * b
    assert (torch.cat([pool.scores, pool.log_p]) == -torch.inf).all()
    assert not pool.steps.any()
    begin.begin_search(*buffers)
    assert not rows.growing.any()  # no sentence starts twice
