"""Finds the Hugging Face family that expresses a model of ours exactly."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import inf
from operator import itemgetter
from pathlib import Path
from typing import Any

from writehead.config import ModelConfig
from writehead.errors import ConfigError
from writehead.interop.ctranslate2 import check_exportable
from writehead.interop.families import IMPORTED, Family, Fields, read_exact
from writehead.interop.layout import Weights
from writehead.runs.folder import empty_model

IGNORED = ("dropout",)  # does not change what a trained model computes


@dataclass(frozen=True)
class Fitted:
    """A family, its config.json, and an equivalent model of ours that it expresses exactly."""

    family: Family
    data: dict[str, Any]
    config: ModelConfig
    weights: Weights


def fit(config: ModelConfig, weights: Weights, original: Mapping[str, Any]) -> Fitted:
    """Returns the family that fits, preferably the original one; raises ConfigError if none does.

    `original` is the config.json of an imported model, whose other fields are kept.
    """
    kind = original.get("model_type")
    reasons: list[tuple[bool, float, str]] = []  # another family, differences
    config, weights = without_logit_scale(config, weights)
    for family in sorted(IMPORTED, key=lambda one: one.name != kind):
        if family.task != config.task:
            continue
        made, tensors = config, weights
        if family.biased:
            made, tensors = with_biases(config, weights)
        kept = original if family.name == kind else {}
        assert family.write is not None
        data = {
            **kept,
            "model_type": family.name,
            "architectures": [family.architecture],
            **family.write(made),
            **_tokens(made),
        }
        try:
            read = read_exact(Fields(Path("config.json"), data)).config
        except ConfigError as error:
            reasons.append((family.name != kind, inf, f"{family.name}: {error}"))
            continue
        read = replace(read, dropout=made.dropout)
        if not (needed := _differences(made, read)):
            return Fitted(family, data, made, tensors)
        reason = f"{family.name} needs {' and '.join(needed)}"
        reasons.append((family.name != kind, len(needed), reason))
    closest = min(reasons, key=itemgetter(0, 1))[-1]
    raise ConfigError(
        f"no Hugging Face model expresses this one exactly: {closest}{_alternative(config)}"
    )


def _alternative(config: ModelConfig) -> str:
    """Returns advice to export a model to CTranslate2, if that is possible."""
    try:
        check_exportable(config)
    except ConfigError:
        return ""
    return "; export it to CTranslate2 instead"


def without_logit_scale(config: ModelConfig, weights: Weights) -> tuple[ModelConfig, Weights]:
    """Folds the scale of the logits into the last norm or the output projection."""
    scale = config.effective_logit_scale
    if scale == 1.0 or (config.norm_place == "post" and config.tied):
        return replace(config, logit_scale=scale), weights
    scaled = dict(weights)
    if config.tied:
        gain, offset = weights["decoder.norm.weight"], config.norm_offset
        scaled["decoder.norm.weight"] = (gain + offset) * scale - offset
        if "decoder.norm.bias" in weights:
            scaled["decoder.norm.bias"] = weights["decoder.norm.bias"] * scale
    else:
        scaled["output.weight"] = weights["output.weight"] * scale
    return replace(config, logit_scale=1.0), scaled


def with_biases(config: ModelConfig, weights: Weights) -> tuple[ModelConfig, Weights]:
    """Adds biases of zero."""
    biased = replace(config, bias=True)
    shapes = {name: W.shape for name, W in empty_model(biased).state_dict().items()}
    zeros = {name: weights["tokens.weight"].new_zeros(shape) for name, shape in shapes.items()}
    return biased, {**zeros, **weights}


def _tokens(config: ModelConfig) -> dict[str, Any]:
    start = "decoder_start_token_id" if config.task == "translation" else "bos_token_id"
    return {"pad_token_id": config.pad, "eos_token_id": config.eos, start: config.bos}


def _differences(ours: ModelConfig, theirs: ModelConfig) -> list[str]:
    """Describes the fields that a family needs to have other values."""
    pairs = ((one.name, getattr(ours, one.name), getattr(theirs, one.name)) for one in fields(ours))
    return [
        f"{name}={needed!r}, not {value!r}"
        for name, value, needed in pairs
        if value != needed and name not in IGNORED
    ]
