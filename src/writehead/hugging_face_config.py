"""Reads a Hugging Face `config.json` as a ModelConfig, to compute the costs of the model.

Parts of a model that ModelConfig cannot express are approximated, and each approximation is listed.
Token ids and dropout do not affect costs, so they keep their defaults.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from writehead.config import ModelConfig
from writehead.errors import ConfigError, shown
from writehead.util.json_files import read_json

CONFIG, MAX_BYTES, MAX_SIZE = "config.json", 1 << 20, 1 << 24

# fields of ModelConfig and their names in config.json; the first name that is set is used
NAMES = {
    "vocab_size": ("vocab_size",),
    "d": ("d_model", "n_embd", "hidden_size"),
    "f": ("decoder_ffn_dim", "d_ff", "n_inner", "intermediate_size"),
    "h": ("decoder_attention_heads", "num_heads", "n_head", "num_attention_heads"),
    "g": ("num_key_value_heads",),
    "k": ("d_kv", "head_dim"),
    "window": ("sliding_window",),
    "encoder_layers": ("encoder_layers", "num_layers"),
    "decoder_layers": ("decoder_layers", "num_decoder_layers", "n_layer", "num_hidden_layers"),
    "target_positions": ("max_position_embeddings", "n_positions"),
}
# fields of each model family; a file may override some of them
BIASED = {"norm": "layer", "norm_epsilon": 1e-5, "bias": True, "activation": "gelu"}
GPT = BIASED | {"activation": "gelu_tanh"}
T5 = {"positions": "sinusoidal"}  # approximates relative position biases
LLAMA = {"positions": "rotary", "gated": True, "activation": "silu", "tied": False}
GEMMA = LLAMA | {"activation": "gelu_tanh", "tied": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "bart": BIASED | {"norm_place": "post", "position_offset": 2, "output_bias": True},
    "gemma": GEMMA,
    "gemma2": GEMMA,
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "llama": LLAMA,
    "m2m_100": BIASED | {"positions": "sinusoidal", "position_offset": 2, "activation": "relu"},
    "marian": BIASED | {"norm_place": "post", "positions": "sinusoidal", "output_bias": True},
    "mbart": BIASED | {"position_offset": 2, "output_bias": True},
    "mistral": LLAMA,
    "mt5": T5 | {"tied": False},
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "t5": T5,
}
SCALED = ("gemma", "gemma2", "m2m_100")  # multiply embeddings by d^0.5 unless disabled by the file
ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "gated-gelu": "gelu_tanh",
    "gated-silu": "silu",
}


@dataclass(frozen=True)
class Imported:
    """A Hugging Face model as a ModelConfig, and the approximations that this makes."""

    config: ModelConfig
    approximations: tuple[str, ...]


def find_config(path: Path) -> Path | None:
    """Returns the Hugging Face config at a path or in a folder, or None if there is none."""
    if path.is_file():
        return path
    file = path / CONFIG
    # our runs have a config.json without model_type
    return file if file.is_file() and "model_type" in _read(file) else None


def import_config(file: Path) -> Imported:
    """Reads a Hugging Face config file; raises ConfigError if the model is not supported."""
    data = _read(file)
    kind = data.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ConfigError(f"{file} has model_type {shown(kind)}; supported: {known}")
    fields = FAMILIES[kind] | _sizes(file, data)
    d, h = fields["d"], fields["h"]
    fields.setdefault("f", 4 * d)
    fields.setdefault("k", d // h)
    fields.setdefault("g", 1 if kind == "gpt_bigcode" and data.get("multi_query", True) else h)
    fields.setdefault("target_positions", MAX_SIZE)
    fields["v"], fields["task"] = fields["k"], "language"
    if "encoder_layers" in fields:
        fields |= {"task": "translation", "source_positions": fields["target_positions"]}
    if kind == "gemma2" or (kind.startswith("qwen") and not data.get("use_sliding_window")):
        fields.pop("window", None)
    if data.get("share_encoder_decoder_embeddings") is False:
        fields["source_vocab_size"] = fields["vocab_size"]
        fields["vocab_size"] = data.get("decoder_vocab_size") or fields["vocab_size"]
    if data.get("tie_word_embeddings") is not None:
        fields["tied"] = data["tie_word_embeddings"]
    fields |= _layers(file, kind, data)
    if data.get("scale_embedding", kind in SCALED):
        fields["embedding_scale"] = d**0.5
    if kind not in ("t5", "mt5") or data.get("scale_decoder_outputs") is False:
        fields["logit_scale"] = 1.0  # T5 scales like our default
    config = ModelConfig(**fields)
    return Imported(config, tuple(_approximations(config, kind, data)))


def _layers(file: Path, kind: str, data: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of norms, rotary positions and activations that the file sets."""
    fields: dict[str, Any] = {}
    for name in ("layer_norm_epsilon", "rms_norm_eps"):
        if data.get(name) is not None:
            fields["norm_epsilon"] = data[name]
    base = _rotary(data).get("rope_theta", data.get("rope_theta"))
    if base is not None:
        fields["rotary_base"] = base
    if kind == "llama" and data.get("attention_bias") and data.get("mlp_bias"):
        fields["bias"] = True
    if kind.startswith("gemma"):
        return fields  # early files name a different activation than the models use
    names = ("activation_function", "hidden_act", "feed_forward_proj")
    activation = next((data[name] for name in names if data.get(name) is not None), None)
    if activation is None:
        return fields
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ConfigError(f"{file} has the activation {shown(activation)}; supported: {known}")
    if activation.startswith("gated-"):
        fields["gated"] = True
    return fields | {"activation": ACTIVATIONS[activation]}


def _rotary(data: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of rotary positions, called rope_scaling in older files."""
    options = data.get("rope_parameters") or data.get("rope_scaling")
    return options if isinstance(options, dict) else {}


def _approximations(config: ModelConfig, kind: str, data: dict[str, Any]) -> list[str]:
    """Lists the parts of a model that ModelConfig cannot express."""
    asymmetric = any(
        data.get(f"encoder_{name}") != data.get(f"decoder_{name}")
        for name in ("ffn_dim", "attention_heads")
    )
    biased = kind == "qwen2" or data.get("attention_bias") or data.get("mlp_bias")
    scaling = _rotary(data).get("rope_type", _rotary(data).get("type", "default"))
    notes = {
        "the norms of the embeddings are left out": kind in ("bart", "mbart"),
        "the encoder is counted with the decoder's heads and d_ff": asymmetric,
        "the relative position biases are left out": kind in ("t5", "mt5"),
        "two of the four norms in each layer are left out": kind == "gemma2",
        "layers with a sliding window are counted as global attention": kind == "gemma2",
        "the query and key norms are left out": kind == "qwen3",
        "the biases of the layers are left out": biased and not config.bias,
        "the scaling of rotary positions is left out": scaling != "default",
    }
    return [note for note, applies in notes.items() if applies]


def _read(file: Path) -> dict[str, Any]:
    advice = "use the config.json of a Hugging Face model"
    data: dict[str, Any] = read_json(file, dict, ConfigError, advice, max_bytes=MAX_BYTES)
    return data


def _sizes(file: Path, data: dict[str, Any]) -> dict[str, Any]:
    """Returns the sizes that the file sets; raises ConfigError unless they are valid."""
    sizes = {}
    for field, names in NAMES.items():
        name = next((name for name in names if data.get(name) is not None), None)
        if name is None:
            continue
        value = data[name]
        if type(value) is not int or not 0 < value <= MAX_SIZE:
            raise ConfigError(
                f"{file} has {name}={shown(value)}, not an integer from 1 to {MAX_SIZE:,}"
            )
        sizes[field] = value
    if "encoder_layers" in sizes:
        sizes.setdefault("decoder_layers", sizes["encoder_layers"])
    for field in ("vocab_size", "d", "h", "decoder_layers"):
        if field not in sizes:
            raise ConfigError(f"{file} lacks {NAMES[field][0]}; use a complete config.json")
    if "k" not in sizes and sizes["d"] % sizes["h"]:
        raise ConfigError(f"{file}: {sizes['h']} heads must divide a width of {sizes['d']}")
    return sizes
