"""A model's decoding in few launches against the model itself; interpreted where no GPU is."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from helpers import config, model, tokens
from writehead import cost
from writehead.kernels import Visibility
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
    *(("language", b, kind) for kind in ("multi-query", "grouped-query, untied", "local")),
    ("language", 1, "local"),
]


def make(task: str, changes: dict[str, object]) -> Model:
    return model(config(task, **(SIZES | changes)), dtype=torch.float32).to(DEVICE)


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
        assert_close(logits, made.step(rows_of.tokens, state), atol=1e-4, rtol=1e-4)
        assert clock.item() == t + 1
        own.cache.lengths.add_(1)
        rows_of.tokens.copy_(tokens(rows))
    assert_close(own.cache.K, state.cache.K, atol=1e-4, rtol=1e-4)
    assert_close(own.cache.V, state.cache.V, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["multi-query", "RMS norm, gelu by tanh", "RMS norm, biases"])
def test_fused_steps_of_few_rows_by_their_own_products_are_the_models(kind, monkeypatch):
    taken = []

    def noted(*args, **options):
        taken.append(options.keys())
        return rows_linear(*args, **options)

    rows_linear = fused_layers.rows_linear
    monkeypatch.setattr(fused_layers, "rows_linear", noted)
    # float32 would take another way, and Triton's interpreter takes no bfloat16
    monkeypatch.setattr(fused_layers, "few_rows", lambda X, W: len(X) > 1)
    test_fused_steps_are_the_models("translation", b, kind)
    assert any("unnormed" in options for options in taken) is (kind == "multi-query")
    assert bool(taken) is (kind != "RMS norm, biases")


@pytest.mark.parametrize("kind", ["multi-query", "multi-head", "local"])
def test_fused_steps_of_rows_by_tiles_are_the_models(kind, monkeypatch):
    taken = []

    def noted(*args, **options):
        taken.append(options)
        return tiles.tiled_linear(*args, **options)

    monkeypatch.setitem(SIZES, "d", 64)  # as the copy engine wants it
    monkeypatch.setattr(fused_layers, "tiled_linear", noted)
    shape = tiles.TileShape(16, 16, 32, warps=4, stages=2)
    monkeypatch.setattr(
        fused_layers, "choose_shape", lambda X, W, widest=0: None if W.shape[1] % 64 else shape
    )
    test_fused_steps_are_the_models("translation", b, kind)
    assert any(options.get("beside") is not None for options in taken)


def test_weights_that_are_too_large_to_merge_are_not(monkeypatch):
    made = make("translation", {})
    assert fused.FusedDecoder(made)._layers[0].P_second is not None
    monkeypatch.setattr(fused_layers, "LARGEST", 100)
    assert fused.FusedDecoder(made)._layers[0].P_second is None
    test_fused_steps_are_the_models("translation", 1, "multi-query")


def test_rows_that_do_not_grow_leave_the_others_as_they_are():
    made = make("translation", {"g": 2})
    state = start(made, b)
    own = deepcopy(state)
    own.cache.growing[0] = 0
    own.cache.K[:, 0] = own.cache.V[:, 0] = torch.nan
    rows = fused.Rows(state.first, own.cache.lengths, own.cache.growing)
    decoder = fused.FusedDecoder(made)
    logits = decoder.step(decoder.embed(rows), rows, own.cache, memories_of(state))
    assert_close(logits[1], made.step(state.first, state)[1], atol=1e-4, rtol=1e-4)
    assert own.cache.K[:, 0].isnan().all()


def memories(made: TranslationModel, source: Tensor, lengths: Tensor | None) -> list[Tensor]:
    """K and V of all layers by the model's own encoder."""
    M = made.encode(source, source_lengths=lengths)
    read = made.decoder.memorize(M, Visibility(lengths=lengths))
    return [torch.stack([getattr(one, name) for one in read]) for name in "KV"]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "changes", [{}, {"g": 2, "norm": "layer"}, {"bias": True, "activation": "gelu"}], ids=str
)
@torch.no_grad()
def test_the_encoders_memory_is_the_models_in_the_first_places_of_a_larger_one(changes, padded):
    made = make("translation", changes)
    source = tokens(b, m).to(DEVICE)
    lengths = torch.tensor([m, m - 3], device=DEVICE) if padded else None
    right = memories(made, source, lengths)
    heads, device = made.config.encoder_attention, right[0].device
    into = fused.Memories.make(heads, 1, b + 1, m + 4, right[0].dtype, device)
    into.K[:] = into.V[:] = -9.0
    into.lengths[:] = 99

    fused.FusedDecoder(made).encode(source, lengths, into)

    for T, expected in zip((into.K, into.V), right, strict=True):
        for row, length in enumerate([m, m - 3 if padded else m]):
            found = T[:, row, :, :length]
            assert_close(found, expected[:, row, :, :length], atol=1e-4, rtol=1e-4)
        assert (T[:, b:] == -9.0).all()
        assert (T[:, :, :, m:] == -9.0).all()
    assert into.lengths.tolist() == [m, m - 3 if padded else m, 99]


@pytest.mark.parametrize("changes", [{"g": 2}, {"g": 2, "bias": True}], ids=str)
@torch.no_grad()
def test_the_encoders_memory_may_have_just_the_room_that_is_needed(changes):
    made = make("translation", changes)
    source = tokens(b, m).to(DEVICE)
    right = memories(made, source, None)
    heads, device = made.config.encoder_attention, right[0].device
    into = fused.Memories.make(heads, 1, b, m, right[0].dtype, device)
    fused.FusedDecoder(made).encode(source, None, into)
    for found, expected in zip((into.K, into.V), right, strict=True):
        assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("k", "v"), [(16, 16), (16, 256), (128, 32)])
def test_heads_of_a_power_of_two_can_be_decoded_by_the_kernels(k, v):
    assert fused.why_not(LanguageModel(config("language", k=k, v=v))) is None


@pytest.mark.parametrize(("k", "v", "name"), [(8, 16, "k"), (16, 24, "v"), (512, 16, "k")])
def test_other_heads_are_refused_in_a_sentence_that_names_them(k, v, name):
    reason = fused.why_not(LanguageModel(config("language", k=k, v=v)))
    assert f"need {name} to be a power of two" in reason
    assert reason.endswith(f"not {k if name == 'k' else v}")


def test_types_that_the_kernels_do_not_know_are_refused_by_name():
    made = LanguageModel(config("language", k=16, v=16))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert fused.why_not(made.to(dtype)) is None
    assert "torch.float64" in fused.why_not(made.double())


def test_the_widest_beam_is_that_of_which_all_queries_fit_one_tile():
    for g, beam in ((1, 21), (2, 42), (6, 128)):
        assert fused.largest_beam(LanguageModel(config("language", k=16, v=16, g=g))) == beam


@pytest.mark.parametrize(
    ("name", "stays"),
    [("boxed/multi-query", True), ("wmt14-small/multi-query", False), ("wmt14/multi-head", False)],
)
def test_only_the_model_in_the_box_is_small_beside_an_h200s_cache(name, stays):
    with torch.device("meta"):
        made = make_model(preset(name)).to(torch.bfloat16)
    assert (fused.decoder_bytes(made) <= fused.STAYS * 62_914_560) == stays
    counted = cost.parameters(made.config)
    parts = ("decoder self-attention", "encoder-decoder attention", "decoder feed-forward")
    norms = 3 * made.config.d * made.config.decoder_layers
    expected = sum(counted[part] for part in (*parts, "token embedding")) + norms
    assert fused.decoder_bytes(made) == 2 * expected


@torch.no_grad()
def test_where_weights_are_to_leave_the_cache_first_all_of_one_rows_are(monkeypatch):
    taken = []

    def noted(*args, **options):
        taken.append(options["passing"])
        return row_linear(*args, **options)

    row_linear = fused_layers.row_linear
    monkeypatch.setattr(fused_layers, "row_linear", noted)
    made = make("translation", {"decoder_layers": 2})
    state = start(made, 1)
    for passing in (False, True):
        decoder, own = fused.FusedDecoder(made), deepcopy(state)
        decoder._passing = passing
        decoder._layers = fused_layers.fused_layers(
            made.decoder.layers, rooted=True, passing=passing
        )
        rows = fused.Rows(state.first, own.cache.lengths, own.cache.growing)
        decoder.step(decoder.embed(rows), rows, own.cache, memories_of(state))
        assert taken == [passing] * (5 * 2 + 1)  # a layer's products with queries merged; logits
        taken.clear()
