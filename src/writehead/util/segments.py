"""Packed sequences: groups of similar lengths, and the indices that copy them to padded rows."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from writehead.util.transfer import send

PADDED_RATIO = 1.25  # maximum ratio of lengths in a group, once it has enough tokens
# Longer sequences share rows only if their lengths round up to the same multiple. On a CPU, the
# rounding of attention depends on the width of such rows, and would depend on the batch.
ALONE_FROM, WIDTH_MULTIPLE = 192, 16


class PaddedRows(NamedTuple):
    """S sequences as padded rows of m positions; the padding repeats a sequence's last element."""

    lengths: Tensor | None  # [S], or None without padding
    elements: Tensor  # [S, m], the index in the packed rows of the element at each position
    own: Tensor  # the indices of the flattened padded rows that are not padding


def group_by_length(lengths: NDArray[np.int_], tokens: int) -> list[NDArray[np.int_]]:
    """Divides sequences into groups of similar lengths, which need little padding.

    A group ends only after about `tokens` tokens, because small matrix products are slow.
    """
    order = np.argsort(lengths, kind="stable")
    starts = [0]
    for i, length in enumerate(lengths[order].tolist()):
        start = starts[-1]
        if length > PADDED_RATIO * lengths[order[start]] and (i - start) * length >= tokens:
            starts.append(i)
    return np.split(order, starts[1:])


def padded_groups(segments: Tensor, tokens: int) -> list[PaddedRows] | None:
    """Returns the sequences of rows [b, n] in groups of similar lengths; 0 is padding.

    The elements of a sequence have the same number. Returns None if they are not contiguous, or if
    a number is negative.
    """
    numbers = segments.cpu().numpy().astype(np.int64)
    used = np.flatnonzero(numbers)
    numbers = numbers + (np.arange(len(numbers)) * (numbers.max() + 1))[:, None]
    names = numbers.ravel()[used]
    starts = np.flatnonzero(np.diff(names, prepend=-1) | (np.diff(used, prepend=-1) != 1))
    if int(segments.min()) < 0 or len(np.unique(names)) < len(starts):
        return None
    lengths, first = np.diff(starts, append=len(used)), used[starts]
    widths = np.where(lengths > ALONE_FROM, -(-lengths // WIDTH_MULTIPLE), 0)
    alike = [np.flatnonzero(widths == width) for width in np.unique(widths)]
    groups = []
    for group in (some[part] for some in alike for part in group_by_length(lengths[some], tokens)):
        own, places = lengths[group][:, None], np.arange(lengths[group].max())
        arrays = lengths[group], first[group][:, None] + np.minimum(places, own - 1)
        sent = (send(one, segments.device) for one in (*arrays, np.flatnonzero(places < own)))
        rows = PaddedRows(*sent)
        groups.append(rows if own.min() < len(places) else rows._replace(lengths=None))
    return groups
