"""Searches on real models: cached states against forward passes over whole histories."""

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from helpers import config as model_config
from helpers import model as random_model
from search_toys import Toy, assert_ranked, assert_same
from writehead.config import DecodeConfig
from writehead.engine import beam_search, greedy, sample
from writehead.errors import CacheError, CacheFull
from writehead.model import LanguageModel

VOCABULARY, EOS = 13, 1
# model sizes, and options of `start`, which change no result
KINDS = {
    "multi-head": ({"g": 6}, {"beam": 3}),
    "multi-query": ({}, {}),
    "grouped-query": ({"g": 2, "v": 5}, {"padded": True}),
    "multi-query local": ({"window": 3}, {}),
    "multi-head local": ({"g": 6, "window": 4, "v": 5}, {"padded": True}),
}
every_task = pytest.mark.parametrize("task", ["translation", "language"])


def make(task: str, kind: str, **changes: object):
    """A model in float64, where no two tokens are nearly equally likely, that ends some texts."""
    sizes = {"vocab_size": VOCABULARY, "decoder_layers": 2, "logit_scale": 0.6}
    sizes |= {"encoder_layers": 1} if task == "translation" else {}
    model = random_model(model_config(task, **(sizes | KINDS[kind][0] | changes)))
    with torch.no_grad():
        model.tokens.weight[EOS] *= 2.5
    return model


def sentences(*lengths: int) -> list[Tensor]:
    return [torch.randint(2, VOCABULARY, (n,)) for n in lengths]


def started(model, rows: list[Tensor], max_length: int, **options):
    """The state of the model for rows of different lengths."""
    tokens, lengths = pad_sequence(rows, batch_first=True), torch.tensor([len(row) for row in rows])
    if isinstance(model, LanguageModel):
        capacity = tokens.shape[1] + max_length
        return model.start(tokens, capacity, prompt_lengths=lengths, **options)
    return model.start(tokens, max_length, source_lengths=lengths, **options)


def recomputed(model, rows: list[Tensor], before: tuple[int, ...] = ()) -> Toy:
    """A toy whose steps are forward passes, row by row, without padding or cache."""

    @torch.no_grad()
    def logits(history: tuple[int, ...]) -> list[float]:
        row, generated = rows[history[0]], history[1:]
        if isinstance(model, LanguageModel):
            return model(torch.tensor([[*row.tolist(), *generated]]))[0, -1].tolist()
        fed = torch.tensor([[*before, model.config.bos, *generated]])
        return model(row.unsqueeze(0), fed)[0, -1].tolist()

    return Toy(VOCABULARY, logits)


@every_task
@pytest.mark.parametrize("kind", KINDS)
def test_searches_with_a_cache_equal_searches_by_forward_passes(kind, task):
    model, rows = make(task, kind), sentences(6, 1, 4, 3)
    toy, prefixes, limits = recomputed(model, rows), [(), (), (7, 3), ()], [10, 10, 10, 4]
    config = DecodeConfig(max_length=10, min_length=3, beam=3, n_best=3, alpha=0.3)
    given = {"eos": EOS, "prefixes": prefixes, "max_lengths": limits}
    expected = beam_search(toy.step, toy.start(*range(4)), config, **given)
    got = beam_search(model.step, started(model, rows, 10, **KINDS[kind][1]), config, **given)
    for i, row in enumerate(rows):
        assert_ranked(got[i], expected[i])
        own = {"eos": EOS, "prefixes": prefixes[i : i + 1], "max_lengths": limits[i : i + 1]}
        [alone] = beam_search(model.step, started(model, [row], 10), config, **own)
        assert_ranked(alone, expected[i])
    longest = max(len(one.tokens) for best in expected for one in best)
    assert longest > 6  # longer than any window
    for search, temperature in ((greedy, None), (sample, 1.0)):
        config = DecodeConfig(max_length=10, temperature=temperature)
        got = search(model.step, started(model, rows, 10), config, eos=EOS)
        assert_same(got, search(toy.step, toy.start(*range(4)), config, eos=EOS))


@pytest.mark.parametrize(("limits", "needed"), [([3, 6], 7), ([4, 6], 8), ([1, 9], 10)])
def test_cache_capacity_counts_the_prompt_of_each_row(limits, needed):
    model, config = make("language", "multi-query"), DecodeConfig(max_length=9)
    prompt, lengths = torch.tensor([[3, 4, 5, 6, 7], [8, 9, 0, 0, 0]]), torch.tensor([5, 2])
    state = model.start(prompt, needed - 1, prompt_lengths=lengths)
    with pytest.raises(CacheFull, match=f"max_length={needed} or more"):
        greedy(model.step, state, config, eos=EOS, max_lengths=limits)
    # the state has not changed, so a shorter search can use it
    assert len(greedy(model.step, state, config, eos=EOS, max_lengths=[1, 1])) == 2
    state = model.start(prompt, needed, prompt_lengths=lengths)
    assert len(greedy(model.step, state, config, eos=EOS, max_lengths=limits)) == 2


def test_a_search_starts_from_the_current_position_and_uses_the_state_up():
    model, source = make("translation", "multi-query"), sentences(4)
    config, state = DecodeConfig(max_length=5, beam=2), started(model, source, 6, beam=2)
    model.step(torch.tensor([7, 7]), state)
    for before in ((7,), ()):
        [got] = beam_search(model.step, state, config, eos=EOS)
        toy = recomputed(model, source, before)
        assert_same(got, beam_search(toy.step, toy.start(0), config, eos=EOS)[0])
        with pytest.raises(CacheError, match="this state has been searched; start a new one"):
            beam_search(model.step, state, config, eos=EOS)
        state.cache.clear()


@pytest.mark.parametrize("beam", [1, 2])
@pytest.mark.parametrize("kind", ["multi-query", "multi-query local"])
def test_a_row_that_ended_needs_no_more_capacity(kind, beam):
    model, prompts = make("language", kind, target_positions=12), sentences(9, 2)
    config = DecodeConfig(beam=beam, n_best=beam, max_length=10)
    padded = pad_sequence(prompts, batch_first=True)
    state = model.start(padded, 12, prompt_lengths=torch.tensor([9, 2]))
    got = beam_search(model.step, state, config, eos=EOS, max_lengths=[3, 10])
    for prompt, limit, batched in zip(prompts, [3, 10], got, strict=True):
        state = model.start(prompt.unsqueeze(0), 12)
        [alone] = beam_search(model.step, state, config, eos=EOS, max_lengths=[limit])
        assert_ranked(batched, alone)
