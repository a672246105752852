"""What a search on the device finds, read back to the host: some of it while it searches."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from writehead.config import DecodeConfig
from writehead.decoding.buffers import Buffers
from writehead.decoding.search import Constraints, Hypothesis, length_penalty, make_hypothesis
from writehead.kernels.choose import NEVER

LOOK = 8  # steps between two looks at what still grows


class Watch:
    """What the host knows of a search as of some steps ago, so that nobody waits to know.

    That is which sentences still grow: one that has ended never grows again, so an old answer is a
    safe one. Of greedy search it is also the tokens chosen so far, in `texts` by sentence: Python's
    numbers are put together while the device has work. `numbers` has one for each id; new ones,
    all over the memory, would take longer to make, and to pass on, than some steps.
    """

    def __init__(
        self, buffers: Buffers, texts: list[tuple[int, ...]], numbers: NDArray[Any]
    ) -> None:
        self.buffers, self.texts = buffers, texts
        self._numbers = numbers
        self._growing, self._beam = buffers.rows.growing, buffers.shape.beam
        self._event: torch.cuda.Event | None = None
        self._asked = len(texts[0])  # steps that are in `texts`, or on their way

    def is_due(self, t: int) -> bool:
        """Whether to look after t steps."""
        return t % LOOK == 0 or self.buffers.mirror is None

    def look(self, t: int) -> list[int]:
        """The sentences that grew when this was asked the last time; asks anew, after t steps."""
        now, mirror = self._growing[:: self._beam], self.buffers.mirror
        if mirror is None:
            return _places(now)
        before = list(range(len(now)))
        if self._event is None:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        else:
            self._event.synchronize()
            before = _places(mirror.growing)
            self._take(self._come())
        mirror.growing.copy_(now, non_blocking=True)
        if self._beam == 1:
            some = slice(self._asked, t)
            mirror.tokens[some].copy_(self.buffers.history.tokens[some], non_blocking=True)
            self._asked = t
        self._event.record(torch.cuda.current_stream(now.device))  # where the copies are
        return before

    def finish(self) -> None:
        """Has all tokens that greedy search chose so far in `texts`; the last are waited for."""
        taken = int(self.buffers.limits.clock)  # and so all that was asked for has come
        last = self.buffers.history.tokens[self._asked : taken].cpu()
        self._take(torch.cat([self._come(), last]))
        self._asked = taken

    def _come(self) -> Tensor:
        """The tokens [steps, rows] that were asked for and are not in the texts yet."""
        tokens = self.buffers.history.tokens
        if self.buffers.mirror is None or self._beam > 1:
            return tokens[:0].cpu()
        return self.buffers.mirror.tokens[len(self.texts[0]) : self._asked]

    def _take(self, tokens: Tensor) -> None:
        """Adds tokens [steps, rows] to the texts."""
        if len(tokens):
            steps = self._numbers[tokens.numpy()[:, : len(self.texts)]].tolist()
            more = zip(*steps, strict=True)
            self.texts = [text + new for text, new in zip(self.texts, more, strict=True)]


def read_greedy(
    buffers: Buffers,
    sentences: Tensor,
    texts: list[tuple[int, ...]],
    constraints: Constraints,
    config: DecodeConfig,
) -> list[list[Hypothesis]]:
    """What greedy search found for some sentences, of which `texts` has all chosen tokens."""
    tokens = buffers.history.tokens[: len(texts[0]), sentences]
    limits = buffers.limits.max_lengths[sentences]
    steps = torch.arange(len(tokens), device=tokens.device).unsqueeze(1)
    first = torch.where(tokens == constraints.end, steps, len(tokens)).amin(dim=0)
    ended = first < limits
    lengths = torch.where(ended, first + 1, limits).cpu()
    totals = buffers.log_p[sentences].cpu()
    scores = totals / length_penalty(lengths, config.alpha)
    return [
        [make_hypothesis(*one)]
        for one in zip(
            texts, lengths.tolist(), scores.tolist(), totals.tolist(), ended.tolist(), strict=True
        )
    ]


def read_beams(
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


def _places(growing: Tensor) -> list[int]:
    places: list[int] = growing.nonzero().flatten().tolist()
    return places
