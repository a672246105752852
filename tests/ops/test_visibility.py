"""Visibility as booleans, against a check of each pair of a query and a memory position."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import sees
from writehead.errors import ConfigError, ShapeError
from writehead.ops.visibility import Visibility

b, n, m = 2, 3, 7
CPU = torch.device("cpu")


def table(values: st.SearchStrategy[int], *shape: int) -> st.SearchStrategy[torch.Tensor]:
    size = torch.Size(shape).numel()
    flat = st.lists(values, min_size=size, max_size=size)
    return flat.map(lambda flat: torch.tensor(flat).view(*shape))


@given(
    causal=st.booleans(),
    window=st.none() | st.integers(1, m + 2),
    lengths=st.none() | table(st.integers(0, m), b),
    query_positions=st.none() | table(st.integers(0, m + 3), b, n),
    segments=st.none() | st.tuples(table(st.integers(0, 2), b, n), table(st.integers(0, 2), b, m)),
)
def test_masks_equal_a_check_of_each_pair(segments, **limits):
    # query_positions alone limit nothing
    given = [segments, *(limit for name, limit in limits.items() if name != "query_positions")]
    queries, memory = segments or (None, None)
    visibility = Visibility(**limits, query_segments=queries, memory_segments=memory)
    may_see = sees(visibility)
    expected = [[[may_see(row, i, j) for j in range(m)] for i in range(n)] for row in range(b)]
    for _ in range(2):  # the second time from its cache
        mask, empty = visibility.mask(n, m, CPU), visibility.fully_masked(n, m, CPU)
        assert (mask is None) == all(limit is None or limit is False for limit in given)
        if mask is None:
            mask, empty = torch.ones(b, 1, n, m).bool(), torch.zeros(b, 1, n, 1).bool()
        assert mask.expand(b, 1, n, m).squeeze(1).tolist() == expected
        sees_nothing = [not any(row) for rows in expected for row in rows]
        assert empty.expand(b, 1, n, 1).flatten().tolist() == sees_nothing


def test_invalid_limits_are_rejected():
    with pytest.raises(ConfigError, match="window=0 must be at least 1"):
        Visibility(window=0)
    with pytest.raises(ShapeError, match="both query_segments and memory_segments"):
        Visibility(query_segments=torch.ones(b, n, dtype=torch.long))
