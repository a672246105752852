"""The memory of one captured decoding: fixed shapes, in place from the first step to the last."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from writehead.config import ModelConfig
from writehead.decoding.search import Constraints
from writehead.kernels.beams import Pool
from writehead.kernels.begin import begin_search
from writehead.kernels.choose import Candidates, History, Limits, Rows
from writehead.model.cache import KVCache
from writehead.model.fused import Memories


@dataclass(frozen=True)
class Shape:
    """What a captured step is made for; one that is larger than needed serves as well.

    source: positions of the encoder's memory, 0 for a language model. capacity: positions of a
    row's cache. n_best and alpha are the search's.
    """

    sentences: int
    beam: int
    source: int
    capacity: int
    n_best: int = 1
    alpha: float = 0.0
    padded: bool = False

    @property
    def rows(self) -> int:
        """Hypotheses that step together."""
        return self.sentences * self.beam


def cache_bytes(shape: Shape, config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of K and V that `Buffers` of a shape hold."""
    own, read = config.decoder_attention, config.encoder_attention
    size = shape.capacity if own.window is None else min(shape.capacity, own.window)
    kept = shape.rows * own.kv_size * size + shape.sentences * read.kv_size * shape.source
    return config.decoder_layers * kept * dtype.itemsize


@dataclass(frozen=True, eq=False)
class Mirror:
    """Memory of the host that a device copies to while it works: no copy waits for a new place.

    growing: [sentences], by their first beams. written: as of `Buffers`.
    """

    growing: Tensor
    written: Tensor

    @classmethod
    def make(cls, sentences: int, written: int, *, pinned: bool) -> "Mirror":
        """One of these sizes; only what is `pinned` is copied to without waiting."""
        growing = torch.zeros(sentences, dtype=torch.long, pin_memory=pinned)
        return cls(growing, torch.zeros(written, dtype=torch.int32, pin_memory=pinned))


def split_written(written: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Texts [rows, capacity] and their log-probabilities [rows], of greedy search."""
    rows = len(written) // (capacity + 1)
    return (
        written[: rows * capacity].view(rows, capacity),
        written[rows * capacity :].view(torch.float32),
    )


class Buffers:
    """All that a decoder and a search keep of `shape`, on a device.

    Rows of a sentence are neighbours. A sentence that is not there has rows that do not grow.
    """

    def __init__(
        self,
        shape: Shape,
        config: ModelConfig,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.shape = shape
        b, beam, rows = shape.sentences, shape.beam, shape.rows
        self.cache = KVCache(
            config.decoder_attention,
            layers=config.decoder_layers,
            rows=rows,
            capacity=shape.capacity,
            padded=shape.padded,
            dtype=dtype,
            device=device,
        )
        if beam > 1:
            self.cache.share()
        self._first_beams = (self.cache.rows // beam * beam).unsqueeze(1)  # of each row's sentence
        self.memories: Memories | None = None
        if shape.source:
            read = config.encoder_attention
            self.memories = Memories.make(
                read, config.decoder_layers, b, shape.source, dtype, device
            )

        def integers(*sizes: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(sizes, dtype=dtype, device=device)

        self.X = torch.zeros(rows, config.d, dtype=dtype, device=device)  # to be fed next
        # of each sentence that is to begin: see `place`; zero but between that and `begin`
        self._told = integers(4, b, dtype=torch.long)
        self._min_length = 0  # what the device was told
        tokens = integers(rows, dtype=torch.long)
        self.rows = Rows(tokens, self.cache.lengths, self.cache.growing)
        self.limits = Limits(
            clock=integers(1),
            prefix=integers(b, shape.capacity),
            prefix_lengths=integers(b),
            max_lengths=integers(b),
            min_length=integers(1),
        )
        # beams have a history; greedy search writes in one piece what is to be read at once
        steps, alone = (shape.capacity, 0) if beam > 1 else (0, rows)
        self.history = History(integers(steps, rows), integers(steps, rows))
        self.written = integers(alone * (shape.capacity + 1))
        self.texts, self.log_p = split_written(self.written, shape.capacity)
        self.live = torch.zeros(b, beam, device=device)
        self.pool = Pool(
            scores=torch.zeros(b, beam, device=device),
            log_p=torch.zeros(b, beam, device=device),
            steps=integers(b, beam),
            rows=integers(b, beam, dtype=torch.long),
            tokens=integers(b, beam),
            ended=integers(b, beam),
        )
        self.mirror: Mirror | None = None
        if device.type == "cuda":
            self.mirror = Mirror.make(b, len(self.written), pinned=True)
        self.found = Candidates.make(rows, vocab_size, 1 if beam == 1 else 2 * beam, device)
        self.cache.growing.zero_()

    @property
    def nbytes(self) -> int:
        """Bytes of K and V, which are nearly all."""
        memories = self.memories
        encoder = 0 if memories is None else memories.K.nbytes + memories.V.nbytes
        return self.cache.nbytes + encoder

    def place(self, first: Tensor, lengths: Tensor | None, constraints: Constraints) -> None:
        """Notes sentences, as `Captured.begin` says, that `begin` then begins with."""
        b = len(first)
        told = (first, constraints.prefix_lengths, constraints.max_lengths)
        torch.stack(told, out=self._told[:3, :b])
        if lengths is not None:
            self._told[3, :b] = lengths
        if constraints.min_length != self._min_length:
            self.limits.min_length.fill_(constraints.min_length)
            self._min_length = constraints.min_length
        if constraints.prefix.numel():
            self.limits.prefix[:b, : constraints.prefix.shape[1]] = constraints.prefix

    def begin(self) -> None:
        """Forgets the sentences before, and begins with those that were noted."""
        begin_search(self._told, self.limits, self.rows, self.log_p, self.live, self.pool)
        if self.cache.ancestors is not None:
            self.cache.ancestors.copy_(self._first_beams)

    def move(self, sentences: Tensor, to: "Buffers") -> None:
        """Puts some of the sentences [count] into the first places of other buffers.

        Those have the shape of these but for the number of sentences.
        """
        count, beam = len(sentences), self.shape.beam
        beams = torch.arange(beam, device=sentences.device)
        rows = (sentences.unsqueeze(1) * beam + beams).flatten()
        moved = to.cache.rows[: count * beam]
        shift = moved - rows  # [rows], the same for all beams of a sentence
        n = count * beam
        to.cache.K[:, :n] = self.cache.K[:, rows]
        to.cache.V[:, :n] = self.cache.V[:, rows]
        if self.memories is not None and to.memories is not None:
            to.memories.K[:, :count] = self.memories.K[:, sentences]
            to.memories.V[:, :count] = self.memories.V[:, sentences]
            to.memories.lengths[:count] = self.memories.lengths[sentences]
        to.rows.growing.zero_()
        for ours, theirs in zip(_tensors(self.rows), _tensors(to.rows), strict=True):
            theirs[:n] = ours[rows]
        to.limits.clock.copy_(self.limits.clock)
        to.limits.min_length.copy_(self.limits.min_length)
        to._min_length = self._min_length
        for name in ("prefix", "prefix_lengths", "max_lengths"):
            getattr(to.limits, name)[:count] = getattr(self.limits, name)[sentences]
        to.history.tokens[:, :n] = self.history.tokens[:, rows]
        to.history.parents[:, :n] = self.history.parents[:, rows] + shift
        to.X[:n] = self.X[rows]
        if beam == 1:
            to.texts[:n], to.log_p[:n] = self.texts[rows], self.log_p[rows]
        to.live[:count] = self.live[sentences]
        for ours, theirs in zip(_tensors(self.pool), _tensors(to.pool), strict=True):
            theirs[:count] = ours[sentences]
        to.pool.rows[:count] += shift.view(count, beam)[:, :1]
        if self.cache.ancestors is not None and to.cache.ancestors is not None:
            to.cache.ancestors[:n] = self.cache.ancestors[rows] + shift.unsqueeze(1)


def _tensors(held: Rows | Pool) -> list[Tensor]:
    return [getattr(held, field.name) for field in fields(held)]
