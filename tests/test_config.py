"""The sizes of the paper's models, and the errors of invalid configs."""

import dataclasses
import json
from itertools import count

import pytest

from helpers import config
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

SIZES = {"d": 1024, "h": 8, "g": 8, "k": 128, "v": 128, "decoder_layers": 6}
ENCODER = {"encoder_layers": 6, "source_positions": 256}
WMT14 = ModelConfig(task="translation", vocab_size=33280, f=4096, **SIZES, **ENCODER)
LM1B = ModelConfig(task="language", vocab_size=32000, f=8192, **SIZES, tied=False)


@pytest.mark.parametrize(
    ("h", "g", "kind"),
    [(6, 6, "multi-head"), (6, 2, "grouped-query"), (6, 1, "multi-query"), (1, 1, "multi-head")],
)
def test_the_write_heads_determine_the_kind(h, g, kind):
    assert config(h=h, g=g).kind == kind


@pytest.mark.parametrize(
    ("baseline", "sizes", "f"),
    [
        (WMT14, {"g": 1}, 5440),
        (WMT14, {"h": 1, "g": 1}, 6784),
        (LM1B, {"g": 1}, 9088),
        (LM1B, {"g": 8, "k": 16, "v": 16}, 9984),
    ],
)
def test_matched_widths_are_the_papers(baseline, sizes, f):
    assert matched_d_ff(dataclasses.replace(baseline, **sizes), baseline) == f


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


@pytest.mark.parametrize("change", [{"vocab_size": 32001}, {"decoder_layers": 7}, {"tied": True}])
def test_widths_are_matched_only_between_models_that_differ_in_their_heads(change):
    with pytest.raises(ConfigError, match=f"only if {next(iter(change))} is equal"):
        matched_d_ff(dataclasses.replace(LM1B, **change), LM1B)
    narrow = config(g=1, f=1)
    with pytest.raises(ConfigError, match="choose fewer or smaller heads"):
        matched_d_ff(dataclasses.replace(narrow, g=6), narrow)


def test_with_write_heads_changes_the_heads_and_the_width_and_nothing_else():
    assert dataclasses.replace(WMT14.with_write_heads(1), g=8, f=4096) == WMT14


def test_a_config_survives_json():
    for cfg in (WMT14, config(window=5, bias=True, norm="layer", logit_scale=2.0)):
        assert ModelConfig.from_json(json.loads(json.dumps(cfg.to_json()))) == cfg


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"windw": 3}, "unknown model field 'windw'; did you mean 'window'?"),
        ({"d": True}, "d=True must be an integer"),
        ({"window": "3"}, "window='3' must be an integer or null"),
        ({"norm": "batch"}, "norm='batch' must be 'rms' or 'layer'"),
        ({"task": ["language"]}, "must be 'translation' or 'language'"),
        ({"decoder_layers": 10**9}, "decoder_layers=1000000000 must be at most 500"),
        ({"h": 6, "g": 4}, "g=4 write-heads must divide h=6"),
        ({"d": 2**63}, "does not fit in 64 bits"),
        ({"norm_epsilon": float("inf")}, "norm_epsilon=inf must be a finite number"),
        ({"norm": "x" * 10**7}, "…"),
        ({"x" * 10**7: 1}, "unknown model field"),
    ],
    ids=count(),
)
def test_an_invalid_field_is_a_short_error(change, sentence):
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_json(config().to_json() | change)
    assert sentence in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_config_needs_its_fields_and_an_object():
    data = config().to_json() | {"logit_scale": 1}  # JSON may write a float as an integer
    assert ModelConfig.from_json(data).logit_scale == 1.0
    del data["h"], data["vocab_size"], data["pad"]
    with pytest.raises(ConfigError, match="lacks vocab_size, h"):
        ModelConfig.from_json(data)
    with pytest.raises(ConfigError, match="a JSON object, not list"):
        ModelConfig.from_json([])


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (TrainConfig, {"steps": 10**8}),
        (TrainConfig, {"seed": -1}),
        (TrainConfig, {"learning_rate": float("nan")}),
        (TrainConfig, {"clip": 10**400}),
        (PrepareConfig, {"task": "language", "seed": 10**20}),
        (QuantizationConfig, {"bits": 10**5000}),
    ],
    ids=count(),
)
def test_a_number_out_of_range_is_a_short_error(kind, fields):
    with pytest.raises(ConfigError) as caught:
        kind(**fields)
    assert list(fields)[-1] in str(caught.value)
    assert len(str(caught.value)) < 200


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
    ],
)
def test_an_invalid_search_is_an_error(changes, sentence):
    with pytest.raises(ConfigError) as caught:
        DecodeConfig(**({"max_length": 7} | changes))
    assert sentence in str(caught.value)
