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
    safe one. Of greedy search it is also the tokens chosen so far, in texts [sentences, steps]:
    Python's numbers are made of them while the device has work. `numbers` has one for each id;
    to make new ones, all over the memory, would take longer than some steps.
    """

    def __init__(
        self, buffers: Buffers, texts: NDArray[Any], numbers: NDArray[Any], read: int = 0
    ) -> None:
        self.buffers, self.texts = buffers, texts
        self.read = read  # steps that are in `texts`
        self._numbers = numbers
        self._growing, self._beam = buffers.rows.growing, buffers.shape.beam
        self._event: torch.cuda.Event | None = None
        self._asked = read  # steps that are on their way, or there

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
            self._take(mirror.tokens[self.read : self._asked])
        mirror.growing.copy_(now, non_blocking=True)
        if self._beam == 1:
            some = slice(self._asked, t)
            mirror.tokens[some].copy_(self.buffers.history.tokens[some], non_blocking=True)
            self._asked = t
        self._event.record()
        return before

    def whole_texts(self, sentences: list[int]) -> list[list[int]]:
        """All tokens chosen for some sentences by greedy search; the last are waited for."""
        taken = int(self.buffers.limits.clock)  # and so all that was asked for has come
        if self.buffers.mirror is not None:
            self._take(self.buffers.mirror.tokens[self.read : self._asked])
        self._take(self.buffers.history.tokens[self.read : taken].cpu())
        texts: list[list[int]] = self.texts[sentences, :taken].tolist()
        return texts

    def _take(self, tokens: Tensor) -> None:
        """Adds tokens [steps, rows] to the texts."""
        more = self._numbers[tokens.numpy()[:, : len(self.texts)].T]
        self.texts[:, self.read : self.read + len(tokens)] = more
        self.read += len(tokens)


def read_greedy(
    buffers: Buffers,
    sentences: Tensor,
    texts: list[list[int]],
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
