"""Beam search against exhaustive search and a beam search in plain Python."""

import math
from itertools import product

import pytest
import torch

from search_toys import Toy, assert_ranked, assert_same, hypothesis, random_toy
from writehead.config import DecodeConfig
from writehead.engine import Hypothesis, beam_search

every_alpha = pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, -0.8])


def exhaustive(toy: Toy, sentence: int, limit: int, least: int, prefix: tuple, alpha: float):
    """Every possible sequence, best first."""

    def grow(tokens: tuple[int, ...], total: float) -> list[Hypothesis]:
        if len(tokens) == limit:
            return [hypothesis(tokens, total, False, alpha)]
        hypotheses = []
        for token, gained in enumerate(toy.log_p((sentence, *tokens))):
            if len(tokens) < len(prefix) and token != prefix[len(tokens)]:
                continue
            if token != toy.eos:
                hypotheses += grow((*tokens, token), total + gained)
            elif len(tokens) + 1 >= least:
                hypotheses.append(hypothesis(tokens, total + gained, True, alpha))
        return hypotheses

    return sorted(grow((), 0.0), key=lambda one: -one.score)


@every_alpha
@pytest.mark.parametrize(("vocab_size", "least"), [(1, 0), (2, 0), (2, 3), (4, 0), (4, 3)])
def test_beam_search_with_a_beam_as_large_as_the_space_equals_exhaustive_search(
    vocab_size, least, alpha
):
    toy = random_toy(vocab_size, seed=2, eos=0.7)
    prefixes = [(), (2,), (1, 3), (3, 3, 1), (1, 2, 1, 2)] if vocab_size == 4 else [()]
    limits = [4, 3, 4, 3, 4][: len(prefixes)]
    config = DecodeConfig(max_length=4, min_length=least, beam=121, n_best=121, alpha=alpha)
    state = toy.start(*range(len(prefixes)))
    got = beam_search(toy.step, state, config, eos=0, prefixes=prefixes, max_lengths=limits)
    for i, hypotheses in enumerate(got):
        assert_ranked(hypotheses, exhaustive(toy, i, limits[i], least, prefixes[i], alpha))


def plain_beam(toy: Toy, sentence: int, config: DecodeConfig, limit: int, prefix: tuple):
    """Beam search in plain Python: the n-best, and how many steps it took."""
    alpha, beam, n_best = config.alpha, config.beam, config.n_best
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    done: list[Hypothesis] = []
    for t in range(limit):
        candidates = []
        for total, tokens in live:
            for token, gained in enumerate(toy.log_p((sentence, *tokens))):
                forced = t < len(prefix) and token != prefix[t]
                if not forced and (token != toy.eos or t + 1 >= config.min_length):
                    candidates.append((total + gained, (*tokens, token)))
        candidates = sorted(candidates, reverse=True)[: 2 * beam]
        for total, tokens in candidates[:beam]:
            if tokens[-1] == toy.eos:
                done.append(hypothesis(tokens[:-1], total, True, alpha))
            elif t + 1 == limit:
                done.append(hypothesis(tokens, total, False, alpha))
        live = [one for one in candidates if one[1][-1] != toy.eos][:beam]
        done.sort(key=lambda one: -one.score)
        worst = done[n_best - 1].score if len(done) >= n_best else -math.inf
        # the score of a live hypothesis at each remaining length, if it lost nothing more
        lengths = range(max(t + 2, config.min_length), limit + 1)
        hopes = [total / ((5 + n) / 6) ** alpha for total, _ in live for n in lengths]
        if max(hopes, default=-math.inf) <= worst:
            return done[:n_best], t + 1
    raise AssertionError("no hypothesis is alive past the limit")


@every_alpha
@pytest.mark.parametrize("least", [0, 4])
@pytest.mark.parametrize(("beam", "n_best"), [(2, 1), (3, 3), (5, 2)])
def test_beam_search_equals_a_plain_python_search_per_sentence(beam, n_best, least, alpha):
    prefixes, limits = [(), (2,), (1, 2), (1, 1, 1), (1, 2, 2, 1)], [8, 5, 4, 7, 4]
    config = DecodeConfig(max_length=8, min_length=least, beam=beam, n_best=n_best, alpha=alpha)
    steps, endings = set(), set()
    for seed, (vocab_size, eos) in enumerate(product([3, 7], [-1.0, 0.5, 2.0])):
        toy = random_toy(vocab_size, seed=seed, eos=eos)
        # a state that already has beams gives the same as one that is expanded
        state = toy.start(*range(5), beam=beam if seed % 2 else 1)
        logits = []

        def step(tokens, state, toy=toy, logits=logits):
            logits.append((found := toy.step(tokens, state), found.clone()))
            return found

        got = beam_search(step, state, config, eos=0, prefixes=prefixes, max_lengths=limits)
        assert all(torch.equal(*pair) for pair in logits)  # not changed in place
        plain = [plain_beam(toy, i, config, limits[i], prefixes[i]) for i in range(5)]
        for one, (expected, _) in zip(got, plain, strict=True):
            assert_same(one, expected)
        assert toy.steps == max(taken for _, taken in plain)
        steps |= {taken for _, taken in plain}
        endings |= {one.finished for hypotheses in got for one in hypotheses}
    assert len(steps) > 1
    assert endings == {True, False}
