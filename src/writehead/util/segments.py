"""Several sequences in one row: groups of similar lengths, and copies of them to padded rows."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from writehead.util.transfer import send

PADDED_RATIO = 1.25  # a longer sequence starts a new group, if the group has enough tokens


class PaddedRows(NamedTuple):
    """S sequences as rows of m places; the padding repeats the last element of a sequence."""

    lengths: Tensor | None  # [S]; None: there is no padding
    elements: Tensor  # [S, m], the index of the element at each place
    own: Tensor  # the indices in the flat rows that are not padding


def group_by_length(lengths: NDArray[np.int_], tokens: int) -> list[NDArray[np.int_]]:
    """Divides sequences into groups of similar lengths, which need little padding.

    Groups have at least `tokens` tokens, if there are as many, because small products are slow.
    """
    order = np.argsort(lengths, kind="stable")
    starts = [0]
    for i, length in enumerate(lengths[order].tolist()):
        start = starts[-1]
        if length > PADDED_RATIO * lengths[order[start]] and (i - start) * length >= tokens:
            starts.append(i)
    return np.split(order, starts[1:])


def padded_groups(segments: Tensor, tokens: int) -> list[PaddedRows]:
    """Returns the sequences of rows [b, n], of equal numbers but 0, in groups of similar lengths.

    The elements of a sequence must be next to each other.
    """
    numbers = segments.cpu().numpy().astype(np.int64)
    used = np.flatnonzero(numbers)
    numbers += (np.arange(len(numbers)) * (numbers.max() + 1))[:, None]
    starts = np.flatnonzero(np.diff(numbers.ravel()[used], prepend=-1))
    lengths, first = np.diff(starts, append=len(used)), used[starts]
    groups = []
    for group in group_by_length(lengths, tokens) if len(lengths) else []:
        own, places = lengths[group][:, None], np.arange(lengths[group].max())
        arrays = lengths[group], first[group][:, None] + np.minimum(places, own - 1)
        sent = (send(one, segments.device) for one in (*arrays, np.flatnonzero(places < own)))
        rows = PaddedRows(*sent)
        groups.append(rows if own.min() < len(places) else rows._replace(lengths=None))
    return groups
