"""GPT-BigCode, the architecture of StarCoder: GPT-2, multi-head or multi-query."""

from typing import Any

from writehead.config import ModelConfig
from writehead.interop.families.family import Entries, Family, Fields
from writehead.interop.families.gpt2 import gpt_entries, read_gpt
from writehead.interop.families.gpt2 import write as write_gpt


def read(fields: Fields) -> dict[str, Any]:
    """Reads a GPT-BigCode config."""
    config = read_gpt(fields, "gelu_pytorch_tanh")
    return config | {"g": 1 if fields.flag("multi_query", True) else config["h"]}


def write(config: ModelConfig) -> dict[str, Any]:
    """Returns the fields of GPT-BigCode's config."""
    return write_gpt(config) | {"multi_query": config.g == 1}


def entries(config: ModelConfig) -> Entries:
    """Yields the names of all tensors; multi-head models join Q, K and V head by head."""
    heads = None if config.g == 1 else config.h
    return gpt_entries(config, transposed=False, heads=heads)


GPT_BIGCODE = Family(
    "gpt_bigcode",
    read,
    entries,
    "GPTBigCodeForCausalLM",
    write,
    biased=True,
    prefix="transformer.",
    computed=r"transformer\.h\.\d+\.attn\.(masked_)?bias",
    tokens={"eos": 50_256, "bos": 50_256},
)
