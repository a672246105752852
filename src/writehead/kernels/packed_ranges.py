"""For packed rows, who may be visible to whom: the ranges that the packed kernels visit."""

import torch
from torch import Tensor

from writehead.kernels.visibility import Visibility

NOWHERE = -(2**31)  # the segment of a query that is padding: no memory has it
FAR = 2**30  # a window past every row, from which int32 does not overflow


def ranges(visibility: Visibility, n: int, m: int) -> tuple[Tensor, Tensor]:
    """Who may be visible to whom, for n queries [b, 3, n] and m memory positions [b, 3, m], int32.

    Of a query: its segment, the first memory position that it may see and the one past the last.
    Of a memory position: its segment, and the queries that may see it likewise. No range is ever
    too narrow; one that is empty begins at the end. In plain operations, which do not wait for
    the device and which a compiler does once for all layers.
    """
    reading, held = visibility.query_segments, visibility.memory_segments
    assert reading is not None
    assert held is not None
    i, j = (torch.arange(size, dtype=torch.int32, device=reading.device) for size in (n, m))
    buckets = max(n, m)
    readers, holders = _buckets(reading, buckets), _buckets(held, buckets)
    first, last = _extents(holders, buckets).gather(2, _twice(readers)).unbind(1)  # [b, n]
    last = -last
    earliest, latest = _extents(readers, buckets).gather(2, _twice(holders)).unbind(1)  # [b, m]
    latest = -latest
    if visibility.causal:
        last, earliest = torch.minimum(last, i + 1), torch.maximum(earliest, j)
    if visibility.window is not None:
        window = min(visibility.window, FAR)
        first = torch.maximum(first, i + 1 - window)
        latest = torch.minimum(latest, j + window)
    reader = torch.where(readers == 0, NOWHERE, reading.to(torch.int32))
    return (
        _table(reader, first, last, (readers != 0) & (first < last), m),
        _table(held.to(torch.int32), earliest, latest, (holders != 0) & (earliest < latest), n),
    )


def _buckets(segments: Tensor, buckets: int) -> Tensor:
    """Each segment's bucket: 0 for padding, its own from 1 on; those past the last share theirs."""
    segments = segments.to(torch.int64)
    return torch.where(segments == 0, 0, (segments - 1).remainder(buckets) + 1)


def _extents(holders: Tensor, buckets: int) -> Tensor:
    """[b, 2, buckets+1]: the first position in each bucket, and minus the one past the last.

    Those of an empty bucket make an empty range.
    """
    b, m = holders.shape
    index = torch.arange(m, dtype=torch.int32, device=holders.device)
    ends = torch.stack([index, -1 - index]).expand(b, 2, m)
    empty = torch.full((b, 2, buckets + 1), m, dtype=torch.int32, device=holders.device)
    return empty.scatter_reduce(2, _twice(holders), ends, "amin")


def _twice(buckets: Tensor) -> Tensor:
    """[b, n] -> [b, 2, n], the index of both ends."""
    return buckets.unsqueeze(1).expand(-1, 2, -1)


def _table(segments: Tensor, first: Tensor, last: Tensor, any_: Tensor, end: int) -> Tensor:
    """[b, 3, n] of a segment and a range, which is from `end` to 0 where there is nothing."""
    return torch.stack([segments, torch.where(any_, first, end), torch.where(any_, last, 0)], dim=1)
