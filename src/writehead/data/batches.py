"""Batches of tokens: several sequences packed to a row for training, one a row for evaluation."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from writehead.config import Task
from writehead.cost import Pairs
from writehead.data.dataset import Split
from writehead.data.order import epoch_order
from writehead.data.rows import Ints, Layout, Pieces, Places, Units, labels_and_inputs
from writehead.errors import ConfigError, shown
from writehead.model import Packing
from writehead.util.json_files import check_shape

DRAWN = 512  # sequences looked up at a time
LOOK_AHEAD = 64  # sequences that may wait for a later batch while others fill the rows


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows to train or evaluate on, int64; labels count where `packing.segments` is not 0.

    source: [b, m] with its packing, or None. inputs, labels: [b, n]. tokens: labels that count.
    indices: [b], where each row is one sequence: which one of the split.
    """

    source: Tensor | None
    source_packing: Packing | None
    inputs: Tensor
    labels: Tensor
    packing: Packing
    tokens: int
    indices: Tensor | None = None

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on a device, which nobody waits for."""
        cuda = torch.device(device).type == "cuda"

        def copy(T: Tensor) -> Tensor:
            # from pinned memory, or else the copy waits for all the work before it
            return T.pin_memory().to(device, non_blocking=True) if cuda else T.to(device)

        def packing(given: Packing) -> Packing:
            return Packing(copy(given.segments), copy(given.positions))

        return Batch(
            None if self.source is None else copy(self.source),
            None if self.source_packing is None else packing(self.source_packing),
            copy(self.inputs),
            copy(self.labels),
            packing(self.packing),
            self.tokens,
            self.indices,
        )

    def copy_(self, other: "Batch") -> None:
        """Puts the tokens of another batch of this one's shape in place of its own."""
        for held, new in zip(self._tensors(), other._tensors(), strict=True):
            held.copy_(new)

    def _tensors(self) -> list[Tensor]:
        packings = [one for one in (self.source_packing, self.packing) if one is not None]
        packed = [T for one in packings for T in (one.segments, one.positions)]
        return [T for T in (self.source, self.inputs, self.labels, *packed) if T is not None]

    def split(self, parts: int) -> "list[Batch]":
        """The batch in `parts` of as many rows each, in order."""
        rows = len(self.inputs)
        if parts < 1 or rows % parts:
            raise ConfigError(f"{rows} rows cannot be split into {parts} equal parts")
        if parts == 1:
            return [self]
        return [self._rows(slice(i, i + rows // parts)) for i in range(0, rows, rows // parts)]

    def visible_pairs(self, window: int | None = None) -> Pairs:
        """Pairs of query and memory position that see each other, each within its sequence."""
        positions = self.packing.positions[self.packing.segments != 0] + 1
        causal = positions if window is None else positions.clamp(max=window)
        if self.source_packing is None:
            return Pairs(0, int(causal.sum()), 0)
        source, target = _lengths(self.source_packing), _lengths(self.packing)
        most = max(source.shape[1], target.shape[1])
        source = torch.nn.functional.pad(source, (0, most - source.shape[1]))
        target = torch.nn.functional.pad(target, (0, most - target.shape[1]))
        return Pairs(int(source.square().sum()), int(causal.sum()), int((source * target).sum()))

    def _rows(self, rows: slice) -> "Batch":
        def packing(given: Packing) -> Packing:
            return Packing(given.segments[rows], given.positions[rows])

        target = packing(self.packing)
        return Batch(
            None if self.source is None else self.source[rows],
            None if self.source_packing is None else packing(self.source_packing),
            self.inputs[rows],
            self.labels[rows],
            target,
            int((target.segments != 0).sum()),
            None if self.indices is None else self.indices[rows],
        )


def _lengths(packing: Packing) -> Tensor:
    """How long each segment of each row is, [b, segments]."""
    segments = packing.segments
    counts = torch.zeros(len(segments), int(segments.max()) + 1, dtype=torch.int64)
    counts.scatter_add_(1, segments.cpu(), torch.ones_like(segments.cpu()))
    return counts[:, 1:]


class PackedBatches:
    """Batches without end, epoch after epoch, each in an order of its own.

    `rows` rows are filled for the whole world, sentence by sentence into the first row with room;
    one that fits nowhere waits for the next batch. This process gets rows rank, rank + world, …
    What the rows hold depends on the seed and the lengths, not on the world.
    """

    def __init__(
        self,
        split: Split,
        task: Task,
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
        if not 0 <= rank < world:
            raise ConfigError(f"rank={rank} is not one of {world} processes, from 0")
        if task == "translation" and not source_length:
            raise ConfigError("translation has a source; give source_length, the tokens of its row")
        self._units = Units(split, task, source_length, target_length)
        if not self._units.count:
            raise ConfigError(
                f"none of {len(split):,} sequences fits a row of {source_length} source and "
                f"{target_length} target tokens; make the rows longer"
            )
        self._split, self._task = split, task
        self._rows, self._rank, self._world = rows, rank, world
        self._lengths = (source_length or 0 if task == "translation" else 0, target_length)
        self._seed = seed
        self._epoch, self._cursor = 0, 0
        self._carry: list[int] = []
        self._order = epoch_order(seed, 0, self._units.count)

    @property
    def skipped(self) -> int:
        """Pairs that are longer than a row, and so never come."""
        return self._units.skipped

    @property
    def epoch(self) -> int:
        """How often all of the text has been read."""
        return self._epoch

    def __iter__(self) -> "PackedBatches":
        return self

    def __next__(self) -> Batch:
        units, places, columns = self._fill_rows()
        mine = np.flatnonzero(places.rows % self._world == self._rank)
        rows, segments = places.rows[mine] // self._world, places.segments[mine]
        return _assemble(
            self._split,
            self._task,
            self._units.look_up(units[mine]),
            Places(rows, columns[mine], segments),
            Places(rows, places.columns[mine], segments),
            (self._rows // self._world, *self._lengths),
        )

    def state(self) -> dict[str, Any]:
        """Where we are, as plain values: restoring it gives the same batches from here on."""
        place = {"epoch": self._epoch, "cursor": self._cursor, "carry": list(self._carry)}
        return {**self._identity(), **place}

    def restore(self, state: dict[str, Any]) -> None:
        """Resumes from `state`, in a world of any size; raises JsonError if it is invalid."""
        for name, ours in self._identity().items():
            if state.get(name) != ours:
                raise ConfigError(
                    f"the batches so far had {name}={shown(state.get(name))}, but these have "
                    f"{ours}; resume with the same text and sizes"
                )
        unit = range(self._units.count)
        shape = {"epoch": range(2**31), "cursor": range(len(unit) + 1), "carry": [unit]}
        check_shape(state, shape)
        if state["epoch"] != self._epoch:
            self._order = epoch_order(self._seed, state["epoch"], self._units.count)
        self._epoch, self._cursor = state["epoch"], state["cursor"]
        self._carry = list(state["carry"])

    def _identity(self) -> dict[str, int]:
        return {
            "seed": self._seed,
            "units": self._units.count,
            "rows": self._rows,
            "source_length": self._lengths[0],
            "target_length": self._lengths[1],
        }

    def _fill_rows(self) -> tuple[Ints, Places, Ints]:
        """The units of the next global batch, their places, and their columns in the source."""
        source_length, target_length = self._lengths
        source_room = np.full(self._rows, source_length, dtype=np.int64)
        target_room = np.full(self._rows, target_length, dtype=np.int64)
        count = [0] * self._rows
        placed: list[tuple[int, int, int, int, int]] = []
        waiting, self._carry = self._carry, []
        most = max(self._rows, LOOK_AHEAD)
        for unit, source, target in chain(self._with_lengths(waiting), self._draw()):
            fits = (target_room >= target) & (source_room >= source)
            row = int(fits.argmax())
            if not fits[row]:
                self._carry.append(unit)
                # never among those that waited: they are no more than this, and the first fits
                if len(self._carry) == most:
                    break
                continue
            count[row] += 1
            target_column = target_length - int(target_room[row])
            source_column = source_length - int(source_room[row])
            placed.append((unit, row, target_column, source_column, count[row]))
            target_room[row] -= target
            source_room[row] -= source
        columns = np.array(placed, dtype=np.int64).T
        return columns[0], Places(columns[1], columns[2], columns[4]), columns[3]

    def _draw(self) -> Iterator[tuple[int, int, int]]:
        """Units in the order of their epoch, one taken from it as each is asked for."""
        while True:
            if self._cursor == self._units.count:
                self._epoch, self._cursor = self._epoch + 1, 0
                self._order = epoch_order(self._seed, self._epoch, self._units.count)
            block = self._order[self._cursor : self._cursor + DRAWN].tolist()
            for row in self._with_lengths(block):
                self._cursor += 1
                yield row

    def _with_lengths(self, units: list[int]) -> Iterator[tuple[int, int, int]]:
        pieces = self._units.look_up(np.array(units, dtype=np.int64))
        return zip(units, pieces.sources.tolist(), pieces.targets.tolist(), strict=True)


def padded_batches(
    split: Split,
    max_tokens: int,
    *,
    source_length: int | None = None,
    target_length: int | None = None,
    limit: int | None = None,
) -> Iterator[Batch]:
    """Every sequence once, or the first `limit`, one a row, the longest first.

    A batch has at most max_tokens positions on its wider side, or one row. Text longer than
    target_length is cut into rows as in training; pairs longer than their rows are left out, as
    many as `Units(...).skipped` says.
    """
    task: Task = "translation" if "source" in split.sides else "language"
    units = Units(split, task, source_length, target_length)
    pieces = units.look_up(np.arange(units.count, dtype=np.int64))
    order = np.lexsort((pieces.indices, -pieces.sources, -pieces.targets))
    if limit is not None:
        order = order[pieces.indices[order] < limit]
    group: list[int] = []
    widest = 0
    for i in order.tolist():
        width = max(widest, int(pieces.targets[i]), int(pieces.sources[i]))
        if group and width * (len(group) + 1) > max_tokens:
            yield _padded(split, task, pieces, np.array(group))
            group, width = [], max(int(pieces.targets[i]), int(pieces.sources[i]))
        group.append(i)
        widest = width
    if group:
        yield _padded(split, task, pieces, np.array(group))


def _padded(split: Split, task: Task, pieces: Pieces, chosen: Ints) -> Batch:
    """One batch of whole rows, as wide as its longest."""
    own = pieces.take(chosen)
    rows = np.arange(len(chosen), dtype=np.int64)
    places = Places(rows, np.zeros_like(rows), np.ones_like(rows))
    shape = (len(rows), int(own.sources.max()), int(own.targets.max()))
    batch = _assemble(split, task, own, places, places, shape)
    return replace(batch, indices=torch.from_numpy(own.indices))


def _assemble(
    split: Split,
    task: Task,
    pieces: Pieces,
    source_places: Places,
    target_places: Places,
    shape: tuple[int, int, int],
) -> Batch:
    """The batch of shape (rows, source length, target length) with the pieces at their places."""
    rows, source_length, target_length = shape
    source = source_packing = None
    if task == "translation":
        side = split.sides["source"]
        ids, _ = labels_and_inputs(side, pieces.indices, pieces.begins, pieces.sources)
        layout = Layout(source_places, pieces.sources, (rows, source_length))
        source, source_packing = layout.spread(ids), layout.packing()
    labels, inputs = labels_and_inputs(
        split.sides["target"], pieces.indices, pieces.begins, pieces.targets
    )
    layout = Layout(target_places, pieces.targets, (rows, target_length))
    return Batch(
        source=source,
        source_packing=source_packing,
        inputs=layout.spread(inputs),
        labels=layout.spread(labels),
        packing=layout.packing(),
        tokens=len(labels),
    )
