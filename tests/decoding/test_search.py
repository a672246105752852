"""Greedy search and sampling against plain loops over the same toy model."""

import dataclasses
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from search_toys import Found, Toy, assert_found, random_toy, table_toy
from writehead.config import DecodeConfig
from writehead.decoding import Hypothesis, beam_search, greedy, sample
from writehead.decoding.search import stream
from writehead.errors import ConfigError, SearchError, ShapeError, TokenError, WriteheadError

ALPHAS = (0.0, 0.6, 1.0, -0.7)


def naive_greedy(
    toy: Toy, sentence: int, max_length: int, min_length: int = 0, prefix: tuple[int, ...] = ()
) -> Found:
    tokens: tuple[int, ...] = ()
    total = 0.0
    while len(tokens) < max_length:
        log_p = toy.log_p((sentence, *tokens))
        if len(tokens) < len(prefix):
            best = prefix[len(tokens)]
        else:
            allowed = [t for t in range(toy.vocabulary) if t or len(tokens) + 1 >= min_length]
            best = max(allowed, key=lambda token: log_p[token])
        total += log_p[best]
        if best == toy.end:
            return Found(tokens, total, True)
        tokens = (*tokens, best)
    return Found(tokens, total, False)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("search", ["greedy", "a beam of 1"])
def test_greedy_search_and_a_beam_of_one_take_the_likeliest_token_at_every_step(search, alpha):
    toy = random_toy(7, seed=1, end=0.5)
    config = DecodeConfig(max_length=9, alpha=alpha)
    sentences = range(30)
    if search == "greedy":
        got = greedy(toy.step, toy.start(*sentences), config, end=0)
    else:
        [*lists] = beam_search(toy.step, toy.start(*sentences), config, end=0)
        got = [one for [one] in lists]
    expected = [naive_greedy(toy, sentence, 9) for sentence in sentences]
    assert_found(got, expected, alpha)
    # both ways to stop happened
    assert {one.finished for one in got} == {True, False}
    assert len({one.length for one in expected}) > 4


def test_greedy_search_honours_prefixes_minimal_and_maximal_lengths_of_each_row():
    toy = random_toy(5, seed=2, end=1.0)
    prefixes = [(), (3,), (4, 4, 1), (2, 1), (1, 2, 3, 4)]
    limits = [6, 4, 7, 4, 4]
    config = DecodeConfig(max_length=7, min_length=4)
    state = toy.start(*range(5))
    got = greedy(toy.step, state, config, end=0, prefixes=prefixes, max_lengths=limits)
    expected = [naive_greedy(toy, i, limits[i], 4, prefixes[i]) for i in range(5)]
    assert_found(got, expected, 0.6)
    assert got[4].tokens == (1, 2, 3, 4)
    assert all(one.length >= 4 for one in expected)


def test_a_finished_hypothesis_has_its_end_token_in_its_scores_but_not_in_its_tokens():
    toy = table_toy(4, {(): {2: 0.5}, (2,): {0: 0.75}})
    [got] = greedy(toy.step, toy.start(9), DecodeConfig(max_length=8, alpha=0.6), end=0)
    assert got.tokens == (2,)
    assert got.finished
    assert got.log_probability == pytest.approx(math.log(0.5 * 0.75), rel=1e-6)
    assert got.score == pytest.approx(math.log(0.5 * 0.75) / (7 / 6) ** 0.6, rel=1e-6)


def test_an_unfinished_hypothesis_has_all_its_tokens_and_their_length():
    toy = table_toy(4, {(): {2: 0.5}, (2,): {3: 0.75}, (2, 3): {1: 0.5}})
    [got] = greedy(toy.step, toy.start(9), DecodeConfig(max_length=3, alpha=1.0), end=0)
    assert got.tokens == (2, 3, 1)
    assert not got.finished
    assert got.score == pytest.approx(math.log(0.5 * 0.75 * 0.5) / (8 / 6), rel=1e-6)


def test_a_search_stops_calling_its_step_once_every_row_is_done():
    ends = {(): {1: 0.9}, (1,): {0: 0.9}}
    toy = table_toy(3, ends)
    greedy(toy.step, toy.start(1, 2), DecodeConfig(max_length=50), end=0)
    assert toy.calls == 2
    assert toy.fed == [[1, 2], [1, 1]]
    toy = Toy(3, lambda history: [-1.0, 1.0, 0.0])  # no end in sight
    greedy(toy.step, toy.start(1, 2), DecodeConfig(max_length=50), end=0, max_lengths=[3, 5])
    assert toy.calls == 5


def test_scores_are_float32_whatever_the_logits():
    def half(tokens, state):
        return toy.step(tokens, state).to(torch.bfloat16)

    toy = random_toy(9, seed=3)
    [got] = greedy(half, toy.start(1), DecodeConfig(max_length=6, min_length=6), end=0)
    exact = 0.0
    for t, token in enumerate(got.tokens):
        logits = torch.tensor(toy.logits((1, *got.tokens[:t]))).bfloat16().double()
        exact += torch.log_softmax(logits, dim=0)[token].item()
    assert got.log_probability == pytest.approx(exact, rel=1e-6)


rows = st.lists(
    st.tuples(
        st.integers(0, 40),  # the sentence
        st.integers(3, 24),  # its own limit
        st.lists(st.integers(1, 4), max_size=3).map(tuple),  # its prefix
        st.integers(-5, 2**40),  # its seed
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("kind", ["greedy", "sample", "narrowed sample", "beam"])
@settings(deadline=None, derandomize=True, max_examples=25)
@given(batch=rows)
def test_what_a_row_gets_never_depends_on_the_rows_beside_it(kind, batch):
    toy = random_toy(5, seed=4, end=-0.5)
    config = {
        "greedy": DecodeConfig(max_length=24, min_length=2),
        "sample": DecodeConfig(max_length=24, min_length=2, temperature=0.9),
        "narrowed sample": DecodeConfig(
            max_length=24, min_length=2, temperature=1.5, top_k=4, top_p=0.8
        ),
        "beam": DecodeConfig(max_length=24, min_length=2, beam=3, n_best=2),
    }[kind]

    def found(chosen):
        sentences, limits, prefixes, seeds = zip(*chosen, strict=True)
        search = {"greedy": greedy, "beam": beam_search}.get(kind, sample)
        extra = {"seeds": seeds} if search is sample else {}
        return search(
            toy.step,
            toy.start(*sentences),
            config,
            end=0,
            prefixes=prefixes,
            max_lengths=limits,
            **extra,
        )

    assert found(batch) == [found([row])[0] for row in batch]


def test_one_seed_draws_one_sequence_and_other_seeds_draw_others():
    toy = random_toy(8, seed=5, end=-2.0)
    config = DecodeConfig(max_length=12, temperature=1.0)

    def draw(seed):
        [one] = sample(toy.step, toy.start(1), config, end=0, seeds=[seed])
        return one

    assert [draw(seed) for seed in range(20)] == [draw(seed) for seed in range(20)]
    assert len({draw(seed).tokens for seed in range(20)}) == 20


def test_rows_without_seeds_of_their_own_count_up_from_the_seed_of_the_config():
    toy = random_toy(8, seed=5, end=-2.0)
    config = DecodeConfig(max_length=12, temperature=1.0, seed=30)
    got = sample(toy.step, toy.start(1, 1, 1), config, end=0)
    assert got == sample(toy.step, toy.start(1, 1, 1), config, end=0, seeds=[30, 31, 32])
    assert len({one.tokens for one in got}) == 3
    other = dataclasses.replace(config, seed=31)
    assert sample(toy.step, toy.start(1), other, end=0) == [got[1]]


def drawn(toy: Toy, count: int, **options: float) -> Counter[int]:
    """How often each token comes first in `count` samples."""
    config = DecodeConfig(max_length=1, **options)
    got = sample(toy.step, toy.start(*[1] * count), config, end=0)
    return Counter(one.tokens[0] if one.tokens else 0 for one in got)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
def test_first_tokens_are_drawn_as_often_as_the_softmax_says(temperature):
    toy, count = random_toy(6, seed=6), 6000
    log_p = toy.log_p((1,))
    weights = [math.exp(x / temperature) for x in log_p]
    expected = [count * weight / sum(weights) for weight in weights]
    seen = drawn(toy, count, temperature=temperature)
    chi_square = sum((seen[i] - expected[i]) ** 2 / expected[i] for i in range(6))
    assert chi_square < 20.5  # 5 degrees of freedom: one in a thousand would be above


def test_later_tokens_are_drawn_independently_of_the_first():
    toy = table_toy(3, {history: {0: 0.0001, 1: 0.5} for history in [(), (1,), (2,)]})
    config = DecodeConfig(max_length=2, temperature=1.0)
    got = sample(toy.step, toy.start(*[1] * 4000), config, end=0)
    seen = Counter(one.tokens for one in got)
    assert all(900 < seen[pair] < 1100 for pair in [(1, 1), (1, 2), (2, 1), (2, 2)])


@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("top_k", [2, 4, 100])
def test_top_k_draws_all_of_the_k_likeliest_tokens_and_no_other(top_k, temperature):
    toy = random_toy(7, seed=7, spread=0.7)
    log_p = toy.log_p((1,))
    likeliest = sorted(range(7), key=lambda token: -log_p[token])[:top_k]
    seen = drawn(toy, 4000, temperature=temperature, top_k=top_k)
    assert set(seen) == set(likeliest)
    weights = {token: math.exp(log_p[token] / temperature) for token in likeliest}
    for token, weight in weights.items():
        assert abs(seen[token] / 4000 - weight / sum(weights.values())) < 0.03


@pytest.mark.parametrize(
    ("top_p", "top_k", "kept"),
    [
        (0.1, None, {3}),
        (0.39, None, {3}),
        (0.41, None, {3, 1}),
        (0.7, None, {3, 1, 2}),
        (0.86, None, {3, 1, 2, 4}),
        (1.0, None, {3, 1, 2, 4, 0}),
        # of the two likeliest, 0.4 and 0.25, the first has 0.61 of what is left
        (0.6, 2, {3}),
        (0.63, 2, {3, 1}),
    ],
)
def test_top_p_draws_the_fewest_tokens_that_reach_p(top_p, top_k, kept):
    toy = table_toy(5, {(): {3: 0.4, 1: 0.25, 2: 0.2, 4: 0.1, 0: 0.05}})
    assert set(drawn(toy, 2000, temperature=1.0, top_p=top_p, top_k=top_k)) == kept


def test_top_p_shares_what_it_leaves_out_among_what_it_keeps():
    toy = table_toy(5, {(): {3: 0.4, 1: 0.25, 2: 0.2, 4: 0.1, 0: 0.05}})
    seen = drawn(toy, 4000, temperature=1.0, top_p=0.6)
    assert abs(seen[3] / 4000 - 0.4 / 0.65) < 0.03


def test_the_temperature_changes_what_top_p_keeps():
    toy = table_toy(4, {(): {1: 0.4, 2: 0.3, 3: 0.2, 0: 0.1}})
    # p^2, over their sum: 0.53, 0.30, 0.13, 0.03
    assert set(drawn(toy, 2000, temperature=0.5, top_p=0.5)) == {1}
    assert set(drawn(toy, 2000, temperature=1.0, top_p=0.5)) == {1, 2}


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.01},
        {"temperature": 1e-12},
        {"temperature": 1e-44},
        {"temperature": 1e-300},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 3.0, "top_k": 1, "top_p": 0.9},
        {"temperature": 1.0, "top_p": 1e-6},
        {"temperature": 1e300, "top_k": 1},
    ],
)
def test_sampling_with_no_freedom_is_greedy_search(options):
    toy = random_toy(6, seed=8, spread=4.0)
    prefixes = [(), (2,), (3, 1), ()] * 5
    config = DecodeConfig(max_length=8, min_length=2)
    expected = greedy(toy.step, toy.start(*range(20)), config, end=0, prefixes=prefixes)
    config = dataclasses.replace(config, **options)
    assert sample(toy.step, toy.start(*range(20)), config, end=0, prefixes=prefixes) == expected


@pytest.mark.parametrize("temperature", [1.0, 1e30, 1e300])
def test_samples_begin_with_their_prefix_and_are_as_long_as_they_must_be(temperature):
    toy = random_toy(4, seed=9, end=3.0)  # an end likelier than not
    prefixes = [(), (2, 3), (1, 1, 1, 1, 1)] * 40
    limits = [4, 6, 7] * 40
    config = DecodeConfig(max_length=7, min_length=4, temperature=temperature)
    got = sample(
        toy.step, toy.start(*range(120)), config, end=0, prefixes=prefixes, max_lengths=limits
    )
    for one, prefix, limit in zip(got, prefixes, limits, strict=True):
        assert one.tokens[: len(prefix)] == prefix
        assert max(4, len(prefix)) <= len(one.tokens) + one.finished <= limit
        assert one.finished or len(one.tokens) == limit
        assert 0 not in one.tokens
    assert {one.finished for one in got} == {True, False}


def test_a_sample_is_scored_by_the_model_itself_whatever_it_was_drawn_from():
    toy = random_toy(6, seed=10)
    config = DecodeConfig(
        max_length=6, min_length=3, temperature=2.0, top_k=5, top_p=0.9, alpha=0.8
    )
    got = sample(toy.step, toy.start(*range(20)), config, end=0)
    expected = []
    for sentence, one in enumerate(got):
        chosen = one.tokens + (0,) * one.finished
        total = sum(toy.log_p((sentence, *chosen[:t]))[token] for t, token in enumerate(chosen))
        expected.append(Found(one.tokens, total, one.finished))
    assert_found(got, expected, 0.8)
    assert {one.finished for one in got} == {True, False}


@pytest.mark.parametrize("temperature", [None, 1.0])
def test_a_row_that_is_done_may_have_logits_of_any_kind(temperature):
    def logits(history):
        if 0 in history[1:]:
            return [math.nan] * 3
        return [math.log(0.98), -4.6, -5.6] if history[0] == 1 else [-9.0, 2.0, 1.0]

    toy = Toy(3, logits)
    config = DecodeConfig(max_length=5, temperature=temperature)
    search = greedy if temperature is None else sample
    short, long = search(toy.step, toy.start(1, 2), config, end=0)
    assert short.tokens == ()
    assert short.finished
    assert len(long.tokens) == 5


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_k": 4, "seed": 7}])
def test_a_stream_gives_the_tokens_that_a_search_finds(options):
    toy = random_toy(6, seed=13, end=-0.5)
    config = DecodeConfig(max_length=9, min_length=2, **options)
    search = sample if options else greedy
    endings = set()
    for sentence in range(20):
        [found] = search(toy.step, toy.start(sentence), config, end=0)
        assert tuple(stream(toy.step, toy.start(sentence), config, end=0)) == found.tokens
        endings.add(found.finished)
    assert endings == {True, False}


def test_a_stream_gives_each_token_before_it_takes_the_next_step():
    toy = Toy(4, lambda history: [-1.0, 0.0, 2.0, 1.0])
    tokens = stream(toy.step, toy.start(1), DecodeConfig(max_length=5), end=0)
    assert toy.calls == 0
    assert [(token, toy.calls) for token in tokens] == [(2, n) for n in range(1, 6)]


@pytest.mark.parametrize(
    ("options", "sentences", "error", "message"),
    [
        ({}, (1, 2), ShapeError, "2 rows; only one"),
        ({}, (), ShapeError, "0 rows; only one"),
        ({"beam": 2}, (1,), ConfigError, "beam=1"),
        ({"temperature": 1.0, "seed": 2**64}, (1,), ConfigError, "seed=18446744073709551616"),
    ],
)
def test_a_stream_refuses_what_it_cannot_do_before_it_begins(options, sentences, error, message):
    toy = random_toy(4, seed=12)
    with pytest.raises(error, match=message):
        stream(toy.step, toy.start(*sentences), DecodeConfig(max_length=3, **options), end=0)
    assert toy.calls == 0


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}])
def test_a_stream_of_logits_that_are_not_numbers_ends_in_an_error(options):
    toy = Toy(3, lambda history: [math.nan] * 3 if len(history) > 2 else [-50.0, 2.0, 1.0])
    tokens = stream(toy.step, toy.start(1), DecodeConfig(max_length=5, **options), end=0)
    assert next(tokens) in (1, 2)
    assert next(tokens) in (1, 2)
    with pytest.raises(SearchError, match="look for NaN"):
        next(tokens)


def spoiled(value: float, at: int):
    """A step function whose logits are `value` from step `at` on."""
    toy = random_toy(4, seed=11, end=-9.0)

    def step(tokens, state):
        logits = toy.step(tokens, state)
        return logits if toy.calls <= at else torch.full_like(logits, value)

    return step, toy.start(1, 2)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.0}, {"beam": 2}, {"beam": 3, "n_best": 2}]
)
def test_logits_that_are_not_numbers_are_an_error_of_ours(value, at, options):
    config = DecodeConfig(max_length=4, **options)
    search = sample if "temperature" in options else beam_search
    step, state = spoiled(value, at)
    with pytest.raises(SearchError, match=r"logits.*look for NaN"):
        search(step, state, config, end=0)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"beam": 2}])
def test_a_prefix_that_the_logits_forbid_is_an_error_of_ours(options):
    toy = Toy(3, lambda history: [0.0, 0.0, -math.inf])
    config = DecodeConfig(max_length=4, **options)
    search = sample if "temperature" in options else beam_search
    with pytest.raises(SearchError, match="prefix"):
        search(toy.step, toy.start(1), config, end=0, prefixes=[(1, 2)])


SEARCHES = {
    "greedy": (greedy, DecodeConfig(max_length=5, min_length=2)),
    "sample": (sample, DecodeConfig(max_length=5, min_length=2, temperature=1.0)),
    "beam": (beam_search, DecodeConfig(max_length=5, min_length=2, beam=2)),
}

WRONG = {
    "a prefix with the end token": (
        {"prefixes": [(1, 0), ()]},
        TokenError,
        "other than the end token 0",
    ),
    "a negative id": ({"prefixes": [(1, -1), ()]}, TokenError, "must hold token ids"),
    "an id past the vocabulary": (
        {"prefixes": [(1,), (2, 4)]},
        TokenError,
        "token 4 is outside the vocabulary of 4",
    ),
    "an end past the vocabulary": (
        {"end": 4},
        TokenError,
        "token 4 is outside the vocabulary of 4",
    ),
    "a negative end": ({"end": -1}, TokenError, "end=-1"),
    "a prefix too long": (
        {"prefixes": [(1,) * 6, ()]},
        ConfigError,
        "prefix of 6 tokens does not fit max_length=5",
    ),
    "a prefix too long for its row": (
        {"prefixes": [(), (1,) * 3], "max_lengths": [5, 2]},
        ConfigError,
        "prefix of 3 tokens does not fit max_length=2",
    ),
    "one prefix for two": ({"prefixes": [(1,)]}, ShapeError, "1 prefixes for 2 sentences"),
    "three limits for two": (
        {"max_lengths": [5, 5, 5]},
        ShapeError,
        "3 max_lengths for 2 sentences",
    ),
    "a limit of nothing": (
        {"max_lengths": [5, 0]},
        ConfigError,
        "max_length=0 must be from 2 to 5",
    ),
    "a limit below the minimum": (
        {"max_lengths": [1, 5]},
        ConfigError,
        "max_length=1 must be from 2 to 5",
    ),
    "a limit above the config's": (
        {"max_lengths": [5, 6]},
        ConfigError,
        "max_length=6 must be from 2 to 5",
    ),
    "a state of three beams": ({"state": 3}, WriteheadError, "3 beams a sentence.*start"),
    "a state of nothing": ({"state": 0}, ShapeError, "no rows"),
}


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_input_is_an_error_that_says_what_is_wrong(name, wrong):
    search, config = SEARCHES[name]
    arguments, error, message = WRONG[wrong]
    arguments = {"end": 0, "state": 1, **arguments}
    toy = random_toy(4, seed=12)
    beam = arguments.pop("state")
    state = toy.start(1, 2, beam=beam) if beam else toy.start()
    with pytest.raises(error, match=message):
        search(toy.step, state, config, **arguments)


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("shape", [(4,), (7, 4), (3, 1, 4)])
def test_a_step_function_with_logits_of_another_shape_is_an_error(name, shape):
    search, config = SEARCHES[name]
    toy = random_toy(4, seed=12)
    with pytest.raises(ShapeError, match="logits"):
        search(lambda tokens, state: torch.zeros(shape), toy.start(1, 2, 3), config, end=0)


@pytest.mark.parametrize(
    ("seeds", "error", "message"),
    [
        ([1], ShapeError, "1 seeds for 2 rows"),
        ([1, 2, 3], ShapeError, "3 seeds for 2 rows"),
        ([1, 2**64], ConfigError, "seed=18446744073709551616"),
        ([-(2**63) - 1, 1], ConfigError, "seed=-9223372036854775809"),
    ],
)
def test_wrong_seeds_are_an_error_that_says_what_is_wrong(seeds, error, message):
    search, config = SEARCHES["sample"]
    toy = random_toy(4, seed=12)
    with pytest.raises(error, match=message):
        search(toy.step, toy.start(1, 2), config, end=0, seeds=seeds)


@pytest.mark.parametrize(
    ("search", "options", "message"),
    [
        (greedy, {"beam": 2}, "use beam_search"),
        (greedy, {"temperature": 1.0}, "sample"),
        (sample, {}, "needs a temperature"),
        (sample, {"beam": 2}, "needs a temperature"),
        (beam_search, {"temperature": 1.0}, "leave temperature out"),
    ],
)
def test_a_config_meant_for_another_search_is_an_error(search, options, message):
    toy = random_toy(4, seed=12)
    with pytest.raises(ConfigError, match=message):
        search(toy.step, toy.start(1), DecodeConfig(max_length=3, **options), end=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 0}, "max_length=0 must be at least 1"),
        ({"max_length": -2}, "max_length=-2 must be at least 1"),
        ({"max_length": 2.5}, "max_length=2.5 is not a whole number"),
        ({"max_length": True}, "max_length=True is not a whole number"),
        ({"max_length": "4"}, "max_length='4' is not a whole number or null"),
        ({"min_length": -1}, "min_length=-1 must be between 0 and max_length=4"),
        ({"min_length": 5}, "min_length=5 must be between 0 and max_length=4"),
        ({"beam": 0}, "beam=0 must be at least 1"),
        ({"n_best": 0}, "n_best=0 must be at least 1"),
        ({"n_best": 3, "beam": 2}, "n_best=3 hypotheses need a beam as wide"),
        ({"alpha": math.nan}, "alpha=nan"),
        ({"alpha": math.inf}, "alpha=inf"),
        ({"alpha": "0.6"}, "alpha='0.6' is not a number"),
        ({"top_k": 3}, "set temperature too"),
        ({"top_p": 0.5}, "set temperature too"),
        ({"temperature": 0.0}, "temperature=0.0 must be above 0"),
        ({"temperature": -1.0}, "temperature=-1.0 must be above 0"),
        ({"temperature": math.nan}, "temperature=nan must be above 0"),
        ({"temperature": math.inf}, "temperature=inf must be above 0"),
        ({"temperature": 1.0, "beam": 2}, "sampling follows one hypothesis; set beam=2"),
        ({"temperature": 1.0, "n_best": 2}, "sampling follows one hypothesis; set n_best=2"),
        ({"temperature": 1.0, "top_k": 0}, "top_k=0 must be at least 1"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p=0.0 must be above 0"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p=1.5 must be above 0 and at most 1"),
        ({"temperature": 1.0, "top_p": math.nan}, "top_p=nan"),
        ({"seed": 0.5}, "seed=0.5 is not a whole number"),
    ],
)
def test_a_decode_config_that_cannot_be_meant_is_an_error(options, message):
    with pytest.raises(ConfigError, match=message):
        DecodeConfig(**{"max_length": 4, **options})


def test_a_hypothesis_is_a_value():
    one = Hypothesis((1, 2), -0.5, -1.0, True)
    assert one == Hypothesis((1, 2), -0.5, -1.0, True)
    assert hash(one) == hash(Hypothesis((1, 2), -0.5, -1.0, True))
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.score = 0.0
