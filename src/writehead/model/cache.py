"""§2.4: the KV cache, with fixed shapes.

One `KVCache` holds K and V of all decoder layers, allocated once: padded to `capacity`, or for
local attention a ring of `window` slots, where position p is in slot p mod window. Lengths and
positions are on the device and no operation waits for it, so that a step can be captured in a CUDA
graph. The host keeps an upper bound of the lengths, to raise an error before a write is lost.

All layers of a step write to the same positions:

    reservation = cache.reserve(n)                          # the next n positions
    K, V, visibility = reservation.layer(i).append(K, V)    # for each layer: write, then attend
    cache.advance(reservation)                              # increase the lengths
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from writehead.config import AttentionConfig
from writehead.errors import CacheError, CacheFull, ShapeError
from writehead.kernels import Visibility


@dataclass(frozen=True, eq=False)
class Reservation:
    """The next n positions of each row: the slots they are written to, and what they attend to."""

    cache: "KVCache"
    positions: Tensor  # [b, n]
    counts: Tensor | None  # [b], how many of the n are used; None: all
    slots: Tensor  # [b, n], or the last `size` of them
    sources: Tensor | None  # [b, n], which of the n is written to each slot; None: in order
    visibility: Visibility

    @property
    def n(self) -> int:
        """Reserved positions per row."""
        return self.positions.shape[1]

    def layer(self, index: int) -> "LayerPast":
        """Returns the past that layer `index` appends to."""
        return LayerPast(self, self.cache.K[index], self.cache.V[index])


@dataclass(frozen=True, eq=False)
class LayerPast:
    """One layer's part of a reservation."""

    reservation: Reservation
    K: Tensor  # [b, g, size, k]
    V: Tensor  # [b, g, size, v]

    def append(self, K: Tensor, V: Tensor) -> tuple[Tensor, Tensor, Visibility]:
        """Writes K [b, g, n, k] and V [b, g, n, v]; returns the memory to attend to."""
        return self._write(self.K, K), self._write(self.V, V), self.reservation.visibility

    def _write(self, held: Tensor, new: Tensor) -> Tensor:
        """Writes `new` to `held`; returns the memory that the new queries attend to."""
        reservation, cache = self.reservation, self.reservation.cache
        if cache.is_ring and reservation.n > 1:
            # the write overwrites positions that the first queries still attend to
            memory = torch.cat([held, new], dim=2)
        else:
            memory = held[:, :, : cache.readable(reservation.n)]
        rows, slots = cache.rows.unsqueeze(1), reservation.slots  # [b, 1], [b, n]
        counts, sources = reservation.counts, reservation.sources
        if sources is None or counts is None:
            held[rows, :, slots] = new[:, :, -slots.shape[1] :].transpose(1, 2)
        else:  # a row without new positions writes back what is there
            writes = (counts > 0).view(-1, 1, 1, 1)
            held[rows, :, slots] = torch.where(writes, new[rows, :, sources], held[rows, :, slots])
        return memory


class KVCache:
    """K [layers, b, g, size, k] and V [layers, b, g, size, v] of all decoder layers.

    `size` is the capacity, or window + `rewindable` if that is smaller: a ring can be rewound by
    `rewindable` positions. `lengths` [b] counts the positions written to each row. If `padded`,
    each read spans the whole size, as in the paper's decoder (§4.3, footnote).
    """

    def __init__(
        self,
        attention: AttentionConfig,
        *,
        layers: int,
        rows: int,
        capacity: int,
        rewindable: int = 0,
        padded: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        for name, count in (("layers", layers), ("rows", rows), ("capacity", capacity)):
            if count < 1:
                raise CacheError(f"{name}={count} must be at least 1")
        if rewindable < 0:
            raise CacheError(f"rewindable={rewindable} must not be negative")
        self.attention = attention
        self.capacity = capacity
        self.rewindable = rewindable
        self.padded = padded
        window = attention.window
        self.size = capacity if window is None else min(capacity, window + rewindable)
        g, k, v = attention.g, attention.k, attention.v
        self.K = torch.zeros(layers, rows, g, self.size, k, dtype=dtype, device=device)
        self.V = torch.zeros(layers, rows, g, self.size, v, dtype=dtype, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.rows = torch.arange(rows, device=device)
        self.growing = torch.ones(rows, dtype=torch.long, device=device)  # 0 if stopped
        self.ancestors: Tensor | None = None  # [b, size], the row that holds each slot of a row
        self.bound = 0  # upper bound of `lengths`, known to the host
        self._rewound = 0  # positions that were rewound and not yet written again
        self._searched = False

    @property
    def is_ring(self) -> bool:
        """Whether slots are reused."""
        return self.size < self.capacity

    @property
    def nbytes(self) -> int:
        """Allocated bytes of K and V."""
        return self.K.nbytes + self.V.nbytes

    def readable(self, n: int) -> int:
        """Number of slots that a step of n positions reads."""
        return self.size if self.padded else min(self.size, self.bound + n)

    def begin_search(self, limits: Sequence[int]) -> None:
        """Starts a search of up to limits[i] tokens in row i; a cache can be searched once.

        Raises CacheFull if the capacity is too small.
        """
        if self._searched:
            raise CacheError("this state has been searched; start a new one")
        if self.bound + max(limits) > self.capacity:
            more = torch.tensor(limits, device=self.lengths.device)
            self._check_capacity(more * self.growing)
        self._searched = True

    def clear(self) -> None:
        """Resets the cache in place, so that a captured step can be replayed from the start."""
        self.lengths.zero_()
        self.growing.fill_(1)
        self.bound = self._rewound = 0
        self._searched = False

    def reserve(self, n: int, counts: Tensor | None = None) -> Reservation:
        """Reserves the next n positions of each row, or the first counts[i] of them in row i.

        A ring keeps the last `size` positions of each row. Raises CacheFull beyond the capacity.
        """
        if n < 1:
            raise CacheError(f"cannot reserve {n} positions; reserve at least 1")
        if counts is not None:
            self._check_counts(counts, n)
        if self.bound + n > self.capacity:
            self._check_capacity(n * self.growing if counts is None else counts)
        steps = torch.arange(n, device=self.rows.device)
        start = self.lengths.unsqueeze(1)
        if counts is None:
            start = start.clamp(max=self.capacity - n)  # a stopped row overwrites its last slots
        positions = start + steps  # [b, n]
        sources = None
        written = positions[:, -self.size :]
        if counts is not None:
            # beyond a row's count, its last position is written again to the same slot
            last = (counts - 1).unsqueeze(1)
            sources = steps.clamp(min=last - self.size + 1, max=last).clamp(min=0)
            written = (start + sources).clamp(max=self.capacity - 1)
        slots = written % self.size
        visibility = self._with_ancestors(self._visibility(positions), slots, counts, n)
        return Reservation(self, positions, counts, slots, sources, visibility)

    def advance(self, reservation: Reservation) -> None:
        """Adds the reserved positions to the lengths."""
        n, counts = reservation.n, reservation.counts
        self.lengths += n * self.growing if counts is None else counts
        self.bound = min(self.bound + n, self.capacity)
        if counts is None:
            self._rewound = max(0, self._rewound - n)

    def stop(self, rows: Tensor) -> None:
        """Stops the rows where `rows` [b] is true, so that others can use the whole capacity.

        The content of a stopped row and the logits of its next steps are undefined.
        """
        self.growing.masked_fill_(rows, 0)

    def rewind(self, r: int) -> None:
        """Removes the last r positions of each row."""
        if r < 0:
            raise CacheError(f"cannot rewind {r} positions; r must not be negative")
        wrapped = self.is_ring and self.bound + self._rewound > self.size
        if wrapped and self._rewound + r > self.rewindable:
            raise CacheError(
                f"cannot rewind {r} positions: a ring of {self.size} keeps only "
                f"{self.rewindable - self._rewound} more than its window; start with "
                f"rewindable={self._rewound + r} or more"
            )
        shortest = int(self.lengths.min()) if self.lengths.device.type == "cpu" else self.bound
        if r > shortest:
            raise CacheError(f"cannot rewind {r} positions: a row has only {shortest}")
        self._check_shared(r)
        self.lengths -= r
        self.bound -= r
        self._rewound += r

    def reorder(self, rows: Tensor) -> None:
        """Makes row i continue row rows[i], without moving K and V.

        The ancestor table records which row holds each position. Rows must have equal lengths, as
        the beams of a sentence do; otherwise one could overwrite what another still reads.
        """
        self._check_integers("rows", rows)
        if rows.device.type == "cpu":  # elsewhere, reading the values would wait for the device
            if bool(((rows < 0) | (rows >= len(self.rows))).any()):
                raise CacheError(f"rows must be from 0 to {len(self.rows) - 1}")
            if not torch.equal(self.lengths[rows], self.lengths):
                raise CacheError("rows of different lengths cannot be exchanged")
        self.share()
        assert self.ancestors is not None
        self.ancestors.copy_(self.ancestors[rows])

    def share(self) -> None:
        """Creates the ancestor table; must precede the capture of a step that uses it."""
        if self.ancestors is None:
            self.ancestors = self.rows.unsqueeze(1).repeat(1, self.size)

    def expand(self, beam: int) -> "KVCache":
        """Returns a cache with `beam` rows for each row, which share the written positions."""
        if beam < 1:
            raise CacheError(f"beam={beam} must be at least 1")
        wide = KVCache(
            self.attention,
            layers=self.K.shape[0],
            rows=len(self.rows) * beam,
            capacity=self.capacity,
            rewindable=self.rewindable,
            padded=self.padded,
            dtype=self.K.dtype,
            device=self.K.device,
        )
        if self.bound:
            wide.K[:, ::beam] = self.K
            wide.V[:, ::beam] = self.V
            wide.lengths.copy_(self.lengths.repeat_interleave(beam))
        self.share()
        assert self.ancestors is not None
        wide.ancestors = self.ancestors.repeat_interleave(beam, dim=0) * beam
        wide.bound, wide._rewound, wide._searched = self.bound, self._rewound, self._searched
        return wide

    def _check_integers(self, name: str, T: Tensor) -> None:
        """Raises ShapeError unless T has an integer per row, on the device of the cache."""
        device = self.rows.device
        wrong = T.shape != self.rows.shape or T.dtype not in (torch.int64, torch.int32)
        if wrong or T.device != device:
            raise ShapeError(
                f"{name} must be integers [{len(self.rows)}] on {device}, not {T.dtype} "
                f"{list(T.shape)} on {T.device}"
            )

    def _check_counts(self, counts: Tensor, n: int) -> None:
        self._check_integers("counts", counts)
        if counts.device.type == "cpu":  # elsewhere, reading the values would wait for the device
            if bool(((counts < 0) | (counts > n)).any()):
                raise CacheError(f"counts must be from 0 to {n}, the reserved positions")
            shared = self.ancestors if self.is_ring else None
            # the longer row would overwrite what the shorter one still reads
            if shared is not None and bool((counts[shared] != counts.unsqueeze(1)).any()):
                raise CacheError("rows that share a ring must grow by equal counts")

    def _check_shared(self, r: int) -> None:
        """Raises CacheError if, after rewinding by r, a row would overwrite what another reads."""
        if self.ancestors is None or self.ancestors.device.type != "cpu":
            return
        lengths, slots = self.lengths - r, torch.arange(self.size)
        read = slots < lengths.unsqueeze(1)
        if bool((read & (slots >= lengths[self.ancestors])).any()):
            raise CacheError(
                f"cannot rewind {r} positions: a longer row reads some of them from a shorter one; "
                f"rewind before rows that share K and V have different lengths"
            )

    def _check_capacity(self, more: Tensor) -> None:
        """Raises CacheFull if rows cannot grow by `more` [b]; waits for the device.

        It is called only if the host's bound is too large, which may be loose.
        """
        needed = int((self.lengths + more).max())
        if needed > self.capacity:
            raise CacheFull(
                f"position {needed - 1} exceeds capacity {self.capacity}; start with "
                f"max_length={needed} or more"
            )

    def _visibility(self, positions: Tensor) -> Visibility:
        """What queries at `positions` [b, n] see of the memory that `append` returns."""
        window, n = self.attention.window, positions.shape[1]
        if self.is_ring and n > 1:
            before = torch.cat([self._slot_positions(self.lengths - 1), positions], dim=1)
            return Visibility(True, window, query_positions=positions, memory_positions=before)
        if self.is_ring and self.rewindable:
            after = self._slot_positions(self.lengths)[:, : self.readable(1)]
            return Visibility(True, window, query_positions=positions, memory_positions=after)
        if n > 1 or (window is not None and window < self.size):
            return Visibility(True, window, query_positions=positions)
        # one query sees everything written, including itself; in a ring, that is the window
        return Visibility(lengths=(self.lengths + 1).clamp(max=self.size))

    def _slot_positions(self, newest: Tensor) -> Tensor:
        """Returns the position in each slot of a ring [b, size] if newest [b] was written last.

        It is negative for an unused slot. For a slot whose position was rewound, it is an earlier
        position outside the window.
        """
        slots = torch.arange(self.size, device=newest.device)
        return newest.unsqueeze(1) - (newest.unsqueeze(1) - slots) % self.size

    def _with_ancestors(
        self, visibility: Visibility, slots: Tensor, counts: Tensor | None, n: int
    ) -> Visibility:
        """Adds the ancestor table to `visibility`; each row becomes the owner of its `slots`."""
        if self.ancestors is None:
            return visibility
        own = self.rows.unsqueeze(1)
        table = self.ancestors[:, : self.readable(n)]
        if self.is_ring and n > 1:
            table = torch.cat([self.ancestors, own.expand(-1, n)], dim=1)
        written = own.expand_as(slots)
        if counts is not None:
            written = torch.where(counts.unsqueeze(1) > 0, written, self.ancestors[own, slots])
        self.ancestors[own, slots] = written
        return dataclasses.replace(visibility, ancestors=table)
