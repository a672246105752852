"""Greedy and beam search as captured CUDA graphs: one launch a step, and no word with the host.

The step of the model, the choice of tokens and the beams' new order are one graph for each shape
(`buffers.Shape`). Shapes are rounded up so that few graphs serve all batches. The host launches
steps ahead and looks, some steps late, at which sentences still grow; when half of them are done,
the others move to a smaller graph. What is found is what `search.greedy` and `beam.beam_search`
find: they are the reference that tests compare with.
"""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from writehead.config import DecodeConfig
from writehead.decoding.buffers import Buffers, Shape
from writehead.decoding.search import (
    Constraints,
    Hypothesis,
    length_penalty,
    make_hypothesis,
)
from writehead.errors import TokenError
from writehead.kernels.choose import NEVER, choose_beam, choose_greedy, survey
from writehead.model import LanguageModel, TranslationModel
from writehead.model.fused import FusedDecoder

LOOK = 8  # steps between two looks at what still grows
FEWEST = 16  # sentences from which on it pays to move to a smaller graph
SHARE = 0.5  # of the device's memory that caches of captured graphs may hold together
UNIT = 64  # positions that memories and caches are rounded up to


class GraphDecoder:
    """Decodes batches by a model whose weights stay as they are.

    Ids from `vocabulary` on are never chosen. `padded` reads whole caches whatever their lengths,
    as the paper's decoder did.
    """

    def __init__(
        self,
        model: TranslationModel | LanguageModel,
        vocabulary: int | None = None,
        *,
        padded: bool = False,
    ) -> None:
        self.model = model
        self.vocabulary = vocabulary or model.config.vocabulary
        self.padded = padded
        self.fused = FusedDecoder(model)
        self._captured: OrderedDict[Shape, Captured] = OrderedDict()
        self._budget = float("inf")
        if model.device.type == "cuda":
            self._budget = SHARE * torch.cuda.get_device_properties(model.device).total_memory

    @torch.no_grad()
    def search(
        self,
        tokens: Tensor,
        lengths: Sequence[int],
        capacity: int,
        config: DecodeConfig,
        *,
        end: int,
        prefixes: Sequence[Sequence[int]] | None = None,
        max_lengths: Sequence[int] | None = None,
    ) -> list[list[Hypothesis]]:
        """The n_best hypotheses of each sentence, best first.

        tokens: [b, m], sources or prompts, padded on the right to `lengths`. A row's cache needs
        `capacity` positions.
        """
        b = len(tokens)
        constraints = Constraints.make(config, end, prefixes, max_lengths, b, tokens.device)
        largest = max(end, int(constraints.prefix.max()) if constraints.prefix.numel() else 0)
        if largest >= self.vocabulary:
            raise TokenError(f"token {largest} is outside the vocabulary of {self.vocabulary}")
        captured = self.start(tokens, lengths, capacity, config, constraints)
        return self._run(captured, b, constraints, config)

    def start(
        self,
        tokens: Tensor,
        lengths: Sequence[int],
        capacity: int,
        config: DecodeConfig,
        constraints: Constraints,
    ) -> "Captured":
        """A captured step whose buffers hold the batch, ready for its first token."""
        b, m = tokens.shape
        is_translation = isinstance(self.model, TranslationModel)
        shape = Shape(
            sentences=_round_rows(b),
            beam=config.beam,
            source=_round_up(m, self.model.config.source_positions) if is_translation else 0,
            capacity=_round_up(capacity, self.model.config.target_positions),
            n_best=config.n_best,
            alpha=config.alpha,
            padded=self.padded,
        )
        captured = self._capture(shape, constraints.end)
        buffers = captured.buffers
        known = torch.tensor(lengths, device=tokens.device)
        if isinstance(self.model, TranslationModel):
            assert buffers.memories is not None
            buffers.memories.lengths.fill_(1)
            mask = known if min(lengths) < m else None
            self.fused.encode(tokens, mask, buffers.memories)
            first = torch.full((b,), self.model.config.start, device=tokens.device)
            buffers.begin(first, None, constraints)
        else:
            state = self.model.start(tokens, shape.capacity, prompt_lengths=known)
            n = b * shape.beam
            buffers.cache.K[:, : n : shape.beam] = state.cache.K
            buffers.cache.V[:, : n : shape.beam] = state.cache.V
            buffers.begin(state.first, known - 1, constraints)
        return captured

    def _run(
        self, captured: "Captured", b: int, constraints: Constraints, config: DecodeConfig
    ) -> list[list[Hypothesis]]:
        """Steps until all b sentences are done, in fewer and fewer rows."""
        found: list[list[Hypothesis]] = [[] for _ in range(b)]
        places = list(range(b))  # which sentence stands where
        watch = Watch(captured.buffers)
        for t in range(constraints.longest):
            captured.step()
            if t + 1 == constraints.longest or not watch.is_due(t + 1):
                continue
            growing = [i for i in watch.look() if i < len(places)]
            if not growing:
                break
            smaller = _round_rows(len(growing))
            if len(places) >= FEWEST and smaller <= captured.buffers.shape.sentences // 2:
                done = sorted(set(range(len(places))) - set(growing))
                self._collect(captured.buffers, done, places, found, constraints, config)
                captured = self._move(captured, growing, smaller, constraints.end)
                places = [places[i] for i in growing]
                watch = Watch(captured.buffers)
        left = list(range(len(places)))
        self._collect(captured.buffers, left, places, found, constraints, config)
        return found

    def _move(
        self, captured: "Captured", growing: list[int], sentences: int, end: int
    ) -> "Captured":
        before = captured.buffers
        values = {**vars(before.shape), "sentences": sentences}
        smaller = self._capture(Shape(**values), end)
        before.move(torch.tensor(growing, device=before.rows.tokens.device), smaller.buffers)
        return smaller

    def _collect(
        self,
        buffers: Buffers,
        done: list[int],
        places: list[int],
        found: list[list[Hypothesis]],
        constraints: Constraints,
        config: DecodeConfig,
    ) -> None:
        """Puts what was found for the sentences at `done` where they belong."""
        if not done:
            return
        index = torch.tensor(done, device=buffers.rows.tokens.device)
        read = _read_greedy if config.beam == 1 else _read_beams
        for i, hypotheses in zip(done, read(buffers, index, constraints, config), strict=True):
            found[places[i]] = hypotheses

    def _capture(self, shape: Shape, end: int) -> "Captured":
        """The captured step of a shape, made if there is none; the longest unused give way."""
        captured = self._captured.get(shape)
        if captured is None or captured.end != end:
            captured = Captured(self.fused, shape, self.vocabulary, end)
        self._captured[shape] = captured
        self._captured.move_to_end(shape)
        while sum(one.buffers.nbytes for one in self._captured.values()) > self._budget:
            if len(self._captured) == 1:
                break
            self._captured.popitem(last=False)
        return captured


class Captured:
    """One step over buffers of its own: on a GPU one launch, elsewhere as it is written."""

    def __init__(self, fused: FusedDecoder, shape: Shape, vocabulary: int, end: int) -> None:
        model = fused.model
        self.end = end
        self.buffers = Buffers(shape, model.config, vocabulary, model.dtype, model.device)
        self._fused, self._vocabulary = fused, vocabulary
        self._graph: torch.cuda.CUDAGraph | None = None
        if model.device.type == "cuda":
            self._take()  # nothing grows yet: this compiles, and changes nothing that matters
            torch.cuda.synchronize(model.device)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._take()

    def step(self) -> None:
        """Feeds the tokens there are, and chooses the next."""
        if self._graph is None:
            self._take()
        else:
            self._graph.replay()

    @torch.no_grad()
    def _take(self) -> None:
        buffers, shape = self.buffers, self.buffers.shape
        limits, rows, found = buffers.limits, buffers.rows, buffers.found
        logits = self._fused.step(rows, buffers.cache, buffers.memories, limits.clock)
        survey(logits, found, vocabulary=self._vocabulary)
        if shape.beam == 1:
            choose_greedy(
                logits,
                found,
                limits,
                rows,
                buffers.history,
                buffers.log_p,
                vocabulary=self._vocabulary,
                end=self.end,
            )
            return
        assert buffers.cache.ancestors is not None
        choose_beam(
            logits,
            found,
            limits,
            rows,
            buffers.history,
            buffers.live,
            buffers.pool,
            buffers.cache.ancestors,
            vocabulary=self._vocabulary,
            end=self.end,
            n_best=shape.n_best,
            alpha=shape.alpha,
        )


class Watch:
    """Which sentences still grow, as of some steps ago, so that nobody waits to know.

    A sentence that has ended never grows again: an old answer is a safe one.
    """

    def __init__(self, buffers: Buffers) -> None:
        self._growing, self._beam = buffers.rows.growing, buffers.shape.beam
        self._event: torch.cuda.Event | None = None
        self._seen = torch.empty(0)

    def is_due(self, t: int) -> bool:
        """Whether to look after t steps."""
        return t % LOOK == 0 or self._growing.device.type != "cuda"

    def look(self) -> list[int]:
        """The sentences that grew when this was asked the last time; asks anew."""
        now = self._growing[:: self._beam]
        if now.device.type != "cuda":
            return _places(now)
        before = list(range(len(now)))
        if self._event is None:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._seen = torch.empty(now.shape, dtype=now.dtype, pin_memory=True)
        else:
            self._event.synchronize()
            before = _places(self._seen)
        self._seen.copy_(now, non_blocking=True)
        self._event.record()
        return before


def _places(growing: Tensor) -> list[int]:
    places: list[int] = growing.nonzero().flatten().tolist()
    return places


def _read_greedy(
    buffers: Buffers, sentences: Tensor, constraints: Constraints, config: DecodeConfig
) -> list[list[Hypothesis]]:
    """What greedy search found for some sentences."""
    tokens = buffers.history.tokens[:, sentences].t().tolist()
    totals = buffers.log_p[sentences]
    limits = buffers.limits.max_lengths[sentences].tolist()
    found = []
    lengths = []
    for row, limit in zip(tokens, limits, strict=True):
        ended = constraints.end in row[:limit]
        lengths.append(row.index(constraints.end) + 1 if ended else limit)
        found.append((row, ended))
    scores = (totals.cpu() / length_penalty(torch.tensor(lengths), config.alpha)).tolist()
    return [
        [make_hypothesis(row, length, score, log_p, ended)]
        for (row, ended), length, score, log_p in zip(
            found, lengths, scores, totals.tolist(), strict=True
        )
    ]


def _read_beams(
    buffers: Buffers, sentences: Tensor, constraints: Constraints, config: DecodeConfig
) -> list[list[Hypothesis]]:
    """The n_best of some sentences, each followed back through its parents."""
    pool = buffers.pool
    scores, log_p, steps, rows, last, ended = (
        T[sentences, : config.n_best].cpu().numpy()
        for T in (pool.scores, pool.log_p, pool.steps, pool.rows, pool.tokens, pool.ended)
    )
    taken = int(buffers.limits.clock)
    tokens = buffers.history.tokens[:taken].cpu().numpy()
    parents = buffers.history.parents[:taken].cpu().numpy()
    texts = np.zeros((*scores.shape, taken), dtype=np.int64)
    np.put_along_axis(texts, steps[..., None].astype(np.int64), last[..., None], axis=2)
    for t in reversed(range(taken)):
        is_before = t < steps
        at = np.where(is_before, rows, 0)
        texts[..., t] = np.where(is_before, tokens[t, at], texts[..., t])
        rows = np.where(is_before, parents[t, at], rows)
    return [
        [
            make_hypothesis(
                texts[i, j].tolist(),
                int(steps[i, j]) + 1,
                float(scores[i, j]),
                float(log_p[i, j]),
                bool(ended[i, j]),
            )
            for j in range(scores.shape[1])
            if j == 0 or scores[i, j] != NEVER  # a sentence without any is an error, raised there
        ]
        for i in range(len(scores))
    ]


def _round_rows(rows: int) -> int:
    """The next of 1, 16, 24, 32, 48, 64, …: at most a third is added once it is many.

    From 2 to 16 rows take the same time, since a step is then the reading of the weights.
    """
    if rows == 1:
        return 1
    size = 16
    while size < rows:
        if size + size // 2 >= rows:
            return size + size // 2
        size *= 2
    return size


def _round_up(positions: int, most: int) -> int:
    return min(most, -(-positions // UNIT) * UNIT)
