"""Exports a translation model to CTranslate2."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from writehead.config import ModelConfig
from writehead.data.bpe import UNKNOWN
from writehead.errors import ConfigError
from writehead.model import TranslationModel
from writehead.model.attention import Attention
from writehead.model.layers import FeedForward, Layer, Stack
from writehead.util.extras import requires
from writehead.util.files import atomic_directory

ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "gelu_tanh": "GELUTanh", "silu": "SWISH"}


def export_ctranslate2(
    model: TranslationModel, tokens: Sequence[str], directory: Path, *, dtype: str = "float32"
) -> None:
    """Writes `model` as a CTranslate2 model directory; `tokens[i]` is the text of token i.

    Weights of tokens beyond `tokens` are left out. CTranslate2 appends eos to each source.
    """
    check_exportable(model.config)
    with requires("interop"):
        specs: Any = import_module("ctranslate2.specs")
    spec = _make_spec(specs, model.config)
    count = len(tokens)
    E = model.tokens.weight[:count]
    embeddings = _array(E * (model.config.embedding_scale or 1.0))
    spec.encoder.embeddings[0].weight = spec.decoder.embeddings.weight = embeddings
    spec.decoder.projection.weight = _array(E if model.config.tied else model.output.weight[:count])
    if model.config.output_bias:
        spec.decoder.projection.bias = _array(model.output_bias[:count])
    for side, stack in ((spec.encoder, model.encoder), (spec.decoder, model.decoder)):
        _set_stack(side, stack)
    # CTranslate2 has no logit scale, so it is multiplied into the norm before the output
    _set_norm(spec.decoder.layer_norm, model.decoder.norm, model.config.effective_logit_scale)
    spec.register_source_vocabulary(list(tokens))
    spec.register_target_vocabulary(list(tokens))
    _set_tokens(spec.config, model.config, tokens)
    spec.validate()
    spec.optimize(quantization=dtype)
    with atomic_directory(directory) as fresh:
        spec.save(str(fresh))


def check_exportable(config: ModelConfig) -> None:
    """Raises ConfigError if CTranslate2 cannot express a model of these sizes."""
    if config.task != "translation":
        raise ConfigError("only translation models can be exported to CTranslate2")
    if config.window is not None:
        raise ConfigError(
            f"window={config.window} cannot be exported: CTranslate2 would also limit the "
            f"attention to the encoder"
        )
    if config.k != config.v:
        raise ConfigError(
            f"k={config.k} and v={config.v} cannot be exported: CTranslate2 has one head size"
        )
    if config.cross_attention.g != config.g:
        raise ConfigError(
            f"cross_g={config.cross_g} with g={config.g} cannot be exported: in CTranslate2, a "
            f"decoder has one number of write-heads"
        )
    unsupported = {"norm_place": "post", "gated": True, "positions": "rotary"}
    for name, value in unsupported.items():
        if getattr(config, name) == value:
            raise ConfigError(f"{name}={value!r} cannot be exported to CTranslate2 yet")
    if config.source_vocab_size is not None:
        raise ConfigError(
            f"source_vocab_size={config.source_vocab_size} cannot be exported to CTranslate2 yet; "
            f"source and target must share a vocabulary"
        )


def _make_spec(specs: Any, config: ModelConfig) -> Any:
    options = {
        "pre_norm": True,
        "activation": specs.Activation[ACTIVATIONS[config.activation]],
        "rms_norm": config.norm == "rms",
        "head_dim": config.k,
    }

    def heads(g: int) -> dict[str, Any]:
        shared = g < config.h
        return {"multi_query_attention": shared and g == 1, "num_heads_kv": g if shared else None}

    encoder = specs.TransformerEncoderSpec(
        config.encoder_layers, config.h, **options, **heads(config.encoder_attention.g)
    )
    decoder = specs.TransformerDecoderSpec(
        config.decoder_layers, config.h, **options, **heads(config.g)
    )
    encoder.scale_embeddings = decoder.scale_embeddings = False
    return specs.TransformerSpec(encoder, decoder)


def _set_tokens(spec_config: Any, config: ModelConfig, tokens: Sequence[str]) -> None:
    spec_config.unk_token = tokens[UNKNOWN]
    spec_config.bos_token = spec_config.decoder_start_token = tokens[config.bos]
    spec_config.eos_token = tokens[config.eos]
    spec_config.add_source_eos = True
    spec_config.layer_norm_epsilon = config.norm_epsilon


def _set_stack(spec: Any, stack: Stack) -> None:
    assert stack.position_table is not None
    spec.position_encodings.encodings = _array(stack.position_table)
    _set_norm(spec.layer_norm, stack.norm)
    for layer_spec, layer in zip(spec.layer, stack.layers, strict=True):
        assert isinstance(layer, Layer)
        _set_attention(layer_spec.self_attention, layer.attention, layer.norm_attention)
        if hasattr(layer_spec, "attention"):
            _set_attention(layer_spec.attention, layer.cross, layer.norm_cross)
        _set_feed_forward(layer_spec.ffn, layer.feed_forward, layer.norm_feed_forward)


def _set_attention(spec: Any, layer: Attention, norm: nn.Module) -> None:
    """Sets Q, K and V as one projection in self-attention, and Q and (K, V) in cross-attention."""
    _set_norm(spec.layer_norm, norm)
    P_q, P_k, P_v = layer.P_q, layer.P_k, layer.P_v
    inputs = [[P_q, P_k, P_v]] if len(spec.linear) == 2 else [[P_q], [P_k, P_v]]
    for linear, projections in zip(spec.linear, [*inputs, [layer.P_o]], strict=True):
        _set_linear(linear, projections)


def _set_feed_forward(spec: Any, layer: FeedForward, norm: nn.Module) -> None:
    _set_norm(spec.layer_norm, norm)
    _set_linear(spec.linear_0, [layer.widen])
    _set_linear(spec.linear_1, [layer.narrow])


def _set_linear(spec: Any, projections: Sequence[nn.Linear]) -> None:
    """Sets several projections of the same input as one matrix."""
    spec.weight = _array(torch.cat([P.weight for P in projections]))
    if projections[0].bias is not None:
        spec.bias = _array(torch.cat([P.bias for P in projections]))


def _set_norm(spec: Any, norm: nn.Module | None, scale: float = 1.0) -> None:
    assert isinstance(norm, nn.RMSNorm | nn.LayerNorm)
    spec.gamma = _array(norm.weight * scale)
    if isinstance(norm, nn.LayerNorm):
        bias = torch.zeros_like(norm.weight) if norm.bias is None else norm.bias
        spec.beta = _array(bias * scale)


def _array(T: Tensor) -> Any:
    return T.detach().float().cpu().numpy()
