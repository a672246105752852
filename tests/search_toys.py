"""Toy models for searches: their logits depend on the whole history of a row.

The first token of a history is the number of the sentence, so that sentences behave differently.
`log_p` computes the same distribution in plain Python.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import pytest
import torch

from writehead.engine import Hypothesis

History = tuple[int, ...]


@dataclass
class ToyState:
    first: torch.Tensor
    beam: int
    histories: list[History]

    def expand(self, beam: int) -> "ToyState":
        histories = [history for history in self.histories for _ in range(beam)]
        return ToyState(self.first.repeat_interleave(beam), beam, histories)

    def begin(self, limits: Sequence[int]) -> None:
        """A toy has no capacity to check."""

    def stop(self, rows: torch.Tensor) -> None:
        """A toy has no memory to free."""

    def reorder(self, rows: torch.Tensor) -> None:
        chosen = rows.tolist()
        assert all(new // self.beam == old // self.beam for new, old in enumerate(chosen))
        self.histories = [self.histories[row] for row in chosen]


@dataclass
class Toy:
    """A model over `vocab_size` tokens; token 0 ends a sequence."""

    vocab_size: int
    logits: Callable[[History], Sequence[float]]  # (sentence, token, …) -> [vocab_size]
    steps: int = 0

    eos = 0

    def start(self, *sentences: int, beam: int = 1) -> ToyState:
        first = torch.tensor(sentences, dtype=torch.long).repeat_interleave(beam)
        return ToyState(first, beam, [()] * len(first))

    def step(self, tokens: torch.Tensor, state: ToyState) -> torch.Tensor:
        self.steps += 1
        rows = zip(state.histories, tokens.tolist(), strict=True)
        state.histories = [(*history, token) for history, token in rows]
        return torch.tensor([self.logits(history) for history in state.histories])

    def log_p(self, history: History) -> list[float]:
        logits = self.logits(history)
        largest = max(logits)
        total = largest + math.log(sum(math.exp(x - largest) for x in logits))
        return [x - total for x in logits]


def random_toy(vocab_size: int = 5, *, seed: int = 0, spread: float = 1.5, eos: float = 0.0) -> Toy:
    """Logits drawn at random for every history; `eos` is added to that of the end token."""

    @cache
    def logits(history: History) -> tuple[float, ...]:
        draw = random.Random(repr((seed, history)))
        drawn = [draw.gauss(0.0, spread) for _ in range(vocab_size)]
        return (drawn[0] + eos, *drawn[1:])

    return Toy(vocab_size, logits)


def hypothesis(tokens: History, log_p: float, finished: bool, alpha: float) -> Hypothesis:
    """A hypothesis scored in plain Python; its length includes the end token."""
    score = log_p / ((5 + len(tokens) + finished) / 6) ** alpha
    return Hypothesis(tokens, score, log_p, finished)


def assert_same(
    got: Sequence[Hypothesis], expected: Sequence[Hypothesis], tolerance: float = 1e-4
) -> None:
    """The same sequences in the same order, with scores that differ only by rounding."""
    ours, theirs = ([(one.tokens, one.finished) for one in some] for some in (got, expected))
    assert ours == theirs
    for name in ("score", "log_probability"):
        ours, theirs = ([getattr(one, name) for one in some] for some in (got, expected))
        assert ours == pytest.approx(theirs, rel=tolerance, abs=tolerance)


def assert_ranked(
    got: Sequence[Hypothesis], expected: Sequence[Hypothesis], tolerance: float = 1e-4
) -> None:
    """The same hypotheses, best first; near ties may be in either order."""
    scores = [one.score for one in got]
    assert scores == sorted(scores, reverse=True)
    ours, theirs = (sorted(some, key=lambda one: one.tokens) for some in (got, expected))
    assert_same(ours, theirs, tolerance)
