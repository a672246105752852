"""Visibility as booleans, against one pair of a query and a position at a time."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import sees
from writehead.errors import ConfigError, ShapeError
from writehead.kernels import Visibility

b, n, m = 2, 3, 7
CPU = torch.device("cpu")


def table(values: st.SearchStrategy[int], *shape: int) -> st.SearchStrategy[torch.Tensor]:
    size = torch.Size(shape).numel()
    return st.lists(values, min_size=size, max_size=size).map(
        lambda flat: torch.tensor(flat).view(*shape)
    )


def maybe(strategy: st.SearchStrategy) -> st.SearchStrategy:
    return st.none() | strategy


segments = st.none() | st.tuples(table(st.integers(0, 2), b, n), table(st.integers(0, 2), b, m))


@given(
    causal=st.booleans(),
    window=maybe(st.integers(1, m + 2)),
    lengths=maybe(table(st.integers(0, m), b)),
    query_positions=maybe(table(st.integers(0, m + 3), b, n)),
    memory_positions=maybe(table(st.integers(-2, m + 3), b, m)),
    segments=segments,
)
def test_the_mask_is_what_each_query_may_see(segments, **limits):
    queries, memory = segments or (None, None)
    visibility = Visibility(**limits, query_segments=queries, memory_segments=memory)
    may_see = sees(visibility)

    mask = visibility.mask(n, m, CPU)

    expected = [[[may_see(row, i, j) for j in range(m)] for i in range(n)] for row in range(b)]
    if mask is None:
        mask = torch.ones(b, 1, n, m, dtype=torch.bool)
    assert mask.expand(b, 1, n, m).squeeze(1).tolist() == expected


def test_without_limits_there_is_no_mask():
    assert Visibility().mask(n, m, CPU) is None


def test_ancestors_say_where_to_read_and_limit_nothing():
    visibility = Visibility(ancestors=torch.zeros(b, m, dtype=torch.long))
    assert visibility.mask(n, m, CPU) is None


def test_window_one_with_causal_is_the_query_itself():
    mask = Visibility(causal=True, window=1).mask(m, m, CPU)
    assert torch.equal(mask[0, 0], torch.eye(m, dtype=torch.bool))


def test_a_window_wider_than_the_memory_limits_nothing_more():
    wide = Visibility(causal=True, window=m + 1).mask(m, m, CPU)
    assert torch.equal(wide, Visibility(causal=True).mask(m, m, CPU))


def test_a_causal_triangle_is_whole_until_anything_else_limits_it():
    assert Visibility(causal=True).is_whole
    ones = torch.ones(b, n, dtype=torch.long)
    for limit in (
        {"window": 2},
        {"lengths": ones[:, 0]},
        {"query_positions": ones},
        {"memory_positions": ones},
        {"query_segments": ones, "memory_segments": ones},
    ):
        assert not Visibility(causal=True, **limit).is_whole, limit


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_holds_at_least_the_query_itself(window):
    with pytest.raises(ConfigError, match=f"window={window} must be at least 1"):
        Visibility(window=window)


@pytest.mark.parametrize("side", ["query_segments", "memory_segments"])
def test_segments_of_one_side_alone_are_refused(side):
    with pytest.raises(ShapeError, match="both query_segments and memory_segments, or neither"):
        Visibility(**{side: torch.ones(b, n, dtype=torch.long)})


def test_masks_are_made_once_and_blind_queries_are_those_that_a_mask_leaves_nothing():
    visibility = Visibility(causal=True, lengths=torch.tensor([m, 0]))
    mask, blind = (getattr(visibility, name)(n, m, CPU) for name in ("mask", "blind"))
    assert visibility.mask(n, m, CPU) is mask
    assert visibility.blind(n, m, CPU) is blind
    assert torch.equal(blind[..., 0], mask.sum(-1) == 0)
    assert blind[1].all()
    assert not blind[0].any()
    assert visibility.mask(n, m - 1, CPU).shape[-1] == m - 1
    assert Visibility().blind(n, m, CPU) is None
