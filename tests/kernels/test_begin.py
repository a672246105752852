"""What a search is before its first step, whatever an earlier batch left behind."""

import pytest
import torch
from torch import Tensor

begin = pytest.importorskip("writehead.kernels.begin", reason="Triton is not installed")
beams = pytest.importorskip("writehead.kernels.beams", reason="Triton is not installed")
choose = pytest.importorskip("writehead.kernels.choose", reason="Triton is not installed")
pytestmark = pytest.mark.usefixtures("interpreted")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LEFT = 77  # what is everywhere before


def left(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.full(shape, LEFT, dtype=dtype, device=DEVICE)


class Search:
    """All that a search of b sentences keeps, as an earlier batch may have left it."""

    def __init__(self, b: int, beam: int) -> None:
        rows = b * beam
        self.limits = choose.Limits(left(1), left(b, 3), left(b), left(b), left(1))
        self.rows = choose.Rows(*(left(rows, dtype=torch.long) for _ in range(3)))
        self.log_p = left(rows if beam == 1 else 0, dtype=torch.float32)
        self.live = left(b, beam, dtype=torch.float32)
        scores, log_p = (left(b, beam, dtype=torch.float32) for _ in range(2))
        integers = left(b, beam), left(b, beam, dtype=torch.long), left(b, beam), left(b, beam)
        self.pool = beams.Pool(scores, log_p, *integers)

    def begin(self, told: Tensor) -> None:
        begin.begin_search(told, self.limits, self.rows, self.log_p, self.live, self.pool)


@pytest.mark.parametrize(("b", "beam"), [(1, 1), (300, 1), (3, 2), (90, 5), (2, 300)])
def test_every_sentence_begins_as_it_was_told(b, beam):
    told = torch.randint(1, 1000, (4, b), device=DEVICE)
    first, forced, most, length = told.clone()
    search = Search(b, beam)
    search.begin(told)
    assert search.limits.clock.tolist() == [0]
    assert torch.equal(search.limits.prefix_lengths.long(), forced)
    assert torch.equal(search.limits.max_lengths.long(), most)
    assert torch.equal(search.rows.tokens, first.repeat_interleave(beam))
    assert torch.equal(search.rows.lengths, length.repeat_interleave(beam))
    assert search.rows.growing.tolist() == [1] * (b * beam)
    assert search.log_p.count_nonzero() == 0
    # only the first beam may speak, and no hypothesis has ended
    never = torch.full((b, beam), -torch.inf, device=DEVICE)
    assert torch.equal(search.live, torch.where(torch.arange(beam, device=DEVICE) == 0, 0.0, never))
    assert torch.equal(search.pool.scores, never)
    assert torch.equal(search.pool.log_p, never)
    assert search.pool.steps.count_nonzero() == 0


def test_what_it_is_not_asked_for_stays():
    search = Search(5, 3)
    search.begin(torch.ones(4, 5, dtype=torch.long, device=DEVICE))
    untouched = (search.limits.prefix, search.limits.min_length)
    for T in (*untouched, search.pool.rows, search.pool.tokens, search.pool.ended):
        assert bool((T == LEFT).all())


def test_who_is_not_there_does_not_grow_and_nobody_is_there_twice():
    told = torch.zeros(4, 6, dtype=torch.long, device=DEVICE)
    told[:, :4] = 9
    search = Search(6, 2)
    search.begin(told)
    assert search.rows.growing.tolist() == [1] * 8 + [0] * 4
    assert told.count_nonzero() == 0
    search.begin(told)
    assert search.rows.growing.count_nonzero() == 0
