"""Greedy and beam search as captured CUDA graphs: one launch a step, and no word with the host.

The step of the model, the choice of tokens and the beams' new order are one graph for each shape
(`buffers.Shape`). Shapes are rounded up so that few graphs serve all batches. The host launches
steps ahead and looks, some steps late, at which sentences still grow; when half of them are done,
the others move to a smaller graph. What is found is what `search.greedy` and `beam.beam_search`
find: they are the reference that tests compare with.
"""

import dataclasses
import functools
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from writehead import cost
from writehead.config import DecodeConfig
from writehead.decoding.buffers import Buffers, Shape, cache_bytes
from writehead.decoding.captured import Captured, launching_on
from writehead.decoding.reading import Found, FoundBeams, FoundGreedy, Places, Watch
from writehead.decoding.search import Constraints, Hypothesis
from writehead.errors import ConfigError, OutOfRoom, TokenError
from writehead.kernels.launch import rehearse
from writehead.model import LanguageModel, TranslationModel
from writehead.model.fused import FusedDecoder, largest_beam

FEWEST = 16  # sentences from which on it pays to move to a smaller graph
SOON = 8  # steps from the end, from which on it does not
SHARE = 0.5  # of the device's memory that caches of captured graphs may hold together
MOST_GRAPHS = 64  # shapes: their graphs take some memory besides the caches
PROMPTS = 1 << 15  # tokens of prompts that are read together
UNIT = 64  # positions that memories and caches are rounded up to


class GraphDecoder:
    """Decodes batches by a model whose weights stay as they are.

    Ids from `vocab_size` on are never chosen. `padded` reads whole caches whatever their lengths,
    as the paper's decoder did. One search runs at a time; others wait.
    """

    def __init__(
        self,
        model: TranslationModel | LanguageModel,
        vocab_size: int | None = None,
        *,
        padded: bool = False,
    ) -> None:
        self.model = model
        self.vocab_size = vocab_size or model.config.vocab_size
        self.padded = padded
        self.fused = FusedDecoder(model)
        self.largest_beam = largest_beam(model)
        self._has_encoded = False
        self._captured: OrderedDict[Shape, Captured] = OrderedDict()
        self._lock = threading.Lock()
        self._budget = float("inf")
        self._pool: Any = None  # graphs take turns, and share their workspace
        if model.device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
            self._budget = SHARE * torch.cuda.get_device_properties(model.device).total_memory

    @torch.no_grad()
    def search(
        self,
        tokens: Tensor,
        lengths: Sequence[int],
        capacity: int,
        config: DecodeConfig,
        *,
        eos: int,
        prefixes: Sequence[Sequence[int]] | None = None,
        max_lengths: Sequence[int] | None = None,
    ) -> Sequence[list[Hypothesis]]:
        """The n_best hypotheses of each sentence, best first, made when the first is asked for.

        tokens: [b, m], sources or prompts, padded on the right to `lengths`. A row's cache needs
        `capacity` positions. Raises OutOfRoom where the device's memory is too small.
        """
        b, m = tokens.shape
        constraints = Constraints.make(config, eos, prefixes, max_lengths, b, tokens.device)
        largest = max(eos, int(constraints.prefix.max()) if constraints.prefix.numel() else 0)
        if largest >= self.vocab_size:
            raise TokenError(f"token {largest} is outside the vocabulary of {self.vocab_size}")
        with self._lock:
            for _ in range(2):  # other shapes may be in the way of the first attempt
                found = self._attempt(tokens, lengths, capacity, config, constraints)
                if found is not None:
                    return found
                self._forget()  # here, where nothing of the attempt is held any more
        fits = self.largest_batch(m, capacity, config.width)
        raise OutOfRoom(
            f"{b} sentences of {m} + {capacity} tokens with beam={config.width} do not fit the "
            f"device's memory, and about {fits} do; decode fewer at once"
        )

    def _attempt(
        self,
        tokens: Tensor,
        lengths: Sequence[int],
        capacity: int,
        config: DecodeConfig,
        constraints: Constraints,
    ) -> Sequence[list[Hypothesis]] | None:
        """What is found for each sentence; None where the memory ran out."""
        try:
            captured = self.start(tokens, lengths, capacity, config, constraints)
            return self.run(captured, len(tokens), constraints, config)
        except torch.OutOfMemoryError:
            return None

    def largest_batch(self, source: int, capacity: int, beam: int) -> int:
        """How many sentences fit the device's memory by what `explain` counts, if nobody else does.

        source: tokens of each source, or prompt. capacity: positions of each row's cache.
        """
        config, device = self.model.config, self.model.device
        memory = torch.cuda.get_device_properties(device).total_memory
        chip = cost.Chip(str(device), memory, 1.0, 1.0, "this device")
        shape = self._shape(1, source, capacity, DecodeConfig(beam=beam))
        element = self.model.dtype.itemsize
        setting = cost.Setting(1, shape.source, shape.capacity, beam, element=element)
        most = cost.largest_batch(config, setting, chip)
        return max((n for n in range(most, most // 2, -1) if _round_rows(n) <= most), default=most)

    def _forget(self) -> None:
        """Gives back the memory of all captured graphs."""
        self._captured.clear()
        self._pool = torch.cuda.graph_pool_handle()  # of the old one blocks may be left
        torch.cuda.empty_cache()

    def _shape(self, b: int, m: int, capacity: int, config: DecodeConfig) -> Shape:
        """What a batch of b sentences is decoded in."""
        sizes = self.model.config
        is_translation = isinstance(self.model, TranslationModel)
        if is_translation and m > sizes.source_positions:
            raise ConfigError(
                f"a source of {m} tokens is past the {sizes.source_positions} learned"
            )
        if capacity > sizes.target_positions:
            raise ConfigError(
                f"{capacity} positions are past the {sizes.target_positions} that were learned"
            )
        return Shape(
            sentences=_round_rows(b),
            beam=config.width,
            source=_round_up(m, sizes.source_positions) if is_translation else 0,
            capacity=_round_up(capacity, sizes.target_positions),
            # greedy search takes the one there is, whatever they are
            n_best=config.n_best if config.width > 1 else 1,
            alpha=config.alpha if config.width > 1 else 0.0,
            padded=self.padded,
        )

    @torch.no_grad()
    def start(
        self,
        tokens: Tensor,
        lengths: Sequence[int],
        capacity: int,
        config: DecodeConfig,
        constraints: Constraints,
    ) -> Captured:
        """A captured step whose buffers hold the batch, ready for its first token."""
        b, m = tokens.shape
        shape = self._shape(b, m, capacity, config)
        captured = self._capture(shape, constraints.eos)
        buffers = captured.buffers
        known = torch.tensor(lengths, device=tokens.device)
        if isinstance(self.model, TranslationModel):
            encode = functools.partial(captured.encode, tokens, known if min(lengths) < m else None)
            if not self._has_encoded and self.model.device.type == "cuda":
                rehearse(encode)
            encode()
            self._has_encoded = True
            first = torch.full((b,), self.model.config.bos, device=tokens.device)
            captured.begin(first, None, constraints)
        else:
            first = self._read_prompts(tokens, known, buffers)
            captured.begin(first, known - 1, constraints)
        return captured

    def _read_prompts(self, tokens: Tensor, lengths: Tensor, buffers: Buffers) -> Tensor:
        """Puts K and V of prompts [b, m] into the rows of the first beams; the last tokens [b].

        Some rows at a time: what reading takes stays small beside the caches.
        """
        assert isinstance(self.model, LanguageModel)
        (b, m), beam = tokens.shape, buffers.shape.beam
        some, first = max(1, PROMPTS // m), []
        for i in range(0, b, some):
            prompts, known = tokens[i : i + some], lengths[i : i + some]
            state = self.model.start(prompts, m, prompt_lengths=known)
            rows = slice(i * beam, (i + len(prompts)) * beam, beam)
            buffers.cache.K[:, rows, :, : state.cache.size] = state.cache.K
            buffers.cache.V[:, rows, :, : state.cache.size] = state.cache.V
            first.append(state.first)
        return torch.cat(first)

    @torch.no_grad()
    def run(
        self, captured: Captured, b: int, constraints: Constraints, config: DecodeConfig
    ) -> Sequence[list[Hypothesis]]:
        """What is found for the b sentences that `start` made ready, in fewer and fewer rows."""
        if config.width == 1:
            found: Found = FoundGreedy(b, constraints, config.alpha)
        else:
            found = FoundBeams(b, config.n_best, constraints.longest)
        places = np.arange(b)  # which sentence stands where
        watch = Watch(captured.buffers, b)
        may_move = b >= FEWEST
        longest = constraints.longest
        for t in range(1, longest + 1):
            captured.step()
            if t == longest or not watch.is_due(t):
                continue
            growing = watch.look()
            if not growing:
                break
            smaller = _round_rows(len(growing))
            pays = smaller <= captured.buffers.shape.sentences // 2 and longest - t >= SOON
            if not (may_move and pays):
                continue
            moved = self._move(captured, growing, smaller, constraints.eos)
            if moved is None:
                may_move = False
                continue
            done = np.setdiff1d(np.arange(len(places)), growing)
            self._collect(found, places[done], captured, done)
            captured, places = moved, places[growing]
            may_move = len(places) >= FEWEST
            watch = Watch(moved.buffers, len(growing))
        self._collect(found, places, captured, np.arange(len(places)))
        return found

    def _collect(
        self,
        found: Found,
        sentences: Places,
        captured: Captured,
        places: Places,
    ) -> None:
        """Puts what was found for some sentences, at their places in buffers, where it belongs."""
        with launching_on(self.model.device):
            found.put(sentences, captured.buffers, places)

    def _move(
        self, captured: Captured, growing: list[int], smaller: int, eos: int
    ) -> Captured | None:
        """The sentences that grow in a smaller graph; None where the memory has no room for it."""
        before = captured.buffers
        shape = dataclasses.replace(before.shape, sentences=smaller)
        try:
            moved = self._capture(shape, eos)
            before.move(torch.tensor(growing, device=before.rows.tokens.device), moved.buffers)
        except torch.OutOfMemoryError:
            self._captured.pop(shape, None)
            return None
        return moved

    def _capture(self, shape: Shape, eos: int) -> Captured:
        """The captured step of a shape, made if there is none; the longest unused give way."""
        captured = self._captured.pop(shape, None)
        if captured is None or captured.eos != eos:
            wanted = cache_bytes(shape, self.model.config, self.model.dtype)
            self._make_room(wanted)
            captured = Captured(self.fused, shape, self.vocab_size, eos, self._pool)
        self._captured[shape] = captured
        return captured

    def _make_room(self, wanted: int) -> None:
        """Drops the graphs used longest ago until `wanted` more bytes are within the budget."""
        held = sum(one.buffers.nbytes for one in self._captured.values())
        while self._captured and (
            held + wanted > self._budget or len(self._captured) >= MOST_GRAPHS
        ):
            _, oldest = self._captured.popitem(last=False)
            held -= oldest.buffers.nbytes


def _round_rows(rows: int) -> int:
    """The next of 1, 16, 20, 24, 28, 32, 40, …: at most a quarter is added once they are many.

    From 2 to 16 rows take the same time, since a step is then the reading of the weights.
    """
    if rows == 1:
        return 1
    step = max(16, 1 << (rows - 1).bit_length() - 1) // 4
    return max(16, -(-rows // step) * step)


def _round_up(positions: int, most: int) -> int:
    return min(most, -(-positions // UNIT) * UNIT)
