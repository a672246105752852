"""§2.4: the keys and values that incremental decoding has written so far, with fixed shapes.

One `KVCache` holds K and V of every decoder layer. Its memory is allocated once: padded to
`capacity`, or for local layers a ring of `window` in which position p lies in slot p mod window.
Lengths and positions live on the device and nothing here waits for it, so that a step can be
captured and replayed. The host keeps an upper bound of the lengths, to raise before a write would
be lost.

All layers of one step write to the same positions, so writing takes three moves:

    reservation = cache.reserve(n)                          # where the next n positions go
    K, V, visibility = reservation.layer(i).append(K, V)    # for each layer: write, then attend
    cache.advance(reservation)                              # the positions now count
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
    """The next n positions of each row: where they go, and what their queries will see."""

    cache: "KVCache"
    positions: Tensor  # [b, n]
    counts: Tensor | None  # [b], how many of the n are real; None: all
    slots: Tensor  # [b, n], or the last `size` of them: where K and V are written
    sources: Tensor | None  # [b, n], which of the n goes into each of `slots`; None: in order
    visibility: Visibility

    @property
    def n(self) -> int:
        """How many positions are reserved in each row."""
        return self.positions.shape[1]

    def layer(self, index: int) -> "LayerPast":
        """The past that layer `index` appends to."""
        layers = self.cache.K.shape[0]
        if not 0 <= index < layers:
            raise CacheError(f"there is no layer {index}; this cache has 0 to {layers - 1}")
        return LayerPast(self, self.cache.K[index], self.cache.V[index])


@dataclass(frozen=True, eq=False)
class LayerPast:
    """One layer's share of a reservation."""

    reservation: Reservation
    K: Tensor  # [b, g, size, k]
    V: Tensor  # [b, g, size, v]

    def append(self, K: Tensor, V: Tensor) -> tuple[Tensor, Tensor, Visibility]:
        """Writes K [b, g, n, k] and V [b, g, n, v]; returns the memory to attend to."""
        for name, new, held in (("K", K, self.K), ("V", V, self.V)):
            expected = [held.shape[0], held.shape[1], self.reservation.n, held.shape[3]]
            if list(new.shape) != expected or new.dtype != held.dtype:
                raise ShapeError(
                    f"{name} is {new.dtype} {list(new.shape)}; the cache takes {held.dtype} "
                    f"{expected}"
                )
            if new.device != held.device:
                raise ShapeError(f"{name} is on {new.device} and the cache on {held.device}")
        return self._write(self.K, K), self._write(self.V, V), self.reservation.visibility

    def _write(self, held: Tensor, new: Tensor) -> Tensor:
        """Puts `new` into `held`; returns what the new queries read."""
        cache = self.reservation.cache
        if cache.is_ring and self.reservation.n > 1:
            # the ring forgets while it is written, so the queries read it as it was
            memory = torch.cat([held, new], dim=2)
        else:
            memory = held[:, :, : cache.readable(self.reservation.n)]
        rows, slots = cache.rows.unsqueeze(1), self.reservation.slots  # [b, 1], [b, n]
        held[rows, :, slots] = self._values(held, new)
        return memory

    def _values(self, held: Tensor, new: Tensor) -> Tensor:
        """What goes into each of the reserved slots: [b, n, g, k]."""
        reservation = self.reservation
        if reservation.sources is None or reservation.counts is None:
            return new[:, :, -reservation.slots.shape[1] :].transpose(1, 2)
        rows = reservation.cache.rows.unsqueeze(1)
        # a row with nothing to write puts back what is there
        writes = (reservation.counts > 0).view(-1, 1, 1, 1)
        return torch.where(
            writes, new[rows, :, reservation.sources], held[rows, :, reservation.slots]
        )


class KVCache:
    """Keys and values of all decoder layers.

    K: [layers, b, g, size, k], V: [layers, b, g, size, v]. `size` is the capacity or, where the
    attention has a window, window + `rewindable` if that is less: how far `rewind` may go back in
    a ring, which otherwise keeps nothing that its next query cannot see. `lengths` [b] counts the
    positions each row has written. `padded` makes every read span the whole size, as the paper's
    decoder did (§4.3, footnote): no shape then changes from step to step.
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
        self.growing = torch.ones(rows, dtype=torch.long, device=device)  # 0 where stopped
        self.ancestors: Tensor | None = None  # [b, size], where rows may trade places
        self.bound = 0  # no row is longer: what the host knows of `lengths`
        self._taken_back = 0  # positions that a row wrote, rewound and has not written again
        self._searched = False

    @property
    def is_ring(self) -> bool:
        """Whether slots are written more than once."""
        return self.size < self.capacity

    @property
    def nbytes(self) -> int:
        """Bytes of K and V, as allocated."""
        return self.K.nbytes + self.V.nbytes

    def readable(self, n: int) -> int:
        """How many slots a step of n positions reads: all of them, or those that can be filled."""
        return self.size if self.padded else min(self.size, self.bound + n)

    def begin_search(self, limits: Sequence[int]) -> None:
        """Lets a search feed up to limits[i] tokens to row i, once: it leaves rows as it ends them.

        Raises CacheFull where a row has no room for them.
        """
        if self._searched:
            raise CacheError("this state has been searched; start a new one")
        if self.bound + max(limits) > self.capacity:
            # the bound may be loose where rows differ, so this rare case looks at the lengths
            more = torch.tensor(limits, device=self.lengths.device) * self.growing
            needed = int((self.lengths + more).max())
            if needed > self.capacity:
                raise CacheFull(
                    f"a search of up to {max(limits)} tokens a row needs room for {needed} "
                    f"positions and this state has {self.capacity}; start with "
                    f"max_length={needed} or more, or search for fewer"
                )
        self._searched = True

    def clear(self) -> None:
        """Forgets all that was written, in place: a step captured before goes on from here."""
        self.lengths.zero_()
        self.growing.fill_(1)
        self.bound = self._taken_back = 0
        self._searched = False

    def reserve(self, n: int, counts: Tensor | None = None) -> Reservation:
        """The next n positions of every row; with `counts` [b], only the first counts[i] of row i.

        A ring keeps each row's last `size` positions. Raises CacheFull past the capacity.
        """
        if n < 1:
            raise CacheError(f"{n} positions cannot be reserved; reserve at least 1")
        if counts is not None:
            self._check_counts(counts, n)
        self._check_room(n, counts)
        steps = torch.arange(n, device=self.rows.device)
        start = self.lengths.unsqueeze(1)
        if counts is None:
            start = start.clamp(max=self.capacity - n)  # a stopped row writes where there is room
        positions = start + steps  # [b, n]
        sources = None
        written = positions[:, -self.size :]
        if counts is not None:
            # places past a row's count repeat its last one: the same value into the same slot
            last = (counts - 1).unsqueeze(1)
            sources = steps.clamp(min=last - self.size + 1, max=last).clamp(min=0)
            written = (start + sources).clamp(max=self.capacity - 1)
        slots = written % self.size
        visibility = self._visibility(positions)
        visibility = self._with_ancestors(visibility, slots, counts, n)
        return Reservation(self, positions, counts, slots, sources, visibility)

    def advance(self, reservation: Reservation) -> None:
        """Makes the reserved positions count; the only place where lengths grow."""
        n, counts = reservation.n, reservation.counts
        self.lengths += n * self.growing if counts is None else counts
        self.bound = min(self.bound + n, self.capacity)
        if counts is None:
            self._taken_back = max(0, self._taken_back - n)

    def stop(self, rows: Tensor) -> None:
        """Rows where `rows` [b] is true grow no more, so that others can go on past their room.

        What such a row holds is given up: its next steps mean nothing.
        """
        self.growing.masked_fill_(rows, 0)

    def rewind(self, r: int) -> None:
        """Takes back the last r positions of every row, as if they had not been written."""
        if r < 0:
            raise CacheError(f"{r} positions cannot be rewound; r must not be negative")
        wrapped = self.is_ring and self.bound + self._taken_back > self.size
        if wrapped and self._taken_back + r > self.rewindable:
            raise CacheError(
                f"{r} positions cannot be rewound: a ring of {self.size} keeps "
                f"{self.rewindable - self._taken_back} more than its window; start with "
                f"rewindable={self._taken_back + r} or more"
            )
        shortest = int(self.lengths.min()) if self.lengths.device.type == "cpu" else self.bound
        if r > shortest:
            raise CacheError(f"{r} positions cannot be rewound: a row has only {shortest}")
        self._check_shared(r)
        self.lengths -= r
        self.bound -= r
        self._taken_back += r

    def reorder(self, rows: Tensor) -> None:
        """Row i goes on from what was row rows[i], without moving K and V.

        rows: [b]. A table remembers in whose row each position lies. Rows may trade places only
        with rows of their own length, as the beams of one sentence do: where lengths differ, one
        row would write over what another still reads.
        """
        if rows.shape != self.rows.shape or rows.dtype != torch.long:
            raise ShapeError(
                f"rows is {rows.dtype} {list(rows.shape)}, not torch.int64 [{len(self.rows)}]"
            )
        if rows.device != self.rows.device:
            raise ShapeError(f"rows is on {rows.device} and the cache on {self.rows.device}")
        if rows.device.type == "cpu":  # elsewhere, looking would wait for the device
            if bool(((rows < 0) | (rows >= len(self.rows))).any()):
                raise CacheError(f"rows must be from 0 to {len(self.rows) - 1}")
            if not torch.equal(self.lengths[rows], self.lengths):
                raise CacheError("rows of different lengths cannot trade places")
        self.share()
        assert self.ancestors is not None
        self.ancestors.copy_(self.ancestors[rows])

    def share(self) -> None:
        """Makes the table of ancestors, which a step captured before it would never read."""
        if self.ancestors is None:
            self.ancestors = self.rows.unsqueeze(1).repeat(1, self.size)

    def expand(self, beam: int) -> "KVCache":
        """A cache of `beam` rows for each of these; what was written is kept once for them all."""
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
        ancestors = self.ancestors
        if ancestors is None:
            ancestors = self.rows.unsqueeze(1).expand(-1, self.size)
        wide.ancestors = ancestors.repeat_interleave(beam, dim=0) * beam
        wide.bound, wide._taken_back = self.bound, self._taken_back
        wide._searched = self._searched
        return wide

    def _check_counts(self, counts: Tensor, n: int) -> None:
        if counts.shape != self.rows.shape or counts.dtype not in (torch.int64, torch.int32):
            raise ShapeError(
                f"counts is {counts.dtype} {list(counts.shape)}, not integers [{len(self.rows)}]"
            )
        if counts.device != self.rows.device:
            raise ShapeError(f"counts is on {counts.device} and the cache on {self.rows.device}")
        if counts.device.type == "cpu":  # elsewhere, looking would wait for the device
            if bool(((counts < 0) | (counts > n)).any()):
                raise CacheError(f"counts must be from 0 to {n}, the positions reserved")
            shared = self.ancestors if self.is_ring else None
            # the longer row would write over what the shorter one still reads
            if shared is not None and bool((counts[shared] != counts.unsqueeze(1)).any()):
                raise CacheError("rows that share a ring must grow by equal counts")

    def _check_shared(self, r: int) -> None:
        """Raises where, rewound by r, a row would write over what a longer one still reads."""
        if self.ancestors is None or self.ancestors.device.type != "cpu":
            return  # elsewhere, looking would wait for the device
        lengths, slots = self.lengths - r, torch.arange(self.size)
        read = slots < lengths.unsqueeze(1)
        if bool((read & (slots >= lengths[self.ancestors])).any()):
            raise CacheError(
                f"{r} positions cannot be rewound: a row reads some of them in the place of a "
                f"shorter one; rewind before rows that share K and V grow apart"
            )

    def _check_room(self, n: int, counts: Tensor | None) -> None:
        if self.bound + n <= self.capacity:
            return
        # the bound may be loose where rows differ, so this rare case looks at the lengths
        needed = int((self.lengths + (n * self.growing if counts is None else counts)).max())
        if needed > self.capacity:
            raise CacheFull(
                f"position {needed - 1} is past capacity {self.capacity}; start with "
                f"max_length={needed} or more"
            )

    def _visibility(self, positions: Tensor) -> Visibility:
        """What queries at `positions` [b, n] see of the memory that `append` returns."""
        window = self.attention.window
        n = positions.shape[1]
        if self.is_ring and n > 1:
            before = torch.cat([self._slot_positions(self.lengths - 1), positions], dim=1)
            return Visibility(True, window, query_positions=positions, memory_positions=before)
        if self.is_ring and self.rewindable:
            after = self._slot_positions(self.lengths)[:, : self.readable(1)]
            return Visibility(True, window, query_positions=positions, memory_positions=after)
        if n > 1 or (window is not None and window < self.size):
            return Visibility(True, window, query_positions=positions)
        # one query sees all that is written, itself included; in a ring, that is the window
        return Visibility(lengths=(self.lengths + 1).clamp(max=self.size))

    def _slot_positions(self, newest: Tensor) -> Tensor:
        """The position that each slot of a ring holds if newest [b] is the last: [b, size].

        Negative for a slot not yet written. A slot holding a position that was rewound answers
        with the one before it, which lies outside the window.
        """
        slots = torch.arange(self.size, device=newest.device)
        return newest.unsqueeze(1) - (newest.unsqueeze(1) - slots) % self.size

    def _with_ancestors(
        self, visibility: Visibility, slots: Tensor, counts: Tensor | None, n: int
    ) -> Visibility:
        """`visibility` through the ancestor table, in which `slots` become each row's own."""
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
