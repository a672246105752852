"""Widths matched for equal parameters, and the errors of invalid configs."""

import dataclasses
import json
from itertools import count

import pytest

from helpers import config
from writehead import cost
from writehead.config import (
    DecodeConfig,
    ModelConfig,
    PrepareConfig,
    QuantizationConfig,
    TrainConfig,
    matched_d_ff,
)
from writehead.errors import ConfigError
from writehead.model import make_model
from writehead.paper.presets import preset

WMT14 = preset("wmt14/multi-head")


def test_a_matched_width_is_the_integer_nearest_to_equal_parameters():
    baseline = config("translation", g=6, bias=True)
    variant = dataclasses.replace(baseline, g=2)

    def layers(cfg: ModelConfig) -> int:
        # P_k, P_v and their biases: the rest of attention is the same in both
        attention = 8 * cfg.g * (cfg.k + cfg.v) * (cfg.d + 1)
        return attention + 5 * ((cfg.d + 1) * cfg.f + (cfg.f + 1) * cfg.d)

    def excess(f: int) -> int:
        return abs(layers(dataclasses.replace(variant, f=f)) - layers(baseline))

    best = min(range(1, 500), key=excess)
    assert excess(best) > 0
    assert matched_d_ff(variant, baseline) == best


@pytest.mark.parametrize("bias", [False, True])
def test_a_matched_width_counts_gates_and_the_write_heads_of_each_kind_of_attention(bias):
    baseline = config("translation", g=6, f=100, gated=True, bias=bias)
    changes = [{"g": 1, "encoder_g": 6, "cross_g": 2}, {"gated": False}, {"gated": False, "g": 2}]
    for change in changes:
        variant = dataclasses.replace(baseline, **change)

        def total(f, variant=variant):
            return sum(cost.parameters(dataclasses.replace(variant, f=f)).values())

        size = sum(cost.parameters(baseline).values())
        best = min(range(1, 500), key=lambda f: abs(total(f) - size))
        assert matched_d_ff(variant, baseline) == best


def test_widths_are_matched_only_between_models_that_differ_in_their_heads():
    for change in ({"vocab_size": 32}, {"decoder_layers": 7}, {"tied": False}):
        with pytest.raises(ConfigError, match=f"only if {next(iter(change))} is the same"):
            matched_d_ff(config(**change), config())
    narrow = config(g=1, f=1)
    with pytest.raises(ConfigError, match="choose fewer or smaller heads"):
        matched_d_ff(dataclasses.replace(narrow, g=6), narrow)


def test_with_write_heads_changes_the_heads_and_the_width_and_nothing_else():
    assert dataclasses.replace(WMT14.with_write_heads(1), g=8, f=4096) == WMT14
    mixed = dataclasses.replace(WMT14, g=1, encoder_g=8, cross_g=2)
    attentions = (mixed.encoder_attention, mixed.decoder_attention, mixed.cross_attention)
    assert [attention.g for attention in attentions] == [8, 1, 2]
    assert mixed.kind == "multi-query"
    multi_query = mixed.with_write_heads(1)
    assert multi_query.encoder_attention == multi_query.cross_attention == mixed.decoder_attention


def test_a_config_survives_json():
    rotary = {"positions": "rotary", "rotary_base": 5e5, "gated": True, "activation": "silu"}
    scaled = {"norm_place": "post", "positions": "sinusoidal", "position_offset": 2}
    separate = {"embedding_scale": 4.9, "output_bias": True, "source_vocab_size": 41}
    for cfg in (
        WMT14,
        config(window=5, bias=True, norm="layer", logit_scale=2.0),
        config(k=6, **rotary),
        config("translation", d=24, encoder_g=6, cross_g=2, **scaled, **separate),
    ):
        assert ModelConfig.from_json(json.loads(json.dumps(cfg.to_json()))) == cfg


def test_the_config_of_an_old_run_is_the_model_it_was():
    data = {"task": "translation", "vocab_size": 61, "d": 13, "f": 29, "h": 6, "g": 2, "k": 7}
    data |= {"v": 11, "window": None, "encoder_layers": 3, "decoder_layers": 2, "tied": True}
    data |= {"source_positions": 19, "target_positions": 17, "norm": "rms", "norm_epsilon": 1e-6}
    data |= {"activation": "relu", "bias": False, "dropout": 0.1, "logit_scale": None}
    data |= {"pad": 0, "bos": 0, "eos": 1}
    cfg = ModelConfig.from_json(data)
    assert (cfg.norm_place, cfg.gated, cfg.output_bias) == ("pre", False, False)
    assert (cfg.positions, cfg.position_offset, cfg.embedding_scale) == ("learned", 0, None)
    assert cfg.encoder_attention == cfg.cross_attention == cfg.decoder_attention
    embeddings, attention = (61 + 19 + 17) * 13, 13 * (6 * 7 + 2 * 7 + 2 * 11 + 6 * 11)
    expected = embeddings + 7 * attention + 5 * 2 * 13 * 29 + (5 + 7 + 2) * 13
    assert sum(cost.parameters(cfg).values()) == expected


@pytest.mark.parametrize(
    ("task", "change", "sentence"),
    [
        ("language", {"cross_g": 1}, "cross_g is for translation"),
        ("language", {"encoder_g": 1}, "encoder_g is for translation"),
        ("language", {"source_vocab_size": 9}, "source_vocab_size is for translation"),
        ("language", {"positions": "rotary", "k": 7}, "an even k, not k=7"),
        ("language", {"positions": "sinusoidal", "d": 13}, "an even d, not d=13"),
        ("language", {"positions": "rotary", "k": 6, "position_offset": 2}, "position_offset to 0"),
        ("language", {"position_offset": -1}, "position_offset=-1 must be at least 0"),
        ("language", {"rotary_base": 1}, "rotary_base=1 must be above 1"),
        ("language", {"embedding_scale": 0.0}, "embedding_scale=0.0 must be above 0"),
        ("language", {"activation": "swish"}, "'gelu_tanh' or 'silu'"),
        ("translation", {"cross_g": 4}, "g=4 write-heads must divide h=6"),
        ("translation", {"encoder_g": 0}, "g=0 must be at least 1"),
        ("translation", {"source_vocab_size": 1}, "eos=1 must be below 1"),
    ],
    ids=count(),
)
def test_fields_that_contradict_each_other_are_an_error(task, change, sentence):
    with pytest.raises(ConfigError) as caught:
        config(task, **({"h": 6, "g": 2} | change))
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        (ModelConfig, {"windw": 3}, "unknown model field 'windw'; did you mean 'window'?"),
        (ModelConfig, {"d": True}, "d=True must be an integer"),
        (ModelConfig, {"window": "3"}, "window='3' must be an integer or null"),
        (ModelConfig, {"norm": "batch"}, "norm='batch' must be 'rms' or 'layer'"),
        (ModelConfig, {"task": ["language"]}, "must be 'translation' or 'language'"),
        (ModelConfig, {"decoder_layers": 10**9}, "decoder_layers=1000000000 must be at most 500"),
        (ModelConfig, {"h": 6, "g": 4}, "g=4 write-heads must divide h=6"),
        (ModelConfig, {"d": 2**63}, "does not fit in 64 bits"),
        (ModelConfig, {"norm_epsilon": float("inf")}, "norm_epsilon=inf must be a finite number"),
        (ModelConfig, {"norm": "x" * 10**7}, "…"),
        (ModelConfig, {"x" * 10**7: 1}, "unknown model field"),
        (TrainConfig, {"steps": 10**8}, "steps"),
        (TrainConfig, {"learning_rate": float("nan")}, "learning_rate"),
        (TrainConfig, {"clip": 10**400}, "clip"),
        (PrepareConfig, {"task": "language", "seed": 10**20}, "seed"),
        (QuantizationConfig, {"bits": 10**5000}, "bits"),
        (DecodeConfig, {"max_length": 0}, "max_length=0 must be at least 1"),
        (DecodeConfig, {"max_length": 7, "min_length": 8}, "min_length=8 must be at most 7"),
        (DecodeConfig, {"n_best": 3, "beam": 2}, "n_best=3 is larger than beam=2"),
        (DecodeConfig, {"top_k": 5}, "set temperature too"),
        (DecodeConfig, {"temperature": 0.0}, "temperature=0.0 must be above 0"),
        (DecodeConfig, {"temperature": 1.0, "beam": 2}, "set beam and n_best to 1"),
        (DecodeConfig, {"temperature": 1.0, "top_p": 1.5}, "top_p=1.5 must be at most 1"),
        (DecodeConfig, {"alpha": float("nan")}, "alpha=nan"),
    ],
    ids=count(),
)
def test_an_invalid_field_is_a_short_error(kind, fields, words):
    with pytest.raises(ConfigError) as caught:
        if kind is ModelConfig:
            kind.from_json(config().to_json() | fields)
        else:
            kind(**fields)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_config_needs_its_fields_and_an_object():
    data = config().to_json() | {"logit_scale": 1}  # JSON may write a float as an integer
    assert ModelConfig.from_json(data).logit_scale == 1.0
    del data["h"], data["vocab_size"], data["pad"]
    with pytest.raises(ConfigError, match="lacks vocab_size, h"):
        ModelConfig.from_json(data)
    with pytest.raises(ConfigError, match="a JSON object, not list"):
        ModelConfig.from_json([])


def test_a_model_beyond_any_memory_is_refused_before_it_is_built():
    huge = config(d=2**30, f=2**30)  # each size can be meant
    with pytest.raises(ConfigError, match="too large"):
        make_model(huge)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"max_length": 0}, "max_length=0 must be at least 1"),
        ({"min_length": 8}, "min_length=8 must be at most 7"),
        ({"n_best": 3, "beam": 2}, "n_best=3 is larger than beam=2"),
        ({"top_k": 5}, "set temperature too"),
        ({"temperature": 0.0}, "temperature=0.0 must be above 0"),
        ({"temperature": 1.0, "beam": 2}, "set beam and n_best to 1"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p=1.5 must be at most 1"),
        ({"alpha": float("nan")}, "alpha=nan"),
        ({"min_p": 0.1}, "min_p is for sampling; set temperature too"),
        ({"temperature": 1.0, "min_p": 1.5}, "min_p=1.5 must be at most 1"),
        ({"repetition_penalty": 0}, "repetition_penalty=0 must be above 0"),
        ({"repetition_penalty": 1.2, "beam": 4}, "repetition_penalty is not for beam search"),
    ],
)
def test_an_invalid_search_is_an_error(changes, sentence):
    with pytest.raises(ConfigError) as caught:
        DecodeConfig(**({"max_length": 7} | changes))
    assert sentence in str(caught.value)


def test_the_default_beam_is_1_where_beams_are_not_allowed():
    assert DecodeConfig().with_default_beam(4).beam == 4
    assert DecodeConfig(beam=2).with_default_beam(4).beam == 2
    for options in ({"temperature": 1.0, "min_p": 0.1}, {"repetition_penalty": 1.2}):
        assert DecodeConfig(**options).with_default_beam(4).beam == 1
