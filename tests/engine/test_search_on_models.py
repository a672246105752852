"""Searches on real models: where they start, and how much of a cache they need.

What they find is compared with Hugging Face's, CTranslate2's and plain PyTorch's elsewhere.
"""

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from scheduling import EOS
from scheduling import make as random_model
from search_toys import Toy, assert_ranked, assert_same
from writehead.config import DecodeConfig
from writehead.engine import beam_search, greedy, sample
from writehead.errors import CacheError, CacheFull

VOCABULARY = 13


def make(task: str, **changes: object):
    """A model in float64, where no two tokens are nearly equally likely."""
    return random_model(task, torch.float64, vocab_size=VOCABULARY, logit_scale=0.6, **changes)


@pytest.mark.parametrize("changes", [{"g": 6}, {"window": 3}, {"g": 2, "v": 5, "window": 4}])
def test_searches_from_any_position_equal_searches_by_forward_passes(changes):
    model, sources = make("translation", **changes), torch.randint(2, VOCABULARY, (3, 5))
    config = DecodeConfig(max_length=9, min_length=3, beam=3, n_best=3, alpha=0.3)
    state = model.start(sources, 10, beam=3)
    model.step(torch.full((9,), 7), state)
    for before in ((7,), ()):

        @torch.no_grad()
        def logits(history: tuple[int, ...], before=before) -> list[float]:
            fed = torch.tensor([[*before, model.config.bos, *history[1:]]])
            return model(sources[history[0] : history[0] + 1], fed)[0, -1].tolist()

        toy = Toy(VOCABULARY, logits)
        expected = beam_search(toy.step, toy.start(*range(3)), config, eos=EOS)
        for got, right in zip(
            beam_search(model.step, state, config, eos=EOS), expected, strict=True
        ):
            assert_ranked(got, right)
        with pytest.raises(CacheError, match="this state has been searched; start a new one"):
            beam_search(model.step, state, config, eos=EOS)
        state.cache.clear()
    for search, temperature in ((greedy, None), (sample, 1.0)):
        config = DecodeConfig(max_length=10, temperature=temperature)
        got = search(model.step, model.start(sources, 10), config, eos=EOS)
        assert_same(got, search(toy.step, toy.start(*range(3)), config, eos=EOS))


@pytest.mark.parametrize(("limits", "needed"), [([3, 6], 7), ([4, 6], 8), ([1, 9], 10)])
def test_cache_capacity_counts_the_prompt_of_each_row(limits, needed):
    model, config = make("language"), DecodeConfig(max_length=9)
    prompt, lengths = torch.tensor([[3, 4, 5, 6, 7], [8, 9, 0, 0, 0]]), torch.tensor([5, 2])
    state = model.start(prompt, needed - 1, prompt_lengths=lengths)
    with pytest.raises(CacheFull, match=f"max_length={needed} or more"):
        greedy(model.step, state, config, eos=EOS, max_lengths=limits)
    # the state has not changed, so a shorter search can use it
    assert len(greedy(model.step, state, config, eos=EOS, max_lengths=[1, 1])) == 2
    state = model.start(prompt, needed, prompt_lengths=lengths)
    assert len(greedy(model.step, state, config, eos=EOS, max_lengths=limits)) == 2


@pytest.mark.parametrize(("beam", "window"), [(1, None), (2, None), (2, 3)])
def test_a_row_that_ended_needs_no_more_capacity(beam, window):
    model = make("language", window=window, target_positions=12)
    prompts = [torch.randint(2, VOCABULARY, (n,)) for n in (9, 2)]
    config = DecodeConfig(beam=beam, n_best=beam, max_length=10)
    padded = pad_sequence(prompts, batch_first=True)
    state = model.start(padded, 12, prompt_lengths=torch.tensor([9, 2]))
    got = beam_search(model.step, state, config, eos=EOS, max_lengths=[3, 10])
    for prompt, limit, batched in zip(prompts, [3, 10], got, strict=True):
        state = model.start(prompt.unsqueeze(0), 12)
        [alone] = beam_search(model.step, state, config, eos=EOS, max_lengths=[limit])
        assert_ranked(batched, alone)
