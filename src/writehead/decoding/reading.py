"""What a search on the device finds, read back to the host, and while it searches, what grows."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from writehead.decoding.buffers import Buffers, split_written
from writehead.decoding.search import (
    Constraints,
    Hypothesis,
    check_numbers,
    length_penalty,
    make_hypotheses,
)
from writehead.kernels.beams import trace_back
from writehead.kernels.choose import NEVER

LOOK = 8  # steps between two looks at what still grows

Places = NDArray[np.int64]


class Watch:
    """Which sentences of a search still grow, as of some steps ago, so that nobody waits to know.

    One that has ended never grows again, so an old answer is a safe one. Of the buffers' places the
    first `count` have sentences.
    """

    def __init__(self, buffers: Buffers, count: int) -> None:
        self._buffers, self._count = buffers, count
        self._event: torch.cuda.Event | None = None

    def is_due(self, t: int) -> bool:
        """Whether to look after t steps."""
        return self._buffers.mirror is None or t % LOOK == 0

    def look(self) -> list[int]:
        """The sentences that grew when this was asked the last time; asks anew."""
        growing, mirror = self._buffers.rows.growing, self._buffers.mirror
        now = growing[:: self._buffers.shape.beam]
        if mirror is None:
            return _places(now[: self._count])
        before = list(range(self._count))
        if self._event is not None:
            self._event.synchronize()
            before = _places(mirror.growing[: self._count])
        mirror.growing.copy_(now, non_blocking=True)
        self._event = _event(growing.device)
        return before


class Found(Sequence[list[Hypothesis]], ABC):
    """The hypotheses of each of b sentences, best first: arrays of the host until one is asked for.

    Then all are made, which takes as long as some steps.
    """

    _texts: NDArray[np.int32]  # [b, …]

    @abstractmethod
    def put(self, sentences: Places, buffers: Buffers, places: Places) -> None:
        """Reads what was found for some sentences, at the places that they have in buffers."""

    @property
    @abstractmethod
    def _made(self) -> list[list[Hypothesis]]:
        """All of them, once all is put."""

    def __len__(self) -> int:
        return len(self._texts)

    @overload
    def __getitem__(self, which: int) -> list[Hypothesis]: ...
    @overload
    def __getitem__(self, which: slice) -> list[list[Hypothesis]]: ...
    def __getitem__(self, which: int | slice) -> list[Hypothesis] | list[list[Hypothesis]]:
        return self._made[which]


class FoundGreedy(Found):
    """What greedy search found: one hypothesis of each sentence."""

    def __init__(self, b: int, constraints: Constraints, alpha: float) -> None:
        self._limits, self._end, self._alpha = constraints.limits, constraints.eos, alpha
        self._texts = np.empty((b, constraints.longest), dtype=np.int32)  # and what is past an end
        self._log_p = np.empty(b, dtype=np.float32)

    def put(self, sentences: Places, buffers: Buffers, places: Places) -> None:
        """Reads it in one piece, and waits for it."""
        written, mirror, steps = buffers.written, buffers.mirror, self._texts.shape[1]
        width = buffers.shape.capacity
        assert steps <= width
        if steps <= width // 2:  # as behind a long prompt: most of it was never written
            told = buffers.texts[:, :steps].flatten(), buffers.log_p.view(torch.int32)
            written, width = torch.cat(told), steps
        here = written if mirror is None else mirror.written[: len(written)].copy_(written)  # waits
        texts, log_p = (T.cpu().numpy() for T in split_written(here, width))
        self._texts[sentences] = texts[places, :steps]
        self._log_p[sentences] = totals = log_p[places]
        check_numbers([float(totals.sum())])

    @cached_property
    def _made(self) -> list[list[Hypothesis]]:
        is_end, limits = self._texts == self._end, np.array(self._limits)
        first = np.where(is_end.any(axis=1), is_end.argmax(axis=1), self._texts.shape[1])
        lengths, ended = np.minimum(first + 1, limits), first < limits
        scores = self._log_p / length_penalty(torch.from_numpy(lengths), self._alpha).numpy()
        columns: tuple[NDArray[Any], ...] = (self._texts, lengths, scores, self._log_p, ended)
        return [[one] for one in make_hypotheses(*(column.tolist() for column in columns))]


class FoundBeams(Found):
    """What beam search found: the n_best of each sentence."""

    def __init__(self, b: int, n_best: int, longest: int) -> None:
        self._texts = np.zeros((b, n_best, longest), dtype=np.int32)
        self._lengths = np.zeros((b, n_best), dtype=np.int32)
        self._scores, self._log_p = (np.full((b, n_best), NEVER, np.float32) for _ in range(2))
        self._ended = np.zeros((b, n_best), dtype=bool)

    def put(self, sentences: Places, buffers: Buffers, places: Places) -> None:
        """Has it followed back on the device, and reads it."""
        n_best, pool = self._scores.shape[1], buffers.pool
        texts = trace_back(buffers.history, pool, n_best)
        scores, log_p, steps, ended = (
            T[:, :n_best].cpu().numpy()[places]
            for T in (pool.scores, pool.log_p, pool.steps, pool.ended)
        )
        check_numbers(log_p[:, 0].tolist())  # a sentence without any is an error
        check_numbers(log_p[scores != NEVER].tolist())
        longest = int(steps.max()) + 1
        self._texts[sentences, :, :longest] = texts[:, :, :longest].cpu().numpy()[places]
        self._lengths[sentences], self._ended[sentences] = steps + 1, ended
        self._scores[sentences], self._log_p[sentences] = scores, log_p

    @cached_property
    def _made(self) -> list[list[Hypothesis]]:
        is_there = self._scores != NEVER
        columns = (self._texts, self._lengths, self._scores, self._log_p, self._ended)
        made = make_hypotheses(*(column[is_there].tolist() for column in columns))
        ends = is_there.sum(axis=1).cumsum().tolist()
        return [made[i:j] for i, j in pairwise([0, *ends])]


def _event(device: torch.device) -> torch.cuda.Event:
    """What has happened once all that the device was asked for until now is done."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))  # where the copies are
    return event


def _places(growing: Tensor) -> list[int]:
    places: list[int] = growing.nonzero().flatten().tolist()
    return places
