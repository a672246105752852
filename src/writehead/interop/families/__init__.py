"""The families of Hugging Face models, and the one reader of their configs."""

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
    "EXPORTED",
    "FAMILIES",
    "Described",
    "Entry",
    "Family",
    "describe",
    "find_config",
    "read_exact",
    "read_values",
]

CONFIG, MAX_BYTES = "config.json", 1 << 20
IMPORTED = (MARIAN, M2M100, GPT2, GPT_BIGCODE, LLAMA, MISTRAL, GEMMA, T5, MT5)
# the first that fits is used
EXPORTED = (GPT_BIGCODE, LLAMA, MISTRAL, GEMMA, GPT2, MARIAN, M2M100, T5, MT5)
EXPLAINED = (BART, MBART, GEMMA2, QWEN2, QWEN3)
FAMILIES = {family.name: family for family in sorted((*IMPORTED, *EXPLAINED), key=lambda f: f.name)}


@dataclass(frozen=True)
class Described:
    """A model of theirs as a ModelConfig, and the approximations that this makes."""

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
    """Reads a config to compute costs: approximates what we cannot express, and leaves out tokens.

    Raises ConfigError if the file is damaged or the family is unknown.
    """
    family, fields = _open(file, read_fields(file), list(FAMILIES))
    config = ModelConfig(**family.read(fields))
    return Described(family, config, tuple(fields.notes))


def read_exact(file: Path, generation: dict[str, Any] | None = None) -> Described:
    """Reads a config to import the model; raises ConfigError unless it is expressed exactly.

    `generation` are the values of generation_config.json, which take precedence.
    """
    return read_values(file, read_fields(file), generation)


def read_values(
    file: Path, data: dict[str, Any], generation: dict[str, Any] | None = None
) -> Described:
    """Does what `read_exact` does for the values of a config; `file` is named in errors."""
    family, fields = _open(file, data, sorted(family.name for family in IMPORTED))
    config = family.read(fields)
    tokens = _tokens({**fields.data, **(generation or {})}, config)
    if fields.notes:
        raise ConfigError(f"{file} describes a model that writehead lacks: {fields.notes[0]}")
    try:
        return Described(family, ModelConfig(**config, **tokens), ())
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def read_fields(file: Path) -> dict[str, Any]:
    """Reads the values of a config file."""
    advice = "use the config.json of a Hugging Face model"
    data: dict[str, Any] = read_json(file, dict, ConfigError, advice, max_bytes=MAX_BYTES)
    return data


def _open(file: Path, data: dict[str, Any], known: list[str]) -> tuple[Family, Fields]:
    kind = data.get("model_type")
    if not isinstance(kind, str) or kind not in known:
        names = ", ".join(known)
        raise ConfigError(f"{file} has model_type {shown(kind)}; supported: {names}")
    return FAMILIES[kind], Fields(file, data)


def _tokens(data: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Returns the special tokens; a translation starts with decoder_start_token_id."""
    eos = data.get("eos_token_id")
    if isinstance(eos, list) and eos:
        eos = eos[0]
    pad = data.get("pad_token_id")
    start = "decoder_start_token_id" if config["task"] == "translation" else "bos_token_id"
    tokens = {"eos": eos, "pad": pad, "bos": data.get(start)}
    given = {name: value for name, value in tokens.items() if value is not None}
    default = given.get("eos", 0)
    first = given.get("pad", default) if config["task"] == "translation" else default
    return {"pad": default, "bos": first, "eos": default} | given
