"""Reads a Hugging Face `config.json` as a ModelConfig, to compute the costs of the model.

`ModelConfig` has one kind of layer, so some parts of other models are approximated; each
approximation is listed. A gated feed-forward layer has three matrices of width f, which have as
many parameters and operations as two of width 1.5 f.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from writehead.config import ModelConfig
from writehead.errors import ConfigError, shown
from writehead.util.json_files import read_json

CONFIG = "config.json"
MAX_BYTES = 1 << 20
MAX_SIZE = 1 << 24

# fields of ModelConfig by their names in config.json; a field with ? is optional
BART = {
    "vocab_size": "vocab_size",
    "d": "d_model",
    "f": "decoder_ffn_dim",
    "h": "decoder_attention_heads",
    "encoder_layers": "encoder_layers",
    "decoder_layers": "decoder_layers",
    "target_positions": "max_position_embeddings",
}
T5 = {
    "vocab_size": "vocab_size",
    "d": "d_model",
    "f": "d_ff",
    "h": "num_heads",
    "k": "d_kv",
    "encoder_layers": "num_layers",
    "decoder_layers": "num_decoder_layers?",
}
GPT = {
    "vocab_size": "vocab_size",
    "d": "n_embd",
    "f": "n_inner?",
    "h": "n_head",
    "decoder_layers": "n_layer",
    "target_positions": "n_positions",
}
LLAMA = {
    "vocab_size": "vocab_size",
    "d": "hidden_size",
    "f": "intermediate_size",
    "h": "num_attention_heads",
    "g": "num_key_value_heads?",
    "k": "head_dim?",
    "window": "sliding_window?",
    "decoder_layers": "num_hidden_layers",
    "target_positions": "max_position_embeddings",
}
MODEL_TYPES = {
    **dict.fromkeys(("bart", "marian", "mbart", "m2m_100"), BART),
    **dict.fromkeys(("t5", "mt5"), T5),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), GPT),
    **dict.fromkeys(("gemma", "gemma2", "llama", "mistral", "qwen2", "qwen3"), LLAMA),
}
UNTIED = {"mt5", "llama", "mistral", "qwen2", "qwen3"}  # unless tie_word_embeddings is set
EXTRA_POSITIONS = {"bart": 2, "mbart": 2}


@dataclass(frozen=True)
class Imported:
    """A Hugging Face model as a ModelConfig; `longest` is its maximum number of tokens."""

    config: ModelConfig
    longest: int
    approximations: tuple[str, ...]


def find_config(path: Path) -> Path | None:
    """Returns the Hugging Face config at a path or in a folder, or None if there is none."""
    if path.is_file():
        return path
    file = path / CONFIG
    return file if file.is_file() and "model_type" in _read(file) else None  # else one of our runs


def import_config(file: Path) -> Imported:
    """Reads a Hugging Face config file; raises ConfigError if the model is not supported."""
    data = _read(file)
    kind = data.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        known = ", ".join(sorted(MODEL_TYPES))
        raise ConfigError(f"{file} has model_type {shown(kind)}; supported are {known}")
    names = MODEL_TYPES[kind]
    sizes = {ours: _size(file, data, name) for ours, name in names.items()}
    fields: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
    d, h = fields["d"], fields["h"]
    if "k" not in fields and d % h:
        raise ConfigError(f"{file} has an uneven split: {h} heads must divide a width of {d}")
    fields.setdefault("k", d // h)
    fields.setdefault("f", 4 * d)
    fields.setdefault("g", 1 if kind == "gpt_bigcode" and data.get("multi_query", True) else h)
    fields.setdefault("decoder_layers", fields.get("encoder_layers"))
    if names is LLAMA or str(data.get("feed_forward_proj")).startswith("gated"):
        fields["f"] = (3 * fields["f"] + 1) // 2
    if kind == "gemma2" or (kind.startswith("qwen") and not data.get("use_sliding_window")):
        fields.pop("window", None)
    longest = fields.get("target_positions", MAX_SIZE)
    learned = names in (BART, GPT) and kind != "m2m_100"
    # ModelConfig needs at least one learned position
    positions = longest + EXTRA_POSITIONS.get(kind, 0) if learned else 1
    encoder = "encoder_layers" in fields
    tied = data.get("tie_word_embeddings")
    fields |= {
        "task": "translation" if encoder else "language",
        "v": fields["k"],
        "target_positions": positions,
        "source_positions": positions if encoder else 0,
        "norm": "layer" if names in (BART, GPT) else "rms",
        "bias": names in (BART, GPT),
        "tied": kind not in UNTIED if tied is None else tied,
    }
    if data.get("share_encoder_decoder_embeddings") is False:
        fields["vocab_size"] = data.get("decoder_vocab_size") or fields["vocab_size"]
        fields["tied"] = False
    return Imported(ModelConfig(**fields), longest, tuple(_approximations(kind, data)))


def _approximations(kind: str, data: dict[str, Any]) -> list[str]:
    """Lists the parts of a model that ModelConfig cannot express."""
    sizes = [
        [data.get(f"{side}_{name}") for name in ("ffn_dim", "attention_heads")]
        for side in ("encoder", "decoder")
    ]
    biased = kind == "qwen2" or data.get("attention_bias")
    notes = {
        "the encoder's embedding is counted with the size of the decoder's": (
            data.get("share_encoder_decoder_embeddings") is False
        ),
        "the encoder is counted with the decoder's heads and feed-forward width": (
            sizes[0] != sizes[1]
        ),
        "the relative position biases are left out": kind in ("t5", "mt5"),
        "two of the four norms in each layer are left out": kind == "gemma2",
        "layers with a sliding window are counted as global attention": (
            kind == "gemma2" and data.get("sliding_window")
        ),
        "the query and key norms are left out": kind == "qwen3",
        "the biases of the attention layers are left out": biased,
        "the biases of the feed-forward layers are left out": data.get("mlp_bias"),
    }
    return [note for note, applies in notes.items() if applies]


def _read(file: Path) -> dict[str, Any]:
    advice = "use the config.json of a Hugging Face model"
    data: dict[str, Any] = read_json(file, dict, ConfigError, advice, max_bytes=MAX_BYTES)
    return data


def _size(file: Path, data: dict[str, Any], name: str) -> int | None:
    """Returns a positive integer; an optional one may be absent or null."""
    value = data.get(name.removesuffix("?"))
    if value is None and name.endswith("?"):
        return None
    if value is None:
        raise ConfigError(f"{file} lacks {name}; use a complete config.json")
    if type(value) is not int or not 0 < value <= MAX_SIZE:
        raise ConfigError(
            f"{file} has {name}={shown(value)}, not an integer from 1 to {MAX_SIZE:,}"
        )
    return value
