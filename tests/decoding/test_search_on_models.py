"""Searches over real models: their cached states against forward passes over whole histories."""

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from helpers import config as model_config
from helpers import model as random_model
from search_toys import Toy, assert_ranked, assert_same
from writehead.config import DecodeConfig
from writehead.decoding import beam_search, greedy, sample
from writehead.decoding.search import stream
from writehead.errors import CacheError, CacheFull
from writehead.model import LanguageModel

VOCABULARY, EOS = 13, 1
# sizes of models, and how their states are started: that makes no difference
KINDS = {
    "multi-head": ({"g": 6}, {"beam": 3}),
    "multi-query": ({}, {}),
    "grouped-query": ({"g": 2, "v": 5}, {"padded": True}),
    "multi-query local": ({"window": 3}, {}),
    "multi-head local": ({"g": 6, "window": 4, "v": 5}, {"padded": True}),
}
every_task = pytest.mark.parametrize("task", ["translation", "language"])


def make(task: str, kind: str, **changes: object):
    """A model in float64, where no two tokens are nearly equally likely; it ends some texts."""
    sizes = {"vocab_size": VOCABULARY, "decoder_layers": 2, "logit_scale": 0.6}
    sizes |= {"encoder_layers": 1} if task == "translation" else {}
    model = random_model(model_config(task, **(sizes | KINDS[kind][0] | changes)))
    with torch.no_grad():
        model.tokens.weight[EOS] *= 2.5
    return model


def sentences(*lengths: int) -> list[Tensor]:
    return [torch.randint(2, VOCABULARY, (n,)) for n in lengths]


def started(model, rows: list[Tensor], max_length: int, **options):
    """The model's own state for rows of different lengths."""
    tokens, lengths = pad_sequence(rows, batch_first=True), torch.tensor([len(row) for row in rows])
    if isinstance(model, LanguageModel):
        capacity = tokens.shape[1] + max_length
        return model.start(tokens, capacity, prompt_lengths=lengths, **options)
    return model.start(tokens, max_length, source_lengths=lengths, **options)


def recomputed(model, rows: list[Tensor], before: tuple[int, ...] = ()) -> Toy:
    """A toy of which every step is a forward pass: row by row, without padding or cache."""

    @torch.no_grad()
    def logits(history: tuple[int, ...]) -> list[float]:
        row, found = rows[history[0]], history[1:]
        if isinstance(model, LanguageModel):
            return model(torch.tensor([[*row.tolist(), *found]]))[0, -1].tolist()
        fed = torch.tensor([[*before, model.config.bos, *found]])
        return model(row.unsqueeze(0), fed)[0, -1].tolist()

    return Toy(VOCABULARY, logits)


@every_task
@pytest.mark.parametrize("kind", KINDS)
def test_searches_are_those_of_forward_passes_in_a_padded_batch_and_alone(kind, task):
    model, rows = make(task, kind), sentences(6, 1, 4, 3)
    toy, prefixes, limits = recomputed(model, rows), [(), (), (7, 3), ()], [10, 10, 10, 4]
    config = DecodeConfig(max_length=10, min_length=3, beam=3, n_best=3, alpha=0.3)
    given = {"eos": EOS, "prefixes": prefixes, "max_lengths": limits}
    right = beam_search(toy.step, toy.start(*range(4)), config, **given)
    got = beam_search(model.step, started(model, rows, 10, **KINDS[kind][1]), config, **given)
    for i, row in enumerate(rows):
        assert_ranked(got[i], right[i])
        own = {"eos": EOS, "prefixes": prefixes[i : i + 1], "max_lengths": limits[i : i + 1]}
        assert_ranked(
            beam_search(model.step, started(model, [row], 10), config, **own)[0], right[i]
        )
    assert max(len(one.tokens) for found in right for one in found) > 6  # longer than any window
    for search, temperature in ((greedy, None), (sample, 1.0)):
        config = DecodeConfig(max_length=10, temperature=temperature)
        got = search(model.step, started(model, rows, 10), config, eos=EOS)
        assert_same(got, search(toy.step, toy.start(*range(4)), config, eos=EOS))


@pytest.mark.parametrize(("limits", "needed"), [([3, 6], 7), ([4, 6], 8), ([1, 9], 10)])
def test_the_room_of_a_search_counts_what_each_row_has_read(limits, needed):
    model, config = make("language", "multi-query"), DecodeConfig(max_length=9)
    prompt, lengths = torch.tensor([[3, 4, 5, 6, 7], [8, 9, 0, 0, 0]]), torch.tensor([5, 2])
    state = model.start(prompt, needed - 1, prompt_lengths=lengths)
    with pytest.raises(CacheFull, match=f"max_length={needed} or more"):
        greedy(model.step, state, config, eos=EOS, max_lengths=limits)
    # the state is as it was, so a shorter search has it
    assert len(greedy(model.step, state, config, eos=EOS, max_lengths=[1, 1])) == 2
    state = model.start(prompt, needed, prompt_lengths=lengths)
    assert len(greedy(model.step, state, config, eos=EOS, max_lengths=limits)) == 2


SEARCHES = {
    "greedy": (greedy, DecodeConfig(max_length=5)),
    "beam": (beam_search, DecodeConfig(max_length=5, beam=3)),
    "sample": (sample, DecodeConfig(max_length=5, temperature=1.0)),
    "stream": (stream, DecodeConfig(max_length=5)),
}


@pytest.mark.parametrize(
    ("first", "again", "beam"),
    [("beam", "beam", 3), ("greedy", "beam", 1), ("sample", "stream", 1), ("stream", "greedy", 1)],
)
def test_a_state_is_searched_once(first, again, beam):
    model = make("translation", "multi-query")
    state = started(model, sentences(4), 20, beam=beam)
    search, config = SEARCHES[first]
    list(search(model.step, state, config, eos=EOS))
    search, config = SEARCHES[again]
    with pytest.raises(CacheError, match="this state has been searched; start a new one"):
        search(model.step, state, config, eos=EOS)


def test_a_state_that_was_stepped_or_cleared_is_searched_from_where_it_is():
    model, source = make("translation", "multi-query"), sentences(4)
    config = DecodeConfig(max_length=5, beam=2)
    state = started(model, source, 6, beam=2)
    model.step(torch.tensor([7, 7]), state)
    [got] = beam_search(model.step, state, config, eos=EOS)
    toy = recomputed(model, source, before=(7,))
    assert_same(got, beam_search(toy.step, toy.start(0), config, eos=EOS)[0])
    state.cache.clear()
    [got] = beam_search(model.step, state, config, eos=EOS)
    toy = recomputed(model, source)
    assert_same(got, beam_search(toy.step, toy.start(0), config, eos=EOS)[0])


@pytest.mark.parametrize("beam", [1, 2])
@pytest.mark.parametrize("kind", ["multi-query", "multi-query local"])
def test_a_row_that_has_ended_leaves_room_for_one_that_goes_on(kind, beam):
    model, prompts = make("language", kind, target_positions=12), sentences(9, 2)
    config = DecodeConfig(beam=beam, n_best=beam, max_length=10)
    state = model.start(
        pad_sequence(prompts, batch_first=True), 12, prompt_lengths=torch.tensor([9, 2])
    )
    got = beam_search(model.step, state, config, eos=EOS, max_lengths=[3, 10])
    for prompt, limit, found in zip(prompts, [3, 10], got, strict=True):
        state = model.start(prompt.unsqueeze(0), 12)
        [alone] = beam_search(model.step, state, config, eos=EOS, max_lengths=[limit])
        assert_ranked(found, alone)
