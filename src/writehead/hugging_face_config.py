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

CONFIG, MAX_BYTES, MAX_SIZE = "config.json", 1 << 20, 1 << 24

# fields of ModelConfig and their names in config.json; the first name that is set counts
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
BIASED = {"bart", "marian", "mbart", "m2m_100", "gpt2", "gpt_bigcode"}  # have layer norms, too
T5 = {"t5", "mt5"}
GATED = {"gemma", "gemma2", "llama", "mistral", "qwen2", "qwen3"}
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
    known = sorted(BIASED | T5 | GATED)
    if kind not in known:
        raise ConfigError(f"{file} has model_type {shown(kind)}; supported: {', '.join(known)}")
    fields = _sizes(file, data)
    d, h = fields["d"], fields["h"]
    fields.setdefault("f", 4 * d)
    fields.setdefault("k", d // h)
    fields.setdefault("g", 1 if kind == "gpt_bigcode" and data.get("multi_query", True) else h)
    if kind in GATED or str(data.get("feed_forward_proj")).startswith("gated"):
        fields["f"] = (3 * fields["f"] + 1) // 2
    if kind == "gemma2" or (kind.startswith("qwen") and not data.get("use_sliding_window")):
        fields.pop("window", None)
    longest = fields.get("target_positions", MAX_SIZE)
    learned = kind in BIASED - {"m2m_100"}
    # ModelConfig needs at least one learned position
    positions = longest + EXTRA_POSITIONS.get(kind, 0) if learned else 1
    encoder, tied = "encoder_layers" in fields, data.get("tie_word_embeddings")
    fields |= {
        "task": "translation" if encoder else "language",
        "v": fields["k"],
        "target_positions": positions,
        "source_positions": positions if encoder else 0,
        "norm": "layer" if kind in BIASED else "rms",
        "bias": kind in BIASED,
        "tied": kind not in UNTIED if tied is None else tied,
    }
    if data.get("share_encoder_decoder_embeddings") is False:
        fields["vocab_size"] = data.get("decoder_vocab_size") or fields["vocab_size"]
        fields["tied"] = False
    return Imported(ModelConfig(**fields), longest, tuple(_approximations(kind, data)))


def _approximations(kind: str, data: dict[str, Any]) -> list[str]:
    """Lists the parts of a model that ModelConfig cannot express."""
    asymmetric = any(
        data.get(f"encoder_{name}") != data.get(f"decoder_{name}")
        for name in ("ffn_dim", "attention_heads")
    )
    unshared = data.get("share_encoder_decoder_embeddings") is False
    biased = kind == "qwen2" or data.get("attention_bias") or data.get("mlp_bias")
    gated = kind in GATED or str(data.get("feed_forward_proj")).startswith("gated")
    notes = {
        "a gated feed-forward layer is counted as an ungated one of 1.5 times its d_ff": gated,
        "the encoder's embedding is counted with the size of the decoder's": unshared,
        "the encoder is counted with the decoder's heads and d_ff": asymmetric,
        "the relative position biases are left out": kind in T5,
        "two of the four norms in each layer are left out": kind == "gemma2",
        "layers with a sliding window are counted as global attention": kind == "gemma2",
        "the query and key norms are left out": kind == "qwen3",
        "the biases of the layers are left out": biased,
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
