"""What a search on the device finds, read back to the host: some of it while it searches."""

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from writehead.decoding.buffers import Buffers, Mirror
from writehead.decoding.search import Hypothesis, length_penalty, make_hypotheses
from writehead.kernels.beams import trace_back
from writehead.kernels.choose import NEVER

LOOK = 8  # steps between two looks at what still grows
LAST = 2  # steps before the end at which to look once more
NOWHERE = np.iinfo(np.int32).max  # past all texts


class Watch:
    """What the host knows of a search as of some steps ago, so that nobody waits to know.

    That is which sentences still grow: one that has ended never grows again, so an old answer is a
    safe one. Of greedy search it is also the texts so far, put together while the device has work.
    `numbers` has Python's number of each id; new ones, all over the memory, would take longer to
    make, and to pass on, than some steps. Of the buffers' places the first `count` have sentences.
    """

    def __init__(self, buffers: Buffers, count: int, numbers: NDArray[Any], end: int) -> None:
        self.buffers = buffers
        self.texts: list[list[int]] = [[] for _ in range(count)]  # past their ends too
        self.ends = np.full(count, NOWHERE)  # where each text has its first end token
        self._numbers, self._end = numbers, end
        self._growing, self._beam = buffers.rows.growing, buffers.shape.beam
        self._event: torch.cuda.Event | None = None
        self._asked = self._taken = 0  # steps that were asked for, and that are in the texts

    def is_due(self, t: int, longest: int) -> bool:
        """Whether to look after t of `longest` steps; just before the last, to be nearly done."""
        return self.buffers.mirror is None or t % LOOK == 0 or t == longest - LAST

    def look(self, t: int) -> list[int]:
        """The sentences that grew when this was asked the last time; asks anew, after t steps."""
        now, mirror = self._growing[:: self._beam], self.buffers.mirror
        if mirror is None:
            return _places(now[: len(self.texts)])
        before = list(range(len(self.texts)))
        if self._event is not None:
            self._event.synchronize()
            before = _places(mirror.growing[: len(self.texts)])
            self._take(self._asked)
        mirror.growing.copy_(now, non_blocking=True)
        self._ask(mirror, t)
        return before

    def finish(self, t: int) -> None:
        """Has all that greedy search found in t steps on the host; waits for the last of them."""
        mirror = self.buffers.mirror
        if mirror is not None:
            before, known = self._event, self._asked
            mirror.log_p.copy_(self.buffers.log_p, non_blocking=True)
            last = self._ask(mirror, t)
            if before is not None:  # while the device takes the last steps
                before.synchronize()
                self._take(known)
            last.synchronize()
        self._take(t)

    def move(self, growing: list[int], buffers: Buffers) -> "Watch":
        """The watch of the sentences that went on in other buffers."""
        moved = Watch(buffers, len(growing), self._numbers, self._end)
        if self.buffers.mirror is not None and self._beam == 1:
            moved.texts = [self.texts[i] for i in growing]
            moved.ends = self.ends[growing]
            moved._asked = moved._taken = self._taken
        return moved

    def log_p(self) -> Tensor:
        """log P of each row, once greedy search is finished."""
        mirror = self.buffers.mirror
        return self.buffers.log_p.cpu() if mirror is None else mirror.log_p

    def _ask(self, mirror: Mirror, t: int) -> torch.cuda.Event:
        """Has the device copy what it chose in the steps up to t; the event of its being done."""
        if self._beam == 1:
            some = slice(self._asked, t)
            mirror.tokens[some].copy_(self.buffers.history.tokens[some], non_blocking=True)
            self._asked = t
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(self._growing.device))  # where the copies are
        return self._event

    def _take(self, known: int) -> None:
        """Adds what was chosen in the steps up to `known` to the texts."""
        if self._beam > 1 or known == self._taken:
            return
        mirror = self.buffers.mirror
        history = self.buffers.history.tokens if mirror is None else mirror.tokens
        steps = history[self._taken : known, : len(self.texts)].cpu().numpy()
        more = zip(*self._numbers[steps].tolist(), strict=True)
        for text, some in zip(self.texts, more, strict=True):
            text.extend(some)
        is_end = steps == self._end
        first = np.where(is_end.any(axis=0), self._taken + is_end.argmax(axis=0), NOWHERE)
        self.ends = np.minimum(self.ends, first)
        self._taken = known


def read_greedy(
    watch: Watch, sentences: list[int], limits: list[int], alpha: float
) -> list[list[Hypothesis]]:
    """What greedy search found for some sentences, none of which may be longer than its limit."""
    first, most = watch.ends[sentences], np.array(limits)
    ended = first < most
    lengths = np.where(ended, first + 1, most)
    totals = watch.log_p().numpy()[sentences]
    scores = totals / length_penalty(torch.from_numpy(lengths), alpha).numpy()
    texts = [watch.texts[i] for i in sentences]
    columns = (lengths, scores, totals, ended)
    made = make_hypotheses(texts, *(column.tolist() for column in columns))
    return [[one] for one in made]


def read_beams(buffers: Buffers, sentences: list[int], n_best: int) -> list[list[Hypothesis]]:
    """The n_best of some sentences."""
    pool = buffers.pool
    texts = trace_back(buffers.history, pool, n_best)
    scores, log_p, steps, ended = (
        T[:, :n_best].cpu().numpy()[sentences]
        for T in (pool.scores, pool.log_p, pool.steps, pool.ended)
    )
    lengths = steps + 1
    tokens = texts[sentences, :, : int(lengths.max())].cpu().numpy()
    is_wanted = scores != NEVER
    is_wanted[:, 0] = True  # a sentence without any is an error, raised where it is made
    columns = (tokens, lengths, scores, log_p, ended.astype(bool))
    made = make_hypotheses(*(T[is_wanted].tolist() for T in columns))
    ends = is_wanted.sum(axis=1).cumsum().tolist()
    return [made[i:j] for i, j in pairwise([0, *ends])]


def _places(growing: Tensor) -> list[int]:
    places: list[int] = growing.nonzero().flatten().tolist()
    return places
