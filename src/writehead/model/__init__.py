"""The models and their KV caches."""

from writehead.model.attention import Attention
from writehead.model.cache import DecoderState, KVCache
from writehead.model.transformer import LanguageModel, Packing, TranslationModel, make_model

__all__ = [
    "Attention",
    "DecoderState",
    "KVCache",
    "LanguageModel",
    "Packing",
    "TranslationModel",
    "make_model",
]
