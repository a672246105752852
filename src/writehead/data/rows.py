"""Where tokens stand in rows: sequences, or pieces of them, looked up, placed and spread."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from writehead.config import Task
from writehead.data.dataset import Side, Split
from writehead.data.tokenizer import EOS, PAD
from writehead.model import Packing

BOS = PAD  # a decoder starts from padding

Ints = NDArray[np.int64]


class Units:
    """What is packed: pairs that fit a row, or text cut into pieces that do.

    A piece goes on from the token before it, so each label of a text is there exactly once.
    `skipped` pairs have a side that is longer than its row.
    """

    def __init__(
        self, split: Split, task: Task, source_length: int | None, target_length: int | None
    ) -> None:
        self.split = split
        self._target = split.target_lengths.astype(np.int64) + 1  # with the end
        self._source = None
        self._pieces_end: Ints | None = None
        self._sequences: Ints | None = None
        self._limit = target_length or int(self._target.max(initial=1))
        self.skipped = 0
        if task == "language":
            self._pieces_end = np.cumsum(-(-self._target // self._limit))
            self.count = int(self._pieces_end[-1]) if len(split) else 0
            return
        self._source = split.source_lengths.astype(np.int64) + 1
        widest = source_length or int(self._source.max(initial=1))
        fit = (self._target <= self._limit) & (self._source <= widest)
        self._sequences = np.flatnonzero(fit)
        self.count = len(self._sequences)
        self.skipped = len(split) - self.count

    def look_up(self, units: Ints) -> "Pieces":
        """Which parts of which sequences the units are."""
        begins = np.zeros(len(units), dtype=np.int64)
        if self._pieces_end is not None:
            indices = np.searchsorted(self._pieces_end, units, side="right")
            before = np.where(indices > 0, self._pieces_end[indices - 1], 0)
            begins = (units - before) * self._limit
            targets = np.minimum(self._target[indices] - begins, self._limit)
            return Pieces(indices, begins, np.zeros_like(begins), targets)
        assert self._sequences is not None
        assert self._source is not None
        indices = self._sequences[units]
        return Pieces(indices, begins, self._source[indices], self._target[indices])


@dataclass(frozen=True, eq=False)
class Pieces:
    """Parts of sequences: from label `begins` on, and their lengths, ends included."""

    indices: Ints
    begins: Ints
    sources: Ints
    targets: Ints

    def take(self, chosen: Ints) -> "Pieces":
        """Some of the pieces."""
        return Pieces(*(values[chosen] for values in vars(self).values()))


@dataclass(frozen=True, eq=False)
class Places:
    """Where pieces stand: row, first column, and number within the row, from 1."""

    rows: Ints
    columns: Ints
    segments: Ints


class Layout:
    """Puts values that follow one another at their pieces' places in rows of zeros."""

    def __init__(self, places: Places, lengths: Ints, shape: tuple[int, int]) -> None:
        self._shape = shape
        self._within = _within(lengths)
        self._at = np.repeat(places.rows * shape[1] + places.columns, lengths) + self._within
        self._segments = np.repeat(places.segments, lengths)

    def spread(self, values: Ints) -> Tensor:
        """The values in rows, [rows, length]."""
        flat = np.zeros(self._shape[0] * self._shape[1], dtype=np.int64)
        flat[self._at] = values
        return torch.from_numpy(flat.reshape(self._shape))

    def packing(self) -> Packing:
        """Which piece each position belongs to, and where in it."""
        return Packing(self.spread(self._segments), self.spread(self._within))


def labels_and_inputs(side: Side, indices: Ints, begins: Ints, lengths: Ints) -> tuple[Ints, Ints]:
    """The labels of pieces one after another, and what a decoder is fed to predict them."""
    starts = side.offsets[indices].astype(np.int64) + begins
    at = np.repeat(starts, lengths) + _within(lengths)
    ends = np.cumsum(lengths)
    is_last = begins + lengths > side.lengths[indices]  # the piece that has the end
    # an end stands in no file: what is read in its place is overwritten
    labels: Ints = side.tokens[np.minimum(at, len(side.tokens) - 1)].astype(np.int64)
    labels[ends[is_last] - 1] = EOS
    inputs = np.empty_like(labels)
    inputs[1:] = labels[:-1]
    inputs[ends - lengths] = np.where(begins > 0, side.tokens[np.maximum(starts - 1, 0)], BOS)
    return labels, inputs


def _within(lengths: Ints) -> Ints:
    """0, 1, … for each of several lengths, one after another."""
    total: int = int(lengths.sum())
    return np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)
