"""The families of Hugging Face models, and the one reader of their configs."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from writehead.config import ModelConfig
from writehead.errors import ConfigError, shown
from writehead.interop.families.bart import BART, MBART
from writehead.interop.families.family import Entry, Family, Fields
from writehead.interop.families.gpt2 import GPT2
from writehead.interop.families.gpt_bigcode import GPT_BIGCODE
from writehead.interop.families.llama import GEMMA, GEMMA2, LLAMA, MISTRAL, QWEN2, QWEN3
from writehead.interop.families.m2m100 import M2M100
from writehead.interop.families.marian import MARIAN
from writehead.interop.families.t5 import MT5, T5
from writehead.util.json_files import read_json

__all__ = [
    "FAMILIES",
    "FORMATS",
    "IMPORTED",
    "TO_CTRANSLATE2",
    "TO_HUGGING_FACE",
    "Described",
    "Entry",
    "Family",
    "Fields",
    "describe",
    "find_config",
    "read_exact",
    "read_fields",
]

FORMATS = TO_HUGGING_FACE, TO_CTRANSLATE2 = "huggingface", "ctranslate2"  # of exports
CONFIG, MAX_BYTES = "config.json", 1 << 20
# our own models are exported to the first that fits
IMPORTED = (GPT_BIGCODE, LLAMA, MISTRAL, GEMMA, GPT2, MARIAN, M2M100, T5, MT5)
EXPLAINED = (BART, MBART, GEMMA2, QWEN2, QWEN3)
FAMILIES = {family.name: family for family in sorted((*IMPORTED, *EXPLAINED), key=lambda f: f.name)}


@dataclass(frozen=True)
class Described:
    """A Hugging Face model as a ModelConfig, and the approximations that this makes."""

    family: Family
    config: ModelConfig
    approximations: tuple[str, ...]


def find_config(path: Path) -> Path | None:
    """Returns the Hugging Face config at a path or in a folder, or None if there is none."""
    if path.is_file():
        return path
    file = path / CONFIG
    # our runs have a config.json without model_type
    return file if file.is_file() and "model_type" in read_fields(file) else None


def describe(file: Path) -> Described:
    """Reads a config to compute costs: approximates what we cannot express, and ignores tokens.

    Raises ConfigError if the file is damaged or the family is unknown.
    """
    family, fields = _open(Fields(file, read_fields(file)), FAMILIES)
    return Described(family, _config(file, family.read(fields)), tuple(fields.notes))


def read_exact(given: Fields, generation: Fields | None = None) -> Described:
    """Reads a config to import the model; raises ConfigError if we cannot express it exactly.

    `generation` are the values of generation_config.json, which take precedence.
    """
    family, fields = _open(given, sorted(family.name for family in IMPORTED))
    config = family.read(fields)
    if fields.notes:
        raise ConfigError(f"{fields.file} cannot be imported: {fields.notes[0]}")
    tokens = _tokens(family, fields, generation or Fields(fields.file, {}), config)
    return Described(family, _config(fields.file, config | tokens), ())


def read_fields(file: Path) -> dict[str, Any]:
    """Reads the values of a config file."""
    advice = "download or copy it again"
    data: dict[str, Any] = read_json(file, dict, ConfigError, advice, max_bytes=MAX_BYTES)
    return data


def _open(fields: Fields, known: Iterable[str]) -> tuple[Family, Fields]:
    kind = fields.data.get("model_type")
    if not isinstance(kind, str) or kind not in known:
        names = ", ".join(known)
        raise ConfigError(f"{fields.file} has model_type {shown(kind)}; supported: {names}")
    quantized = fields.get("quantization_config") is not None
    fields.note("its weights are quantized (quantization_config)", quantized)
    return FAMILIES[kind], fields


def _config(file: Path, values: dict[str, Any]) -> ModelConfig:
    try:
        return ModelConfig(**values)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def _tokens(
    family: Family, fields: Fields, generation: Fields, config: dict[str, Any]
) -> dict[str, Any]:
    """Returns the special tokens; a translation starts with decoder_start_token_id.

    Tokens that no file names default to those of the family, if the model has them. Of several end
    tokens, the first is `eos`; the tokenizer has all of them.
    """
    size: int = config["vocab_size"]
    start = "decoder_start_token_id" if config["task"] == "translation" else "bos_token_id"
    names = {"eos": "eos_token_id", "pad": "pad_token_id", "bos": start}
    tokens: dict[str, Any] = {}
    for ours, name in names.items():
        source = fields if generation.get(name) is None else generation
        value = source.get(name)
        several = value if ours == "eos" and isinstance(value, list) else [value]
        found = [source.token(name, one, size) for one in several if one is not None and one != -1]
        default = family.tokens.get(ours)
        if not found and default is not None and default < size:
            found = [default]
        if found:
            tokens[ours] = found[0]
    if "eos" not in tokens:
        raise ConfigError(f"{fields.file} lacks eos_token_id; add it")
    tokens.setdefault("pad", tokens["eos"])
    tokens.setdefault("bos", tokens["pad" if config["task"] == "translation" else "eos"])
    return tokens
