"""Greedy search, sampling and streams against plain loops over the same toy model."""

import dataclasses
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from search_toys import Toy, assert_same, hypothesis, random_toy, table_toy
from writehead.config import DecodeConfig
from writehead.decoding import Hypothesis, beam_search, greedy, sample
from writehead.decoding.search import stream
from writehead.errors import ConfigError, SearchError, ShapeError, TokenError, WriteheadError

SEARCHES = {"greedy": greedy, "sample": sample, "beam": beam_search, "stream": stream}
OPTIONS = {"sample": {"temperature": 1.0}, "beam": {"beam": 2}}
every_search = pytest.mark.parametrize("name", ["greedy", "sample", "beam"])
both_walks = pytest.mark.parametrize("name", ["greedy", "sample"])


def naive_greedy(
    toy: Toy, sentence: int, limit: int, least: int, prefix: tuple[int, ...], alpha: float
) -> Hypothesis:
    tokens, total = (), 0.0
    while len(tokens) < limit:
        log_p = toy.log_p((sentence, *tokens))
        if len(tokens) < len(prefix):
            best = prefix[len(tokens)]
        else:
            allowed = [t for t in range(toy.vocab_size) if t or len(tokens) + 1 >= least]
            best = max(allowed, key=lambda token: log_p[token])
        total += log_p[best]
        if best == toy.eos:
            return hypothesis(tokens, total, True, alpha)
        tokens = (*tokens, best)
    return hypothesis(tokens, total, False, alpha)


@pytest.mark.parametrize("alpha", [0.0, 0.6, -0.7])
@pytest.mark.parametrize("least", [0, 4])
@pytest.mark.parametrize("name", ["greedy", "beam"])
def test_greedy_search_and_a_beam_of_one_take_the_likeliest_token_at_every_step(name, least, alpha):
    toy = random_toy(7, seed=1, eos=0.5)
    prefixes, limits = [(), (3,), (4, 4, 1), (), (1, 2, 3, 4)] * 6, [9, 4, 7, 8, 4] * 6
    config = DecodeConfig(max_length=9, min_length=least, beam=1, alpha=alpha)
    state, given = toy.start(*range(30)), {"prefixes": prefixes, "max_lengths": limits}
    got = SEARCHES[name](toy.step, state, config, eos=0, **given)
    got = got if name == "greedy" else [one for [one] in got]
    rows = zip(range(30), limits, prefixes, strict=True)
    assert_same(got, [naive_greedy(toy, i, n, least, prefix, alpha) for i, n, prefix in rows])
    assert {one.finished for one in got} == {True, False}
    assert toy.steps == max(len(one.tokens) + one.finished for one in got)


def test_scores_are_float32_whatever_the_logits():
    toy = random_toy(9, seed=3)
    config = DecodeConfig(max_length=6, min_length=6)
    [got] = greedy(lambda *given: toy.step(*given).bfloat16(), toy.start(1), config, eos=0)
    exact = 0.0
    for t, token in enumerate(got.tokens):
        logits = torch.tensor(toy.logits((1, *got.tokens[:t]))).bfloat16().double()
        exact += torch.log_softmax(logits, dim=0)[token].item()
    assert got.log_probability == pytest.approx(exact, rel=1e-6)


# a row: its sentence, limit, prefix and seed
PREFIXES = st.lists(st.integers(1, 4), max_size=3).map(tuple)
ROW = st.tuples(st.integers(0, 40), st.integers(3, 16), PREFIXES, st.integers(-5, 2**40))


NARROWED = {"temperature": 1.5, "top_k": 4, "top_p": 0.8}


@pytest.mark.parametrize("options", [{}, NARROWED, {"beam": 3, "n_best": 2}], ids=str)
@settings(max_examples=15)
@given(batch=st.lists(ROW, min_size=1, max_size=6))
def test_a_row_never_depends_on_the_rows_beside_it(options, batch):
    toy = random_toy(5, seed=4, eos=-0.5)
    config = DecodeConfig(max_length=16, min_length=2, **options)

    def found(chosen):
        sentences, limits, prefixes, seeds = zip(*chosen, strict=True)
        given = {"eos": 0, "prefixes": prefixes, "max_lengths": limits}
        if "temperature" in options:
            drawn = sample(toy.step, toy.start(*sentences), config, seeds=seeds, **given)
            return [[one] for one in drawn]
        return beam_search(toy.step, toy.start(*sentences), config, **given)

    for row, together in zip(batch, found(batch), strict=True):
        assert_same(together, found([row])[0])


def test_a_seed_draws_one_sequence_and_rows_count_up_from_the_configs():
    toy = random_toy(8, seed=5, eos=-2.0)
    config = DecodeConfig(max_length=12, temperature=1.0, seed=30)
    got = sample(toy.step, toy.start(*[1] * 20), config, eos=0)
    assert len({one.tokens for one in got}) == 20
    assert_same(sample(toy.step, toy.start(*[1] * 20), config, eos=0, seeds=range(30, 50)), got)
    other = dataclasses.replace(config, seed=31)
    assert_same(sample(toy.step, toy.start(1), other, eos=0), got[1:2])


FIVE = {3: 0.4, 1: 0.25, 2: 0.2, 4: 0.1, 0: 0.05}


@pytest.mark.parametrize(
    ("kept", "temperature", "top_k", "top_p"),
    [
        ([3, 1, 2, 4, 0], 1.0, None, None),
        ([3, 1, 2, 4, 0], 2.5, 100, 1.0),
        ([3, 1, 2, 4], 0.6, 4, None),
        ([3], 1.0, None, 0.39),
        ([3, 1], 1.0, None, 0.41),
        ([3, 1, 2, 4], 1.0, None, 0.86),
        # of the two likeliest, 0.4 and 0.25, the first has 0.61 of what is left
        ([3], 1.0, 2, 0.6),
        ([3, 1], 1.0, 2, 0.63),
        # the squares, over their sum: 0.59, 0.23, …
        ([3], 0.5, None, 0.55),
    ],
)
def test_tokens_are_drawn_as_often_as_the_softmax_says(kept, temperature, top_k, top_p):
    toy, count = table_toy(5, {(): FIVE}), 4000
    config = DecodeConfig(max_length=1, temperature=temperature, top_k=top_k, top_p=top_p)
    got = sample(toy.step, toy.start(*[1] * count), config, eos=0)
    seen = Counter(one.tokens[0] if one.tokens else 0 for one in got)
    assert set(seen) == set(kept)
    weights = {token: FIVE[token] ** (1 / temperature) for token in kept}
    expected = {token: count * weights[token] / sum(weights.values()) for token in kept}
    # 4 degrees of freedom: one in a thousand would be above
    assert sum((seen[i] - expected[i]) ** 2 / expected[i] for i in kept) < 18.5


def test_later_tokens_are_drawn_independently_of_the_first():
    toy = table_toy(3, {history: {0: 0.0001, 1: 0.5} for history in [(), (1,), (2,)]})
    config = DecodeConfig(max_length=2, temperature=1.0)
    seen = Counter(one.tokens for one in sample(toy.step, toy.start(*[1] * 4000), config, eos=0))
    assert all(900 < seen[pair] < 1100 for pair in [(1, 1), (1, 2), (2, 1), (2, 2)])


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(0.01, None, None), (1e-300, None, None), (1e300, 1, None), (1.0, None, 1e-6), (3.0, 1, 0.9)],
)
def test_sampling_with_no_freedom_is_greedy_search(temperature, top_k, top_p):
    toy = random_toy(6, seed=8, spread=4.0)
    prefixes = [(), (2,), (3, 1), ()] * 5
    config = DecodeConfig(max_length=8, min_length=2)
    expected = greedy(toy.step, toy.start(*range(20)), config, eos=0, prefixes=prefixes)
    config = dataclasses.replace(config, temperature=temperature, top_k=top_k, top_p=top_p)
    got = sample(toy.step, toy.start(*range(20)), config, eos=0, prefixes=prefixes)
    assert_same(got, expected)


@pytest.mark.parametrize("temperature", [1.0, 1e300])
def test_samples_keep_to_prefixes_and_lengths_and_are_scored_by_the_model_itself(temperature):
    toy = random_toy(5, seed=9, eos=3.0)  # an end likelier than not
    prefixes, limits = [(), (2, 3), (1, 1, 1, 1, 1)] * 40, [4, 6, 7] * 40
    config = DecodeConfig(max_length=7, min_length=4, temperature=temperature, top_k=4, alpha=0.8)
    given = {"prefixes": prefixes, "max_lengths": limits}
    got = sample(toy.step, toy.start(*range(120)), config, eos=0, **given)
    for i, (one, prefix, limit) in enumerate(zip(got, prefixes, limits, strict=True)):
        assert one.tokens[: len(prefix)] == prefix
        assert max(4, len(prefix)) <= len(one.tokens) + one.finished <= limit
        assert one.finished or len(one.tokens) == limit
        chosen = one.tokens + (0,) * one.finished
        total = sum(toy.log_p((i, *chosen[:t]))[token] for t, token in enumerate(chosen))
        assert_same([one], [hypothesis(one.tokens, total, one.finished, 0.8)])
    assert {one.finished for one in got} == {True, False}


@both_walks
def test_a_row_that_is_done_may_have_logits_of_any_kind(name):
    def logits(history):
        if 0 in history[1:]:
            return [math.nan] * 3
        return [math.log(0.98), -4.6, -5.6] if history[0] == 1 else [-9.0, 2.0, 1.0]

    toy, config = Toy(3, logits), DecodeConfig(max_length=5, **OPTIONS.get(name, {}))
    short, long = SEARCHES[name](toy.step, toy.start(1, 2), config, eos=0)
    assert (short.tokens, short.finished) == ((), True)
    assert len(long.tokens) == 5


@both_walks
def test_a_stream_yields_each_token_of_the_search_before_the_next_step(name):
    toy = random_toy(6, seed=13, eos=-0.5)
    config = DecodeConfig(max_length=9, min_length=2, seed=7, **OPTIONS.get(name, {}))
    endings = set()
    for sentence in range(20):
        [found] = SEARCHES[name](toy.step, toy.start(sentence), config, eos=0)
        toy.steps = 0
        got = [(token, toy.steps) for token in stream(toy.step, toy.start(sentence), config, eos=0)]
        assert got == [(token, t) for t, token in enumerate(found.tokens, 1)]
        endings.add(found.finished)
    assert endings == {True, False}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("name", SEARCHES)
def test_logits_that_are_not_numbers_are_an_error(name, at, value):
    toy = random_toy(4, seed=11, eos=-9.0)

    def step(tokens, state):
        logits = toy.step(tokens, state)
        return logits if toy.steps <= at else torch.full_like(logits, value)

    config = DecodeConfig(max_length=4, **OPTIONS.get(name, {}))
    with pytest.raises(SearchError, match=r"logits.*look for NaN"):
        list(SEARCHES[name](step, toy.start(1), config, eos=0))


OUTSIDE = "token 4 is outside the vocabulary of 4"


@every_search
@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"prefixes": [(1, 0), ()]}, TokenError, "other than the end token 0"),
        ({"prefixes": [(1,), (2, 4)]}, TokenError, OUTSIDE),
        ({"eos": 4}, TokenError, OUTSIDE),
        ({"prefixes": [(), (1,) * 3], "max_lengths": [5, 2]}, ConfigError, "does not fit max_len"),
        ({"prefixes": [(1,)]}, ShapeError, "1 prefixes for 2 sentences"),
        ({"max_lengths": [1, 6]}, ConfigError, "must be from 2 to 5"),
        ({"state": 3}, WriteheadError, "3 beams per sentence.*start"),
        ({"state": 0}, ShapeError, "no rows"),
        ({"logits": (2, 1, 4)}, ShapeError, "logits"),
        ({"forbidden": 2, "prefixes": [(1, 2), ()]}, SearchError, "prefix"),
    ],
    ids=str,
)
def test_wrong_input_is_an_error_that_says_what_is_wrong(name, given, error, words):
    given, toy = {"eos": 0, **given}, random_toy(4, seed=12)
    beam, shape = given.pop("state", 1), given.pop("logits", None)
    forbidden = given.pop("forbidden", None)

    def step(tokens, state):
        logits = toy.step(tokens, state) if shape is None else torch.zeros(shape)
        if forbidden is not None:
            logits[:, forbidden] = -math.inf
        return logits

    config = DecodeConfig(max_length=5, min_length=2, **OPTIONS.get(name, {}))
    state = toy.start(1, 2, beam=beam) if beam else toy.start()
    with pytest.raises(error, match=words):
        SEARCHES[name](step, state, config, **given)


@pytest.mark.parametrize(
    ("name", "options", "given", "words"),
    [
        ("greedy", {"beam": 2}, {}, "use beam_search"),
        ("greedy", {"temperature": 1.0}, {}, "sample"),
        ("sample", {}, {}, "needs a temperature"),
        ("beam", {"temperature": 1.0}, {}, "omit temperature"),
        ("greedy", {"max_length": None}, {}, "no length limit"),
        ("sample", OPTIONS["sample"], {"seeds": [1, 2]}, "2 seeds for 1 rows"),
        ("sample", OPTIONS["sample"], {"seeds": [2**64]}, "seed=18446744073709551616"),
        ("stream", {"beam": 2}, {}, "beam=1"),
        ("stream", {}, {"state": (1, 2)}, "2 rows; only one"),
    ],
)
def test_a_search_refuses_what_it_cannot_do_before_its_first_step(name, options, given, words):
    toy = random_toy(4, seed=12)
    state = toy.start(*given.get("state", (1,)))
    seeds = {"seeds": given["seeds"]} if "seeds" in given else {}
    config = DecodeConfig(**{"max_length": 3, **options})
    with pytest.raises((ConfigError, ShapeError), match=words):
        SEARCHES[name](toy.step, state, config, eos=0, **seeds)
    assert toy.steps == 0
