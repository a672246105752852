"""What decoding carries from step to step."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from writehead.errors import CacheError
from writehead.model.attention import Memory
from writehead.model.cache import KVCache


@dataclass(frozen=True, eq=False)
class DecoderState:
    """The decoder's own K and V, the encoder's (fixed), and the tokens to feed first.

    A state has `beam` rows for each sentence, next to one another. The encoder's K and V exist
    once a sentence and serve all its beams.
    """

    cache: KVCache
    memories: list[Memory]  # one a layer; empty for a language model
    first: Tensor  # [rows]
    beam: int = 1

    @property
    def rows(self) -> int:
        """How many hypotheses step together: sentences × beam."""
        return len(self.cache.rows)

    @property
    def positions(self) -> Tensor:
        """[rows], where each row's next token will stand."""
        return self.cache.lengths

    @property
    def nbytes(self) -> int:
        """Bytes of all K and V held."""
        return self.cache.nbytes + sum(memory.nbytes for memory in self.memories)

    def expand(self, beam: int) -> "DecoderState":
        """A state with `beam` rows for each of this one's; this one is not to be used again."""
        if self.beam != 1:
            raise CacheError(f"this state has {self.beam} beams already; expand a new one")
        cache = self.cache.expand(beam)
        first = self.first.repeat_interleave(beam)
        return dataclasses.replace(self, cache=cache, first=first, beam=beam)

    def begin(self, limits: Sequence[int]) -> None:
        """Lets a search of up to limits[i] tokens for sentence i begin; a state has room for one.

        It may have been stepped before, but not searched.
        """
        self.cache.begin_search([limit for limit in limits for _ in range(self.beam)])

    def reorder(self, rows: Tensor) -> None:
        """Row i goes on from what was row rows[i], a beam of the same sentence; moves no K or V."""
        sentences = self.cache.rows // self.beam
        fixed = bool(self.memories) and rows.device.type == sentences.device.type == "cpu"
        if fixed and rows.shape == sentences.shape and bool((rows // self.beam != sentences).any()):
            raise CacheError("a row goes on only from a beam of its own sentence")
        self.cache.reorder(rows)

    def stop(self, rows: Tensor) -> None:
        """Rows where `rows` [rows] is true have ended, and take no more room."""
        self.cache.stop(rows)

    def rewind(self, r: int) -> None:
        """Takes back the last r positions of every row."""
        self.cache.rewind(r)
