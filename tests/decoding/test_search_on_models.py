"""Searches over real models: their cached states against forward passes over copied histories."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from helpers import config as model_config
from search_toys import assert_ranked, assert_same
from writehead.config import DecodeConfig
from writehead.decoding import beam_search, greedy, sample
from writehead.decoding.search import stream
from writehead.errors import CacheError, CacheFull
from writehead.model import LanguageModel, make_model

VOCABULARY, END = 13, 1
KINDS = {
    "multi-head": {"g": 6},
    "multi-query": {},
    "grouped-query": {"g": 2, "v": 5},
    "multi-query local": {"window": 3},
    "multi-head local": {"g": 6, "window": 4, "v": 5},
}
every_task = pytest.mark.parametrize("task", ["translation", "language"])


def make(task: str, kind: str, seed: int = 0, **changes: object):
    """A model with random weights and peaked logits, in float64: no two are nearly equal."""
    torch.manual_seed(seed)
    sizes = {"vocabulary": VOCABULARY, "d": 24, "decoder_layers": 2, "logit_scale": 0.6}
    sizes |= {"encoder_layers": 1} if task == "translation" else {}
    model = make_model(model_config(task, **(sizes | KINDS[kind] | changes))).double().eval()
    with torch.no_grad():
        model.decoder.positions.weight.mul_(2.0)
    return model


@dataclass
class Recomputed:
    """A state that holds nothing but tokens: every step is a forward pass over all of them."""

    first: Tensor
    beam: int
    sources: list[Tensor | None]
    histories: list[list[int]]  # the tokens before `first`

    def expand(self, beam: int) -> "Recomputed":
        sources = [source for source in self.sources for _ in range(beam)]
        histories = [list(history) for history in self.histories for _ in range(beam)]
        return Recomputed(self.first.repeat_interleave(beam), beam, sources, histories)

    def begin(self, limits: Sequence[int]) -> None: ...

    def stop(self, rows: Tensor) -> None: ...

    def reorder(self, rows: Tensor) -> None:
        self.histories = [list(self.histories[row]) for row in rows.tolist()]


def recompute(model):
    """A step function over `Recomputed`, one row at a time and without padding."""

    @torch.no_grad()
    def step(tokens: Tensor, state: Recomputed) -> Tensor:
        logits = []
        rows = zip(state.sources, state.histories, tokens.tolist(), strict=True)
        for source, history, token in rows:
            history.append(token)
            fed = torch.tensor([history])
            inputs = (fed,) if source is None else (source.unsqueeze(0), fed)
            logits.append(model(*inputs)[0, -1])
        return torch.stack(logits)

    return step


def ending(step):
    """`step` with a likelier end token, so that some sequences end."""

    def likelier(tokens: Tensor, state) -> Tensor:
        logits = step(tokens, state)
        logits[:, END] += 3.0
        return logits

    return likelier


def sentences(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(2, VOCABULARY, (n,), generator=generator) for n in lengths]


def started(model, rows: list[Tensor], max_length: int, **options):
    """The model's own state for rows of different lengths."""
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    if isinstance(model, LanguageModel):
        capacity = tokens.shape[1] + max_length
        return model.start(tokens, capacity, prompt_lengths=lengths, **options)
    return model.start(tokens, max_length, source_lengths=lengths, **options)


def remembered(model, rows: list[Tensor]) -> Recomputed:
    """The same rows as tokens only."""
    if isinstance(model, LanguageModel):
        first = torch.stack([row[-1] for row in rows])
        return Recomputed(first, 1, [None] * len(rows), [row[:-1].tolist() for row in rows])
    return Recomputed(torch.full((len(rows),), model.config.start), 1, rows, [[] for _ in rows])


@every_task
@pytest.mark.parametrize("kind", KINDS)
def test_beam_search_is_that_of_forward_passes_in_a_padded_batch_and_alone(kind, task):
    model, rows = make(task, kind, seed=4), sentences(6, 1, 4, 3)
    prefixes, limits = [(), (), (7, 3), ()], [10, 10, 10, 4]
    config = DecodeConfig(max_length=10, min_length=3, beam=3, n_best=3, alpha=0.3)

    def search(step, state, chosen):
        given = {
            "prefixes": [prefixes[i] for i in chosen],
            "max_lengths": [limits[i] for i in chosen],
        }
        return beam_search(ending(step), state, config, end=END, **given)

    together = search(model.step, started(model, rows, 10), range(4))
    right = search(recompute(model), remembered(model, rows), range(4))
    for i, row in enumerate(rows):
        assert_ranked(together[i], right[i])
        [alone] = search(model.step, started(model, [row], 10), [i])
        assert_ranked(alone, right[i])
    found = [one for some in right for one in some]
    assert {one.finished for one in found} == {True, False}
    assert max(len(one.tokens) for one in found) > 6  # longer than any window


@every_task
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [None, 1.0])
def test_greedy_search_and_samples_are_those_of_forward_passes(temperature, kind, task):
    model, rows = make(task, kind, seed=3), sentences(6, 1, 4, 3)
    config = DecodeConfig(max_length=12, temperature=temperature)
    search = greedy if temperature is None else sample
    got = search(model.step, started(model, rows, 12), config, end=END)
    assert_same(got, search(recompute(model), remembered(model, rows), config, end=END))
    assert max(len(one.tokens) for one in got) > 4


@every_task
@pytest.mark.parametrize("options", [{"beam": 3}, {"padded": True}, {"rewindable": 2}], ids=str)
def test_how_a_state_was_started_does_not_change_what_is_found(options, task):
    model, rows = make(task, "multi-query local", seed=2), sentences(4, 6, 2)
    config = DecodeConfig(max_length=9, beam=3, n_best=3)
    plain = beam_search(model.step, started(model, rows, 9), config, end=END)
    other = beam_search(model.step, started(model, rows, 9, **options), config, end=END)
    for one, expected in zip(other, plain, strict=True):
        assert_ranked(one, expected)


@pytest.mark.parametrize("beam", [1, 2])
def test_a_search_longer_than_its_state_is_refused_and_leaves_the_state_usable(beam):
    model = make("translation", "multi-head")
    state = started(model, sentences(3), 4)
    with pytest.raises(CacheFull, match="this state has 4; start with max_length=9 or more"):
        beam_search(model.step, state, DecodeConfig(max_length=9, beam=beam), end=END)
    config = DecodeConfig(max_length=4, beam=beam)
    [got] = beam_search(model.step, state, config, end=END)
    [right] = beam_search(model.step, started(model, sentences(3), 4), config, end=END)
    assert_same(got, right)


@pytest.mark.parametrize(("limits", "needed"), [([3, 6], 7), ([4, 6], 8), ([1, 9], 10)])
def test_the_room_of_a_search_counts_what_each_row_has_read(limits, needed):
    model, config = make("language", "multi-query"), DecodeConfig(max_length=9)
    prompt, lengths = torch.tensor([[3, 4, 5, 6, 7], [8, 9, 0, 0, 0]]), torch.tensor([5, 2])
    if needed > 7:
        state = model.start(prompt, needed - 1, prompt_lengths=lengths)
        with pytest.raises(CacheFull, match=f"max_length={needed} or more"):
            greedy(model.step, state, config, end=END, max_lengths=limits)
    state = model.start(prompt, needed, prompt_lengths=lengths)
    assert len(greedy(model.step, state, config, end=END, max_lengths=limits)) == 2


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
    list(search(model.step, state, config, end=END))
    search, config = SEARCHES[again]
    with pytest.raises(CacheError, match="this state has been searched; start a new one"):
        search(model.step, state, config, end=END)


def test_a_state_that_was_stepped_or_cleared_is_searched_from_where_it_is():
    model, source = make("translation", "multi-query"), sentences(4)
    config = DecodeConfig(max_length=5, beam=2)
    [fresh] = beam_search(model.step, started(model, source, 5), config, end=END)
    state, history = started(model, source, 6), remembered(model, source)
    for stepped, step in ((state, model.step), (history, recompute(model))):
        step(torch.tensor([7]), stepped)
    [got] = beam_search(model.step, state, config, end=END)
    assert_same(got, beam_search(recompute(model), history, config, end=END)[0])
    assert got[0].tokens != fresh[0].tokens

    state = started(model, source, 9, beam=2)
    beam_search(model.step, state, config, end=END)
    state.cache.clear()
    assert_same(beam_search(model.step, state, config, end=END)[0], fresh)


@pytest.mark.parametrize("beam", [1, 2])
@pytest.mark.parametrize("kind", ["multi-query", "multi-query local"])
def test_a_row_that_has_ended_leaves_room_for_one_that_goes_on(kind, beam):
    model = make("language", kind, target_positions=12)
    prompts, limits = sentences(9, 2), [3, 10]
    tokens, lengths = (
        torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True),
        torch.tensor([9, 2]),
    )
    config = DecodeConfig(beam=beam, n_best=beam, max_length=10)
    state = model.start(tokens, 12, prompt_lengths=lengths)
    together = beam_search(model.step, state, config, end=END, max_lengths=limits)
    for prompt, limit, found in zip(prompts, limits, together, strict=True):
        state = model.start(prompt.unsqueeze(0), 12)
        [alone] = beam_search(model.step, state, config, end=END, max_lengths=[limit])
        assert_ranked(found, alone)
