"""Searches on the device against the plain ones; interpreted where there is no GPU."""

import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from helpers import config, model, tokens
from search_toys import assert_ranked
from texts import engine, sentences
from writehead import cost
from writehead.config import DecodeConfig
from writehead.decoding import Hypothesis, beam_search
from writehead.errors import ConfigError, OutOfRoom, SearchError, TokenError
from writehead.kernels import choose
from writehead.model import LanguageModel, TranslationModel

graphs = pytest.importorskip("writehead.decoding.graphs", reason="Triton is not installed")
reading = pytest.importorskip("writehead.decoding.reading", reason="Triton is not installed")
captures = pytest.importorskip("writehead.decoding.captured", reason="Triton is not installed")
fused = pytest.importorskip("writehead.model.fused", reason="Triton is not installed")
pytestmark = [
    pytest.mark.usefixtures("interpreted"),
    # in the kernels minus infinity is a number like others
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
END = 1
SIZES = {"k": 16, "v": 32, "d": 21, "h": 4, "decoder_layers": 1}
Model = TranslationModel | LanguageModel
GREEDY = DecodeConfig(max_length=4, beam=1)
BEAM = DecodeConfig(max_length=4, beam=2, n_best=2)
ROUND_ROWS = graphs._round_rows

both_searches = pytest.mark.parametrize("options", [GREEDY, BEAM], ids=["greedy", "beam"])


@pytest.fixture(autouse=True)
def _few_rows(monkeypatch):
    """Graphs of 1, 2, 4, 6, … rows: an interpreter is too slow for rows of padding."""
    monkeypatch.setattr(graphs, "_round_rows", lambda rows: rows if rows == 1 else rows + rows % 2)
    if DEVICE == "cpu":
        monkeypatch.setattr(choose, "PART", 64)


def make(task: str = "translation", **changes: object) -> Model:
    """A model of random weights that ends some of its texts."""
    encoder = {"encoder_layers": 1} if task == "translation" else {}
    made = model(config(task, **(SIZES | encoder | changes)), dtype=torch.float32)
    with torch.no_grad():
        made.tokens.weight[END] *= 2.5
    return made.to(DEVICE)


def read(*lengths: int) -> tuple[Tensor, list[int]]:
    """Sources or prompts of these lengths."""
    return tokens(len(lengths), max(lengths)).clamp(min=2).to(DEVICE), list(lengths)


def room(made: Model, batch, options: DecodeConfig) -> int:
    """Positions that a row's cache needs."""
    if isinstance(made, TranslationModel):
        return options.max_length
    return max(batch[1]) + options.max_length - 1


def plain(made: Model, batch, options: DecodeConfig, *, end=END, vocabulary=37, **limits):
    """The hypotheses that the search in PyTorch finds, step by step."""
    name = "source_lengths" if isinstance(made, TranslationModel) else "prompt_lengths"
    lengths = {name: torch.tensor(batch[1], device=DEVICE)}
    state = made.start(batch[0], room(made, batch, options), beam=options.width, **lengths)

    def step(fed: Tensor, state) -> Tensor:
        return made.step(fed, state)[:, :vocabulary]

    return beam_search(step, state, options, end=end, **limits)


def captured(decoder, batch, options: DecodeConfig, **limits):
    """The hypotheses that the kernels find."""
    capacity = room(decoder.model, batch, options)
    return decoder.search(*batch, capacity, options, **({"end": END} | limits))


def assert_same(found: list[list[Hypothesis]], right: list[list[Hypothesis]]) -> None:
    for one, other in zip(found, right, strict=True):
        assert_ranked(one, other)


LIMITS = {"prefixes": [[8], []], "max_lengths": [4, 3]}


@pytest.mark.parametrize(
    ("task", "changes", "lengths", "options", "limits"),
    [
        ("translation", {}, (5, 2, 4), replace(GREEDY, max_length=5), {}),
        ("language", {}, (5, 2, 4), replace(GREEDY, max_length=5), {}),
        ("translation", {"g": 4, "window": 2}, (2, 5), GREEDY, {}),
        ("translation", {"norm": "layer", "bias": True}, (2, 5), GREEDY, {}),
        ("translation", {}, (5,), GREEDY, {}),
        ("translation", {}, (4, 2), replace(GREEDY, min_length=2, alpha=1.1), LIMITS),
        ("translation", {}, (2, 4), BEAM, {}),
        ("language", {"window": 3}, (5, 2), BEAM, {}),
        ("translation", {"g": 2}, (4, 2), replace(BEAM, alpha=0.0, n_best=1, min_length=3), LIMITS),
        ("translation", {"window": 2}, (4, 2), replace(BEAM, alpha=-1.0), LIMITS),
        ("translation", {}, (4, 2), replace(BEAM, beam=3, alpha=2.0), LIMITS),
    ],
)
def test_a_search_finds_what_the_plain_one_does(task, changes, lengths, options, limits):
    made, batch = make(task, **changes), read(*lengths)
    right = plain(made, batch, options, **limits)
    assert_same(captured(graphs.GraphDecoder(made), batch, options, **limits), right)
    if not changes and not limits and len(lengths) > 1:
        assert {one.finished for found in right for one in found} == {True, False}


@pytest.mark.parametrize(
    ("task", "beam", "lengths", "limits", "prefixes", "fails"),
    [
        ("translation", 1, (1, 5, 2, 4), [2, 5, 1, 4], [[], [5, 6, 7], [], [8]], None),
        ("translation", 2, (2, 4), [2, 5], [[], [5]], None),
        ("language", 2, (2, 4), [2, 5], [[], [5]], None),
        ("translation", 1, (2, 4), [2, 5], [[], [5]], "_capture"),
        ("translation", 1, (2, 4), [2, 5], [[], [5]], "move"),
    ],
)
def test_sentences_that_go_on_move_to_smaller_graphs_where_there_is_memory(
    task, beam, lengths, limits, prefixes, fails, monkeypatch
):
    for owner, name, value in ((graphs, "FEWEST", 2), (graphs, "SOON", 1), (reading, "LOOK", 1)):
        monkeypatch.setattr(owner, name, value)
    made, batch = make(task), read(*lengths)
    options = DecodeConfig(max_length=5, min_length=1, beam=beam, n_best=beam)
    given = {"max_lengths": limits, "prefixes": prefixes}
    decoder, moved = graphs.GraphDecoder(made), []
    owner = decoder if fails == "_capture" else graphs.Buffers
    name = fails or "move"
    as_usual = getattr(owner, name)

    def watched(first, *rest):
        if fails == "_capture" and first.sentences == len(lengths):
            return as_usual(first, *rest)
        moved.append(first)
        if fails:
            raise torch.OutOfMemoryError("too much")
        return as_usual(first, *rest)

    monkeypatch.setattr(owner, name, watched)
    assert_same(captured(decoder, batch, options, **given), plain(made, batch, options, **given))
    assert moved


@both_searches
def test_one_decoder_serves_many_batches_and_what_it_found_stays(options, monkeypatch):
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 1)  # so that graphs give way to others
    made = make()
    decoder = graphs.GraphDecoder(made, padded=options == GREEDY)
    searches = [
        (read(5, 2), options, {"prefixes": [[3, 4], [5]]}),
        (read(2, 4), replace(options, max_length=3, min_length=3), {"end": 12}),
        (read(2, 4, 3), replace(options, max_length=2), {}),
        # all is forced, so that there is one hypothesis of each sentence
        (read(2, 4), replace(options, max_length=2), {"prefixes": [[7, 8], [9, 3]]}),
    ]
    found = [captured(decoder, batch, asked, **limits) for batch, asked, limits in searches]
    for got, (batch, asked, limits) in zip(found, searches, strict=True):
        assert_same(got, plain(made, batch, asked, **limits))
    assert [len(one) for one in found[3]] == [1, 1]
    assert found[2][1:] == [found[2][1], found[2][-1]]


def test_padding_rows_change_nothing_and_few_sizes_of_graphs_serve_all_batches(monkeypatch):
    monkeypatch.setattr(graphs, "_round_rows", ROUND_ROWS)
    made, batch, options = make(), read(2, 5), replace(GREEDY, max_length=2)
    found = captured(graphs.GraphDecoder(made), batch, options)
    assert_same(found, plain(made, batch, options))
    sizes = [ROUND_ROWS(rows) for rows in range(16, 2000)]
    assert all(rows <= size <= 1.34 * rows for rows, size in enumerate(sizes, 16))
    assert len(set(sizes)) < 40


@pytest.mark.parametrize("beam", [1, 2])
def test_prompts_that_are_read_some_at_a_time_are_decoded_as_all_at_once(beam, monkeypatch):
    monkeypatch.setattr(graphs, "PROMPTS", 8)  # two rows
    made, batch = make("language", window=3), read(4, 1, 3)
    options = DecodeConfig(max_length=2, beam=beam, n_best=beam)
    found = captured(graphs.GraphDecoder(made), batch, options)
    assert_same(found, plain(made, batch, options))


def test_a_padded_encoder_fills_memories_as_one_that_is_not():
    made, bad = make(), 9
    with torch.no_grad():
        made.tokens.weight[bad] = torch.nan
    decoder = fused.FusedDecoder(made)
    sizes, layers = decoder.config.encoder_attention, decoder.config.decoder_layers

    def room_for(b: int, m: int) -> fused.Memories:
        return fused.Memories.make(sizes, layers, b, m, torch.float32, torch.device(DEVICE))

    padded = room_for(3, 8)
    encoder = captures.CapturedEncoder(decoder, padded)
    encoder.encode(torch.full((3, 8), bad, device=DEVICE), None)
    for source, lengths in (read(5, 2, 4), read(7, 3), read(2)):  # each over what the last left
        source[source == bad] = 8
        b, m = source.shape
        known = torch.tensor(lengths, device=DEVICE) if b > 1 else None
        alone = room_for(b, m)
        decoder.encode(source, known, alone)
        encoder.encode(source, known)
        assert padded.lengths.tolist() == lengths + [1] * (3 - b)
        for i, n in enumerate(lengths):
            for found, right in ((padded.K, alone.K), (padded.V, alone.V)):
                assert_close(found[:, i, :, :n], right[:, i, :, :n], atol=1e-5, rtol=1e-5)


@both_searches
def test_ids_that_the_tokenizer_has_no_text_for_are_never_chosen(options):
    made, batch = make(), read(2, 4)
    options = replace(options, max_length=3)
    right = plain(made, batch, options, vocabulary=19)
    assert_same(captured(graphs.GraphDecoder(made, 19), batch, options), right)
    assert right != plain(made, batch, options)


@both_searches
def test_a_batch_with_nan_raises_and_leaves_nothing_behind(options):
    made, options = make(tied=False), replace(options, max_length=2)
    with torch.no_grad():
        made.tokens.weight[9] = torch.nan
    decoder = graphs.GraphDecoder(made)
    source, lengths = read(4, 5)
    source[source == 9] = 8
    bad = source.clone()
    bad[1, 4] = 9
    with pytest.raises(SearchError, match="look for NaN"):
        captured(decoder, (bad, lengths), options)
    short = source[:, :3], [3, 2]
    assert_same(captured(decoder, short, options), plain(made, short, options))


@pytest.mark.parametrize(
    ("lengths", "options", "limits", "error", "words"),
    [
        ((2, 4), GREEDY, {"prefixes": [[4], [29, 30]]}, TokenError, "token 30 is outside"),
        ((2, 4), GREEDY, {"end": 33}, TokenError, "token 33 is outside the vocabulary of 30"),
        ((2, 4), GREEDY, {"prefixes": [[END], []]}, TokenError, "other than the end"),
        ((3, 20), GREEDY, {}, ConfigError, "20 tokens is past the 19"),
        ((3, 2), DecodeConfig(max_length=24), {}, ConfigError, "24 positions are past the 23"),
    ],
)
def test_what_a_model_has_not_learned_is_refused(lengths, options, limits, error, words):
    with pytest.raises(error, match=words):
        captured(graphs.GraphDecoder(make(), 30), read(*lengths), options, **limits)


@pytest.mark.parametrize("failures", [1, 2])
def test_memory_is_given_back_before_a_second_attempt_and_then_the_largest_batch_is_named(
    failures, monkeypatch
):
    memory, held = 3_000_000, []
    device = SimpleNamespace(total_memory=memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    made, batch = graphs.GraphDecoder(make()), read(*[5] * 900)

    def start(*_):
        assert all(ref() is None for ref in held)  # nothing of the first is in the second's way
        attempt = torch.empty(0)
        held.append(weakref.ref(attempt))
        return attempt

    def run(*_):
        if len(held) <= failures:
            raise torch.OutOfMemoryError("too much")
        return [["found"]]

    monkeypatch.setattr(made, "start", start)
    monkeypatch.setattr(made, "run", run)
    if failures == 1:
        assert captured(made, batch, GREEDY) == [["found"]]
        return
    with pytest.raises(OutOfRoom, match="900 sentences of 5") as raised:
        captured(made, batch, GREEDY)
    named = int(str(raised.value).split("about ")[1].split()[0])
    # sources and caches are rounded up to whole units, here to all that the model has learned
    setting, chip = cost.Setting(1, 19, 23, element=4), cost.Chip("", memory, 1.0, 1.0, "")
    most = cost.largest_batch(made.model.config, setting, chip)
    assert 0 < graphs._round_rows(named) <= most < graphs._round_rows(named + 1)


def test_an_engine_decodes_smaller_batches_or_step_by_step_where_graphs_cannot(caplog):
    made, lines = engine("translation"), sentences(5)
    right = [output.text for output in made.translate(lines, BEAM)]

    def search(batch, *_, **__):
        raise OutOfRoom(f"{len(batch)} sentences do not fit, and about 0 do")

    made._worker._graphs = SimpleNamespace(largest_beam=1, search=search)
    assert [output.text for output in made.translate(lines, BEAM)] == right
    assert "beam=2 goes step by step" in caplog.text
    with pytest.raises(SearchError, match="does not hold one line"):
        list(made.translate(lines, GREEDY))
    assert "about 0 do" in caplog.text
