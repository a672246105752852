"""What a search on the device finds, read back to the host: some of it while it searches."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from writehead.decoding.buffers import Buffers, Mirror
from writehead.decoding.search import Hypothesis, length_penalty, make_hypothesis
from writehead.kernels.choose import NEVER

LOOK = 8  # steps between two looks at what still grows
LAST = 2  # steps before the end at which to look once more


class Watch:
    """What the host knows of a search as of some steps ago, so that nobody waits to know.

    That is which sentences still grow: one that has ended never grows again, so an old answer is a
    safe one. Of greedy search it is also the tokens chosen so far, by step: Python's numbers are
    looked up while the device has work. `numbers` has one for each id; new ones, all over the
    memory, would take longer to make, and to pass on, than some steps. Of the buffers' places the
    first `count` have sentences.
    """

    def __init__(self, buffers: Buffers, count: int, numbers: NDArray[Any]) -> None:
        self.buffers = buffers
        self._count, self._numbers = count, numbers
        self._growing, self._beam = buffers.rows.growing, buffers.shape.beam
        self._event: torch.cuda.Event | None = None
        self._steps: list[list[int]] = []  # each step's tokens by sentence
        self._asked = 0  # steps that are among these, or on their way

    def is_due(self, t: int, longest: int) -> bool:
        """Whether to look after t of `longest` steps; just before the last, to be nearly done."""
        return self.buffers.mirror is None or t % LOOK == 0 or t == longest - LAST

    def look(self, t: int) -> list[int]:
        """The sentences that grew when this was asked the last time; asks anew, after t steps."""
        now, mirror = self._growing[:: self._beam], self.buffers.mirror
        if mirror is None:
            return _places(now[: self._count])
        before = list(range(self._count))
        if self._event is not None:
            self._event.synchronize()
            before = _places(mirror.growing[: self._count])
            self._take()
        mirror.growing.copy_(now, non_blocking=True)
        self._ask(mirror, t)
        return before

    def finish(self, t: int) -> None:
        """Has all that greedy search found in t steps on the host; waits for the last of them."""
        mirror = self.buffers.mirror
        if mirror is not None:
            mirror.log_p.copy_(self.buffers.log_p, non_blocking=True)
            self._ask(mirror, t).synchronize()
        self._asked = t
        self._take()

    def move(self, growing: list[int], buffers: Buffers) -> "Watch":
        """The watch of the sentences that went on in other buffers."""
        moved = Watch(buffers, len(growing), self._numbers)
        if self.buffers.mirror is not None and buffers.mirror is not None and self._beam == 1:
            moved._asked = known = len(self._steps)
            moved._steps = [[step[i] for i in growing] for step in self._steps]
            to, before = buffers.mirror.tokens, self.buffers.mirror.tokens
            to[:known, : len(growing)] = before[:known, growing]
        return moved

    def texts(self) -> list[tuple[int, ...]]:
        """The tokens of each sentence, once greedy search is finished."""
        return list(zip(*self._steps, strict=True))

    def chosen(self) -> tuple[NDArray[np.int32], Tensor]:
        """The tokens [steps, rows] of greedy search, and log P of each row, once it is finished."""
        mirror, tokens, log_p = self.buffers.mirror, self.buffers.history.tokens, self.buffers.log_p
        if mirror is not None:
            tokens, log_p = mirror.tokens, mirror.log_p
        return tokens[: self._asked].cpu().numpy(), log_p.cpu()

    def _ask(self, mirror: Mirror, t: int) -> torch.cuda.Event:
        """Has the device copy what it chose in the steps up to t; the event of its being done."""
        if self._beam == 1:
            some = slice(self._asked, t)
            mirror.tokens[some].copy_(self.buffers.history.tokens[some], non_blocking=True)
            self._asked = t
        self._event = self._event or torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(self._growing.device))  # where the copies are
        return self._event

    def _take(self) -> None:
        """Looks up the numbers of the steps that have come."""
        if self._beam == 1:
            tokens, _ = self.chosen()
            self._steps += self._numbers[tokens[len(self._steps) :, : self._count]].tolist()


def read_greedy(
    watch: Watch, sentences: list[int], limits: list[int], end: int, alpha: float
) -> list[list[Hypothesis]]:
    """What greedy search found for some sentences, none of which may be longer than its limit."""
    tokens, log_p = watch.chosen()
    is_end, most = tokens == end, np.array(limits)
    first = np.where(is_end.any(axis=0), is_end.argmax(axis=0), len(tokens))[sentences]
    ended = first < most
    lengths = np.where(ended, first + 1, most)
    totals = log_p[sentences]
    scores = totals / length_penalty(torch.from_numpy(lengths), alpha)
    texts = watch.texts()
    return [
        [make_hypothesis(texts[i], *one)]
        for i, *one in zip(
            sentences,
            lengths.tolist(),
            scores.tolist(),
            totals.tolist(),
            ended.tolist(),
            strict=True,
        )
    ]


def read_beams(buffers: Buffers, sentences: list[int], n_best: int) -> list[list[Hypothesis]]:
    """The n_best of some sentences, each followed back through its parents."""
    pool = buffers.pool
    scores, log_p, steps, rows, last, ended = (
        T[:, :n_best].cpu().numpy()[sentences]
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


def _places(growing: Tensor) -> list[int]:
    places: list[int] = growing.nonzero().flatten().tolist()
    return places
