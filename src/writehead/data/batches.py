"""Batches of tokens: rows packed with several sequences, or padded to a similar length."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from writehead.cost import Pairs
from writehead.data.dataset import Ints, Split
from writehead.errors import ConfigError, shown
from writehead.model import Packing
from writehead.util.json_files import check_shape
from writehead.util.transfer import send

DRAW_SIZE = 512  # sequences looked up at a time
LOOK_AHEAD = 64  # sequences that may wait for the next batch while others fill the rows

STEP, BITS = 0x9E3779B97F4A7C15, (1 << 64) - 1  # of splitmix64


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of tokens, int64; labels count where `packing.segments` is not 0.

    source: [b, m] with its packing, or None. inputs, labels: [b, n]. tokens: labels that count.
    """

    source: Tensor | None
    source_packing: Packing | None
    inputs: Tensor
    labels: Tensor
    packing: Packing
    tokens: int

    def to(self, device: torch.device | str) -> "Batch":
        """Copies the batch to a device without waiting for it."""
        device = torch.device(device)
        return self._map(lambda T: send(T, device))

    def copy_(self, other: "Batch") -> None:
        """Copies the tokens of another batch of the same shape into this one."""
        for ours, theirs in zip(self._tensors(), other._tensors(), strict=True):
            ours.copy_(theirs)

    def split(self, parts: int) -> "list[Batch]":
        """Splits the rows into equal parts."""
        rows = len(self.inputs)
        if parts < 1 or rows % parts:
            raise ConfigError(f"{rows} rows cannot be split into {parts} equal parts")
        step = rows // parts
        return [self._rows(slice(start, start + step)) for start in range(0, rows, step)]

    def visible_pairs(self, window: int | None = None) -> Pairs:
        """Counts the visible pairs of query and memory position, within each sequence."""
        positions = self.packing.positions[self.packing.segments != 0] + 1
        causal = int((positions if window is None else positions.clamp(max=window)).sum())
        if self.source_packing is None:
            return Pairs(0, causal, 0)
        source, target = _segment_lengths(self.source_packing), _segment_lengths(self.packing)
        return Pairs(int(source.square().sum()), causal, int((source * target).sum()))

    def _rows(self, rows: slice) -> "Batch":
        part = self._map(lambda T: T[rows])
        return replace(part, tokens=int((part.packing.segments != 0).sum()))

    def _map(self, f: Callable[[Tensor], Tensor]) -> "Batch":
        def map_packing(packing: Packing) -> Packing:
            return Packing(f(packing.segments), f(packing.positions))

        return replace(
            self,
            source=None if self.source is None else f(self.source),
            source_packing=self.source_packing and map_packing(self.source_packing),
            inputs=f(self.inputs),
            labels=f(self.labels),
            packing=map_packing(self.packing),
        )

    def _tensors(self) -> list[Tensor]:
        packings = [packing for packing in (self.source_packing, self.packing) if packing]
        packed = [T for packing in packings for T in (packing.segments, packing.positions)]
        return [T for T in (self.source, self.inputs, self.labels, *packed) if T is not None]


def _segment_lengths(packing: Packing) -> Tensor:
    """Returns the length of each segment, [b, segments]; source and target have as many."""
    segments = packing.segments.cpu()
    counts = torch.zeros(len(segments), int(segments.max()) + 1, dtype=torch.int64)
    return counts.scatter_add_(1, segments, torch.ones_like(segments))[:, 1:]


class Pieces(NamedTuple):
    """Whole sequences, or parts of them that start at label `begins`.

    `lengths` counts the tokens of sources, and the labels of targets.
    """

    indices: Ints
    begins: Ints
    lengths: dict[str, Ints]


class Units:
    """The units that are packed: pairs that fit in a row, or text cut into pieces that do.

    A piece continues after the last token of the piece before it, so each label appears once.
    `skipped` pairs have a side that is longer than its row.
    """

    def __init__(self, split: Split, source_length: int | None, target_length: int | None) -> None:
        self._lengths = {name: side.whole_lengths for name, side in split.sides.items()}
        self._lengths["target"] -= 1  # the first token is not a label
        targets = self._lengths["target"]
        self._limit = target_length or int(targets.max(initial=1))
        fits = np.ones(len(split), dtype=np.bool_)
        if "source" in split.sides:
            fits = targets <= self._limit
            if source_length is not None:
                fits &= self._lengths["source"] <= source_length
        self._indices = np.flatnonzero(fits)
        self._ends = np.cumsum(-(-targets[fits] // self._limit))  # a pair is one piece
        self.count = int(self._ends[-1]) if len(self._ends) else 0
        self.skipped = len(split) - len(self._indices)

    def look_up(self, units: Ints) -> Pieces:
        """Returns the sequences, or parts of them, of the given units."""
        place = np.searchsorted(self._ends, units, side="right")
        begins = (units - np.where(place > 0, self._ends[place - 1], 0)) * self._limit
        indices = self._indices[place]
        lengths = {name: values[indices] for name, values in self._lengths.items()}
        lengths["target"] = np.minimum(lengths["target"] - begins, self._limit)
        return Pieces(indices, begins, lengths)


class PackedBatches:
    """An endless iterator of packed batches; each epoch has its own order.

    The `rows` rows of all processes are filled together: a sequence goes into the first row with
    room, or waits for the next batch. This process gets rows rank, rank + world, and so on. The
    content of the rows depends on the seed and the lengths, but not on `world`.
    """

    def __init__(
        self,
        split: Split,
        rows: int,
        source_length: int | None,
        target_length: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if rows < 1 or rows % world:
            raise ConfigError(
                f"rows={rows} cannot be shared by {world} processes; choose a multiple of {world}"
            )
        self._units = Units(split, source_length, target_length)
        if not self._units.count:
            raise ConfigError(
                f"none of {len(split):,} sequences fits in a row of {source_length} source and "
                f"{target_length} target tokens; make the rows longer"
            )
        self._split, self._rows, self._rank, self._world = split, rows, rank, world
        source_width = (source_length or 0) if "source" in split.sides else 0
        self._widths = {"source": source_width, "target": target_length}
        self.skipped = self._units.skipped  # pairs that are longer than a row
        self.epoch, self._cursor, self._seed = 0, 0, seed
        self._carry: list[int] = []
        self._order = epoch_order(seed, 0, self._units.count)

    def __iter__(self) -> "PackedBatches":
        return self

    def __next__(self) -> Batch:
        units, *places = self._fill_rows()
        pieces, rows = self._units.look_up(units), self._rows // self._world
        return _assemble(self._split, pieces, places, rows, self._widths)

    def state(self) -> dict[str, Any]:
        """The position as plain values; `restore` continues with the same batches."""
        place = {"epoch": self.epoch, "cursor": self._cursor, "carry": list(self._carry)}
        return {**self._identity(), **place}

    def restore(self, state: dict[str, Any]) -> None:
        """Resumes from `state`, with any `world`; raises JsonError if it is invalid."""
        for name, ours in self._identity().items():
            if state.get(name) != ours:
                raise ConfigError(
                    f"the saved batches had {name}={shown(state.get(name))}, not {ours}; resume "
                    f"with the same text and sizes"
                )
        count = self._units.count
        shape = {"epoch": range(2**31), "cursor": range(count + 1), "carry": [range(count)]}
        check_shape(state, shape)
        self.epoch, self._cursor, self._carry = state["epoch"], state["cursor"], [*state["carry"]]
        self._order = epoch_order(self._seed, self.epoch, count)

    def _identity(self) -> dict[str, int]:
        widths = {f"{side}_length": width for side, width in self._widths.items()}
        return {"seed": self._seed, "units": self._units.count, "rows": self._rows, **widths}

    def _fill_rows(self) -> Ints:
        """Fills the rows of all processes; returns this one's units and places, [5, units]."""
        source_width, target_width = self._widths.values()
        source_used, target_used, segments = np.zeros((3, self._rows), dtype=np.int64)
        placed: list[tuple[int, ...]] = []
        waiting, self._carry = self._carry, []
        for unit, source, target in chain(self._with_lengths(waiting), self._draw()):
            fits = (target_used <= target_width - target) & (source_used <= source_width - source)
            row = int(fits.argmax())
            if not fits[row]:
                self._carry.append(unit)
                # waiting units never reach this limit: they are not more, and the first one fits
                if len(self._carry) == max(self._rows, LOOK_AHEAD):
                    break
                continue
            segments[row] += 1
            if row % self._world == self._rank:
                place = (row // self._world, segments[row], source_used[row], target_used[row])
                placed.append((unit, *place))
            source_used[row] += source
            target_used[row] += target
        return np.array(placed, dtype=np.int64).reshape(-1, 5).T

    def _draw(self) -> Iterator[tuple[int, int, int]]:
        """Yields units with their lengths, in the order of the epoch, and moves the cursor."""
        while True:
            if self._cursor == self._units.count:
                self.epoch, self._cursor = self.epoch + 1, 0
                self._order = epoch_order(self._seed, self.epoch, self._units.count)
            block = self._order[self._cursor : self._cursor + DRAW_SIZE].tolist()
            for row in self._with_lengths(block):
                self._cursor += 1
                yield row

    def _with_lengths(self, units: list[int]) -> Iterator[tuple[int, int, int]]:
        lengths = self._units.look_up(np.array(units, dtype=np.int64)).lengths
        sources = lengths.get("source", np.zeros_like(lengths["target"]))
        return zip(units, sources.tolist(), lengths["target"].tolist(), strict=True)


def padded_batches(
    split: Split,
    max_tokens: int,
    *,
    source_length: int | None = None,
    target_length: int | None = None,
    limit: int | None = None,
) -> Iterator[Batch]:
    """Yields every sequence once, or the first `limit`, one per row, the longest first.

    A batch has at most max_tokens positions on its wider side, unless it has only one row. Text
    longer than target_length is cut into rows; longer pairs are left out (`Units.skipped`).
    """
    units = Units(split, source_length, target_length)
    pieces = units.look_up(np.arange(units.count, dtype=np.int64))
    lengths = np.stack([pieces.lengths[side] for side in sorted(split.sides)])  # target last
    order = np.lexsort((pieces.indices, *-lengths))
    if limit is not None:
        order = order[pieces.indices[order] < limit]
    widths = lengths.max(axis=0)[order].tolist()
    start = 0
    while start < len(widths):
        end, width = start + 1, widths[start]
        while end < len(widths) and max(width, widths[end]) * (end + 1 - start) <= max_tokens:
            end, width = end + 1, max(width, widths[end])
        group = units.look_up(order[start:end])
        rows, zeros = np.arange(end - start), np.zeros(end - start, dtype=np.int64)
        sizes = {side: int(values.max()) for side, values in group.lengths.items()}
        yield _assemble(split, group, [rows, zeros + 1, zeros, zeros], len(rows), sizes)
        start = end


def _assemble(
    split: Split, pieces: Pieces, places: list[Ints], rows: int, widths: dict[str, int]
) -> Batch:
    """Puts pieces into rows at `places`: row, segment from 1, source column, target column."""
    row, segments, *columns = places
    filled = {}
    for name, column in zip(("source", "target"), columns, strict=True):
        if name in split.sides:
            cells, shape = row * widths[name] + column, (rows, widths[name])
            filled[name] = _fill(split, name, pieces, segments, cells, shape)
    labels, inputs, packing = filled["target"]
    source, _, source_packing = filled.get("source", (None, None, None))
    tokens = int(pieces.lengths["target"].sum())
    return Batch(source, source_packing, inputs, labels, packing, tokens)


def _fill(
    split: Split, name: str, pieces: Pieces, segments: Ints, cells: Ints, shape: tuple[int, int]
) -> tuple[Tensor, Tensor, Packing]:
    """Puts the pieces of one side into rows; returns labels, decoder inputs and packing."""
    side, lengths = split.sides[name], pieces.lengths[name]
    starts = np.cumsum(lengths) - lengths
    positions = np.arange(int(lengths.sum())) - np.repeat(starts, lengths)
    if name == "source":  # the encoder reads all tokens
        labels = inputs = side.read(pieces.indices, np.zeros_like(lengths), lengths)
    else:
        labels = side.read(pieces.indices, pieces.begins + 1, lengths)
        inputs = np.roll(labels, 1)
        inputs[starts] = side.read(pieces.indices, pieces.begins, np.ones_like(lengths))
    cells = np.repeat(cells, lengths) + positions

    def spread(values: Ints) -> Tensor:
        flat = np.zeros(shape[0] * shape[1], dtype=np.int64)
        flat[cells] = values
        return torch.from_numpy(flat.reshape(shape))

    packing = Packing(spread(np.repeat(segments, lengths)), spread(positions))
    return spread(labels), spread(inputs), packing


def epoch_order(seed: int, epoch: int, count: int) -> Ints:
    """Returns a permutation of 0 … count-1 that does not depend on the version of NumPy.

    The indices are sorted by splitmix64 of the index and a key, a bijection, so there are no ties.
    """
    seeded = _splitmix64(np.array([seed & BITS], dtype=np.uint64))
    key = _splitmix64(seeded ^ np.uint64(epoch * STEP & BITS))
    return np.argsort(_splitmix64(np.arange(count, dtype=np.uint64) ^ key))


def _splitmix64(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = z * np.uint64(STEP) + np.uint64(STEP)  # wraps around
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
