"""The choice of tokens against log_softmax and argmax, and against beam search in PyTorch."""

import pytest
import torch
from torch import Tensor

from helpers import DEVICE, assert_close_in, randn
from helpers import integers as longs
from search_toys import Toy, random_toy
from writehead.config import DecodeConfig
from writehead.decoding import beam_search
from writehead.kernels import beams, choose

# in the kernels minus infinity is a number like others
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

NEVER = float("-inf")
EOS = 1
LARGE = choose.PART + 100  # two parts, and neither they nor their chunks are full


@pytest.fixture
def small_parts(monkeypatch):
    """Chunks and parts of which a small vocabulary has several."""
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

    def __init__(self, rows: int, chosen: int = 0, min_length: int = 0, prefixes=None):
        config = DecodeConfig(max_length=9, min_length=min_length)
        self.limits = make_limits(rows, chosen, 3, config, prefixes, None)
        self.rows = choose.Rows(*(longs(*[i] * rows) for i in (7, 5, 1)))
        self.texts = torch.full((rows, 9), -3, dtype=torch.int32, device=DEVICE)
        self.log_p = torch.full((rows,), -2.0, device=DEVICE)
        # later positions count as the last of six
        X = torch.full((rows, 5), torch.nan, device=DEVICE)
        self.feed = choose.Feed(randn(32768, 5), randn(6, 5), X)
        self.found = None  # the same for all steps of a search

    def step(self, logits: Tensor, vocab_size: int) -> list[int]:
        """The tokens chosen from `logits` [rows, …]; checks what the next step reads."""
        logits, before = logits.to(DEVICE), self.limits.clock.item()
        if self.found is None:
            self.found = choose.Candidates.make(len(logits), vocab_size, 1, logits.device)
        state = self.found, self.limits, self.rows, self.texts, self.log_p, self.feed
        choose.choose_greedy(logits, *state, vocab_size=vocab_size, eos=EOS)
        assert self.limits.clock.item() == before + 1
        assert not self.found.done.any()
        E, P, X = self.feed.E, self.feed.P, self.feed.X
        right = E[self.rows.tokens] + P[self.rows.lengths.clamp(max=5)]
        assert_close_in(torch.float32, X, right, ulps=1)
        return self.rows.tokens.tolist()

    def check(self, logits: Tensor, vocab_size: int, right: list[int]) -> None:
        """One step chooses the tokens `right` and adds their log-probabilities."""
        before = self.log_p.clone()
        assert self.step(logits, vocab_size) == right
        log_p = torch.log_softmax(logits[:, :vocab_size].double(), 1)[range(len(right)), right]
        assert_close_in(torch.float32, self.log_p - before, log_p.to(DEVICE), ulps=64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_survey_knows_the_largest_of_every_chunk_and_each_rows_softmax(dtype):
    logits = (3.0 * randn(2, LARGE + 7)).to(dtype)
    logits[:, LARGE:] = 100.0  # ids that nobody may choose
    found = choose.Candidates.make(2, LARGE, 1, logits.device)
    choose.survey(logits, found, vocab_size=LARGE)

    known = logits[:, :LARGE].float()
    missing = found.largest.shape[1] * choose.CHUNK - LARGE
    chunks = torch.nn.functional.pad(known, (0, missing), value=NEVER).unflatten(1, (-1, 32))
    assert torch.equal(found.largest, chunks.amax(2))
    largest, total = found.statistics.unbind(2)
    assert largest.shape == (2, 2)
    assert_close_in(torch.float32, (largest + total.log()).logsumexp(1), known.logsumexp(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_likeliest_token_is_chosen_and_its_log_probability_added(dtype):
    logits = (2.0 * torch.randn(3, LARGE)).to(dtype)
    right = [LARGE - 1, choose.PART - 1, 64]  # the last of all, of a part, the first of a chunk
    logits[range(3), right] = 12.0
    search = Greedy(3, chosen=4)
    search.check(logits, LARGE, right)
    assert search.texts[:, 4].tolist() == right
    assert search.rows.lengths.tolist() == [6] * 3
    assert search.rows.growing.tolist() == [1] * 3


def test_a_row_ends_by_the_end_token_or_at_its_length_and_changes_no_more(small_parts):
    logits = torch.randn(3, 29)
    logits[0, EOS] = logits[1, 4] = logits[2, 5] = 9.0
    search = Greedy(3, chosen=3)
    search.limits.max_lengths.copy_(integers(9, 4, 5))
    search.step(logits, 29)
    assert search.rows.growing.tolist() == [0, 0, 1]
    held = search.rows.tokens, search.rows.lengths, search.log_p
    before = [T.tolist() for T in held]

    logits[2, 6] = 9.5
    search.step(logits, 29)

    for T, was in zip(held, before, strict=True):
        assert T[:2].tolist() == was[:2]
        assert T[2].item() != was[2]
    assert search.texts[:2, 4].tolist() == [-3, -3]
    assert search.rows.growing.tolist() == [0, 0, 0]


def test_of_equals_the_lowest_token_is_chosen(small_parts):
    logits = torch.zeros(4, 29)
    logits[1, [7, 5, 6]] = 1.0  # in one chunk and the next
    logits[2, [28, 18, 17]] = 1.0  # in another part and the last
    logits[3, [22, 3]] = 1.0  # in two parts
    Greedy(4).check(logits, 29, [0, 5, 17, 3])


def test_a_choice_keeps_to_least_lengths_prefixes_and_the_vocab_size(small_parts):
    # what is not allowed keeps its share of the softmax, as in `Constraints`
    logits = torch.randn(2, 32)
    logits[:, 29:] = 50.0
    logits[:, EOS] = 9.0
    logits[0, 3] = 8.0  # of the end's own chunk
    logits[1, 21] = 8.0
    for chosen, right in ((0, [3, 21]), (1, [3, 21]), (2, [EOS, EOS])):
        Greedy(2, chosen, min_length=3).check(logits, 29, right)
    Greedy(2, chosen=1, prefixes=[[4, 28], [6]]).check(logits, 29, [28, EOS])


def test_logits_without_a_number_end_the_row_with_a_log_probability_that_is_none(small_parts):
    logits = torch.randn(4, 29)
    logits[0] = logits[1, 20] = torch.nan
    logits[2] = NEVER
    logits[3, 7] = torch.inf
    search = Greedy(4)
    assert all(0 <= token < 29 for token in search.step(logits, 29))
    assert not search.log_p.isfinite().any()


@pytest.mark.gpu
def test_programs_that_meet_choose_each_rows_token_once():
    rows, size = 1024, 32768
    search = Greedy(rows)
    for t in range(8):
        logits = randn(rows, size, dtype=torch.bfloat16)
        logits[:, EOS] = -9.0
        # of equals the lowest
        right = (logits == logits.max(1, keepdim=True).values).int().argmax(1).tolist()
        search.check(logits, size, right)
        assert search.texts[:, t].tolist() == right


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
        # an empty place has no row
        self.pool = beams.Pool(*numbers, steps, places.long() - 1, last, ended)

    def step(self, logits: Tensor, vocab_size: int, eos: int = EOS) -> None:
        logits, config = logits.to(DEVICE), self.config
        found = choose.Candidates.make(len(logits), vocab_size, 2 * config.beam, logits.device)
        self.limits.clock.add_(1)
        choose.survey(logits, found, vocab_size=vocab_size)
        state = self.rows, self.history, self.live, self.pool, self.ancestors
        options = {"eos": eos, "n_best": config.n_best, "alpha": config.alpha}
        beams.choose_beam(logits, found, self.limits, *state, vocab_size=vocab_size, **options)

    def search(self, toy: Toy) -> list[list[tuple]]:
        """The hypotheses for a model that sees each row's history through its ancestors."""
        memory = torch.zeros_like(self.ancestors)
        for t in range(self.config.max_length):
            seen, fed = memory.gather(0, self.ancestors)[:, :t], self.rows.tokens.unsqueeze(1)
            memory[:, t] = self.rows.tokens
            histories = torch.cat([seen, fed], dim=1).tolist()
            logits = torch.tensor([toy.logits(tuple(history)) for history in histories])
            # ids past the vocabulary are neither chosen nor counted
            logits = torch.nn.functional.pad(logits, (0, 2), value=40.0)
            self.step(logits, toy.vocab_size, toy.eos)
            if not self.rows.growing.any():
                break
        texts = beams.trace_back(self.history, self.pool, self.config.n_best)
        pool, found = self.pool, []
        for i, best in enumerate(texts.tolist()):
            there = [j for j in range(len(best)) if pool.scores[i, j] != NEVER]
            lengths = [int(pool.steps[i, j]) + 1 - int(pool.ended[i, j]) for j in there]
            numbers = [(float(pool.scores[i, j]), float(pool.log_p[i, j])) for j in there]
            said = [best[j][:length] for j, length in zip(there, lengths, strict=True)]
            ended = [bool(pool.ended[i, j]) for j in there]
            found.append(list(zip(said, numbers, ended, strict=True)))
        return found


@pytest.mark.parametrize(
    ("options", "vocab_size", "prefixes"),
    [
        ({"beam": 3, "n_best": 2, "min_length": 3}, 29, [[5, 3], [], [9, 4, 2]]),
        ({"beam": 2, "n_best": 2, "alpha": -2.0}, 29, [[5, 3], [], [9, 4, 2]]),
        ({"beam": 2, "n_best": 2, "alpha": 0.0}, 3, None),
    ],
)
def test_beams_are_those_of_the_search_in_pytorch(options, vocab_size, prefixes, small_parts):
    config, toy = (
        DecodeConfig(max_length=6, **options),
        random_toy(vocab_size, eos=2.0 * (vocab_size > 3)),
    )
    # all of the last sentence is forced, so that it has one hypothesis
    limits = {"prefixes": prefixes, "max_lengths": [6, 4, 3]}
    right = beam_search(toy.step, toy.start(7, 8, 9), config, eos=toy.eos, **limits)
    found = Beam(config, [7, 8, 9], **limits).search(toy)
    for ours, theirs in zip(found, right, strict=True):
        assert [(said, ended) for said, _, ended in ours] == [
            (list(one.tokens), one.finished) for one in theirs
        ]
        numbers = [x for _, pair, _ in ours for x in pair]
        expected = [x for one in theirs for x in (one.score, one.log_probability)]
        assert numbers == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_beams_over_parts_and_chunks_of_the_default_size():
    config, toy = DecodeConfig(beam=2, max_length=2), random_toy(LARGE)
    [[right]] = beam_search(toy.step, toy.start(7), config, eos=toy.eos)
    [[(said, _, _)]] = Beam(config, [7]).search(toy)
    assert said == list(right.tokens)


# log .5 at its best, one token later, beats log .2; log .3 at its best, at the end, beats log .6
@pytest.mark.parametrize(("alpha", "ends", "lives"), [(-2.0, 0.2, 0.5), (2.0, 0.6, 0.3)])
def test_a_search_continues_while_a_live_hypothesis_may_become_the_best(
    alpha, ends, lives, small_parts
):
    search = Beam(DecodeConfig(beam=2, max_length=6, alpha=alpha), [0])
    p = torch.arange(1.0, 30.0).repeat(2, 1)  # no two alike
    p *= (1.0 - ends - lives) / p[0].sum()
    p[:, EOS], p[:, 5] = ends, lives
    search.step(p.log(), 29)
    assert search.rows.growing.all()


def test_of_equal_candidates_the_earlier_beam_and_then_the_lower_token_lives(small_parts):
    search = Beam(DecodeConfig(beam=3, max_length=4), [0])
    search.live.copy_(torch.tensor([[-1.0, -1.0, -3.0]]))
    logits = torch.zeros(3, 29)
    logits[0, [12, 20]] = logits[1, [4, 20]] = 1.0
    search.step(logits, 29)
    assert search.rows.tokens.tolist() == [12, 20, 4]
    assert search.history.parents[0].tolist() == [0, 0, 1]


@pytest.mark.parametrize("lost", [slice(2), slice(1, 2), (slice(1, 2), 7)], ids=str)
def test_a_sentence_whose_logits_are_no_numbers_ends_without_a_log_probability(lost, small_parts):
    search = Beam(DecodeConfig(beam=2, n_best=2, max_length=6), [0, 0])
    first, second = torch.randn(2, 4, 29)
    first[:, EOS] = 3.0  # something has ended when the numbers are lost
    search.step(first, 29)
    assert search.rows.growing.tolist() == [1] * 4
    second[lost] = torch.nan
    search.step(second, 29)
    assert search.rows.growing.tolist() == [0, 0, 1, 1]
    assert search.pool.log_p[:, 0].isfinite().tolist() == [False, True]
