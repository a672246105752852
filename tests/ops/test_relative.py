"""Buckets of distances against those of T5 in Transformers."""

import pytest
import torch

from helpers import random
from writehead.ops.relative import bias_at, relative_buckets

modeling_t5 = pytest.importorskip("transformers.models.t5.modeling_t5")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (4, 3), (10, 77), (64, 512)])
def test_buckets_are_those_of_t5(buckets, furthest, causal):
    limit = furthest + 9
    relative = -torch.arange(-limit, limit + 1)  # T5 counts from the query to the memory position
    theirs = modeling_t5.T5Attention._relative_position_bucket(
        relative, bidirectional=not causal, num_buckets=buckets, max_distance=furthest
    )
    ours = relative_buckets(limit, buckets, furthest, causal=causal)
    assert torch.equal(ours, theirs)


def test_distances_beyond_the_limit_use_the_last_column():
    table = random(3, 5)  # distances -2 to 2
    distances = torch.tensor([[[0, -7], [1, 2]], [[99, -2], [-1, 0]]])
    columns = torch.tensor([[[2, 0], [3, 4]], [[4, 0], [1, 2]]])
    assert torch.equal(bias_at(table, distances), torch.stack([table[:, c] for c in columns]))
