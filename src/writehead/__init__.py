"""Transformers that decode fast because their keys and values have one head.

An implementation of *Fast Transformer Decoding: One Write-Head is All You Need*. The public names
are imported on first use, so that the command line can answer before PyTorch is loaded.
"""

from importlib import import_module

from writehead.util.threads import limit_spinning

TYPE_CHECKING = False  # type checkers treat it as true; importing typing is slow
if TYPE_CHECKING:
    from writehead.bulk import BatchTranslator
    from writehead.config import (
        AttentionConfig,
        Batching,
        DecodeConfig,
        ModelConfig,
        matched_d_ff,
    )
    from writehead.engine import (
        Engine,
        Hypothesis,
        Output,
        ScoredText,
        beam_search,
        greedy,
        sample,
    )
    from writehead.errors import WriteheadError
    from writehead.interop.convert import convert
    from writehead.interop.huggingface import export_model, import_model
    from writehead.interop.pretrained import load_run
    from writehead.model import LanguageModel, TranslationModel, make_model
    from writehead.ops.attention import attend
    from writehead.ops.visibility import Visibility
    from writehead.paper.presets import preset, preset_names
    from writehead.runs import Run, save_run

__version__ = "0.1.0"

limit_spinning()  # has an effect only before PyTorch is loaded

__all__ = [
    "AttentionConfig",
    "BatchTranslator",
    "Batching",
    "DecodeConfig",
    "Engine",
    "Hypothesis",
    "LanguageModel",
    "ModelConfig",
    "Output",
    "Run",
    "ScoredText",
    "TranslationModel",
    "Visibility",
    "WriteheadError",
    "__version__",
    "attend",
    "beam_search",
    "convert",
    "export_model",
    "greedy",
    "import_model",
    "load_run",
    "make_model",
    "matched_d_ff",
    "preset",
    "preset_names",
    "sample",
    "save_run",
]

_MODULES = (
    *("config", "errors", "paper.presets", "ops.attention", "model", "engine"),
    *("interop.pretrained", "interop.huggingface", "interop.convert", "runs", "bulk"),
)


def __getattr__(name: str) -> object:
    if name in __all__:
        for module in map(import_module, (f"writehead.{path}" for path in _MODULES)):
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module 'writehead' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
