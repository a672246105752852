"""§2.4: the KV cache and the encoder's K and V, with fixed shapes.

A cache is allocated once. For local attention, it is a ring of `window` positions, where position p
is stored at p mod window. Lengths are on the device and a step does not synchronize, so a CUDA
graph can capture it. The host keeps an upper bound of the lengths, to raise an error before the
cache overflows. All layers of a step write to the same positions:

    cache.reserve(n)                            # raises CacheFull beyond the capacity
    for layer in cache.layers():
        attention(X, layer)                     # writes n positions, then attends
    cache.advance(n)                            # increases the lengths
"""

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from writehead.config import AttentionConfig
from writehead.errors import CacheError, CacheFull
from writehead.ops.decode_attention import INVARIANT_POSITIONS, CacheLayer, MemoryLayer, round_up
from writehead.util.tensors import check_integers


class KVCache:
    """K [layers, rows, g, size, k] and V [layers, rows, g, size, v] of all decoder layers.

    `size` is the capacity, or the window if that is smaller. `lengths` [rows] counts the positions
    of each row, and `live` [rows] is 0 for a row that has stopped. The `beam` rows of a sentence
    are adjacent. If `padded`, each step reads all `size` positions, as in the paper (§4.3). If
    `batch_invariant`, a row's results are the same in any batch; see `CacheLayer`.
    """

    def __init__(
        self,
        attention: AttentionConfig,
        *,
        layers: int,
        rows: int,
        capacity: int,
        beam: int = 1,
        padded: bool = False,
        batch_invariant: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        sizes = {"layers": layers, "rows": rows, "capacity": capacity, "beam": beam}
        for name, count in sizes.items():
            if count < 1:
                raise CacheError(f"{name}={count} must be at least 1")
        self.attention, self.capacity, self.beam, self.padded = attention, capacity, beam, padded
        self.batch_invariant = batch_invariant
        size = round_up(capacity, INVARIANT_POSITIONS) if batch_invariant else capacity
        is_ring = attention.window is not None and attention.window < capacity
        self.window = attention.window if is_ring else None
        self.size = self.window or size
        g, k, v = attention.g, attention.k, attention.v
        self.K = torch.zeros(layers, rows, g, self.size, k, dtype=dtype, device=device)
        self.V = torch.zeros(layers, rows, g, self.size, v, dtype=dtype, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.live = torch.ones(rows, dtype=torch.long, device=device)
        self.ancestors = self._new_ancestors()
        self.bound = 0  # upper bound of `lengths`, known to the host
        self.searched = False

    def _new_ancestors(self) -> Tensor | None:
        """Returns the table of the beam that holds each position of a row; None with one beam."""
        if self.beam == 1:
            return None
        return torch.zeros(self.rows, self.size, dtype=torch.int32, device=self.lengths.device)

    @property
    def rows(self) -> int:
        """Rows per step: sentences × beam."""
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        """Allocated bytes of K and V."""
        return self.K.nbytes + self.V.nbytes

    def layers(
        self, slots: Tensor | None = None, counts: Tensor | None = None, bias: Tensor | None = None
    ) -> list[CacheLayer]:
        """Returns the context of each layer in one step of the sentences in `slots`, or of all."""
        rows = self.lengths, self.live, self.beam, slots, self.padded, min(self.bound, self.size)
        shared: dict[str, Any] = {}
        options = *rows, shared, self.batch_invariant, self.ancestors, self.window, counts, bias
        return [CacheLayer(self.K[i], self.V[i], *options) for i in range(len(self.K))]

    def clear(self, length: int = 0) -> None:
        """Sets all lengths in place, so that a step can be repeated or replayed for timing."""
        self.lengths.fill_(length)
        self.live.fill_(1)
        self.bound = length
        self.searched = False

    def reserve(self, n: int, counts: Tensor | None = None) -> None:
        """Raises CacheFull unless n more positions fit, or the first counts[i] of them in row i."""
        if n < 1:
            raise CacheError(f"cannot reserve {n} positions; reserve at least 1")
        if counts is not None:
            check_integers("counts", counts, self.lengths.shape, self.lengths.device, most=n)
        if self.beam > 1 and (n > 1 or counts is not None):
            raise CacheError("beams grow by one position per step; pass n=1 and no counts")
        self.check_capacity(n, n if counts is None else counts)

    def advance(self, n: int, counts: Tensor | None = None) -> None:
        """Adds n, or counts[i] for row i, to the lengths of live rows."""
        if self.ancestors is not None:
            own = torch.arange(self.rows, device=self.lengths.device) % self.beam
            newest = (self.lengths % self.size).unsqueeze(1)
            self.ancestors.scatter_(1, newest, own.unsqueeze(1).to(torch.int32))
        self.lengths += (n if counts is None else counts) * self.live
        self.bound = min(self.bound + n, self.capacity)

    def reorder(self, rows: Tensor) -> None:
        """Makes row i continue row rows[i], a beam of the same sentence; does not move K and V."""
        device = self.lengths.device
        check_integers("rows", rows, self.lengths.shape, device, most=self.rows - 1)
        sentences = torch.arange(self.rows, device=device) // self.beam
        if device.type == "cpu" and (rows // self.beam != sentences).any():
            raise CacheError("rows[i] must be a beam of the same sentence as row i")
        if self.ancestors is not None:
            self.ancestors.copy_(self.ancestors[rows])

    def expand(self, beam: int) -> "KVCache":
        """Returns a cache with `beam` rows per row of this one; they share its positions."""
        if beam < 1:
            raise CacheError(f"beam={beam} must be at least 1")
        if self.beam != 1:
            raise CacheError(f"this cache already has {self.beam} beams; expand one with beam=1")
        wide = copy.copy(self)
        wide.beam = beam
        wide.K, wide.V = (T.repeat_interleave(beam, dim=1) for T in (self.K, self.V))
        wide.lengths, wide.live = (T.repeat_interleave(beam) for T in (self.lengths, self.live))
        wide.ancestors = wide._new_ancestors()
        return wide

    def check_capacity(self, most: int, more: int | Tensor) -> None:
        """Raises CacheFull if live rows cannot grow by `more` positions, each at most `most`."""
        if self.bound + most <= self.capacity:  # known without waiting for the device
            return
        needed = int((self.lengths + more * self.live).max())
        if needed > self.capacity:
            raise CacheFull(
                f"position {needed - 1} exceeds capacity {self.capacity}; start with "
                f"max_length={needed} or more"
            )


@dataclass(eq=False)
class EncoderMemory:
    """The encoder's K [layers, sentences, g, m, k] and V [layers, sentences, g, m, v].

    On a GPU, the heads of a position are adjacent in memory, as the projection writes them; on a
    CPU, the positions of a head are, for products of all heads at once.
    """

    K: Tensor
    V: Tensor
    lengths: Tensor  # [sentences]
    batch_invariant: bool = False  # see `MemoryLayer`
    bound: int | None = None  # upper bound of `lengths`, known to the host

    def write(self, KV: Sequence[tuple[Tensor, Tensor]], rows: Tensor, positions: Tensor) -> None:
        """Writes K [b, g, n, k] and V [b, g, n, v] of each layer.

        `rows` and `positions`, which broadcast to b × n elements, say where each vector goes.
        """
        places = (rows * self.K.shape[3] + positions).flatten()
        for i, both in enumerate(KV):
            for own, new in zip((self.K[i], self.V[i]), both, strict=True):
                own, new = own.transpose(1, 2), new.transpose(1, 2)  # [sentences, m, g, k]
                if own.device.type == "cpu":
                    own[rows, positions] = new
                else:  # the same, faster
                    own.flatten(0, 1).index_copy_(0, places, new.flatten(0, 1))

    def layers(self, cache: KVCache, slots: Tensor | None = None) -> list[MemoryLayer]:
        """Returns the memory of each layer in one step of the sentences in `slots`, or of all."""
        rows = self.lengths, cache.live, cache.beam, slots, cache.padded, self.bound
        shared: dict[str, Any] = {}
        options = *rows, shared, self.batch_invariant
        return [MemoryLayer(self.K[i], self.V[i], *options) for i in range(len(self.K))]


@dataclass(frozen=True, eq=False)
class DecoderState:
    """The state of decoding between steps: the KV cache and the encoder's K and V."""

    cache: KVCache
    memory: EncoderMemory | None  # None for a language model
    first: Tensor  # [rows], the first token to feed to each row

    @property
    def beam(self) -> int:
        """Rows per sentence, which are adjacent and share the encoder's K and V."""
        return self.cache.beam

    @property
    def nbytes(self) -> int:
        """Bytes of all K and V."""
        memory = self.memory
        return self.cache.nbytes + (memory.K.nbytes + memory.V.nbytes if memory else 0)

    def expand(self, beam: int) -> "DecoderState":
        """Returns a state with `beam` rows per row of this one; do not use this one afterwards."""
        cache = self.cache.expand(beam)  # checks beam
        return dataclasses.replace(self, cache=cache, first=self.first.repeat_interleave(beam))

    def begin(self, limits: Sequence[int]) -> None:
        """Begins a search of up to limits[i] tokens for sentence i; raises if it does not fit."""
        if self.cache.searched:
            raise CacheError("this state has been searched; start a new one")
        rows = torch.tensor(limits, device=self.first.device).repeat_interleave(self.beam)
        self.cache.check_capacity(max(limits), rows)
        self.cache.searched = True

    def reorder(self, rows: Tensor) -> None:
        """Makes row i continue row rows[i], a beam of the same sentence; does not move K and V."""
        self.cache.reorder(rows)

    def stop(self, rows: Tensor) -> None:
        """Stops the rows where `rows` is true: they do not grow, and their logits are undefined."""
        self.cache.live.masked_fill_(rows, 0)
