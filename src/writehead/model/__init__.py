"""The models, their KV caches and their run directories."""

from writehead.model.attention import Attention, Memory
from writehead.model.cache import KVCache
from writehead.model.language import LanguageModel
from writehead.model.runs import (
    Quantized,
    Run,
    load_run,
    make_model,
    quantize_run,
    read_config,
    save_run,
)
from writehead.model.state import DecoderState
from writehead.model.transformer import Packing
from writehead.model.translation import TranslationModel

__all__ = [
    "Attention",
    "DecoderState",
    "KVCache",
    "LanguageModel",
    "Memory",
    "Packing",
    "Quantized",
    "Run",
    "TranslationModel",
    "load_run",
    "make_model",
    "quantize_run",
    "read_config",
    "save_run",
]
