"""The state that decoding carries from step to step."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from writehead.errors import CacheError
from writehead.model.attention import Memory
from writehead.model.cache import KVCache


@dataclass(frozen=True, eq=False)
class DecoderState:
    """The decoder's KV cache, the encoder's K and V, and the first token of each row.

    The `beam` rows of a sentence are adjacent, and share the encoder's K and V.
    """

    cache: KVCache
    memories: list[Memory]  # one per layer; empty for a language model
    first: Tensor  # [rows]
    beam: int = 1

    @property
    def rows(self) -> int:
        """Rows per step: sentences × beam."""
        return len(self.cache.rows)

    @property
    def nbytes(self) -> int:
        """Bytes of all K and V."""
        return self.cache.nbytes + sum(M.K.nbytes + M.V.nbytes for M in self.memories)

    def expand(self, beam: int) -> "DecoderState":
        """Returns a state with `beam` rows per row of this one, which must not be used any more."""
        if self.beam != 1:
            raise CacheError(f"this state already has {self.beam} beams; expand one with beam=1")
        cache = self.cache.expand(beam)
        first = self.first.repeat_interleave(beam)
        return dataclasses.replace(self, cache=cache, first=first, beam=beam)

    def begin(self, limits: Sequence[int]) -> None:
        """Begins a search of up to limits[i] tokens for sentence i; see `KVCache.begin_search`."""
        self.cache.begin_search([limit for limit in limits for _ in range(self.beam)])

    def reorder(self, rows: Tensor) -> None:
        """Makes row i continue row rows[i], a beam of the same sentence, without moving K and V."""
        sentences = self.cache.rows // self.beam
        checked = bool(self.memories) and rows.device.type == sentences.device.type == "cpu"
        if checked and rows.shape == sentences.shape and (rows // self.beam != sentences).any():
            raise CacheError("rows[i] must be a beam of the same sentence as row i")
        self.cache.reorder(rows)

    def stop(self, rows: Tensor) -> None:
        """Stops the rows where `rows` [rows] is true; they use no more positions of the cache."""
        self.cache.stop(rows)
