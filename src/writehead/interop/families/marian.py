"""Marian, the architecture of the OPUS-MT models."""

from typing import Any

from writehead.config import ModelConfig
from writehead.interop.families.bart import layer_entries, read_layers, write_layers
from writehead.interop.families.family import Entries, Entry, Family, Fields


def read(fields: Fields) -> dict[str, Any]:
    """Reads a Marian config; source and target may have separate vocabularies."""
    config = read_layers(fields)
    config |= {"norm_place": "post", "positions": "sinusoidal", "output_bias": True}
    if not fields.flag("share_encoder_decoder_embeddings", True):
        config["source_vocab_size"] = config["vocab_size"]
        config["vocab_size"] = fields.size("decoder_vocab_size", config["vocab_size"])
    return config


def write(config: ModelConfig) -> dict[str, Any]:
    """Returns the fields of Marian's config."""
    fields = write_layers(config)
    if config.source_vocab_size is None:
        return fields | {"share_encoder_decoder_embeddings": True}
    sizes = {"vocab_size": config.source_vocab_size, "decoder_vocab_size": config.vocab_size}
    return fields | sizes | {"share_encoder_decoder_embeddings": False}


def entries(config: ModelConfig) -> Entries:
    """Yields the names of all tensors."""
    yield from layer_entries(config)
    yield Entry("final_logits_bias", ("output_bias",), leading=True, optional=True)


MARIAN = Family(
    "marian",
    read,
    entries,
    "MarianMTModel",
    write,
    "translation",
    biased=True,
    sinusoids=r"model\.(en|de)coder\.embed_positions\.weight",
    tokens={"eos": 0, "pad": 58_100, "bos": 58_100},
)
