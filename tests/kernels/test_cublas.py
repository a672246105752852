"""Which of cuBLASLt's proposals a product takes, held against a library that does no products."""

import ctypes

import pytest
import torch
from torch import Tensor

from writehead.errors import BackendError

cublas = pytest.importorskip("writehead.kernels.cublas", reason="Triton is not installed")


class Library:
    """Answers as cuBLASLt does, and notes which proposal each product was made by.

    proposals: of each, its tile and in how many parts it sums. results: what each writes. broken:
    those that it cannot do after all.
    """

    def __init__(self, proposals: list[tuple[int, int]]) -> None:
        self.proposals, self.results = proposals, [1.0] * len(proposals)
        self.taken, self.broken, self.alive = [], set(), 0

    def __getattr__(self, name: str):
        assert name.startswith("cublasLt")

        def answer(*arguments: object) -> int:
            self.alive += name.endswith("Create") - name.endswith("Destroy")
            return 0

        return answer

    def cublasLtMatmulAlgoGetHeuristic(self, *arguments: object) -> int:
        found, count = arguments[-2:]
        for i in range(len(self.proposals)):
            found[i].algorithm.data[0] = i
        count._obj.value = len(self.proposals)
        return 0

    def cublasLtMatmulAlgoConfigGetAttribute(self, algorithm, name, value, *_) -> int:
        tile, splits = self.proposals[algorithm._obj.data[0]]
        value._obj.value = {cublas.TILE: tile, cublas.SPLITS: splits}.get(name, 0)
        return 0

    def cublasLtMatmul(self, *arguments: object) -> int:
        which = arguments[12]._obj.data[0]
        if which in self.broken:
            return 15
        self.taken.append(which)
        first = ctypes.cast(arguments[8], ctypes.POINTER(ctypes.c_uint16))
        first[0] = torch.tensor(self.results[which], dtype=torch.bfloat16).view(torch.uint16).item()
        return 0


@pytest.fixture(autouse=True)
def clock(monkeypatch) -> list[float]:
    """What the next timings say; the device is never asked."""
    times: list[float] = []

    def timed(work, weights) -> float:
        work(weights[-1])
        return times.pop(0)

    stream = type("Stream", (), {"cuda_stream": 0})
    monkeypatch.setattr(cublas, "_time", timed)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return times


def size(rows: int, **changes: object) -> object:
    plain = {"x_row": 8, "y_row": 16, "dtype": torch.bfloat16, "relu": False, "adds": False}
    return cublas.Size(rows, 16, 8, **{**plain, **changes})


def operands(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    sizes = (rows, 8), (16, 8), (rows, 16)
    X, W, Y = (torch.zeros(size, dtype=torch.bfloat16) for size in sizes)
    return X, W, Y


def take(planner, rows: int, **changes: object) -> int:
    """The proposal by which a product is made."""
    assert planner.run(size(rows, **changes), *operands(rows))
    return planner._library.taken[-1]


def test_what_nobody_tried_is_pytorchs_to_make():
    library = Library([(5, 1), (6, 1)])
    planner = cublas.Planner(library)
    assert not planner.run(size(4), *operands(4))
    assert not library.taken
    assert library.alive == 1  # and nothing was planned


def test_the_quickest_is_taken_once_it_was_tried(clock):
    planner = cublas.Planner(Library([(5, 1), (6, 1), (7, 1)]))
    clock[:] = [3.0, 3.0, 2.0, 2.5, 9.0, 1.0]  # the better of two counts
    with cublas.trying():
        assert take(planner, 4) == 2
    assert take(planner, 4) == 2
    assert not planner.run(size(5), *operands(5))  # of another size nothing is known
    assert not planner.run(size(4, relu=True), *operands(4))
    assert not clock


def test_nothing_is_timed_while_a_graph_is_captured(monkeypatch, clock):
    planner = cublas.Planner(Library([(5, 1), (6, 1)]))
    clock[:] = [2.0, 2.0, 1.0, 1.0]
    with cublas.trying():
        assert take(planner, 4) == 1
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert take(planner, 4) == 1
        assert not planner.run(size(5), *operands(5))
    assert not planner.run(size(cublas.MANY), *operands(cublas.MANY))


def test_what_would_sum_in_parts_is_not_tried(clock):
    planner = cublas.Planner(Library([(5, 1), (6, 4), (7, 1)]))
    clock[:] = [2.0, 2.0, 1.0, 1.0]
    with cublas.trying():
        assert take(planner, 4) == 2
    assert not clock


def test_where_the_library_would_sum_in_parts_its_first_proposal_stays(clock):
    planner = cublas.Planner(Library([(5, 4), (6, 1), (7, 4)]))
    with cublas.trying():
        assert take(planner, 4) == 0


def test_a_proposal_with_another_result_is_not_taken_however_quick(clock):
    planner = cublas.Planner(Library([(5, 1), (6, 1), (7, 1)]))
    planner._library.results = [1.0, 1.5, 1.0]
    clock[:] = [3.0, 3.0, 2.0, 2.0]
    with cublas.trying():
        assert take(planner, 4) == 2
    assert not clock


def test_a_proposal_that_cannot_be_done_is_not_taken(clock):
    planner = cublas.Planner(Library([(5, 1), (6, 1)]))
    planner._library.broken = {1}
    clock[:] = [3.0, 3.0]
    with cublas.trying():
        assert take(planner, 4) == 0
    assert not clock


def test_where_there_is_no_room_to_try_the_first_is_taken(monkeypatch, clock):
    def without_room(work, weights):
        raise torch.OutOfMemoryError("too much")

    planner = cublas.Planner(Library([(5, 1), (6, 1)]))
    with monkeypatch.context() as patch, cublas.trying():
        patch.setattr(cublas, "_time", without_room)
        assert take(planner, 4) == 0
    clock[:] = [3.0, 3.0, 2.0, 2.0]
    with cublas.trying():
        assert take(planner, 4) == 1  # it is tried when there is


def test_large_products_are_timed_once_for_all_of_about_their_size(clock, monkeypatch):
    monkeypatch.setattr(cublas, "MANY", 64)
    library = Library([(5, 1), (6, 1)])
    planner = cublas.Planner(library)
    clock[:] = [2.0, 1.0]
    assert take(planner, 64) == 1
    library.proposals = [(6, 1), (5, 1)]  # for another size in another order
    assert take(planner, 127) == 0
    library.proposals = [(8, 1), (9, 1)]  # or not at all
    assert take(planner, 80) == 0
    assert not clock
    clock[:] = [1.0, 2.0]
    assert take(planner, 128) == 0  # about twice as many
    assert not clock


def test_what_is_added_to_stays_as_it_is_while_proposals_are_timed(clock):
    planner, (X, W, Y) = cublas.Planner(Library([(5, 1), (6, 1)])), operands(4)
    places = []
    run = cublas.Plan.run

    def noted(self, X, W, Y, which):
        places.append(Y.data_ptr())
        run(self, X, W, Y, which)

    clock[:] = [1.0, 1.0, 2.0, 2.0]
    with pytest.MonkeyPatch.context() as patch, cublas.trying():
        patch.setattr(cublas.Plan, "run", noted)
        planner.run(size(4, adds=True), X, W, Y)
    assert places[-1] == Y.data_ptr()
    assert Y.data_ptr() not in places[:-1]


def test_a_library_without_a_proposal_says_so():
    with cublas.trying():
        assert not cublas.Planner(Library([])).run(size(4), *operands(4))


def test_an_error_of_the_librarys_is_one_of_ours():
    planner = cublas.Planner(Library([(5, 1)]))
    planner._library.broken = {0}
    with cublas.trying(), pytest.raises(BackendError, match="status 15"):
        take(planner, 4)


def test_plans_that_give_way_give_their_memory_back_and_what_was_timed_stays_known(
    clock, monkeypatch
):
    monkeypatch.setattr(cublas, "MOST_PLANS", 2)
    library = Library([(5, 1), (6, 1)])
    planner = cublas.Planner(library)
    clock[:] = [2.0, 2.0, 1.0, 1.0] * 4
    with cublas.trying():
        assert [take(planner, rows) for rows in (4, 5, 6, 7)] == [1, 1, 1, 1]
    assert [one.rows for one in planner._plans] == [6, 7]
    # the handle, and of each plan the product and three matrices
    assert library.alive == 1 + 2 * 4
    assert take(planner, 4) == 1
    assert not clock


def test_products_elsewhere_are_pytorchs():
    X, W = torch.zeros(4, 8, dtype=torch.bfloat16), torch.zeros(16, 8, dtype=torch.bfloat16)
    assert cublas.product(X, W) is None
