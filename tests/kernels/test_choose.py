"""The choice of tokens against log_softmax and argmax, and against beam search in PyTorch."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from writehead.config import AttentionConfig, DecodeConfig
from writehead.decoding.beam import _Beams
from writehead.decoding.search import Constraints
from writehead.model import KVCache

choose = pytest.importorskip("writehead.kernels.choose", reason="Triton is not installed")
beams = pytest.importorskip("writehead.kernels.beams", reason="Triton is not installed")
pytestmark = [
    pytest.mark.usefixtures("interpreted"),
    # in the kernels minus infinity is a number like others
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEVER = float("-inf")
END = 1
LARGE = choose.PART + 100  # two parts, and neither they nor their chunks are full


@pytest.fixture
def small_parts(monkeypatch):
    """Chunks and parts of which a small vocabulary has several."""
    monkeypatch.setattr(choose, "CHUNK", 4)
    monkeypatch.setattr(choose, "PART", 16)


def integers(*values: int) -> Tensor:
    return torch.tensor(values, device=DEVICE, dtype=torch.int32)


class Greedy:
    """What greedy steps read and write; every row has chosen `chosen` tokens before the first.

    Each is checked for what it leaves to the next: the clock, counters of zero, and X.
    """

    def __init__(self, rows: int, chosen: int = 0, min_length: int = 0, prefixes=None):
        prefixes = prefixes or [[]] * rows
        width = max(1, *map(len, prefixes))
        padded = [[*prefix, *[0] * (width - len(prefix))] for prefix in prefixes]
        self.limits = choose.Limits(
            clock=integers(chosen),
            prefix=torch.tensor(padded, device=DEVICE, dtype=torch.int32),
            prefix_lengths=integers(*map(len, prefixes)),
            max_lengths=integers(*[9] * rows),
            min_length=integers(min_length),
        )
        self.rows = choose.Rows(
            *(torch.full((rows,), i, dtype=torch.long, device=DEVICE) for i in (7, 5, 1))
        )
        self.texts = torch.full((rows, 9), -3, dtype=torch.int32, device=DEVICE)
        self.log_p = torch.full((rows,), -2.0, device=DEVICE)
        self.found = None  # as in a search, the same for all steps
        self.feed = choose.Feed(
            torch.randn(LARGE, 5, device=DEVICE),
            torch.randn(6, 5, device=DEVICE),  # later positions count as the last
            torch.full((rows, 5), torch.nan, device=DEVICE),
        )

    def step(self, logits: Tensor, vocabulary: int) -> list[int]:
        """The tokens chosen from `logits` [rows, …]."""
        logits = logits.to(DEVICE)
        if self.found is None:
            self.found = choose.Candidates.make(len(logits), vocabulary, 1, logits.device)
        found, before = self.found, self.limits.clock.item()
        choose.choose_greedy(
            logits,
            found,
            self.limits,
            self.rows,
            self.texts,
            self.log_p,
            self.feed,
            vocabulary=vocabulary,
            end=END,
        )
        assert self.limits.clock.item() == before + 1
        assert not found.done.any()
        E, P, X = self.feed.E, self.feed.P, self.feed.X
        assert torch.equal(X, E[self.rows.tokens] + P[self.rows.lengths.clamp(max=5)])
        return self.rows.tokens.tolist()

    @property
    def gained(self) -> Tensor:
        return (self.log_p + 2.0).cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_survey_knows_the_largest_of_every_chunk_and_each_rows_softmax(dtype):
    logits = (3.0 * torch.randn(2, LARGE + 7)).to(dtype).to(DEVICE)
    logits[:, LARGE:] = 100.0  # ids that nobody may choose
    found = choose.Candidates.make(2, LARGE, 1, logits.device)
    choose.survey(logits, found, vocabulary=LARGE)

    known = logits[:, :LARGE].float()
    missing = found.largest.shape[1] * choose.CHUNK - LARGE
    chunks = torch.nn.functional.pad(known, (0, missing), value=NEVER).unflatten(1, (-1, 32))
    assert torch.equal(found.largest, chunks.amax(2))
    largest, total = found.statistics.unbind(2)
    assert largest.shape == (2, 2)
    assert_close((largest + total.log()).logsumexp(1), known.logsumexp(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_likeliest_token_is_chosen_and_its_log_probability_added(dtype):
    logits = (2.0 * torch.randn(3, LARGE)).to(dtype)
    right = [LARGE - 1, choose.PART - 1, 64]  # the last of all, of a part, the first of a chunk
    logits[range(3), right] = 12.0
    step = Greedy(3, chosen=4)

    assert step.step(logits, LARGE) == right

    expected = torch.log_softmax(logits.float(), 1)[range(3), right]
    assert_close(step.gained, expected, atol=1e-5, rtol=1e-5)
    assert step.texts[:, 4].tolist() == right
    assert step.rows.lengths.tolist() == [6] * 3
    assert step.rows.growing.tolist() == [1] * 3


def test_a_row_ends_by_the_end_token_or_at_its_length_and_changes_no_more(small_parts):
    logits = torch.randn(3, 29)
    logits[0, END] = logits[1, 4] = logits[2, 5] = 9.0
    step = Greedy(3, chosen=3)
    step.limits.max_lengths.copy_(integers(9, 4, 5))
    step.step(logits, 29)
    assert step.rows.growing.tolist() == [0, 0, 1]
    held = step.rows.tokens, step.rows.lengths, step.log_p
    before = [T.clone() for T in held]

    step.step(torch.randn(3, 29), 29)

    for T, was in zip(held, before, strict=True):
        assert torch.equal(T[:2], was[:2])
        assert T[2] != was[2]
    assert step.texts[:2, 4].tolist() == [-3, -3]
    assert step.rows.growing.tolist() == [0, 0, 0]


def test_of_equals_the_lowest_token_is_chosen(small_parts):
    logits = torch.zeros(4, 29)
    logits[1, [7, 5, 6]] = 1.0  # in one chunk and the next
    logits[2, [28, 18, 17]] = 1.0  # in another part and the last
    logits[3, [22, 3]] = 1.0  # in two parts
    assert Greedy(4).step(logits, 29) == [0, 5, 17, 3]


def test_the_end_is_not_chosen_before_the_least_length(small_parts):
    logits = torch.randn(2, 29)
    logits[:, END] = 9.0
    logits[0, 3] = 8.0  # of the end's own chunk
    logits[1, 21] = 8.0
    for chosen, right in ((0, [3, 21]), (1, [3, 21]), (2, [END, END])):
        step = Greedy(2, chosen=chosen, min_length=3)
        assert step.step(logits, 29) == right
        # what is not allowed keeps its share of the softmax, as in `Constraints`
        assert_close(step.gained, torch.log_softmax(logits, 1)[range(2), right])


def test_a_forced_prefix_is_chosen_and_counts(small_parts):
    logits = torch.randn(3, 29)
    step = Greedy(3, chosen=1, prefixes=[[4, 28], [6], []])
    right = [28, *logits[1:].argmax(1).tolist()]
    assert step.step(logits, 29) == right
    assert_close(step.gained, torch.log_softmax(logits, 1)[range(3), right])


def test_ids_past_the_vocabulary_are_neither_chosen_nor_counted(small_parts):
    logits = torch.randn(2, 32)
    logits[:, 29:] = 50.0
    right = logits[:, :29].argmax(1).tolist()
    step = Greedy(2)
    assert step.step(logits, 29) == right
    assert_close(step.gained, torch.log_softmax(logits[:, :29], 1)[range(2), right])


def test_logits_without_a_number_end_the_row_with_a_log_probability_that_is_none(small_parts):
    logits = torch.randn(4, 29)
    logits[0] = torch.nan
    logits[1, 20] = torch.nan
    logits[2] = NEVER
    logits[3, 7] = torch.inf
    step = Greedy(4)
    assert all(0 <= token < 29 for token in step.step(logits, 29))
    assert not step.log_p.isfinite().any()


class Beam:
    """A beam search by the kernels beside the same one in PyTorch, both fed the same logits."""

    def __init__(self, b: int, config: DecodeConfig, window: int | None = None, **limits):
        self.b, self.config = b, config
        beam, longest = config.beam, config.max_length
        prefixes, max_lengths = limits.get("prefixes"), limits.get("max_lengths")
        device = torch.device(DEVICE)
        self.right_limits = Constraints.make(config, END, prefixes, max_lengths, b, device)
        self.right = _Beams(config, self.right_limits, b, device)
        attention = AttentionConfig(d=1, h=1, g=1, k=1, v=1, window=window)
        self.right_cache, self.cache = (
            KVCache(attention, layers=1, rows=b * beam, capacity=longest, device=DEVICE)
            for _ in range(2)
        )
        self.right_cache.share()
        self.cache.share()
        limits = self.right_limits
        width = max(1, limits.prefix.shape[1])
        prefix = torch.zeros(b, width, dtype=torch.int32, device=DEVICE)
        prefix[:, : limits.prefix.shape[1]] = limits.prefix
        self.limits = choose.Limits(
            clock=integers(0),
            prefix=prefix,
            prefix_lengths=limits.prefix_lengths.int(),
            max_lengths=limits.max_lengths.int(),
            min_length=integers(config.min_length),
        )
        tokens = torch.zeros(b * beam, dtype=torch.long, device=DEVICE)
        self.rows = choose.Rows(tokens, self.cache.lengths, self.cache.growing)
        table = torch.zeros(2, longest, b * beam, dtype=torch.int32, device=DEVICE)
        self.history = choose.History(*table)
        self.live = self.right.live.clone()
        numbers = (torch.full((b, beam), NEVER, device=DEVICE) for _ in range(2))
        counts = (torch.zeros(b, beam, dtype=torch.int32, device=DEVICE) for _ in range(4))
        steps, rows, last, ended = counts
        # an empty place has no row
        self.pool = beams.Pool(*numbers, steps, rows.long() - 1, last, ended)

    def step(self, logits: Tensor, vocabulary: int) -> None:
        """One step of the kernels."""
        logits = logits.to(DEVICE)
        found = choose.Candidates.make(len(logits), vocabulary, 2 * self.config.beam, logits.device)
        self.limits.clock.add_(1)
        choose.survey(logits, found, vocabulary=vocabulary)
        beams.choose_beam(
            logits,
            found,
            self.limits,
            self.rows,
            self.history,
            self.live,
            self.pool,
            self.cache.ancestors,
            vocabulary=vocabulary,
            end=END,
            n_best=self.config.n_best,
            alpha=self.config.alpha,
        )

    def advance(self, logits: Tensor, vocabulary: int) -> None:
        """One step of both, which must agree in all that the next one reads."""
        t = int(self.limits.clock)
        grew = self.rows.growing.bool()
        self.step(logits, vocabulary)
        log_p = logits.to(DEVICE)[:, :vocabulary].view(self.b, self.config.beam, vocabulary)
        tokens, rows = self.right.advance(self.right_limits.log_probabilities(log_p, t), t)

        assert_close(self.live, self.right.live, atol=1e-4, rtol=1e-5)
        lives = (self.live != NEVER).flatten()
        assert torch.equal(self.rows.tokens[lives], tokens[lives])
        assert torch.equal(self.history.tokens[t, lives], tokens[lives].int())
        parents = self.history.parents[t].long()
        assert torch.equal(parents[lives], rows[lives])
        assert torch.equal(self.rows.growing == 0, self.right.over())
        self._assert_same_pool()
        # beams that died may come from anywhere, so the cache follows ours
        self.right_cache.advance(self.right_cache.reserve(1))
        self.right_cache.reorder(torch.where(grew, parents, self.cache.rows))
        assert torch.equal(self.cache.lengths, self.right_cache.lengths)
        filled = min(t + 1, self.cache.size)
        ours, theirs = (c.ancestors[grew, :filled] for c in (self.cache, self.right_cache))
        assert torch.equal(ours, theirs)
        self.right_cache.stop(self.right.over())

    def _assert_same_pool(self) -> None:
        done, pool = self.right.done, self.pool
        assert_close(pool.scores, done.scores, atol=1e-4, rtol=1e-5)
        there = done.scores != NEVER
        assert_close(pool.log_p[there], done.log_p[there], atol=1e-4, rtol=1e-5)
        assert torch.equal(pool.steps[there] + 1, done.lengths[there].int())
        assert torch.equal(pool.ended[there].bool(), done.ended[there])
        texts = beams.trace_back(self.history, pool, self.config.beam)
        for sentence, place in there.nonzero().tolist():
            length = int(done.lengths[sentence, place])
            right = done.tokens[sentence, place, :length].tolist()
            assert self._text(sentence, place) == right
            assert texts[sentence, place, :length].tolist() == right

    def _text(self, sentence: int, place: int) -> list[int]:
        """The tokens of an ended hypothesis, followed back through its parents."""
        pool, history = self.pool, self.history
        tokens, row = [int(pool.tokens[sentence, place])], int(pool.rows[sentence, place])
        for t in reversed(range(int(pool.steps[sentence, place]))):
            tokens.append(int(history.tokens[t, row]))
            row = int(history.parents[t, row])
        return tokens[::-1]


# of the last sentence all is forced, so that it has one hypothesis
LIMITS = {"prefixes": [[5, 3], [], [9, 4, 2]], "max_lengths": [6, 4, 3]}


@pytest.mark.parametrize(
    ("config", "vocabulary", "likelier", "window"),
    [
        (DecodeConfig(beam=3, n_best=2, max_length=6, min_length=3), 29, 3.0, None),
        (DecodeConfig(beam=2, n_best=2, max_length=6, alpha=-2.0), 29, 3.0, 2),
        (DecodeConfig(beam=2, n_best=2, max_length=6, alpha=0.0), 3, 0.0, 4),
    ],
    ids=["paper's penalty", "negative penalty, ring", "few tokens, ring"],
)
def test_steps_of_a_beam_are_those_in_pytorch(config, vocabulary, likelier, window, small_parts):
    limits = LIMITS if vocabulary > 9 else {"max_lengths": LIMITS["max_lengths"]}
    search = Beam(3, config, window, **limits)
    assert search.cache.size == (window or 6)
    for _ in range(6):
        logits = 2.0 * torch.randn(3 * config.beam, vocabulary + 2)
        logits[:, vocabulary:] = 40.0
        logits[:, END] += likelier  # so that some end on the way
        search.advance(logits, vocabulary)
    done = search.right.done
    ended, there = done.ended, done.scores != NEVER
    assert (ended & there).any()
    assert (~ended & there).any()
    assert not search.rows.growing.any()


# log .5 at its best, one token later, beats log .2; log .3 at its best, at the end, beats log .6
@pytest.mark.parametrize(("alpha", "ends", "lives"), [(-2.0, 0.2, 0.5), (2.0, 0.6, 0.3)])
def test_a_sentence_goes_on_while_one_that_lives_may_become_the_best(
    alpha, ends, lives, small_parts
):
    search = Beam(1, DecodeConfig(beam=2, max_length=6, alpha=alpha))
    p = torch.arange(1.0, 30.0).repeat(2, 1)  # no two alike
    p *= (1.0 - ends - lives) / p[0].sum()
    p[:, END], p[:, 5] = ends, lives
    search.advance(p.log(), 29)
    assert search.rows.growing.all()


def test_many_parts_and_the_default_chunks_give_the_same_beams():
    search = Beam(1, DecodeConfig(beam=2, max_length=2))
    for _ in range(2):
        search.advance(torch.randn(2, LARGE), LARGE)  # which holds it against PyTorch's
    assert not search.rows.growing.any()


def test_of_equal_candidates_the_earlier_beam_and_then_the_lower_token_lives(small_parts):
    search = Beam(1, DecodeConfig(beam=3, max_length=4))
    search.live.copy_(torch.tensor([[-1.0, -1.0, -3.0]]))
    logits = torch.zeros(3, 29)
    logits[0, [12, 20]] = logits[1, [4, 20]] = 1.0
    search.step(logits, 29)
    assert search.rows.tokens.tolist() == [12, 20, 4]
    assert search.history.parents[0].tolist() == [0, 0, 1]


@pytest.mark.parametrize("where", ["all", "one beam", "one token"])
def test_a_sentence_whose_logits_are_no_numbers_ends_without_a_log_probability(where, small_parts):
    search = Beam(2, DecodeConfig(beam=2, n_best=2, max_length=6))
    logits = torch.randn(2, 4, 29).unbind(0)
    logits[0][:, END] = 3.0  # something has ended when the numbers are lost
    search.step(logits[0], 29)
    assert search.rows.growing.tolist() == [1] * 4
    lost = {"all": slice(2), "one beam": slice(1, 2), "one token": (slice(1, 2), 7)}[where]
    logits[1][lost] = torch.nan

    search.step(logits[1], 29)

    assert search.rows.growing[:2].tolist() == [0, 0]
    assert not search.pool.log_p[0, 0].isfinite()
    assert (search.pool.log_p[1, 0].isfinite() and search.rows.growing[2:].all()).item()
