"""Token selection kernels against log_softmax and argmax, and against beam search in PyTorch."""

import pytest
import torch
from torch import Tensor

from helpers import DEVICE, assert_close_in, randn
from helpers import integers as longs
from search_toys import Toy, assert_same, random_toy, table_toy
from writehead.config import DecodeConfig
from writehead.decoding import Hypothesis, beam_search
from writehead.kernels import beams, choose

# the kernels compute with minus infinity
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

NEVER = float("-inf")
EOS = 1
LARGE = choose.PART + 100  # two parts; the second part and its last chunk are incomplete


@pytest.fixture
def small_parts(monkeypatch):
    """Splits even a small vocabulary into several chunks and parts."""
    monkeypatch.setattr(choose, "CHUNK", 4)
    monkeypatch.setattr(choose, "PART", 16)


def integers(*values: int) -> Tensor:
    return longs(*values, dtype=torch.int32)


def make_limits(rows: int, chosen: int, width: int, config: DecodeConfig, prefixes, max_lengths):
    """The limits of a search whose rows have chosen `chosen` tokens."""
    prefixes = prefixes or [[]] * rows
    padded = [(prefix + [0] * width)[:width] for prefix in prefixes]
    return choose.Limits(
        clock=integers(chosen),
        prefix=torch.tensor(padded, device=DEVICE, dtype=torch.int32),
        prefix_lengths=integers(*map(len, prefixes)),
        max_lengths=integers(*(max_lengths or [config.max_length] * rows)),
        min_length=integers(config.min_length),
    )


class Greedy:
    """The state of greedy steps; every row has chosen `chosen` tokens before the first."""

    def __init__(self, rows: int, vocab_size: int, chosen: int = 0):
        self.vocab_size = vocab_size
        self.limits = make_limits(rows, chosen, 3, DecodeConfig(max_length=9), None, None)
        self.rows = choose.Rows(*(longs(*[i] * rows) for i in (7, 5, 1)))
        self.texts = torch.full((rows, 9), -3, dtype=torch.int32, device=DEVICE)
        self.log_p = torch.full((rows,), -2.0, device=DEVICE)
        X = torch.full((rows, 5), torch.nan, device=DEVICE)
        self.feed = choose.Feed(randn(32768, 5), randn(6, 5), X)
        self.candidates = choose.Candidates.make(rows, vocab_size, 1, X.device)

    def step(self, logits: Tensor) -> list[int]:
        """The tokens chosen from `logits` [rows, …]; checks the input of the next step."""
        before = self.limits.clock.item()
        state = self.candidates, self.limits, self.rows, self.texts, self.log_p, self.feed
        choose.choose_greedy(logits.to(DEVICE), *state, vocab_size=self.vocab_size, eos=EOS)
        assert self.limits.clock.item() == before + 1
        assert not self.candidates.done.any()
        E, P, X = self.feed.E, self.feed.P, self.feed.X
        # positions past the last of six embeddings use the last
        expected = E[self.rows.tokens] + P[self.rows.lengths.clamp(max=5)]
        assert_close_in(torch.float32, X, expected, ulps=1)
        return self.rows.tokens.tolist()

    def check(self, logits: Tensor) -> list[int]:
        """One step chooses the first of the likeliest tokens and adds their log-probabilities."""
        before, chosen = self.log_p.clone(), self.limits.clock.item()
        expected = (logits == logits.max(1, keepdim=True).values).int().argmax(1).tolist()
        assert self.step(logits) == expected
        assert self.texts[:, chosen].tolist() == expected
        log_p = logits.double().log_softmax(1)[range(len(expected)), expected].to(DEVICE)
        assert_close_in(torch.float32, self.log_p - before, log_p, ulps=64)
        return expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_greedy_choice_over_parts_and_chunks_of_the_default_size(dtype):
    logits = (2.0 * torch.randn(3, LARGE)).to(dtype)
    best = [LARGE - 1, choose.PART - 1, 64]  # last of all, last of a part, first of a chunk
    logits[range(3), best] = 12.0
    search = Greedy(3, LARGE, chosen=4)
    assert search.check(logits) == best
    assert search.rows.lengths.tolist() == [6] * 3
    assert search.rows.growing.all()


def test_greedy_choice_breaks_ties_by_the_lowest_token(small_parts):
    logits = torch.zeros(4, 29)
    logits[1, [7, 5, 6]] = 1.0  # in one chunk and the next
    logits[2, [28, 18, 17]] = 1.0  # in another part and the last
    logits[3, [22, 3]] = 1.0  # in two parts
    assert Greedy(4, 29).check(logits) == [0, 5, 17, 3]


def test_nan_and_infinite_logits_give_a_valid_token_without_a_finite_score(small_parts):
    logits = torch.randn(4, 29)
    logits[0] = logits[1, 20] = torch.nan
    logits[2] = NEVER
    logits[3, 7] = torch.inf
    search = Greedy(4, 29)
    assert all(0 <= token < 29 for token in search.step(logits))
    assert not search.log_p.isfinite().any()


@pytest.mark.gpu
def test_concurrent_programs_choose_the_token_of_each_row_once():
    search = Greedy(1024, 32768)
    for _ in range(8):
        logits = randn(1024, 32768, dtype=torch.bfloat16)
        logits[:, EOS] = -9.0
        search.check(logits)


class Beam:
    """The state of a beam search by the kernels."""

    def __init__(self, config: DecodeConfig, first: list[int], prefixes=None, max_lengths=None):
        self.config = config
        b, beam, longest = len(first), config.beam, config.max_length
        self.limits = make_limits(b, 0, longest, config, prefixes, max_lengths)
        rows = longs(*range(b * beam))
        tokens = longs(*first).repeat_interleave(beam)
        self.rows = choose.Rows(tokens, torch.zeros_like(rows), torch.ones_like(rows))
        self.ancestors = rows.unsqueeze(1).repeat(1, longest)
        table = torch.zeros(2, longest, b * beam, dtype=torch.int32, device=DEVICE)
        self.history = choose.History(*table)
        self.live, *numbers = torch.full((3, b, beam), NEVER, device=DEVICE)
        self.live[:, 0] = 0.0
        steps, places, last, ended = torch.zeros(4, b, beam, dtype=torch.int32, device=DEVICE)
        # row -1 marks an empty place
        self.pool = beams.Pool(*numbers, steps, places.long() - 1, last, ended)

    def step(self, logits: Tensor, vocab_size: int = 29, eos: int = EOS) -> None:
        logits, config = logits.to(DEVICE), self.config
        best = choose.Candidates.make(len(logits), vocab_size, 2 * config.beam, logits.device)
        self.limits.clock.add_(1)
        choose.survey(logits, best, vocab_size=vocab_size)
        state = self.rows, self.history, self.live, self.pool, self.ancestors
        options = {"eos": eos, "n_best": config.n_best, "alpha": config.alpha}
        beams.choose_beam(logits, best, self.limits, *state, vocab_size=vocab_size, **options)

    def search(self, toy: Toy, dtype: torch.dtype) -> list[list[Hypothesis]]:
        """The hypotheses for a model that sees the history of each row through its ancestors."""
        memory = torch.zeros_like(self.ancestors)
        for t in range(self.config.max_length):
            past = memory.gather(0, self.ancestors)[:, :t]
            memory[:, t] = self.rows.tokens
            histories = torch.cat([past, self.rows.tokens.unsqueeze(1)], dim=1).tolist()
            logits = torch.tensor([toy.logits(tuple(history)) for history in histories])
            # ids past the vocabulary are neither chosen nor part of the softmax
            logits = torch.nn.functional.pad(logits.to(dtype), (0, 2), value=40.0)
            self.step(logits, toy.vocab_size, toy.eos)
            if not self.rows.growing.any():
                break
        texts = beams.trace_back(self.history, self.pool, self.config.n_best).tolist()
        return [
            [
                self._hypothesis(i, j, text)
                for j, text in enumerate(best)
                if self.pool.scores[i, j] != NEVER
            ]
            for i, best in enumerate(texts)
        ]

    def _hypothesis(self, i: int, j: int, text: list[int]) -> Hypothesis:
        pool, finished = self.pool, bool(self.pool.ended[i, j])
        tokens = tuple(text[: int(pool.steps[i, j]) + 1 - finished])
        return Hypothesis(tokens, float(pool.scores[i, j]), float(pool.log_p[i, j]), finished)


PREFIXES = [[5, 3], [], [9, 4, 2]]
# an ended hypothesis leads until a live one overtakes it: at the last length, or at the next
LAST = table_toy(4, {(): {0: 0.5, 1: 0.4}} | {(1,) * n: {1: 0.99} for n in range(1, 6)})
NEXT = table_toy(4, {(): {0: 0.4, 1: 0.59}, (1,): {0: 0.99}})


@pytest.mark.parametrize(
    ("options", "toy", "prefixes", "dtype"),
    [
        (
            {"beam": 3, "n_best": 2, "min_length": 3},
            random_toy(29, eos=2.0),
            PREFIXES,
            torch.float32,
        ),
        ({"beam": 2, "n_best": 2, "alpha": -2.0}, random_toy(29, eos=2.0), PREFIXES, torch.float16),
        ({"beam": 2, "n_best": 2, "alpha": 0.0}, random_toy(3), None, torch.float32),
        ({"beam": 2, "max_length": 3}, random_toy(LARGE), None, torch.float32),
        ({"beam": 2, "alpha": 1.0}, LAST, None, torch.float32),
        ({"beam": 2, "alpha": -1.0}, NEXT, None, torch.float32),
    ],
)
def test_beam_kernels_equal_beam_search_in_pytorch(options, toy, prefixes, dtype, monkeypatch):
    if toy.vocab_size != LARGE:
        monkeypatch.setattr(choose, "CHUNK", 4)
        monkeypatch.setattr(choose, "PART", 16)
    config = DecodeConfig(**{"max_length": 6} | options)
    # the third prefix is as long as its limit, which leaves one hypothesis
    limits = {"prefixes": prefixes, "max_lengths": [min(n, config.max_length) for n in (6, 4, 3)]}
    state, search = toy.start(7, 8, 9), Beam(config, [7, 8, 9], **limits)
    expected = beam_search(lambda *args: toy.step(*args).to(dtype), state, config, eos=0, **limits)
    for ours, theirs in zip(search.search(toy, dtype), expected, strict=True):
        assert_same(ours, theirs, 1e-5)
    assert search.limits.clock.item() == toy.steps  # both stop at the same step


def test_beams_break_ties_by_the_earlier_beam_and_then_the_lower_token(small_parts):
    search = Beam(DecodeConfig(beam=3, max_length=4), [0])
    search.live.copy_(torch.tensor([[-1.0, -1.0, -3.0]]))
    logits = torch.zeros(3, 29)
    logits[0, [12, 20]] = logits[1, [4, 20]] = 1.0
    search.step(logits)
    assert search.rows.tokens.tolist() == [12, 20, 4]
    assert search.history.parents[0].tolist() == [0, 0, 1]


@pytest.mark.parametrize("lost", [slice(2), slice(1, 2), (slice(1, 2), 7)], ids=str)
def test_a_sentence_with_nan_logits_ends_without_a_finite_score(lost, small_parts):
    search = Beam(DecodeConfig(beam=2, n_best=2, max_length=6), [0, 0])
    first, second = torch.randn(2, 4, 29)
    first[:, EOS] = 3.0  # a hypothesis has ended before the NaN
    search.step(first)
    assert search.rows.growing.tolist() == [1] * 4
    second[lost] = torch.nan
    search.step(second)
    assert search.rows.growing.tolist() == [0, 0, 1, 1]
    assert search.pool.log_p[:, 0].isfinite().tolist() == [False, True]
