"""§2.4: the KV cache, with fixed shapes.

One `KVCache` holds K and V of all decoder layers, allocated once: padded to `capacity`, or for
local attention a ring of `window` slots, where position p is in slot p mod window. Lengths and
positions are on the device, and a step does not synchronize with it, so a CUDA graph can capture
the step. The host keeps an upper bound of the lengths, to raise an error before a write is lost.

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
from writehead.errors import CacheError, CacheFull, ShapeError, WriteheadError
from writehead.kernels import Visibility


def check_integers(
    name: str,
    T: object,
    shape: Sequence[int],
    device: torch.device,
    *,
    least: int = 0,
    most: int,
    error: type[WriteheadError] = ShapeError,
) -> None:
    """Raises ShapeError unless T is an integer tensor of this shape on this device.

    On the CPU, also raises `error` if a value is out of range; elsewhere, the check would be slow.
    """
    if not isinstance(T, Tensor):
        raise ShapeError(f"{name} must be a tensor, not {type(T).__name__}; use torch.tensor")
    expected, actual = list(shape), list(T.shape)
    if actual != expected or T.device != device or T.dtype not in (torch.int64, torch.int32):
        raise ShapeError(
            f"{name} must be integers {expected} on {device}, not {T.dtype} {actual} on {T.device}"
        )
    if device.type == "cpu" and not least <= int(T.min()) <= int(T.max()) <= most:
        wrong = int(T.max() if T.min() >= least else T.min())
        raise error(f"{name} must be from {least} to {most}, not {wrong}")


@dataclass(frozen=True, eq=False)
class Reservation:
    """The next n positions of each row: the slots they are written to, and what they attend to."""

    cache: "KVCache"
    positions: Tensor  # [b, n]
    counts: Tensor | None  # [b], positions used of the n; None: all
    rows: Tensor  # [b, 1], or [writes] with counts
    columns: Tensor | None  # [writes], indices into the n; None: the last of each row
    slots: Tensor  # [b, min(n, size)], or [writes]
    visibility: Visibility

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

    def _write(self, stored: Tensor, new: Tensor) -> Tensor:
        to, cache, n = self.reservation, self.reservation.cache, new.shape[2]
        if cache.is_ring and n > 1:
            # the write overwrites positions that the first queries still attend to
            memory = torch.cat([stored, new], dim=2)
        else:
            memory = stored[:, :, : cache.readable(n)]
        if to.columns is None:
            stored[to.rows, :, to.slots] = new[:, :, -to.slots.shape[1] :].transpose(1, 2)
        else:
            stored[to.rows, :, to.slots] = new[to.rows, :, to.columns]
        return memory


class KVCache:
    """K [layers, b, g, size, k] and V [layers, b, g, size, v] of all decoder layers.

    `size` is the capacity, or the window if that is smaller. `lengths` [b] counts the positions
    written to each row. If `padded`, each step reads the whole size, as in the paper's decoder
    (§4.3, footnote).
    """

    def __init__(
        self,
        attention: AttentionConfig,
        *,
        layers: int,
        rows: int,
        capacity: int,
        padded: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        for name, count in (("layers", layers), ("rows", rows), ("capacity", capacity)):
            if count < 1:
                raise CacheError(f"{name}={count} must be at least 1")
        self.attention, self.capacity, self.padded = attention, capacity, padded
        self.size = min(capacity, attention.window or capacity)
        g, k, v = attention.g, attention.k, attention.v
        self.K = torch.zeros(layers, rows, g, self.size, k, dtype=dtype, device=device)
        self.V = torch.zeros(layers, rows, g, self.size, v, dtype=dtype, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.rows = torch.arange(rows, device=device)
        self.growing = torch.ones(rows, dtype=torch.long, device=device)  # 0 if stopped
        self.ancestors: Tensor | None = None  # [b, size], the row in which each slot is stored
        self.bound = 0  # upper bound of `lengths`, known to the host
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
        """Begins a search of up to limits[i] tokens in row i; a cache can be searched once."""
        if self._searched:
            raise CacheError("this state has been searched; start a new one")
        if self.bound + max(limits) > self.capacity:
            self._check_capacity(torch.tensor(limits, device=self.lengths.device) * self.growing)
        self._searched = True

    def clear(self, length: int = 0) -> None:
        """Sets all lengths in place, so that a step can be repeated or replayed for timing."""
        self.lengths.fill_(length)
        self.growing.fill_(1)
        self.bound = length
        self._searched = False

    def reserve(self, n: int, counts: Tensor | None = None) -> Reservation:
        """Reserves the next n positions of each row, or the first counts[i] of them in row i.

        A ring keeps the last `size` positions of each row. Raises CacheFull beyond the capacity.
        """
        if n < 1:
            raise CacheError(f"cannot reserve {n} positions; reserve at least 1")
        if counts is not None:
            check_integers("counts", counts, self.rows.shape, self.rows.device, most=n)
            if self.ancestors is not None:
                raise CacheError("rows that share K and V must grow by equal counts; omit counts")
        if self.bound + n > self.capacity:
            self._check_capacity(n * self.growing if counts is None else counts)
        steps = torch.arange(n, device=self.rows.device)
        start = self.lengths.unsqueeze(1)
        if counts is None:
            # a stopped row overwrites its last slots
            positions = start.clamp(max=self.capacity - n) + steps  # [b, n]
            rows, columns, written = self.rows.unsqueeze(1), None, positions[:, -self.size :]
        else:
            positions, ends = start + steps, counts.unsqueeze(1)
            used = (steps < ends) & (steps >= ends - self.size)
            rows, columns = used.nonzero(as_tuple=True)
            written = positions[rows, columns]
        slots = written % self.size
        visibility = self._visibility(positions)
        if self.ancestors is not None:
            visibility = dataclasses.replace(visibility, ancestors=self._own(slots, n))
        return Reservation(self, positions, counts, rows, columns, slots, visibility)

    def advance(self, reservation: Reservation) -> None:
        """Adds the reserved positions to the lengths."""
        n, counts = reservation.positions.shape[1], reservation.counts
        self.lengths += n * self.growing if counts is None else counts
        self.bound = min(self.bound + n, self.capacity)

    def stop(self, rows: Tensor) -> None:
        """Stops the rows where `rows` [b] is true; the others can still use the whole capacity.

        The content of a stopped row and the logits of its next steps are undefined.
        """
        self.growing.masked_fill_(rows, 0)

    def reorder(self, rows: Tensor) -> None:
        """Makes row i continue row rows[i] by updating the ancestor table, without moving K and V.

        Rows must have equal lengths; otherwise one could overwrite what another still reads.
        """
        shape, device = self.rows.shape, self.rows.device
        check_integers("rows", rows, shape, device, most=len(self.rows) - 1)
        if device.type == "cpu" and not torch.equal(self.lengths[rows], self.lengths):
            raise CacheError("rows of different lengths cannot be exchanged")
        ancestors = self.share()
        ancestors.copy_(ancestors[rows])

    def share(self) -> Tensor:
        """Returns the ancestor table; creates it if needed, which no CUDA graph can capture."""
        if self.ancestors is None:
            self.ancestors = self.rows.unsqueeze(1).repeat(1, self.size)
        return self.ancestors

    def expand(self, beam: int) -> "KVCache":
        """Returns a cache with `beam` rows for each row, which share the written positions."""
        if beam < 1:
            raise CacheError(f"beam={beam} must be at least 1")
        wide = KVCache(
            self.attention,
            layers=self.K.shape[0],
            rows=len(self.rows) * beam,
            capacity=self.capacity,
            padded=self.padded,
            dtype=self.K.dtype,
            device=self.K.device,
        )
        if self.bound:
            wide.K[:, ::beam] = self.K
            wide.V[:, ::beam] = self.V
            wide.lengths.copy_(self.lengths.repeat_interleave(beam))
        wide.ancestors = self.share().repeat_interleave(beam, dim=0) * beam
        wide.bound, wide._searched = self.bound, self._searched
        return wide

    def _check_capacity(self, more: Tensor) -> None:
        """Raises CacheFull if rows cannot grow by `more` [b]; waits for the device."""
        needed = int((self.lengths + more).max())
        if needed > self.capacity:
            raise CacheFull(
                f"position {needed - 1} exceeds capacity {self.capacity}; start with "
                f"max_length={needed} or more"
            )

    def _visibility(self, positions: Tensor) -> Visibility:
        """Returns what queries at `positions` [b, n] see of the memory that `append` returns."""
        if positions.shape[1] == 1:  # one query sees everything written, including itself
            return Visibility(lengths=(self.lengths + 1).clamp(max=self.size))
        memory = None
        if self.is_ring:
            slots, newest = torch.arange(self.size, device=positions.device), self.lengths - 1
            past = newest.unsqueeze(1) - (newest.unsqueeze(1) - slots) % self.size  # < 0 if unused
            memory = torch.cat([past, positions], dim=1)
        window = self.attention.window
        return Visibility(True, window, query_positions=positions, memory_positions=memory)

    def _own(self, slots: Tensor, n: int) -> Tensor:
        """Makes each row own its `slots`; returns the ancestors of the memory to attend to."""
        ancestors, own = self.share(), self.rows.unsqueeze(1)
        table = ancestors[:, : self.readable(n)]
        if self.is_ring and n > 1:
            table = torch.cat([ancestors, own.expand(-1, n)], dim=1)
        ancestors[own, slots] = own.expand_as(slots)
        return table
