"""Transformers that decode fast because their keys and values have one head.

An implementation of *Fast Transformer Decoding: One Write-Head is All You Need*. The names below
are the public interface; they are imported when first used, so that the command line can answer
before PyTorch has loaded.
"""

from importlib import import_module

from writehead.util.threads import wait_passively

TYPE_CHECKING = False  # type checkers treat it as true; importing typing is slow
if TYPE_CHECKING:
    from writehead.config import AttentionConfig, DecodeConfig, ModelConfig, matched_d_ff
    from writehead.decoding import (
        Batching,
        Engine,
        Hypothesis,
        Output,
        ScoredText,
        beam_search,
        greedy,
        sample,
    )
    from writehead.errors import WriteheadError
    from writehead.kernels import Visibility, attend
    from writehead.model import (
        DecoderState,
        KVCache,
        LanguageModel,
        Packing,
        Run,
        TranslationModel,
        load_run,
        make_model,
        save_run,
    )
    from writehead.paper.presets import preset, preset_names

__version__ = "0.1.0"

wait_passively()  # has an effect only before PyTorch loads

__all__ = [
    "AttentionConfig",
    "Batching",
    "DecodeConfig",
    "DecoderState",
    "Engine",
    "Hypothesis",
    "KVCache",
    "LanguageModel",
    "ModelConfig",
    "Output",
    "Packing",
    "Run",
    "ScoredText",
    "TranslationModel",
    "Visibility",
    "WriteheadError",
    "__version__",
    "attend",
    "beam_search",
    "greedy",
    "load_run",
    "make_model",
    "matched_d_ff",
    "preset",
    "preset_names",
    "sample",
    "save_run",
]

_ROOMS = {
    "config": ("AttentionConfig", "DecodeConfig", "ModelConfig", "matched_d_ff"),
    "decoding": (
        "Batching",
        "Engine",
        "Hypothesis",
        "Output",
        "ScoredText",
        "beam_search",
        "greedy",
        "sample",
    ),
    "errors": ("WriteheadError",),
    "kernels": ("Visibility", "attend"),
    "model": (
        "DecoderState",
        "KVCache",
        "LanguageModel",
        "Packing",
        "Run",
        "TranslationModel",
        "load_run",
        "make_model",
        "save_run",
    ),
    "paper.presets": ("preset", "preset_names"),
}


def __getattr__(name: str) -> object:
    for room, names in _ROOMS.items():
        if name in names:
            return getattr(import_module(f"writehead.{room}"), name)
    raise AttributeError(f"module 'writehead' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
