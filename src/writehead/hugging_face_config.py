"""Reads the sizes in a Hugging Face `config.json`, to count the costs of the model.

`ModelConfig` has one kind of layer, so some parts of other models are approximated; each
approximation is listed. Gated feed-forward layers need none: their three matrices of width f have
as many parameters and operations as two matrices of width 1.5 f.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from writehead import cost
from writehead.config import ModelConfig
from writehead.errors import ConfigError, shown
from writehead.util.json_files import read_json

CONFIG = "config.json"
MAX_BYTES = 1 << 20
MAX_SIZE = 1 << 24
NO_POSITIONS = 1  # for a model without learned positions: ModelConfig requires at least one


@dataclass(frozen=True)
class Imported:
    """A Hugging Face model as a ModelConfig, with its approximations.

    `parameters` is the model's exact total, from which `cost.parameters(config)` may differ
    slightly. `longest` is the maximum number of tokens in a text.
    """

    config: ModelConfig
    parameters: int
    longest: int
    approximations: tuple[str, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """The approximations, and the exact number of parameters if the count differs."""
        counted = sum(cost.parameters(self.config).values())
        if counted == self.parameters:
            return self.approximations
        total = f"{counted:,} parameters are counted; the model has {self.parameters:,}"
        return (*self.approximations, total)


def find_config(path: Path) -> Path | None:
    """Returns the Hugging Face config at a path or in a folder, or None if there is none."""
    if path.is_file():
        return path
    file = path / CONFIG
    return file if file.is_file() and "model_type" in _read(file) else None  # not one of our runs


def import_config(file: Path) -> Imported:
    """Reads a Hugging Face config file; raises ConfigError if the model is not supported."""
    fields = _Fields(file, _read(file))
    kind = fields.values.get("model_type")
    if not isinstance(kind, str) or kind not in READERS:
        raise ConfigError(
            f"{file} has model_type {shown(kind)}; known are {', '.join(sorted(READERS))}"
        )
    return READERS[kind](fields, kind)


def _read(file: Path) -> dict[str, Any]:
    advice = "give the config.json of a model"
    values: dict[str, Any] = read_json(file, dict, ConfigError, advice, max_bytes=MAX_BYTES)
    return values


@dataclass(frozen=True)
class _Fields:
    """The values of a config file, checked when they are read; null counts as absent."""

    file: Path
    values: dict[str, Any]

    @overload
    def size(self, name: str, default: int | None = None) -> int: ...
    @overload
    def size(self, name: str, default: str) -> int | None: ...
    def size(self, name: str, default: int | str | None = None) -> int | None:
        """Returns a positive integer; without a default it is required; "none" gives None."""
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise ConfigError(f"{self.file} lacks {name}; use a complete config.json")
            return None if isinstance(default, str) else default
        if type(value) is not int or not 0 < value <= MAX_SIZE:
            raise ConfigError(
                f"{self.file} has {name}={shown(value)}, not an integer from 1 to {MAX_SIZE:,}"
            )
        return value

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(f"{self.file} has {name}={shown(value)}, not true or false")
        return value

    def head_depth(self, d: int, h: int) -> int:
        """Returns the depth of each head if d is split evenly among them."""
        if d % h:
            raise ConfigError(
                f"{self.file} has an uneven split: {h} heads must divide a model width of {d}"
            )
        return d // h


def _bart(fields: _Fields, kind: str) -> Imported:
    """BART, mBART, Marian, M2M-100 and NLLB."""
    d, h = fields.size("d_model"), fields.size("decoder_attention_heads")
    f, longest = fields.size("decoder_ffn_dim"), fields.size("max_position_embeddings")
    encoder = fields.size("encoder_layers"), fields.size("encoder_ffn_dim")
    vocab_size, notes, difference = fields.size("vocab_size"), [], 0
    tied = fields.flag("tie_word_embeddings", True)
    if not fields.flag("share_encoder_decoder_embeddings", True):
        own = fields.size("decoder_vocab_size", vocab_size)
        difference += (vocab_size - own) * d
        vocab_size, tied = own, False
        notes.append("the encoder's embedding is counted with the size of the decoder's")
    # BART and mBART have two extra rows for padding; M2M-100 computes its positions
    positions = {"marian": longest, "m2m_100": NO_POSITIONS}.get(kind, longest + 2)
    if kind == "m2m_100":
        difference -= 2 * NO_POSITIONS * d
    # the count includes two norms outside the layers; Marian has none, and mBART has four
    difference += {"marian": -2, "mbart": 2}.get(kind, 0) * 2 * d
    if (encoder[1], fields.size("encoder_attention_heads")) != (f, h):
        difference += encoder[0] * (encoder[1] - f) * (2 * d + 1)
        notes.append("the encoder is counted with the decoder's heads and feed-forward width")
    config = ModelConfig(
        task="translation",
        vocab_size=vocab_size,
        d=d,
        f=f,
        h=h,
        g=h,
        k=fields.head_depth(d, h),
        v=d // h,
        encoder_layers=encoder[0],
        decoder_layers=fields.size("decoder_layers"),
        source_positions=positions,
        target_positions=positions,
        tied=tied,
        norm="layer",
        bias=True,
    )
    return _imported(config, longest, difference, notes)


def _t5(fields: _Fields, kind: str) -> Imported:
    """T5 and mT5."""
    d, h, k = fields.size("d_model"), fields.size("num_heads"), fields.size("d_kv")
    f, layers = fields.size("d_ff"), fields.size("num_layers")
    gated = str(fields.values.get("feed_forward_proj", "relu")).startswith("gated")
    config = ModelConfig(
        task="translation",
        vocab_size=fields.size("vocab_size"),
        d=d,
        f=_two_matrices(f) if gated else f,
        h=h,
        g=h,
        k=k,
        v=k,
        encoder_layers=layers,
        decoder_layers=fields.size("num_decoder_layers", layers),
        source_positions=NO_POSITIONS,
        target_positions=NO_POSITIONS,
        tied=fields.flag("tie_word_embeddings", kind == "t5"),
    )
    difference = 2 * (fields.size("relative_attention_num_buckets", 32) * h - NO_POSITIONS * d)
    if gated:
        difference += config.feed_forward_layers * (3 * f - 2 * config.f) * d
    notes = ["the relative position biases are left out"]
    return _imported(config, MAX_SIZE, difference, notes)


def _gpt(fields: _Fields, kind: str) -> Imported:
    """GPT-2 and GPT-BigCode."""
    d, h = fields.size("n_embd"), fields.size("n_head")
    longest, k = fields.size("n_positions"), fields.head_depth(d, h)
    shared = kind == "gpt_bigcode" and fields.flag("multi_query", True)
    config = ModelConfig(
        task="language",
        vocab_size=fields.size("vocab_size"),
        d=d,
        f=fields.size("n_inner", 4 * d),
        h=h,
        g=1 if shared else h,
        k=k,
        v=k,
        decoder_layers=fields.size("n_layer"),
        target_positions=longest,
        tied=fields.flag("tie_word_embeddings", True),
        norm="layer",
        bias=True,
    )
    return _imported(config, longest, 0, [])


def _llama(fields: _Fields, kind: str) -> Imported:
    """Llama, Mistral, Gemma and Qwen: rotary positions, gated layers, RMS norms."""
    d, h = fields.size("hidden_size"), fields.size("num_attention_heads")
    f, layers = fields.size("intermediate_size"), fields.size("num_hidden_layers")
    g = fields.size("num_key_value_heads", h)
    k = fields.size("head_dim", "none") or fields.head_depth(d, h)
    local = fields.size("sliding_window", "none")
    if kind.startswith("qwen") and not fields.flag("use_sliding_window", False):
        local = None
    notes, difference = [], -NO_POSITIONS * d
    if kind == "gemma2":
        difference += 2 * layers * d
        notes.append("two of the four norms in each layer are left out")
        if local is not None:
            notes.append("layers with a sliding window are counted as global attention")
            local = None
    if kind == "qwen3":
        difference += 2 * layers * k
        notes.append("the query and key norms are left out")
    if kind == "qwen2" or fields.flag("attention_bias", False):
        difference += layers * ((h + 2 * g) * k + (0 if kind == "qwen2" else d))
        notes.append("the biases of the attention layers are left out")
    if fields.flag("mlp_bias", False):
        difference += layers * (2 * f + d)
        notes.append("the biases of the feed-forward layers are left out")
    config = ModelConfig(
        task="language",
        vocab_size=fields.size("vocab_size"),
        d=d,
        f=_two_matrices(f),
        h=h,
        g=g,
        k=k,
        v=k,
        window=local,
        decoder_layers=layers,
        target_positions=NO_POSITIONS,
        tied=fields.flag("tie_word_embeddings", kind.startswith("gemma")),
    )
    difference += layers * (3 * f - 2 * config.f) * d
    return _imported(config, fields.size("max_position_embeddings"), difference, notes)


def _two_matrices(f: int) -> int:
    """Returns the width at which two matrices are as large as three of width f."""
    return (3 * f + 1) // 2


def _imported(config: ModelConfig, longest: int, difference: int, notes: list[str]) -> Imported:
    """Makes the result; `difference` is the model's parameters minus those that are counted."""
    total = sum(cost.parameters(config).values()) + difference
    return Imported(config, total, longest, tuple(notes))


READERS: dict[str, Callable[[_Fields, str], Imported]] = {
    **dict.fromkeys(("bart", "marian", "mbart", "m2m_100"), _bart),
    **dict.fromkeys(("t5", "mt5"), _t5),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), _gpt),
    **dict.fromkeys(("gemma", "gemma2", "llama", "mistral", "qwen2", "qwen3"), _llama),
}
