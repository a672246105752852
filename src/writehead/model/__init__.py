"""The models, their KV caches and their run folders."""

from writehead.model.attention import Attention
from writehead.model.cache import DecoderState, KVCache
from writehead.model.runs import Run, load_run, quantize_run, read_config, save_run
from writehead.model.transformer import LanguageModel, Packing, TranslationModel, make_model

__all__ = [
    "Attention",
    "DecoderState",
    "KVCache",
    "LanguageModel",
    "Packing",
    "Run",
    "TranslationModel",
    "load_run",
    "make_model",
    "quantize_run",
    "read_config",
    "save_run",
]
