"""M2M-100 and NLLB."""

from typing import Any

from writehead.config import ModelConfig
from writehead.interop.families.bart import layer_entries, read_layers, write_layers
from writehead.interop.families.family import Entries, Entry, Family, Fields


def read(fields: Fields) -> dict[str, Any]:
    """Reads an M2M-100 config; positions are counted from the one after the padding token's id."""
    config = read_layers(fields, activation="relu", scaled=True)
    offset = fields.token("pad_token_id", fields.get("pad_token_id", 1), config["vocab_size"])
    config |= {"positions": "sinusoidal", "sinusoid": "d-2"}
    return config | {"position_offset": offset + 1}


def entries(config: ModelConfig) -> Entries:
    """Yields the names of all tensors."""
    yield from layer_entries(config)
    for side in ("encoder", "decoder"):
        yield Entry(f"model.{side}.layer_norm", (f"{side}.norm",))


M2M100 = Family(
    "m2m_100",
    read,
    entries,
    "M2M100ForConditionalGeneration",
    write_layers,
    "translation",
    biased=True,
    sinusoids=r"model\.(en|de)coder\.embed_positions\.weights",
    tokens={"eos": 2, "pad": 1, "bos": 2},
)
