"""Exports translation models to CTranslate2's Translator, and language models to its Generator.

CTranslate2 has one size for the heads of Q, K and V. If k and v differ, the smaller one is padded
with zeros, which changes no result.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from writehead.config import ModelConfig
from writehead.data.tokenizer import Tokenizer
from writehead.errors import ConfigError, RunError, nearest, shown
from writehead.model import LanguageModel, TranslationModel
from writehead.model.attention import Attention
from writehead.model.layers import FeedForward, Layer, Stack
from writehead.ops.norm import Norm
from writehead.util.extras import requires
from writehead.util.files import atomic_directory

ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "gelu_tanh": "GELUTanh", "silu": "SWISH"}
POSITIONS = ("learned", "sinusoidal", "rotary")
INT8 = ("int8", "int8_float32", "int8_float16", "int8_bfloat16")
QUANTIZATIONS = (*INT8, "int16", "float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Vocabulary:
    """The texts of a model's tokens, by id; `source` has those of a separate source vocabulary.

    Text that is not a token becomes `unknown`, by default eos. Tokens in `suppressed` are never
    generated.
    """

    tokens: Sequence[str]
    source: Sequence[str] | None = None
    unknown: int | None = None
    suppressed: Sequence[int] = ()

    @classmethod
    def of(cls, tokenizer: Tokenizer, *, ids: bool = False) -> "Vocabulary":
        """Returns the vocabulary of a tokenizer: its pieces or, with `ids`, the ids as texts."""
        target = tokenizer.target
        tokens, source = (
            [*map(str, range(one.vocab_size))] if ids else one.pieces for one in (target, tokenizer)
        )
        separate = None if target is tokenizer else source
        return cls(tokens, separate, target.unknown, tokenizer.suppressed)


def export_ctranslate2(
    model: TranslationModel | LanguageModel,
    given: Vocabulary,
    directory: Path,
    *,
    quantization: str = "float32",
    add_source_eos: bool = True,
    files: Mapping[str, bytes] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes `model` as a CTranslate2 model directory.

    Weights of tokens beyond the vocabulary are left out. CTranslate2 appends eos to a source if
    `add_source_eos`. `files`, by name, are written into the directory too, such as those of the
    tokenizer.
    """
    config = model.config
    model.check_has_floats()
    check_exportable(config, quantization)
    with requires("interop"):
        specs: Any = import_module("ctranslate2.specs")
    vocabulary = _texts("the vocabulary", given.tokens, config.vocab_size)
    spec = _make_spec(specs, model)
    spec.config.layer_norm_epsilon = config.norm_epsilon
    special = _set_special_tokens(spec.config, config, vocabulary, given.unknown)
    _set_decoder(spec.decoder, model, len(vocabulary), given.suppressed)
    if isinstance(model, TranslationModel):
        source = vocabulary
        if given.source is not None or config.source_vocab_size is not None:
            size = config.source_vocab_size or config.vocab_size
            source = _texts("the source vocabulary", given.source or (), size, special)
        _set_encoder(spec.encoder, model, len(source))
        spec.register_source_vocabulary(source)
        spec.register_target_vocabulary(vocabulary)
        spec.config.decoder_start_token = spec.config.bos_token
        spec.config.add_source_eos = add_source_eos
    else:
        spec.register_vocabulary(vocabulary)
    spec.validate()
    spec.optimize(quantization=quantization)
    try:
        with atomic_directory(directory, replace=overwrite) as fresh:
            for name, content in (files or {}).items():
                (fresh / name).write_bytes(content)
            spec.save(str(fresh))
    except OSError as error:
        raise RunError(f"{directory} could not be written: {error}") from error


def check_exportable(config: ModelConfig, quantization: str = "float32") -> None:
    """Raises ConfigError if CTranslate2 cannot express a model of these sizes."""
    if quantization not in QUANTIZATIONS:
        hint = nearest(quantization, QUANTIZATIONS)
        raise ConfigError(f"CTranslate2 has no quantization {shown(quantization)}; {hint}")
    if config.positions not in POSITIONS:
        raise ConfigError(
            f"positions={config.positions!r} cannot be exported to CTranslate2; export the model "
            f"to Hugging Face, and convert that with CTranslate2's own converter"
        )
    if config.task == "language" and _window(config) is not None:
        raise ConfigError(
            f"window={config.window} of a language model cannot be exported: in a prompt longer "
            f"than the window, CTranslate2 attends to positions before the window"
        )


def _window(config: ModelConfig) -> int | None:
    """Returns the window, or None if the longest target fits into it."""
    limited = config.window is not None and config.window < config.target_positions
    return config.window if limited else None


def _texts(
    name: str, tokens: Sequence[str], vocab_size: int, special: Sequence[str] = ()
) -> list[str]:
    """Returns a unique text for each token, because CTranslate2 looks up ids by text."""
    if not 0 < len(tokens) <= vocab_size:
        raise ConfigError(
            f"{name} has {len(tokens)} texts, but the model has {vocab_size} tokens; pass the text "
            f"of each token of its tokenizer"
        )
    known, texts = set(tokens), dict[str, None]()
    for i, text in enumerate(tokens):
        while text in texts or (text != tokens[i] and text in known):
            text = f"<{i}:{text}>"
        texts[text] = None
    for text in special:
        if text not in known:
            raise ConfigError(f"{name} lacks {shown(text)}, a special token of the target")
    return list(texts)


def _set_special_tokens(
    spec: Any, config: ModelConfig, vocabulary: list[str], unknown: int | None
) -> list[str]:
    """Sets the special tokens; returns those that a source also has."""
    ids = config.bos, config.eos, config.eos if unknown is None else unknown
    if max(ids) >= len(vocabulary):
        raise ConfigError(
            f"the vocabulary has {len(vocabulary)} texts, but bos, eos and unknown are {ids}; "
            f"pass the text of each token"
        )
    spec.bos_token, spec.eos_token, spec.unk_token = (vocabulary[i] for i in ids)
    return [spec.eos_token, spec.unk_token]


def _make_spec(specs: Any, model: TranslationModel | LanguageModel) -> Any:
    config = model.config
    options: dict[str, Any] = {
        "pre_norm": config.norm_place == "pre",
        "activation": specs.Activation[ACTIVATIONS[config.activation]],
        "rms_norm": config.norm == "rms",
        "ffn_glu": config.gated,
        "head_dim": max(config.k, config.v),
    }
    if config.positions == "rotary":
        options |= {"rotary_dim": config.k, "rotary_interleave": False}
        options["rotary_base"] = config.rotary_base
    decoder = specs.TransformerDecoderSpec(
        config.decoder_layers,
        config.h,
        with_encoder_attention=config.encoder_layers > 0,
        num_heads_kv=config.g,
        sliding_window=_window(config),
        **options,
    )
    decoder.scale_embeddings = config.embedding_scale or False
    _set_rotary_scaling(specs, decoder, config)
    if isinstance(model, LanguageModel):
        return specs.TransformerDecoderModelSpec(decoder)
    for layer in decoder.layer:
        layer.attention.num_heads_kv = np.int32(config.cross_attention.g)
        if _window(config) is not None:
            del layer.attention.sliding_window
    g = config.encoder_attention.g
    encoder = specs.TransformerEncoderSpec(
        config.encoder_layers, config.h, num_heads_kv=g, multi_query_attention=g == 1, **options
    )
    encoder.scale_embeddings = decoder.scale_embeddings
    _set_rotary_scaling(specs, encoder, config)
    return specs.TransformerSpec(encoder, decoder)


def _set_rotary_scaling(specs: Any, spec: Any, config: ModelConfig) -> None:
    """Sets attributes that CTranslate2 reads in all layers but its specs define only in some."""
    if config.positions != "rotary" or config.rotary_factor == 1.0:
        return
    kind = specs.RotaryScalingType.Linear
    attributes: dict[str, Any] = {"rotary_scaling_factor": np.float32(config.rotary_factor)}
    if config.rotary_original is not None:
        kind = specs.RotaryScalingType.Llama3
        attributes["original_max_position_embeddings"] = np.int32(config.rotary_original)
        attributes["rotary_low_freq_factor"] = np.float32(config.rotary_low)
        attributes["rotary_high_freq_factor"] = np.float32(config.rotary_high)
    for layer in spec.layer:
        vars(layer.self_attention).update(attributes, rotary_scaling_type=np.int8(kind))


def _set_encoder(spec: Any, model: TranslationModel, vocab_size: int) -> None:
    shared = model.config.source_vocab_size is None
    E = (model.tokens if shared else model.source_tokens).weight
    spec.embeddings[0].weight = _array(E[:vocab_size])
    _set_stack(spec, model.encoder)


def _set_decoder(
    spec: Any,
    model: TranslationModel | LanguageModel,
    vocab_size: int,
    suppressed: Sequence[int],
) -> None:
    config, E = model.config, model.tokens.weight
    spec.embeddings.weight = _array(E[:vocab_size])
    _set_linear(spec.projection, (E if config.tied else model.output.weight)[:vocab_size])
    if config.output_bias or suppressed:
        bias = model.output_bias if config.output_bias else E.new_zeros(config.vocab_size)
        spec.projection.bias = _array(bias[:vocab_size])
        spec.projection.bias[[i for i in suppressed if i < vocab_size]] = -np.inf
    if config.effective_logit_scale != 1.0:
        spec.scale_outputs = float(config.effective_logit_scale)
    _set_stack(spec, model.decoder)


def _set_stack(spec: Any, stack: Stack) -> None:
    if stack.position_table is not None:
        spec.position_encodings.encodings = _array(stack.position_table)
    if stack.norm is not None:
        _set_norm(spec.layer_norm, stack.norm)
    for layer_spec, layer in zip(spec.layer, stack.layers, strict=True):
        assert isinstance(layer, Layer)
        _set_norm(layer_spec.self_attention.layer_norm, layer.norm_attention)
        _set_attention(layer_spec.self_attention, layer.attention)
        if layer.has_cross:
            _set_norm(layer_spec.attention.layer_norm, layer.norm_cross)
            _set_attention(layer_spec.attention, layer.cross)
        _set_norm(layer_spec.ffn.layer_norm, layer.norm_feed_forward)
        _set_feed_forward(layer_spec.ffn, layer.feed_forward)


def _set_attention(spec: Any, layer: Attention) -> None:
    """Sets Q, K and V as one projection in self-attention, and Q and (K, V) in cross-attention."""
    k, v, depth = layer.config.k, layer.config.v, max(layer.config.k, layer.config.v)
    spec.queries_scale = float(layer.scale)
    *inputs, output = spec.linear
    QKV = [
        [None if T is None else _pad_heads(T, size, depth) for T in (P.weight, P.bias)]
        for P, size in ((layer.P_q, k), (layer.P_k, k), (layer.P_v, v))
    ]
    parts = [QKV] if len(inputs) == 1 else [QKV[:1], QKV[1:]]
    for linear, part in zip(inputs, parts, strict=True):
        weights, biases = zip(*part, strict=True)
        _set_linear(linear, torch.cat(weights), None if biases[0] is None else torch.cat(biases))
    _set_linear(output, _pad_heads(layer.P_o.weight.T, v, depth).T, layer.P_o.bias)


def _pad_heads(W: Tensor, size: int, depth: int) -> Tensor:
    """Appends zeros to each head of W [heads × size, …]: [heads × depth, …]."""
    heads = W.reshape(-1, size, *W.shape[1:])
    zeros = W.new_zeros(len(heads), depth - size, *W.shape[1:])
    return torch.cat([heads, zeros], dim=1).flatten(0, 1)


def _set_feed_forward(spec: Any, layer: FeedForward) -> None:
    first = layer.gate if layer.gated else layer.widen  # the one with the activation
    _set_linear(spec.linear_0, first.weight, first.bias)
    if layer.gated:
        _set_linear(spec.linear_0_noact, layer.widen.weight, layer.widen.bias)
    _set_linear(spec.linear_1, layer.narrow.weight, layer.narrow.bias)


def _set_linear(spec: Any, W: Tensor, bias: Tensor | None = None) -> None:
    spec.weight = _array(W)
    if bias is not None:
        spec.bias = _array(bias)


def _set_norm(spec: Any, norm: nn.Module) -> None:
    assert isinstance(norm, nn.RMSNorm | nn.LayerNorm)
    spec.gamma = _array(Norm.of(norm).wide_gain(torch.float32))
    if isinstance(norm, nn.LayerNorm):
        spec.beta = _array(torch.zeros_like(norm.weight) if norm.bias is None else norm.bias)


def _array(T: Tensor) -> Any:
    """Returns a copy, because CTranslate2 quantizes in place."""
    return T.detach().to("cpu", torch.float32, copy=True).contiguous().numpy()
