"""Greedy search and sampling against plain loops over the same toy model."""

import math
from collections import Counter
from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from search_toys import Toy, assert_same, hypothesis, random_toy
from writehead.config import DecodeConfig
from writehead.engine import Hypothesis, beam_search, greedy, sample
from writehead.engine.search import Options, Search, Targets
from writehead.errors import ConfigError, SearchError, ShapeError, TokenError, WriteheadError

SEARCHES = {"greedy": greedy, "sample": sample, "beam": beam_search}
OPTIONS = {"sample": {"temperature": 1.0}, "beam": {"beam": 2}}
every_search = pytest.mark.parametrize("name", ["greedy", "sample", "beam"])


def split_mix_64(seed: int) -> Iterator[int]:
    """The generator of Steele, Lea and Flood (2014)."""
    while True:
        seed = (seed + 0x9E3779B97F4A7C15) % 2**64
        z = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        yield z ^ (z >> 31)


def test_the_random_numbers_are_those_published():
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert list(islice(split_mix_64(1234567), 3)) == expected


def naive_search(
    toy: Toy, sentence: int, config: DecodeConfig, limit: int, prefix: tuple[int, ...], seed: int
) -> Hypothesis:
    """Takes the likeliest token, or draws from the kept ones in the order of their ids."""
    draws = [number / 2**64 for number in islice(split_mix_64(seed), limit)]
    tokens, total = (), 0.0
    for t, draw in enumerate(draws):
        logits, log_p = list(toy.logits((sentence, *tokens))), toy.log_p((sentence, *tokens))
        for token in set(tokens):
            penalty = config.repetition_penalty or 1.0
            logits[token] *= 1.0 / penalty if logits[token] > 0.0 else penalty
        allowed = [i for i in range(toy.vocab_size) if i != toy.eos or t + 1 >= config.min_length]
        order = sorted(allowed, key=lambda token: (-logits[token], token))[: config.top_k]
        if t < len(prefix):
            token = prefix[t]
        elif config.temperature is None:
            token = order[0]
        else:
            largest = logits[order[0]]
            p = {i: math.exp((logits[i] - largest) / config.temperature) for i in order}
            total_p, preceding, kept = sum(p.values()), 0.0, []
            for token in order:
                if preceding < (config.top_p or 2.0) * total_p and p[token] >= (config.min_p or 0):
                    kept.append(token)
                preceding += p[token]
            left = draw * sum(p[token] for token in kept)
            for token in sorted(kept):
                left -= p[token]
                if left < 0.0:
                    break
        total += log_p[token]
        if token == toy.eos:
            return hypothesis(tokens, total, True, config.alpha)
        tokens = (*tokens, token)
    return hypothesis(tokens, total, False, config.alpha)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in SEARCHES),
        *((name, {"alpha": alpha}) for name in ("greedy", "beam") for alpha in (0.0, -0.7)),
        *(("greedy", {"repetition_penalty": penalty}) for penalty in (1.7, 0.6)),
        *(("sample", {"min_p": min_p}) for min_p in (0.3, 1.0)),
        ("sample", {"top_k": 5, "top_p": 0.8, "min_p": 0.1, "alpha": 0.8}),
        ("sample", {"repetition_penalty": 2.5}),
        ("sample", {"repetition_penalty": 0.4, "top_p": 0.7}),
        # there is only one candidate
        ("sample", {"temperature": 1e-300}),
        ("sample", {"temperature": 1e300, "top_k": 1}),
        ("sample", {"top_p": 1e-6}),
    ],
    ids=str,
)
@pytest.mark.parametrize("least", [0, 4])
def test_searches_equal_a_naive_loop(least, name, options):
    drawn = random_toy(9, seed=15, eos=0.5)
    # logits in bfloat16, whose scores must be computed in float32
    toy = Toy(9, lambda history: torch.tensor(drawn.logits(history)).bfloat16().tolist())
    prefixes, limits = [(), (3,), (4, 4, 1), (), (1, 2, 3, 4)] * 6, [9, 4, 7, 8, 4] * 6
    options = ({"temperature": 1.4} if name == "sample" else {}) | options
    config = DecodeConfig(max_length=9, min_length=least, beam=1, seed=5, **options)
    given = {"prefixes": prefixes, "max_lengths": limits}
    state = toy.start(*range(30))
    got = SEARCHES[name](lambda *fed: toy.step(*fed).bfloat16(), state, config, eos=0, **given)
    got = [one for [one] in got] if name == "beam" else got
    rows = enumerate(zip(limits, prefixes, strict=True))
    assert_same(got, [naive_search(toy, i, config, *row, seed=5 + i) for i, row in rows])
    assert {one.finished for one in got} == {True, False}
    assert toy.steps == max(len(one.tokens) + one.finished for one in got)


# a row: its sentence, limit, prefix and seed
PREFIXES = st.lists(st.integers(1, 4), max_size=3).map(tuple)
ROW = st.tuples(st.integers(0, 40), st.integers(3, 16), PREFIXES, st.integers(-5, 2**40))

NARROWED = {"temperature": 1.5, "top_k": 4, "top_p": 0.8}


@pytest.mark.parametrize("options", [{}, NARROWED, {"beam": 3, "n_best": 2}], ids=str)
@settings(max_examples=15)
@given(batch=st.lists(ROW, min_size=1, max_size=6))
def test_a_row_does_not_depend_on_the_rest_of_its_batch(options, batch):
    toy = random_toy(5, seed=4, eos=-0.5)
    config = DecodeConfig(max_length=16, min_length=2, **options)

    def search(rows):
        sentences, limits, prefixes, seeds = zip(*rows, strict=True)
        given = {"eos": 0, "prefixes": prefixes, "max_lengths": limits}
        if "temperature" in options:
            drawn = sample(toy.step, toy.start(*sentences), config, seeds=seeds, **given)
            return [[one] for one in drawn]
        return beam_search(toy.step, toy.start(*sentences), config, **given)

    for row, batched in zip(batch, search(batch), strict=True):
        assert_same(batched, search([row])[0])


def test_negative_seeds_are_seeds_modulo_two_to_the_64():
    toy, config = random_toy(5, seed=4), DecodeConfig(max_length=9, temperature=1.0)
    seeds = [-1, 2**64 - 1, -(2**63), 2**63]
    drawn = sample(toy.step, toy.start(*[1] * 4), config, eos=0, seeds=seeds)
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]


FIVE = [0.05, 0.25, 0.2, 0.4, 0.1]


@pytest.mark.parametrize(
    ("kept", "temperature", "top_k", "top_p"),
    [
        ([3, 1, 2, 4, 0], 2.5, 100, 1.0),
        ([3, 1, 2, 4], 0.6, 4, None),
        ([3, 1, 2, 4], 1.0, None, 0.86),
        # of the two likeliest, 0.4 and 0.25, the first has 0.61 of their sum
        ([3], 1.0, 2, 0.6),
        ([3, 1], 1.0, 2, 0.63),
    ],
)
def test_tokens_are_sampled_with_their_softmax_probability(kept, temperature, top_k, top_p):
    toy, count = Toy(5, lambda history: [math.log(p) for p in FIVE]), 4000
    config = DecodeConfig(max_length=1, temperature=temperature, top_k=top_k, top_p=top_p)
    got = sample(toy.step, toy.start(*[1] * count), config, eos=0)
    seen = Counter(one.tokens[0] if one.tokens else 0 for one in got)
    assert set(seen) == set(kept)
    weights = {token: FIVE[token] ** (1 / temperature) for token in kept}
    expected = {token: count * weights[token] / sum(weights.values()) for token in kept}
    # chi-squared with 4 degrees of freedom: p < 0.001
    assert sum((seen[i] - expected[i]) ** 2 / expected[i] for i in kept) < 18.5


@every_search
def test_processors_change_the_logits_by_the_tokens_so_far(name):
    toy = random_toy(5, seed=16, eos=-9.0)

    def forbid_repeats(tokens, logits):
        assert tokens.shape == (len(logits), toy.steps - 1)
        for row, chosen in enumerate(tokens.tolist()):
            logits[row, chosen] = -math.inf
        return logits

    config = DecodeConfig(max_length=4, **OPTIONS.get(name, {}))
    given = {"eos": 0, "processors": [lambda tokens, logits: logits.clone(), forbid_repeats]}
    got = SEARCHES[name](toy.step, toy.start(*range(6)), config, **given)
    for one in [best for [best] in got] if name == "beam" else got:
        assert sorted(one.tokens) == [1, 2, 3, 4]
    given["processors"] = [lambda tokens, logits: None]
    with pytest.raises(ShapeError, match=r"a processor must return logits .* not None"):
        SEARCHES[name](toy.step, toy.start(1), config, **given)


@every_search
def test_a_row_that_ended_may_have_nan_logits(name):
    # sentence 1 must be token 1 and then the end; sentence 2 never ends
    def logits(history):
        if 0 in history[1:]:
            return [math.nan] * 4
        if history[0] == 2:
            return [-99.0, 1.0, 2.0, 2.5]
        allowed = 1 if len(history) == 1 else 0
        return [0.0 if token == allowed else -math.inf for token in range(4)]

    toy, config = Toy(4, logits), DecodeConfig(max_length=6, **OPTIONS.get(name, {}))
    short, long = SEARCHES[name](toy.step, toy.start(1, 2), config, eos=0)
    if name == "beam":
        [short], [long] = short, long
    assert (short.tokens, short.score, short.finished) == ((1,), 0.0, True)
    assert len(long.tokens) == 6


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("name", SEARCHES)
def test_nan_and_infinite_logits_are_an_error(name, at, value):
    toy = random_toy(4, seed=11, eos=-9.0)

    def step(tokens, state):
        logits = toy.step(tokens, state)
        return logits if toy.steps <= at else torch.full_like(logits, value)

    config = DecodeConfig(max_length=4, **OPTIONS.get(name, {}))
    with pytest.raises(SearchError, match=r"logits.*look for NaN"):
        list(SEARCHES[name](step, toy.start(1), config, eos=0))


TEMPERATURE = {"temperature": 1.0}
INVALID_INPUT = [
    ({"prefixes": [(1, 0), ()]}, TokenError, "without eos=0"),
    ({"prefixes": [(1,), (2, 4)]}, TokenError, "token 4 is outside the vocabulary of 4"),
    ({"eos": 4}, TokenError, "token 4 is outside the vocabulary of 4"),
    ({"prefixes": [(), (1,) * 3], "max_lengths": [5, 2]}, ConfigError, "more than max_length=2"),
    ({"prefixes": [(1,)]}, ShapeError, "1 prefixes for 2 sentences"),
    ({"max_lengths": [1, 6]}, ConfigError, "must be from 2 to 5"),
    ({"beams": 3}, WriteheadError, "3 beams per sentence.*start"),
    ({"sentences": ()}, ShapeError, "no rows"),
    ({"logits": (2, 1, 4)}, ShapeError, "logits"),
    ({"forbidden": 2, "prefixes": [(1, 2), ()]}, SearchError, "prefix"),
]


@pytest.mark.parametrize(
    ("name", "options", "given", "error", "words"),
    [
        *((name, {}, *case) for name in ("greedy", "sample", "beam") for case in INVALID_INPUT),
        ("greedy", {"beam": 2}, {}, ConfigError, "use beam_search"),
        ("greedy", TEMPERATURE, {}, ConfigError, "sample"),
        ("sample", {"temperature": None}, {}, ConfigError, "needs a temperature"),
        ("beam", {"beam": 1, **TEMPERATURE}, {}, ConfigError, "omit temperature"),
        ("greedy", {"max_length": None}, {}, ConfigError, "no length limit"),
        ("sample", {}, {"seeds": [1, 2, 3]}, ShapeError, "3 seeds for 2 rows"),
        ("sample", {}, {"seeds": [1, 2**64]}, ConfigError, "seed=18446744073709551616"),
    ],
    ids=str,
)
def test_invalid_input_is_rejected_by_the_first_step(name, options, given, error, words):
    given, toy = {"eos": 0, **given}, random_toy(4, seed=12)
    state = toy.start(*given.pop("sentences", (1, 2)), beam=given.pop("beams", 1))
    shape, forbidden = given.pop("logits", None), given.pop("forbidden", None)

    def step(tokens, state):
        logits = toy.step(tokens, state) if shape is None else torch.zeros(shape)
        if forbidden is not None:
            logits[:, forbidden] = -math.inf
        return logits

    config = DecodeConfig(**{"max_length": 5, "min_length": 2, **OPTIONS.get(name, {}), **options})
    with pytest.raises(error, match=words):
        SEARCHES[name](step, state, config, **given)
    assert toy.steps <= 1 or forbidden is not None


@pytest.mark.parametrize("beam", [1, 4])
def test_a_step_without_live_slots_changes_nothing(beam):
    search = Search(3, beam, 5, Targets(11, 1), device="cpu", implementation="reference")
    search.admit([0, 2], [Options(DecodeConfig(beam=beam), 5)] * 2)
    search.release([0, 2])
    before = search.tokens.clone()
    search.advance(torch.randn(3 * beam, 11))
    assert torch.equal(search.tokens, before)
