"""Llama, Mistral and Gemma, which share their layers; Gemma 2 and Qwen cannot be imported."""

from functools import partial
from typing import Any

from writehead.config import ModelConfig
from writehead.errors import shown
from writehead.interop.families.family import (
    OUR_ACTIVATIONS,
    OUTPUT,
    Entries,
    Entry,
    Family,
    Fields,
    renamed,
)

LAYER = {
    "input_layernorm": "norm_attention",
    "self_attn.q_proj": "attention.P_q",
    "self_attn.k_proj": "attention.P_k",
    "self_attn.v_proj": "attention.P_v",
    "self_attn.o_proj": "attention.P_o",
    "post_attention_layernorm": "norm_feed_forward",
    "mlp.gate_proj": "feed_forward.gate",
    "mlp.up_proj": "feed_forward.widen",
    "mlp.down_proj": "feed_forward.narrow",
}


def read_llama(
    fields: Fields, *, tied: bool = False, activation: str = "silu", head_dim: int | None = None
) -> dict[str, Any]:
    """Reads the config of a Llama model; the other families have other defaults."""
    d, h = fields.size("hidden_size"), fields.size("num_attention_heads")
    has_depth = fields.get("head_dim", head_dim) is not None
    k = fields.size("head_dim", head_dim) if has_depth else fields.depth(d, h)
    biases = {name: fields.flag(name) for name in ("attention_bias", "mlp_bias")}
    is_mixed = len(set(biases.values())) > 1
    fields.note("only some of its projections have biases", is_mixed)
    return {
        "task": "language",
        "vocab_size": fields.size("vocab_size"),
        "d": d,
        "f": fields.size("intermediate_size"),
        "h": h,
        "g": fields.size("num_key_value_heads", h),
        "k": k,
        "v": k,
        "decoder_layers": fields.size("num_hidden_layers"),
        "target_positions": fields.size("max_position_embeddings", 2048),
        "positions": "rotary",
        **_rotary(fields),
        "tied": fields.flag("tie_word_embeddings", tied),
        "norm_epsilon": fields.number("rms_norm_eps", 1e-6),
        "activation": fields.activation("hidden_act", activation),
        "gated": True,
        "bias": not is_mixed and biases["mlp_bias"],
        "dropout": 0.0,
        "logit_scale": 1.0,
    }


def _rotary(fields: Fields) -> dict[str, Any]:
    """Reads the options of rotary positions, which older files call rope_scaling."""
    options = fields.inner("rope_parameters") or fields.inner("rope_scaling")
    options = options or Fields(fields.file, {})
    kind = options.get("rope_type", options.get("type", "default"))
    config = {"rotary_base": options.number("rope_theta", _base(fields), above=1.0)}
    part = options.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))
    fields.note("only part of each head has rotary positions", part != 1.0)
    needed = {"default": [], "linear": ["factor"], "llama3": ["factor", *LLAMA3.values()]}
    names = needed.get(kind) if isinstance(kind, str) else None
    if names is None or any(options.get(name) is None for name in names):
        fields.note(f"the scaling of its rotary positions is {shown(kind, 20)}", True)
        return config
    if names:
        config["rotary_factor"] = options.number("factor", 1.0)
    if kind == "llama3":
        config["rotary_original"] = options.size(LLAMA3["rotary_original"])
        config["rotary_low"] = low = options.number(LLAMA3["rotary_low"], 1.0)
        config["rotary_high"] = options.number(LLAMA3["rotary_high"], 4.0, above=low)
    return config


def _base(fields: Fields) -> float:
    return fields.number("rope_theta", 10_000.0, above=1.0)


LLAMA3 = {
    "rotary_original": "original_max_position_embeddings",
    "rotary_low": "low_freq_factor",
    "rotary_high": "high_freq_factor",
}


def write_llama(config: ModelConfig) -> dict[str, Any]:
    """Returns the fields of Llama's config."""
    rotary: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rotary_base}
    if config.rotary_factor != 1.0:
        rotary |= {"rope_type": "linear", "factor": config.rotary_factor}
        if config.rotary_original is not None:
            values = {theirs: getattr(config, ours) for ours, theirs in LLAMA3.items()}
            rotary |= {"rope_type": "llama3", **values}
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d,
        "intermediate_size": config.f,
        "num_hidden_layers": config.decoder_layers,
        "num_attention_heads": config.h,
        "num_key_value_heads": config.g,
        "head_dim": config.k,
        "hidden_act": OUR_ACTIVATIONS.get(config.activation, config.activation),
        "max_position_embeddings": config.target_positions,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tied,
        "rope_parameters": rotary,
        "attention_bias": config.bias,
        "mlp_bias": config.bias,
    }


def read_mistral(fields: Fields) -> dict[str, Any]:
    """Reads a Mistral config; a sliding window on all layers is our local attention."""
    kinds = fields.get("layer_types", [])
    is_mixed = not isinstance(kinds, list) or len({*map(str, kinds)}) > 1
    fields.note("only some of its layers have a sliding window", is_mixed)
    window = None if fields.get("sliding_window") is None else fields.size("sliding_window")
    return read_llama(fields) | {"window": window, "bias": False}


def write_mistral(config: ModelConfig) -> dict[str, Any]:
    """Returns the fields of Mistral's config."""
    return write_llama(config) | {"sliding_window": config.window}


def read_gemma(fields: Fields) -> dict[str, Any]:
    """Reads a Gemma config; early files name a different activation than the models use."""
    both = fields.flag("use_bidirectional_attention")
    fields.note("tokens also attend to those after them", both)
    config = read_llama(fields, tied=True, activation="gelu_new", head_dim=256)
    if config["activation"] == "gelu":
        config["activation"] = "gelu_tanh"
    return config | {"embedding_scale": config["d"] ** 0.5, "norm_offset": 1.0}


def read_gemma2(fields: Fields) -> dict[str, Any]:
    """Reads a Gemma 2 config."""
    fields.note("its layers have four norms, two of which are ignored", True)
    fields.note("some of its layers have a sliding window, which is ignored", True)
    return read_gemma(fields)


def read_qwen(fields: Fields) -> dict[str, Any]:
    """Reads a Qwen 2 or Qwen 3 config."""
    is_second = fields.data["model_type"] == "qwen2"
    fields.note("only some of its projections have biases", is_second)
    fields.note("it has query and key norms", not is_second)
    window = fields.size("sliding_window") if fields.flag("use_sliding_window") else None
    return read_llama(fields) | {"window": window}


def entries(config: ModelConfig) -> Entries:
    """Yields the names of all tensors."""
    copies = (OUTPUT,) if config.tied else ()
    yield Entry("model.embed_tokens.weight", ("tokens.weight",), aliases=copies)
    yield Entry("model.norm", ("decoder.norm",))
    if not config.tied:
        yield Entry(OUTPUT, ("output.weight",))
    for i in range(config.decoder_layers):
        yield from renamed(f"model.layers.{i}", f"decoder.layers.{i}", LAYER)


TOKENS = {"eos": 2, "bos": 1}
_family = partial(
    Family, entries=entries, computed=r"model\.layers\.\d+\..*rotary_emb\.inv_freq", tokens=TOKENS
)
LLAMA = _family("llama", read_llama, architecture="LlamaForCausalLM", write=write_llama)
MISTRAL = _family("mistral", read_mistral, architecture="MistralForCausalLM", write=write_mistral)
GEMMA = _family(
    "gemma",
    read_gemma,
    architecture="GemmaForCausalLM",
    write=write_llama,
    tokens={"eos": 1, "bos": 2, "pad": 0},
)
GEMMA2 = Family("gemma2", read_gemma2)
QWEN2 = Family("qwen2", read_qwen)
QWEN3 = Family("qwen3", read_qwen)
