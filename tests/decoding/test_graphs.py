"""Searches on the device against the plain ones; interpreted where there is no GPU."""

import re
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from graph_searches import EOS, Batch, Model, assert_same, captured, plain
from helpers import DEVICE, config, model, tokens
from texts import engine, sentences
from writehead.config import DecodeConfig
from writehead.errors import ConfigError, OutOfRoom, SearchError, TokenError
from writehead.kernels import choose
from writehead.model import LanguageModel

pytest.importorskip("triton")
MODULES = "decoding.captured decoding.graphs decoding.reading model.fused model.fused_layers"
captures, graphs, reading, fused, fused_layers, tiles = (
    import_module(f"writehead.{name}") for name in f"{MODULES} kernels.tiles".split()
)
pytestmark = [
    pytest.mark.usefixtures("interpreted"),
    # in the kernels minus infinity is a number like others
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]

SIZES = {"k": 16, "v": 32, "d": 21, "h": 4, "decoder_layers": 1}
GREEDY = DecodeConfig(max_length=4, beam=1)
BEAM = DecodeConfig(max_length=4, beam=2, n_best=2)
ROUND_ROWS = graphs._round_rows

both_searches = pytest.mark.parametrize("options", [GREEDY, BEAM], ids=["greedy", "beam"])


@pytest.fixture(autouse=True)
def _few_rows(monkeypatch):
    """Graphs of 1, 2, 4, 6, … rows: an interpreter is too slow for rows of padding."""
    monkeypatch.setattr(graphs, "_round_rows", lambda rows: rows if rows == 1 else rows + rows % 2)
    monkeypatch.setattr(graphs, "PROMPTS", 10)  # of which two are read together
    if DEVICE == "cpu":
        monkeypatch.setattr(choose, "PART", 64)


def make(task: str = "translation", **changes: object) -> Model:
    """A model of random weights that ends some of its texts."""
    encoder = {"encoder_layers": 1} if task == "translation" else {}
    made = model(config(task, **(SIZES | encoder | changes)), dtype=torch.float32)
    with torch.no_grad():
        made.tokens.weight[EOS] *= 2.5
    return made.to(DEVICE)


def read(*lengths: int) -> Batch:
    """Sources or prompts of these lengths."""
    return tokens(len(lengths), max(lengths)).clamp(min=2).to(DEVICE), list(lengths)


TASKS = ("translation", "language")
LIMITS = {"prefixes": [[8], []], "max_lengths": [4, 3]}
SHORT = replace(GREEDY, max_length=3, min_length=3)
KINDS = [
    {"decoder_layers": 2},
    {"g": 4, "window": 2, "logit_scale": 0.2},
    {"g": 2, "tied": False},
    {"norm": "layer", "activation": "gelu"},
    {"norm": "layer", "bias": True},
    {"bias": True, "norm_epsilon": 0.1},
    {"activation": "gelu_tanh", "norm_epsilon": 0.1},
]


@pytest.mark.parametrize(
    ("task", "changes", "lengths", "options", "limits"),
    [
        *((task, {}, (5, 2, 4), replace(GREEDY, max_length=5), {}) for task in TASKS),
        *(("translation", changes, (2, 5), SHORT, {}) for changes in KINDS),
        # one row has kernels of its own, which know RMS norms only
        *(("translation", changes, (5,), SHORT, {}) for changes in KINDS[3:]),
        ("language", {"g": 2, "tied": False}, (2, 5), SHORT, {}),
        ("language", {"window": 2}, (5,), SHORT, {}),
        ("translation", {}, (4, 2), replace(GREEDY, min_length=2, alpha=1.1), LIMITS),
        ("translation", {}, (2, 4), BEAM, {}),
        ("language", {"window": 3}, (5, 2), BEAM, {}),
        ("translation", {"g": 2}, (4, 2), replace(BEAM, alpha=0.0, n_best=1, min_length=3), LIMITS),
        ("translation", {"window": 2}, (4, 2), replace(BEAM, alpha=-1.0), LIMITS),
        ("translation", {}, (4, 2), replace(BEAM, beam=3, alpha=2.0), LIMITS),
        ("translation", {}, (2, 4), replace(GREEDY, max_length=3), {"vocab_size": 19}),
        ("translation", {}, (2, 4), replace(BEAM, max_length=3), {"vocab_size": 19}),
    ],
)
def test_a_search_finds_what_the_plain_one_does(task, changes, lengths, options, limits):
    made, batch = make(task, **changes), read(*lengths)
    right = plain(made, batch, options, **limits)
    decoder = graphs.GraphDecoder(made, limits.get("vocab_size"))
    asked = {name: limits[name] for name in limits if name != "vocab_size"}
    assert_same(captured(decoder, batch, options, **asked), right)
    if "vocab_size" in limits:  # ids past it, of which the tokenizer has no text, are never chosen
        assert right != plain(made, batch, options)
    if not changes and not limits and len(lengths) > 1:
        assert {one.finished for found in right for one in found} == {True, False}


@pytest.mark.parametrize(
    ("products", "changes", "lengths"),
    [
        # float32 would take another way, and Triton's interpreter takes no bfloat16
        *(("few_rows", changes, (2, 5)) for changes in ({"decoder_layers": 2}, *KINDS[5:])),
        *(("choose_shape", {"d": 64, "g": g}, (2, 5)) for g in (1, 4)),
        ("LARGEST", {}, (5,)),
    ],
)
def test_other_products_find_the_same(products, changes, lengths, monkeypatch):
    tile = tiles.TileShape(16, 16, 32, warps=4, stages=2)
    instead = {
        "few_rows": lambda X, W: len(X) > 1,
        "choose_shape": lambda X, W, widest=0: None if W.shape[1] % 64 else tile,
        "LARGEST": 100,  # so that no weights are merged
    }
    monkeypatch.setattr(fused_layers, products, instead[products])
    test_a_search_finds_what_the_plain_one_does("translation", changes, lengths, SHORT, {})


@pytest.mark.parametrize(
    ("k", "v", "dtype", "words"),
    [
        (16, 256, torch.bfloat16, None),
        (8, 16, torch.float32, "need k to be a power of two.* not 8$"),
        (16, 24, torch.float32, "need v to be a power of two.* not 24$"),
        (16, 16, torch.float64, r"torch\.float64"),
    ],
)
def test_models_that_the_kernels_cannot_decode_are_told_why(k, v, dtype, words):
    reason = fused.why_not(LanguageModel(config("language", k=k, v=v)).to(dtype))
    assert reason is None if words is None else re.search(words, reason)


@pytest.mark.parametrize(
    ("task", "beam", "lengths", "limits", "prefixes"),
    [
        ("translation", 1, (1, 5, 2, 4), [2, 5, 1, 4], [[], [5, 6, 7], [], [8]]),
        ("translation", 2, (2, 4), [2, 5], [[], [5]]),
        ("language", 2, (2, 4), [2, 5], [[], [5]]),
    ],
)
def test_smaller_graphs_find_the_same(task, beam, lengths, limits, prefixes, monkeypatch):
    for owner, name, value in ((graphs, "FEWEST", 2), (graphs, "SOON", 1), (reading, "LOOK", 1)):
        monkeypatch.setattr(owner, name, value)
    made, batch = make(task), read(*lengths)
    options = DecodeConfig(max_length=5, min_length=1, beam=beam, n_best=beam)
    given = {"max_lengths": limits, "prefixes": prefixes}
    found = captured(graphs.GraphDecoder(made), batch, options, **given)
    assert_same(found, plain(made, batch, options, **given))


@both_searches
def test_one_decoder_serves_many_batches_and_what_it_found_stays(options, monkeypatch):
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 1)  # so that graphs give way to others
    made = make()
    decoder = graphs.GraphDecoder(made, padded=options == GREEDY)
    searches = [
        (read(5, 2), options, {"prefixes": [[3, 4], [5]]}),
        (read(2, 4), replace(options, max_length=3, min_length=3), {"eos": 12}),
        (read(2, 4, 3), replace(options, max_length=2), {}),
        # all is forced, so that there is one hypothesis of each sentence
        (read(2, 4), replace(options, max_length=2), {"prefixes": [[7, 8], [9, 3]]}),
    ]
    found = [captured(decoder, batch, asked, **limits) for batch, asked, limits in searches]
    for got, (batch, asked, limits) in zip(found, searches, strict=True):
        assert_same(got, plain(made, batch, asked, **limits))
    assert [len(one) for one in found[3]] == [1, 1]
    assert found[2][1:] == [found[2][1], found[2][-1]]


def test_padding_rows_change_nothing(monkeypatch):
    monkeypatch.setattr(graphs, "_round_rows", ROUND_ROWS)
    made, batch, options = make(), read(2, 5), replace(GREEDY, max_length=2)
    found = captured(graphs.GraphDecoder(made), batch, options)
    assert_same(found, plain(made, batch, options))


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
        ((3, 20), GREEDY, {}, ConfigError, "20 tokens is past the 19"),
        ((3, 2), DecodeConfig(max_length=24), {}, ConfigError, "24 positions are past the 23"),
    ],
)
def test_what_a_model_has_not_learned_is_refused(lengths, options, limits, error, words):
    with pytest.raises(error, match=words):
        captured(graphs.GraphDecoder(make(), 30), read(*lengths), options, **limits)


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
