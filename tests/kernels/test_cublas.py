"""The choice among cuBLASLt's algorithms; tests/gpu has the products themselves."""

from types import SimpleNamespace

import pytest
import torch

from writehead.errors import BackendError
from writehead.kernels import cublas


class Plan:
    """A plan whose algorithms write `results`, or fail where these are None."""

    def __init__(self, results: list[float | None], *, adds: bool) -> None:
        self.proposals, self.size = results, SimpleNamespace(rows=4, adds=adds)
        self.last = 0

    def run(self, X, W, Y, which: int) -> None:
        if self.proposals[which] is None:
            raise BackendError("not supported")
        self.last = which
        Y.fill_(self.proposals[which])


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(
    ("results", "times", "fastest"),
    [
        ([1.0], [], 0),
        ([1.0, 1.0, 1.0], [3.0, 2.0, 1.0], 2),
        ([1.0, 1.5, 1.0], [3.0, 1.0, 2.0], 2),  # one with another result is not taken
        ([1.0, None], [3.0, 1.0], 0),
    ],
)
def test_the_fastest_algorithm_with_the_result_of_the_first_wins(
    monkeypatch, results, times, fastest, adds
):
    def timed(work, weights):
        work(weights[0])
        return times[plan.last]

    monkeypatch.setattr(cublas, "_time", timed)
    plan, (X, W) = Plan(results, adds=adds), torch.zeros(2, 4, 8, dtype=torch.bfloat16)
    Y = torch.full((4, 4), 7.0, dtype=torch.bfloat16)
    assert cublas._quickest(plan, X, W, Y) == fastest
    assert not adds or (Y == 7.0).all()  # what is added to stays as it is


def test_a_first_algorithm_that_fails_is_an_error():
    X, W, Y = torch.zeros(3, 4, 4, dtype=torch.bfloat16)
    with pytest.raises(BackendError):
        cublas._quickest(Plan([None, 1.0], adds=False), X, W, Y)


def test_products_on_a_cpu_are_left_to_pytorch():
    X, W = torch.zeros(4, 8, dtype=torch.bfloat16), torch.zeros(16, 8, dtype=torch.bfloat16)
    assert cublas.product(X, W) is None
