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
    TrainConfig,
    matched_d_ff,
)
from writehead.errors import ConfigError
from writehead.model import make_model
from writehead.paper.presets import preset

WMT14 = preset("wmt14/multi-head")
LANGUAGE, TRANSLATION = (config(task, g=2).to_json() for task in ("language", "translation"))


@pytest.mark.parametrize("bias", [False, True])
def test_a_matched_width_is_the_integer_nearest_to_equal_parameters(bias):
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
    ("kind", "fields", "words"),
    [
        (LANGUAGE, {"windw": 3}, "unknown model field 'windw'; did you mean 'window'?"),
        (LANGUAGE, {"d": True}, "d=True must be an integer"),
        (LANGUAGE, {"window": "3"}, "window='3' must be an integer or null"),
        (LANGUAGE, {"norm": "batch"}, "norm='batch' must be 'rms' or 'layer'"),
        (LANGUAGE, {"task": ["language"]}, "must be 'translation' or 'language'"),
        (LANGUAGE, {"decoder_layers": 10**9}, "decoder_layers=1000000000 must be at most 500"),
        (LANGUAGE, {"d": 2**63}, "does not fit in 64 bits"),
        (LANGUAGE, {"norm_epsilon": float("inf")}, "norm_epsilon=inf must be a finite number"),
        (LANGUAGE, {"norm": "x" * 10**7}, "…"),
        (LANGUAGE, {"x" * 10**7: 1}, "unknown model field"),
        (LANGUAGE, {"cross_g": 1}, "cross_g is for translation"),
        (LANGUAGE, {"source_vocab_size": 9}, "source_vocab_size is for translation"),
        (LANGUAGE, {"positions": "rotary", "k": 7}, "an even k, not k=7"),
        (LANGUAGE, {"positions": "sinusoidal", "d": 13}, "an even d, not d=13"),
        (LANGUAGE, {"positions": "rotary", "k": 6, "position_offset": 2}, "position_offset to 0"),
        (
            LANGUAGE,
            {"positions": "relative", "relative_buckets": 7},
            "buckets=7 must be even",
        ),
        (LANGUAGE, {"relative_distance": 16}, "relative_distance=16 must be above 16"),
        (LANGUAGE, {"attention_scale": 0.0}, "attention_scale=0.0 must be above 0"),
        (LANGUAGE, {"position_offset": -1}, "position_offset=-1 must be at least 0"),
        (LANGUAGE, {"rotary_base": 1}, "rotary_base=1 must be above 1"),
        (LANGUAGE, {"embedding_scale": 0.0}, "embedding_scale=0.0 must be above 0"),
        (LANGUAGE, {"activation": "swish"}, "'gelu_tanh' or 'silu'"),
        (TRANSLATION, {"cross_g": 4}, "g=4 write-heads must divide h=6"),
        (TRANSLATION, {"encoder_g": 0}, "g=0 must be at least 1"),
        (TRANSLATION, {"source_vocab_size": 1}, "eos=1 must be below 1"),
        (TrainConfig, {"steps": 10**8}, "steps"),
        (TrainConfig, {"learning_rate": float("nan")}, "learning_rate"),
        (TrainConfig, {"clip": 10**400}, "clip"),
        (TrainConfig, {"rows": 10**5000}, "rows"),
        (DecodeConfig, {"max_length": 0}, "max_length=0 must be at least 1"),
        (DecodeConfig, {"max_length": 7, "min_length": 8}, "min_length=8 exceeds max_length=7"),
        (DecodeConfig, {"n_best": 3, "beam": 2}, "n_best=3 is larger than beam=2"),
        (DecodeConfig, {"top_k": 5}, "set temperature too"),
        (DecodeConfig, {"temperature": 0.0}, "temperature=0.0 must be above 0"),
        (DecodeConfig, {"temperature": 1.0, "beam": 2}, "set beam and n_best to 1"),
        (DecodeConfig, {"temperature": 1.0, "top_p": 1.5}, "top_p=1.5 must be at most 1"),
        (DecodeConfig, {"alpha": float("nan")}, "alpha=nan"),
        (DecodeConfig, {"min_p": 0.1}, "min_p is for sampling; set temperature too"),
        (DecodeConfig, {"temperature": 1.0, "min_p": 1.5}, "min_p=1.5 must be at most 1"),
        (DecodeConfig, {"repetition_penalty": 0}, "repetition_penalty=0 must be above 0"),
        (DecodeConfig, {"repetition_penalty": 1.2, "beam": 4}, "not for beam search"),
    ],
    ids=count(),
)
def test_an_invalid_field_is_a_short_error(kind, fields, words):
    with pytest.raises(ConfigError) as caught:
        if isinstance(kind, dict):
            ModelConfig.from_json(kind | fields)
        else:
            kind(**fields)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_config_needs_its_fields_and_a_size_that_can_be_meant():
    data = config().to_json() | {"logit_scale": 1}  # JSON may write a float as an integer
    assert ModelConfig.from_json(data).logit_scale == 1.0
    del data["h"], data["vocab_size"], data["pad"]
    with pytest.raises(ConfigError, match="lacks vocab_size, h"):
        ModelConfig.from_json(data)
    with pytest.raises(ConfigError, match="a JSON object, not list"):
        ModelConfig.from_json([])
    with pytest.raises(ConfigError, match="too large"):
        make_model(config(d=2**30, f=2**30))  # before it is built
