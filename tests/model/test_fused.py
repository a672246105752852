"""A model's decoding in few launches against the model itself; interpreted where no GPU is."""

import re
from copy import deepcopy

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from helpers import config, model, tokens
from writehead import cost
from writehead.model import DecoderState, LanguageModel, TranslationModel, make_model
from writehead.paper.presets import preset

fused = pytest.importorskip("writehead.model.fused", reason="Triton is not installed")
fused_layers = pytest.importorskip("writehead.model.fused_layers")
tiles = pytest.importorskip("writehead.kernels.tiles", reason="Triton is not installed")
pytestmark = pytest.mark.usefixtures("interpreted")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
b, m, steps = 2, 7, 3
SIZES = {"k": 16, "v": 32, "d": 21, "h": 4, "decoder_layers": 1}
Model = TranslationModel | LanguageModel

KINDS = {
    "multi-query": {"decoder_layers": 2},
    "multi-head": {"g": 4},
    "grouped-query, untied": {"g": 2, "tied": False},
    "layer norm, gelu": {"norm": "layer", "activation": "gelu"},
    "layer norm, biases": {"norm": "layer", "bias": True},
    "RMS norm, biases": {"bias": True, "norm_epsilon": 0.1},
    "RMS norm, gelu by tanh": {"activation": "gelu_tanh", "norm_epsilon": 0.1},
    "local": {"window": 2, "logit_scale": 0.7},
}
# one row has kernels of its own, which know RMS norms only
CASES = [
    *(("translation", b, kind) for kind in KINDS),
    *(("translation", 1, kind) for kind in list(KINDS)[3:7]),
    *(("language", b, kind) for kind in ("grouped-query, untied", "local")),
    ("language", 1, "local"),
]


def make(task: str, changes: dict[str, object]) -> Model:
    return model(config(task, **(SIZES | changes)), dtype=torch.float32).to(DEVICE)


def close(found: Tensor, right: Tensor) -> None:
    assert_close(found, right, atol=1e-4, rtol=1e-4)


def start(made: Model, rows: int, **options: object) -> DecoderState:
    """A state of rows of different lengths: of their sources, or of their prompts."""
    lengths = torch.tensor([m, m - 3][:rows], device=DEVICE)
    read = tokens(rows, m).to(DEVICE)
    if isinstance(made, TranslationModel):
        return made.start(read, m + steps, source_lengths=lengths, **options)
    return made.start(read, m + steps, prompt_lengths=lengths, **options)


def memories_of(state: DecoderState) -> object | None:
    if not state.memories:
        return None
    K, V = (torch.stack([getattr(one, name) for one in state.memories]) for name in "KV")
    return fused.Memories(K, V, state.memories[0].visibility.lengths)


@pytest.mark.parametrize(("task", "rows", "kind"), CASES)
@torch.no_grad()
def test_fused_steps_are_the_models(task, rows, kind):
    made = make(task, KINDS[kind])
    state = start(made, rows)
    own = deepcopy(state)
    clock = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    rows_of = fused.Rows(state.first.clone(), own.cache.lengths, own.cache.growing)
    decoder = fused.FusedDecoder(made)
    for t in range(steps):
        X = decoder.embed(rows_of, clock)
        logits = decoder.step(X, rows_of, own.cache, memories_of(state))
        close(logits, made.step(rows_of.tokens, state))
        assert clock.item() == t + 1
        own.cache.lengths.add_(1)
        rows_of.tokens.copy_(tokens(rows))
    close(own.cache.K, state.cache.K)
    close(own.cache.V, state.cache.V)


@pytest.mark.parametrize("kind", ["multi-query", "RMS norm, gelu by tanh", "RMS norm, biases"])
def test_fused_steps_of_few_rows_by_their_own_products_are_the_models(kind, monkeypatch):
    # float32 would take another way, and Triton's interpreter takes no bfloat16
    monkeypatch.setattr(fused_layers, "few_rows", lambda X, W: len(X) > 1)
    test_fused_steps_are_the_models("translation", b, kind)


@pytest.mark.parametrize("kind", ["multi-query", "local"])
def test_fused_steps_of_rows_by_tiles_are_the_models(kind, monkeypatch):
    monkeypatch.setitem(SIZES, "d", 64)  # as the copy engine wants it
    shape = tiles.TileShape(16, 16, 32, warps=4, stages=2)
    monkeypatch.setattr(
        fused_layers, "choose_shape", lambda X, W, widest=0: None if W.shape[1] % 64 else shape
    )
    test_fused_steps_are_the_models("translation", b, kind)


def test_weights_that_are_too_large_to_merge_are_not(monkeypatch):
    monkeypatch.setattr(fused_layers, "LARGEST", 100)
    test_fused_steps_are_the_models("translation", 1, "multi-query")


@pytest.mark.parametrize(
    ("k", "v", "dtype", "words"),
    [
        *((k, v, torch.bfloat16, None) for k, v in [(16, 16), (16, 256), (128, 32)]),
        (16, 16, torch.float16, None),
        (16, 16, torch.float32, None),
        (8, 16, torch.float32, "need k to be a power of two.* not 8$"),
        (16, 24, torch.float32, "need v to be a power of two.* not 24$"),
        (512, 16, torch.float32, "need k to be a power of two.* not 512$"),
        (16, 16, torch.float64, r"torch\.float64"),
    ],
)
def test_models_that_the_kernels_cannot_decode_are_told_why(k, v, dtype, words):
    reason = fused.why_not(LanguageModel(config("language", k=k, v=v)).to(dtype))
    assert reason is None if words is None else re.search(words, reason)


def test_the_widest_beam_is_that_of_which_all_queries_fit_one_tile():
    for g, beam in ((1, 21), (2, 42), (6, 128)):
        assert fused.largest_beam(LanguageModel(config("language", k=16, v=16, g=g))) == beam


@pytest.mark.parametrize("name", ["boxed/multi-query", "wmt14/multi-head"])
def test_bytes_of_a_decoder_are_those_that_its_cost_counts(name):
    with torch.device("meta"):
        made = make_model(preset(name)).to(torch.bfloat16)
    counted = cost.parameters(made.config)
    parts = ("decoder self-attention", "encoder-decoder attention", "decoder feed-forward")
    norms = 3 * made.config.d * made.config.decoder_layers
    expected = sum(counted[part] for part in (*parts, "token embedding")) + norms
    assert fused.decoder_bytes(made) == 2 * expected
