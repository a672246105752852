"""Captured searches against plain ones; the kernels are interpreted without a GPU."""

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
from writehead.model import LanguageModel

pytest.importorskip("triton")
graphs, fused, choose, tiles = (
    import_module(f"writehead.{name}")
    for name in ("decoding.graphs", "model.fused", "kernels.choose", "kernels.tiles")
)
pytestmark = [
    pytest.mark.usefixtures("interpreted"),
    # the kernels compute with minus infinity
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]

SIZES = {"k": 16, "v": 32, "d": 21, "h": 4, "decoder_layers": 1}
GREEDY = DecodeConfig(max_length=4, beam=1)
BEAM = DecodeConfig(max_length=4, beam=2, n_best=2)
ROUND_ROWS = graphs._round_rows

both_searches = pytest.mark.parametrize("options", [GREEDY, BEAM], ids=["greedy", "beam"])


@pytest.fixture(autouse=True)
def _few_rows(monkeypatch):
    """Graphs of 1, 2, 4, 6, … rows: the interpreter is too slow for padding rows."""
    monkeypatch.setattr(graphs, "_round_rows", lambda rows: rows if rows == 1 else rows + rows % 2)
    monkeypatch.setattr(graphs, "PROMPTS", 10)  # tokens, of two prompts
    if DEVICE == "cpu":
        monkeypatch.setattr(choose, "PART", 64)


def make(task: str = "translation", **changes: object) -> Model:
    """A model with random weights that ends some of its texts."""
    encoder = {"encoder_layers": 1} if task == "translation" else {}
    made = model(config(task, **(SIZES | encoder | changes)), dtype=torch.float32)
    with torch.no_grad():
        made.tokens.weight[EOS] *= 2.5
    return made.to(DEVICE)


def read(*lengths: int) -> Batch:
    """Sources or prompts with these lengths."""
    return tokens(len(lengths), max(lengths)).clamp(min=2).to(DEVICE), list(lengths)


TASKS = ("translation", "language")
LIMITS = {"prefixes": [[8], []], "max_lengths": [4, 3]}
SHORT = replace(GREEDY, max_length=3, min_length=3)
LONGER = replace(GREEDY, max_length=5, min_length=1)
KINDS = [
    {"decoder_layers": 2},
    {"g": 4, "window": 2, "logit_scale": 0.2},
    {"g": 2, "tied": False},
    {"norm": "layer", "activation": "gelu"},
    {"norm": "layer", "bias": True},
    {"bias": True, "norm_epsilon": 0.1},
    {"activation": "gelu_tanh", "norm_epsilon": 0.1},
]


CASES = [
    *((task, {}, (5, 2, 4), replace(GREEDY, max_length=5), {}) for task in TASKS),
    *(("translation", changes, (2, 5), SHORT, {}) for changes in KINDS),
    # one row has its own kernels, for RMS norms only
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
]
TILE = tiles.TileShape(16, 16, 32, warps=4, stages=2)
# float32 would use other products, and Triton's interpreter has no bfloat16
ROWS_LINEAR = {"model.fused_layers.few_rows": lambda X, W: len(X) > 1}
TILED_LINEAR = {
    "model.fused_layers.choose_shape": lambda X, W, widest=0: None if W.shape[1] % 64 else TILE
}
UNMERGED_WEIGHTS = {"model.fused_layers.LARGEST": 100}
SMALLER_GRAPHS = {
    "decoding.graphs.FEWEST": 2,
    "decoding.graphs.SOON": 1,
    "decoding.reading.LOOK": 1,
}
ENDING_EARLY = {"max_lengths": [2, 5], "prefixes": [[], [5]]}
FOUR_ENDING_EARLY = {"max_lengths": [2, 5, 1, 4], "prefixes": [[], [5, 6, 7], [], [8]]}
PATCHED = [
    *(
        (ROWS_LINEAR, "translation", changes, (2, 5), SHORT, {})
        for changes in ({"decoder_layers": 2}, *KINDS[5:])
    ),
    *((TILED_LINEAR, "translation", {"d": 64, "g": g}, (2, 5), SHORT, {}) for g in (1, 4)),
    (UNMERGED_WEIGHTS, "translation", {}, (5,), SHORT, {}),
    (SMALLER_GRAPHS, "translation", {}, (1, 5, 2, 4), LONGER, FOUR_ENDING_EARLY),
    *(
        (SMALLER_GRAPHS, task, {}, (2, 4), replace(BEAM, max_length=5), ENDING_EARLY)
        for task in TASKS
    ),
    ({"decoding.graphs._round_rows": ROUND_ROWS}, "translation", {}, (2, 5), SHORT, {}),
]


@pytest.mark.parametrize(
    ("patches", "task", "changes", "lengths", "options", "limits"),
    [*(({}, *case) for case in CASES), *PATCHED],
)
def test_captured_search_equals_plain_search(
    patches, task, changes, lengths, options, limits, monkeypatch
):
    for name, value in patches.items():
        monkeypatch.setattr(f"writehead.{name}", value)
    made, batch, vocab_size = make(task, **changes), read(*lengths), limits.get("vocab_size")
    expected = plain(made, batch, options, **limits)
    limits = {name: value for name, value in limits.items() if name != "vocab_size"}
    ours = captured(graphs.GraphDecoder(made, vocab_size), batch, options, **limits)
    assert_same(ours, expected)
    if vocab_size:  # ids past it, which have no text, are never chosen
        assert expected != plain(made, batch, options)
    if len(lengths) == 3:
        assert {one.finished for best in expected for one in best} == {True, False}


@pytest.mark.parametrize(
    ("k", "v", "dtype", "words"),
    [
        (16, 256, torch.bfloat16, None),
        (8, 16, torch.float32, "need k to be a power of two.* not 8$"),
        (16, 24, torch.float32, "need v to be a power of two.* not 24$"),
        (16, 16, torch.float64, r"torch\.float64"),
    ],
)
def test_unsupported_models_are_explained(k, v, dtype, words):
    reason = fused.why_not(LanguageModel(config("language", k=k, v=v)).to(dtype))
    assert reason is None if words is None else re.search(words, reason)


@both_searches
def test_one_decoder_searches_many_batches(options, monkeypatch):
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 1)  # so that graphs are evicted
    made = make()
    decoder = graphs.GraphDecoder(made, padded=options == GREEDY)
    searches = [
        (read(5, 2), options, {"prefixes": [[3, 4], [5]]}),
        (read(2, 4), replace(options, max_length=3, min_length=3), {"eos": 12}),
        (read(2, 4, 3), replace(options, max_length=2), {}),
        # every token is forced, so each sentence has one hypothesis
        (read(2, 4), replace(options, max_length=2), {"prefixes": [[7, 8], [9, 3]]}),
    ]
    results = [captured(decoder, batch, asked, **limits) for batch, asked, limits in searches]
    for got, (batch, asked, limits) in zip(results, searches, strict=True):
        assert_same(got, plain(made, batch, asked, **limits))
    assert [len(one) for one in results[3]] == [1, 1]
    assert results[2][1:] == [results[2][1], results[2][-1]]


@both_searches
def test_nan_raises_and_does_not_affect_the_next_batch(options):
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
def test_inputs_past_the_limits_of_the_model_are_rejected(lengths, options, limits, error, words):
    with pytest.raises(error, match=words):
        captured(graphs.GraphDecoder(make(), 30), read(*lengths), options, **limits)


def test_an_engine_falls_back_to_smaller_batches_or_single_steps(caplog):
    made, lines = engine("translation"), sentences(5)
    expected = [output.text for output in made.translate(lines, BEAM)]

    def search(batch, *_, **__):
        raise OutOfRoom(f"{len(batch)} sentences do not fit, and about 0 do")

    made._worker._graphs = SimpleNamespace(largest_beam=1, search=search)
    assert [output.text for output in made.translate(lines, BEAM)] == expected
    assert "beam=2 is decoded without CUDA graphs" in caplog.text
    with pytest.raises(SearchError, match="does not hold one line"):
        list(made.translate(lines, GREEDY))
    assert "about 0 do" in caplog.text
