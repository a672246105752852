"""Searches over real models: their cached states against forward passes over copied histories."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from writehead.config import DecodeConfig, ModelConfig
from writehead.decoding import Hypothesis, beam_search, greedy, sample
from writehead.decoding.search import stream
from writehead.errors import CacheError, CacheFull, WriteheadError
from writehead.model import LanguageModel, TranslationModel

BASE = ModelConfig(
    task="translation",
    vocabulary=13,
    d=24,
    f=40,
    h=4,
    g=4,
    k=5,
    v=7,
    encoder_layers=1,
    decoder_layers=2,
    source_positions=9,
    target_positions=20,
)
KINDS = {
    "multi-head": {},
    "multi-query": {"g": 1},
    "grouped-query": {"g": 2, "v": 5},
    "multi-query local": {"g": 1, "window": 3},
    "multi-head local": {"window": 4, "v": 5},
}
END = BASE.end


def make(cls, kind: str, seed: int = 0):
    """A model with random weights and peaked logits."""
    config = dataclasses.replace(BASE, **KINDS[kind])
    if cls is LanguageModel:
        config = dataclasses.replace(config, task="language", encoder_layers=0, source_positions=0)
    torch.manual_seed(seed)
    model = cls(dataclasses.replace(config, logit_scale=0.6)).eval()
    with torch.no_grad():
        model.decoder.positions.weight.mul_(2.0)
    return model


@dataclass
class Recomputed:
    """A state that holds nothing but tokens: every step is a forward pass over all of them."""

    first: Tensor
    beam: int
    sentences: list[Tensor]  # a row's source, or none
    histories: list[list[int]]  # what a row has read before `first`

    def expand(self, beam: int) -> "Recomputed":
        return Recomputed(
            self.first.repeat_interleave(beam),
            beam,
            [sentence for sentence in self.sentences for _ in range(beam)],
            [list(history) for history in self.histories for _ in range(beam)],
        )

    def begin(self, limits: Sequence[int]) -> None:
        """Recomputing can begin wherever it is."""

    def stop(self, rows: Tensor) -> None:
        """Recomputing has room for everybody."""

    def reorder(self, rows: Tensor) -> None:
        self.histories = [list(self.histories[row]) for row in rows.tolist()]


def recompute(model):
    """A step function over `Recomputed`, one row at a time and without padding."""

    def step(tokens: Tensor, state: Recomputed) -> Tensor:
        logits = []
        for source, history, token in zip(
            state.sentences, state.histories, tokens.tolist(), strict=True
        ):
            history.append(token)
            target = torch.tensor([history])
            inputs = (source.unsqueeze(0), target) if len(source) else (target,)
            with torch.no_grad():
                logits.append(model(*inputs)[0, -1])
        return torch.stack(logits)

    return step


def ending(step, bonus: float = 4.0):
    """`step` with an end that is likelier, so that ends happen."""

    def likelier(tokens: Tensor, state) -> Tensor:
        logits = step(tokens, state)
        logits[:, END] += bonus
        return logits

    return likelier


def sentences(*lengths: int, seed: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, BASE.vocabulary, (n,), generator=generator) for n in lengths]


def padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([len(row) for row in rows])
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), lengths


def started(model, rows: list[Tensor], max_length: int, **options):
    """The model's own state for rows of different lengths."""
    tokens, lengths = padded(rows)
    if isinstance(model, LanguageModel):
        capacity = tokens.shape[1] + max_length
        return model.start(tokens, capacity, prompt_lengths=lengths, **options)
    return model.start(tokens, max_length, source_lengths=lengths, **options)


def remembered(model, rows: list[Tensor]) -> Recomputed:
    """The same rows as tokens only."""
    if isinstance(model, LanguageModel):
        first = torch.stack([row[-1] for row in rows])
        nothing = torch.tensor([], dtype=torch.long)
        return Recomputed(first, 1, [nothing] * len(rows), [row[:-1].tolist() for row in rows])
    first = torch.full((len(rows),), model.config.start)
    return Recomputed(first, 1, rows, [[] for _ in rows])


def assert_same(got: list[Hypothesis], expected: list[Hypothesis]) -> None:
    assert [(one.tokens, one.finished) for one in got] == [
        (one.tokens, one.finished) for one in expected
    ]
    for one, other in zip(got, expected, strict=True):
        assert one.log_probability == pytest.approx(other.log_probability, abs=1e-4)
        assert one.score == pytest.approx(other.score, abs=1e-4)


@pytest.mark.parametrize("cls", [TranslationModel, LanguageModel])
@pytest.mark.parametrize("kind", KINDS)
def test_beam_search_through_the_cache_is_beam_search_over_forward_passes(cls, kind):
    model = make(cls, kind)
    rows = sentences(6, 1, 4, 3, 6)
    prefixes, limits = [(), (), (7, 3), (), (5,)], [10, 10, 10, 6, 10]
    config = DecodeConfig(max_length=10, min_length=3, beam=4, n_best=4, alpha=0.3)
    options = {"end": END, "prefixes": prefixes, "max_lengths": limits}
    got = beam_search(ending(model.step), started(model, rows, 10), config, **options)
    expected = beam_search(ending(recompute(model)), remembered(model, rows), config, **options)
    for one, other in zip(got, expected, strict=True):
        assert_same(one, other)
    found = [one for some in got for one in some]
    assert {one.finished for one in found} == {True, False}
    # longer than any window, so that rings have turned
    assert max(len(one.tokens) for one in found) > 6


@pytest.mark.parametrize("cls", [TranslationModel, LanguageModel])
@pytest.mark.parametrize("kind", KINDS)
def test_a_sentence_alone_finds_what_it_finds_in_a_padded_batch(cls, kind):
    model = make(cls, kind, seed=1)
    rows = sentences(5, 2, 6, 1)
    config = DecodeConfig(max_length=9, beam=3, n_best=3)
    together = beam_search(model.step, started(model, rows, 9), config, end=END)
    for row, expected in zip(rows, together, strict=True):
        [alone] = beam_search(model.step, started(model, [row], 9), config, end=END)
        assert_same(alone, expected)


@pytest.mark.parametrize("cls", [TranslationModel, LanguageModel])
@pytest.mark.parametrize("options", [{"beam": 3}, {"padded": True}, {"rewindable": 2}])
def test_how_a_state_was_started_does_not_change_what_is_found(cls, options):
    model = make(cls, "multi-query local", seed=2)
    rows = sentences(4, 6, 2)
    config = DecodeConfig(max_length=9, beam=3, n_best=3)
    plain = beam_search(model.step, started(model, rows, 9), config, end=END)
    other = beam_search(model.step, started(model, rows, 9, **options), config, end=END)
    for one, expected in zip(other, plain, strict=True):
        assert_same(one, expected)


@pytest.mark.parametrize("cls", [TranslationModel, LanguageModel])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [None, 1.0])
def test_greedy_search_and_samples_through_the_cache_are_those_of_forward_passes(
    cls, kind, temperature
):
    model = make(cls, kind, seed=3)
    rows = sentences(6, 1, 4, 3)
    config = DecodeConfig(max_length=12, temperature=temperature)
    search = greedy if temperature is None else sample
    got = search(model.step, started(model, rows, 12), config, end=END)
    expected = search(recompute(model), remembered(model, rows), config, end=END)
    assert_same(got, expected)
    assert max(len(one.tokens) for one in got) > 4


def test_a_forced_translation_scores_what_a_forward_pass_gives_it():
    model = make(TranslationModel, "multi-query", seed=4)
    source = sentences(5, 3)
    prefixes = [(4, 9, 2, 6), (3, 3, 8, 5)]
    for beam in (1, 3):
        config = DecodeConfig(max_length=4, beam=beam, alpha=0.0)
        state = started(model, source, 4)
        got = beam_search(model.step, state, config, end=END, prefixes=prefixes)
        for [one], row, prefix in zip(got, source, prefixes, strict=True):
            fed = torch.tensor([[model.config.start, *prefix[:-1]]])
            log_p = torch.log_softmax(model(row.unsqueeze(0), fed)[0], dim=-1)
            total = log_p.gather(1, torch.tensor(prefix).unsqueeze(1)).sum().item()
            assert one.tokens == prefix
            assert not one.finished
            assert one.score == pytest.approx(total, abs=1e-5)


def test_a_search_longer_than_its_state_is_an_error_that_says_how_long_to_make_it():
    model = make(TranslationModel, "multi-head")
    calls = []

    def step(tokens, state):
        calls.append(tokens)
        return model.step(tokens, state)

    for beam in (1, 2):
        state = started(model, sentences(3), 4)
        config = DecodeConfig(max_length=9, beam=beam)
        with pytest.raises(CacheFull, match="this state has 4; start with max_length=9 or more"):
            beam_search(step, state, config, end=END)
        assert not calls
        # the state is as it was, so a shorter search has it
        beam_search(step, state, DecodeConfig(max_length=4, beam=beam), end=END)
        calls.clear()


def test_the_room_of_a_search_counts_what_each_row_has_read():
    model = make(LanguageModel, "multi-query")
    prompt, lengths = torch.tensor([[3, 4, 5, 6, 7], [8, 9, 0, 0, 0]]), torch.tensor([5, 2])
    config = DecodeConfig(max_length=9)
    for limits, needed in (([3, 6], None), ([4, 6], 8), ([1, 9], 10)):
        state = model.start(prompt, 7, prompt_lengths=lengths)
        if needed is None:
            greedy(model.step, state, config, end=END, max_lengths=limits)
            continue
        with pytest.raises(CacheFull, match=f"max_length={needed} or more"):
            greedy(model.step, state, config, end=END, max_lengths=limits)


SEARCHES = {
    "greedy": (greedy, DecodeConfig(max_length=5)),
    "beam": (beam_search, DecodeConfig(max_length=5, beam=3)),
    "sample": (sample, DecodeConfig(max_length=5, temperature=1.0)),
    "stream": (stream, DecodeConfig(max_length=5)),
}


@pytest.mark.parametrize(
    ("first", "again", "beam"),
    [
        ("beam", "beam", 3),
        ("greedy", "greedy", 1),
        ("greedy", "sample", 1),
        ("greedy", "beam", 1),
        ("sample", "stream", 1),
        ("stream", "greedy", 1),
    ],
)
def test_a_state_that_was_searched_is_not_searched_again(first, again, beam):
    model = make(TranslationModel, "multi-query")
    state = started(model, sentences(4), 20, beam=beam)
    search, config = SEARCHES[first]
    list(search(model.step, state, config, end=END))
    search, config = SEARCHES[again]
    with pytest.raises(CacheError, match="this state has been searched; start a new one"):
        search(model.step, state, config, end=END)


def test_a_state_that_was_stepped_or_cleared_is_searched_from_where_it_is():
    model = make(TranslationModel, "multi-query")
    source, config = sentences(4), DecodeConfig(max_length=5, beam=2)
    [[right]] = beam_search(model.step, started(model, source, 5), config, end=END)
    state, history = started(model, source, 6), remembered(model, source)
    for stepped, step in ((state, model.step), (history, recompute(model))):
        step(torch.tensor([7]), stepped)
    got = beam_search(model.step, state, config, end=END)
    expected = beam_search(recompute(model), history, config, end=END)
    assert_same(got[0], expected[0])
    assert got[0][0].tokens != right.tokens

    state = started(model, source, 9, beam=2)
    beam_search(model.step, state, config, end=END)
    state.cache.clear()
    [[again]] = beam_search(model.step, state, config, end=END)
    assert again.tokens == right.tokens
    assert again.score == pytest.approx(right.score)


def test_a_state_of_other_beams_is_an_error_that_says_how_to_start_one():
    model = make(TranslationModel, "multi-head")
    for beam, message in ((2, "beam=2 or 1"), (1, "beam=1")):
        state = started(model, sentences(3), 4, beam=3)
        with pytest.raises(WriteheadError, match=message):
            beam_search(model.step, state, DecodeConfig(max_length=4, beam=beam), end=END)
    with pytest.raises(CacheError, match="3 beams already"):
        state.expand(2)


@pytest.mark.parametrize("beam", [1, 2])
@pytest.mark.parametrize("window", [None, 3])
def test_a_row_that_has_ended_leaves_room_for_one_that_goes_on(beam, window):
    torch.manual_seed(0)
    config = ModelConfig(
        task="language",
        vocabulary=17,
        d=8,
        f=12,
        h=4,
        g=1,
        k=3,
        v=5,
        window=window,
        decoder_layers=2,
        target_positions=12,
        dropout=0.0,
    )
    model = LanguageModel(config).double().eval()
    prompts, limits = ([3, 4, 5, 6, 7, 8, 9, 10, 11], [12, 13]), [3, 10]
    options = DecodeConfig(beam=beam, n_best=beam, max_length=10)

    def search(rows):
        width = max(len(prompts[row]) for row in rows)
        prompt = torch.tensor([prompts[row] + [0] * (width - len(prompts[row])) for row in rows])
        lengths = torch.tensor([len(prompts[row]) for row in rows])
        state = model.start(prompt, 12, prompt_lengths=lengths)
        return beam_search(
            model.step, state, options, end=1, max_lengths=[limits[row] for row in rows]
        )

    together = search([0, 1])
    for row in (0, 1):
        [alone] = search([row])
        assert [one.tokens for one in together[row]] == [one.tokens for one in alone]
        assert [one.score for one in together[row]] == pytest.approx([one.score for one in alone])
