"""Scaled rotary positions, one scalar at a time."""

import math

import pytest
import torch
from torch.testing import assert_close

from writehead.ops.rotary import Rotary, Scaling


@pytest.mark.parametrize("original", [None, 64])
def test_scaling_divides_low_frequencies_and_keeps_high_ones(original):
    factor, low, high, k, base = 3.0, 1.5, 5.0, 14, 40.0
    rotary = Rotary.make(5, k, base, Scaling(factor, original, low, high))
    kept = set()
    for i in range(k // 2):
        frequency = base ** (-2 * i / k)
        turns = 0.0 if original is None else original * frequency / (2 * math.pi)
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        kept.add(share if share in (0.0, 1.0) else 0.5)
        frequency = share * frequency + (1 - share) * frequency / factor
        expected = torch.tensor([math.cos(position * frequency) for position in range(5)])
        assert_close(rotary.cos[:, i], expected)
    assert kept == ({0.0} if original is None else {0.0, 0.5, 1.0})
