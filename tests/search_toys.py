"""Small models that searches can be checked on: their logits depend on the whole history.

A toy's state holds every row's history. The first token fed is the name of the sentence, so that
rows of different sentences behave differently. `log_p` is the same distribution in plain Python.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch

History = tuple[int, ...]


@dataclass
class ToyState:
    first: torch.Tensor
    beam: int
    histories: list[History]

    def expand(self, beam: int) -> "ToyState":
        assert self.beam == 1
        histories = [history for history in self.histories for _ in range(beam)]
        return ToyState(self.first.repeat_interleave(beam), beam, histories)

    def begin(self, limits: Sequence[int]) -> None:
        """A toy forgets nothing, so it can be searched whenever one likes."""

    def stop(self, rows: torch.Tensor) -> None:
        """A toy has room for everybody."""

    def reorder(self, rows: torch.Tensor) -> None:
        chosen = rows.tolist()
        assert len(chosen) == len(self.histories)
        assert all(new // self.beam == old // self.beam for new, old in enumerate(chosen))
        self.histories = [self.histories[row] for row in chosen]


@dataclass
class Toy:
    """A model over `vocabulary` tokens, the first of which ends a sequence."""

    vocabulary: int
    logits: Callable[[History], Sequence[float]]  # (sentence, token, …) -> [vocabulary]
    calls: int = 0
    fed: list[list[int]] = field(default_factory=list)

    end = 0

    def start(self, *sentences: int, beam: int = 1) -> ToyState:
        first = torch.tensor(sentences).repeat_interleave(beam)
        return ToyState(first, beam, [()] * len(first))

    def step(self, tokens: torch.Tensor, state: ToyState) -> torch.Tensor:
        self.calls += 1
        self.fed.append(tokens.tolist())
        state.histories = [
            (*history, token)
            for history, token in zip(state.histories, tokens.tolist(), strict=True)
        ]
        return torch.tensor([self.logits(history) for history in state.histories])

    def log_p(self, history: History) -> list[float]:
        logits = self.logits(history)
        largest = max(logits)
        total = largest + math.log(sum(math.exp(x - largest) for x in logits))
        return [x - total for x in logits]


def random_toy(vocabulary: int = 5, *, seed: int = 0, spread: float = 1.5, end: float = 0.0) -> Toy:
    """Logits drawn anew for every history, by a hash of it; `end` is added to the end token's."""

    @cache
    def logits(history: History) -> tuple[float, ...]:
        draw = random.Random(repr((seed, history)))
        drawn = [draw.gauss(0.0, spread) for _ in range(vocabulary)]
        return (drawn[0] + end, *drawn[1:])

    return Toy(vocabulary, logits)


def table_toy(vocabulary: int, table: dict[History, dict[int, float]]) -> Toy:
    """Probabilities by history, without the sentence; what is left over goes to the other tokens.

    A history that is not in the table is followed by any token alike.
    """

    def logits(history: History) -> list[float]:
        given = table.get(history[1:], {})
        others = vocabulary - len(given)
        rest = (1.0 - sum(given.values())) / others if others else 0.0
        return [math.log(given.get(token, rest)) for token in range(vocabulary)]

    return Toy(vocabulary, logits)


@dataclass(frozen=True)
class Found:
    """What an independent search found: `length` counts the end token."""

    tokens: History
    log_p: float
    finished: bool

    @property
    def length(self) -> int:
        return len(self.tokens) + int(self.finished)

    def score(self, alpha: float) -> float:
        return self.log_p / ((5 + self.length) / 6) ** alpha


def assert_found(got: Sequence, expected: Sequence[Found], alpha: float) -> None:
    """The same sequences in the same order, with their log-probabilities and scores."""
    assert [(one.tokens, one.finished) for one in got] == [
        (one.tokens, one.finished) for one in expected
    ]
    for one, other in zip(got, expected, strict=True):
        assert math.isclose(one.log_probability, other.log_p, rel_tol=1e-5, abs_tol=1e-5)
        assert math.isclose(one.score, other.score(alpha), rel_tol=1e-5, abs_tol=1e-5)
