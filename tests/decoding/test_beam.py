"""Beam search against exhaustive search, a plain beam search, and cases worked by hand."""

import math
from itertools import product

import pytest
import torch

from search_toys import Found, Toy, assert_found, random_toy, table_toy
from writehead.config import DecodeConfig
from writehead.decoding import beam_search
from writehead.errors import SearchError

ALPHAS = (0.0, 0.6, 1.0, -0.8)


def exhaustive(
    toy: Toy, sentence: int, max_length: int, min_length: int = 0, prefix: tuple[int, ...] = ()
) -> list[Found]:
    """Every sequence there is, in no order."""

    def grow(tokens: tuple[int, ...], total: float) -> list[Found]:
        if len(tokens) == max_length:
            return [Found(tokens, total, False)]
        found = []
        for token, gained in enumerate(toy.log_p((sentence, *tokens))):
            if tokens[: len(prefix)] != prefix[: len(tokens)]:
                continue
            if token != toy.end:
                found += grow((*tokens, token), total + gained)
            elif len(tokens) + 1 >= min_length and len(tokens) >= len(prefix):
                found.append(Found(tokens, total + gained, True))
        return found

    return [one for one in grow((), 0.0) if one.tokens[: len(prefix)] == prefix]


def ranked(found: list[Found], alpha: float) -> list[Found]:
    return sorted(found, key=lambda one: -one.score(alpha))


@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_beam_as_wide_as_the_space_ranks_every_sequence_as_exhaustive_search_does(alpha):
    toy = random_toy(4, seed=1)
    every = [ranked(exhaustive(toy, sentence, 4), alpha) for sentence in range(3)]
    count = len(every[0])
    assert count == (1 + 3 + 9 + 27) + 81
    config = DecodeConfig(max_length=4, beam=count, n_best=count, alpha=alpha)
    got = beam_search(toy.step, toy.start(*range(3)), config, end=0)
    for one, expected in zip(got, every, strict=True):
        assert_found(one, expected, alpha)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("min_length", [0, 3])
def test_a_wide_beam_finds_the_best_under_all_constraints_at_once(alpha, min_length):
    toy = random_toy(4, seed=2, end=0.7)
    prefixes = [(), (2,), (1, 3), (3, 3, 1), (1, 2, 1, 2)] * 4
    limits = [4, 3, 4, 3, 4] * 4
    config = DecodeConfig(max_length=4, min_length=min_length, beam=121, n_best=5, alpha=alpha)
    state = toy.start(*range(20))
    got = beam_search(toy.step, state, config, end=0, prefixes=prefixes, max_lengths=limits)
    for i, found in enumerate(got):
        every = exhaustive(toy, i, limits[i], min_length, prefixes[i])
        assert_found(found, ranked(every, alpha)[:5], alpha)
    # fewer come back where fewer exist
    assert [len(found) for found in got[:5]] == [5, 5, 5, 1, 1]
    assert {one.finished for found in got for one in found} == {True, False}


def test_sequences_cut_at_the_maximal_length_compete_as_they_are():
    toy = table_toy(3, {(): {0: 0.3, 1: 0.6}, (1,): {0: 0.2, 1: 0.7}})
    config = DecodeConfig(max_length=2, beam=3, n_best=3, alpha=0.0)
    [got] = beam_search(toy.step, toy.start(1), config, end=0)
    expected = [((1, 1), 0.42, False), ((), 0.3, True), ((1,), 0.12, True)]
    assert [(one.tokens, one.finished) for one in got] == [(a, c) for a, _, c in expected]
    for one, (_, p, _) in zip(got, expected, strict=True):
        assert one.score == one.log_probability == pytest.approx(math.log(p), rel=1e-6)


def plain_beam(
    toy: Toy, sentence: int, config: DecodeConfig, limit: int, prefix: tuple[int, ...] = ()
) -> tuple[list[Found], int]:
    """The rule of beam search in plain Python: the n-best, and how many steps that took."""
    alpha, beam, n_best = config.alpha, config.beam, config.n_best
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    done: list[Found] = []
    for t in range(limit):
        candidates = []
        for total, tokens in live:
            for token, gained in enumerate(toy.log_p((sentence, *tokens))):
                forced = t < len(prefix) and token != prefix[t]
                if not forced and (token != toy.end or t + 1 >= config.min_length):
                    candidates.append((total + gained, (*tokens, token)))
        candidates = sorted(candidates, reverse=True)[: 2 * beam]
        for total, tokens in candidates[:beam]:
            if tokens[-1] == toy.end:
                done.append(Found(tokens[:-1], total, True))
            elif t + 1 == limit:
                done.append(Found(tokens, total, False))
        live = [one for one in candidates if one[1][-1] != toy.end][:beam]
        done = ranked(done, alpha)
        worst = done[n_best - 1].score(alpha) if len(done) >= n_best else -math.inf
        # what the live ones would score at any length still open to them, losing nothing more
        lengths = range(max(t + 2, config.min_length), limit + 1)
        hopes = [total / ((5 + n) / 6) ** alpha for total, _ in live for n in lengths]
        if max(hopes, default=-math.inf) <= worst:
            return done[:n_best], t + 1
    raise AssertionError("nothing lives past the limit")


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize(("beam", "n_best"), [(2, 1), (3, 1), (3, 3), (5, 2)])
def test_a_narrow_beam_finds_what_a_plain_beam_search_finds_in_as_many_steps(beam, n_best, alpha):
    stopped, cut = 0, 0
    for seed, (vocabulary, end) in enumerate(product([3, 7], [-1.0, 0.5, 2.0])):
        toy = random_toy(vocabulary, seed=seed, end=end)
        config = DecodeConfig(max_length=8, beam=beam, n_best=n_best, alpha=alpha)
        for sentence in range(4):
            toy.calls = 0
            [got] = beam_search(toy.step, toy.start(sentence), config, end=0)
            expected, steps = plain_beam(toy, sentence, config, 8)
            assert_found(got, expected, alpha)
            assert toy.calls == steps
            stopped += steps < 8
            cut += not got[0].finished
    assert stopped > 0
    assert cut > 0


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("min_length", [0, 4])
def test_a_batch_of_narrow_beams_is_as_many_plain_beam_searches(alpha, min_length):
    toy = random_toy(5, seed=7, end=0.5)
    prefixes = [(), (4,), (1, 2), (3, 3, 3), (1, 2, 3, 4)] * 5
    limits = [8, 5, 4, 7, 4] * 5
    config = DecodeConfig(max_length=8, min_length=min_length, beam=3, n_best=2, alpha=alpha)
    state = toy.start(*range(25), beam=3)
    got = beam_search(toy.step, state, config, end=0, prefixes=prefixes, max_lengths=limits)
    plain = [plain_beam(toy, i, config, limits[i], prefixes[i]) for i in range(25)]
    for one, (expected, _) in zip(got, plain, strict=True):
        assert_found(one, expected, alpha)
    assert toy.calls == max(steps for _, steps in plain)


def test_a_beam_finds_better_sequences_than_greedy_search():
    toy = random_toy(6, seed=8)
    one = DecodeConfig(max_length=6, alpha=0.0)
    four = DecodeConfig(max_length=6, alpha=0.0, beam=4)
    greedy = beam_search(toy.step, toy.start(*range(30)), one, end=0)
    wide = beam_search(toy.step, toy.start(*range(30)), four, end=0)
    gains = [b[0].score - a[0].score for a, b in zip(greedy, wide, strict=True)]
    assert sum(gain > 0.01 for gain in gains) > 8


def search(toy: Toy, **options) -> tuple[list, int]:
    toy.calls = 0
    [got] = beam_search(toy.step, toy.start(1), DecodeConfig(**options), end=0)
    return got, toy.calls


def test_a_search_waits_for_a_longer_sequence_that_the_penalty_may_still_favour():
    # ends at once: log 0.5 = -0.69. Ends after four more: log(0.4 · 0.99⁴) / (10/6) = -0.57
    chain = {(1,) * n: {1: 0.99} for n in range(1, 4)}
    toy = table_toy(5, {(): {0: 0.5, 1: 0.4}, **chain, (1, 1, 1, 1): {0: 0.99}})
    [best], steps = search(toy, max_length=10, beam=2, alpha=1.0)
    assert best.tokens == (1, 1, 1, 1)
    assert best.score == pytest.approx(math.log(0.4 * 0.99**4) / (10 / 6), rel=1e-5)
    # the next best alive has 0.4 · 0.0025, and could not win even at length 10
    assert steps == 5
    # without a penalty the first end is best, and that is seen at once
    [best], steps = search(toy, max_length=10, beam=2, alpha=0.0)
    assert (best.tokens, steps) == ((), 1)


def test_a_search_ends_at_once_where_nothing_alive_can_win():
    toy = table_toy(4, {(): {0: 0.9}})
    for alpha in (0.0, 0.6, 1.0, -1.0):
        [best], steps = search(toy, max_length=40, beam=3, alpha=alpha)
        assert best.tokens == ()
        assert steps == 1


def test_a_negative_alpha_waits_for_the_next_length_not_the_last():
    # ends at once: log 0.4 = -0.92. One later: log(0.59 · 0.99) · 7/6 = -0.63
    toy = table_toy(4, {(): {0: 0.4, 1: 0.59}, (1,): {0: 0.99}})
    [best], steps = search(toy, max_length=10, beam=2, alpha=-1.0)
    assert best.tokens == (1,)
    assert steps == 2


def test_the_limit_that_counts_for_stopping_is_the_rows_own():
    # alive: log 0.3 = -1.2, at best -0.9 at length 3 but -0.29 at length 20; ended: -0.69
    table = {(): {0: 0.5, 1: 0.3}} | {(1,) * n: {1: 0.999} for n in range(1, 20)}
    undecided, decided = table_toy(4, table), table_toy(4, {(): {0: 0.9}})
    toy = Toy(4, lambda history: (undecided if history[0] == 1 else decided).logits(history))
    config = DecodeConfig(max_length=20, beam=2, alpha=1.0)
    [[best], _] = beam_search(toy.step, toy.start(1, 2), config, end=0, max_lengths=[3, 20])
    assert (best.tokens, best.finished, toy.calls) == ((), True, 1)
    toy.calls = 0
    [[best], _] = beam_search(toy.step, toy.start(1, 2), config, end=0)
    assert (best.tokens, best.finished, toy.calls) == ((1,) * 20, False, 20)


def test_a_search_goes_on_until_all_of_its_n_best_are_sure():
    table = {(): {0: 0.8, 1: 0.15}, (1,): {0: 0.9}}
    toy = table_toy(4, table)
    assert search(toy, max_length=9, beam=2, alpha=0.0)[1] == 1
    got, steps = search(toy, max_length=9, beam=2, n_best=2, alpha=0.0)
    assert [one.tokens for one in got] == [(), (1,)]
    assert steps == 2


def test_a_sequence_that_ends_behind_the_first_beam_candidates_is_not_taken():
    # with beam=2 the end is third at first, so it does not count, though it would have won
    toy = table_toy(4, {(): {1: 0.4, 2: 0.32, 0: 0.2}})
    got, _ = search(toy, max_length=4, beam=2, n_best=2, alpha=0.0)
    assert () not in [one.tokens for one in got]
    got, _ = search(toy, max_length=4, beam=3, n_best=1, alpha=0.0)
    assert [one.tokens for one in got] == [()]


def test_a_state_started_with_its_beams_gives_what_one_expanded_here_gives():
    toy = random_toy(6, seed=9)
    config = DecodeConfig(max_length=7, beam=3, n_best=3)
    expanded = beam_search(toy.step, toy.start(4, 5), config, end=0)
    assert beam_search(toy.step, toy.start(4, 5, beam=3), config, end=0) == expanded


@pytest.mark.parametrize("vocabulary", [1, 2])
def test_a_beam_wider_than_the_vocabulary_finds_all_there_is(vocabulary):
    toy = random_toy(vocabulary, seed=10)
    config = DecodeConfig(max_length=3, beam=5, n_best=5, alpha=0.6)
    [got] = beam_search(toy.step, toy.start(1), config, end=0)
    assert_found(got, ranked(exhaustive(toy, 1, 3), 0.6), 0.6)
    assert len(got) == {1: 1, 2: 4}[vocabulary]


def test_beams_that_are_dead_may_have_logits_of_any_kind():
    # a grammar: after token 1 nothing may follow but the end, after the end nothing at all
    def logits(history):
        if history[-1] == 0 and len(history) > 1:
            return [math.nan] * 4
        if history[1:2] == (1,):
            return [0.0, -math.inf, -math.inf, -math.inf]
        return [-math.inf, 0.0, -math.inf, -math.inf] if history[0] == 1 else [-2.0, 1.0, 2.0, 2.5]

    toy = Toy(4, logits)
    config = DecodeConfig(max_length=6, beam=3, n_best=3, alpha=1.0)
    short, long = beam_search(toy.step, toy.start(1, 2), config, end=0)
    assert [(one.tokens, one.score) for one in short] == [((1,), 0.0)]
    assert len(long) == 3
    assert len(long[0].tokens) == 6


def test_logits_that_stop_being_numbers_after_something_ended_are_still_an_error():
    def logits(history):
        return [math.nan] * 3 if len(history) > 2 else [1.0, 1.2, 0.9]

    toy = Toy(3, logits)
    for n_best in (1, 2):
        config = DecodeConfig(max_length=6, beam=2, n_best=n_best, alpha=1.0)
        with pytest.raises(SearchError, match="look for NaN"):
            beam_search(toy.step, toy.start(1), config, end=0)


def test_a_search_leaves_the_logits_and_the_first_tokens_as_they_were():
    kept = []

    def step(tokens, state):
        logits = toy.step(tokens, state)
        kept.append((logits, logits.clone()))
        return logits

    toy = random_toy(5, seed=11)
    state = toy.start(1, 2, beam=2)
    config = DecodeConfig(max_length=5, min_length=3, beam=2)
    beam_search(step, state, config, end=0, prefixes=[(1,), (2, 3)])
    assert all(torch.equal(now, then) for now, then in kept)
    assert state.first.tolist() == [1, 1, 2, 2]
