"""Decodes with other libraries for comparison: Hugging Face and CTranslate2, with our sizes.

If a peer is not installed or fails, the result contains the reason.
"""

import importlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from writehead.config import ModelConfig
from writehead.cost import Setting
from writehead.errors import BackendError, WriteheadError
from writehead.interop.ctranslate2 import Vocabulary, export_ctranslate2
from writehead.interop.huggingface import export_model
from writehead.interop.pretrained import is_pretrained, load_run
from writehead.model import LanguageModel, TranslationModel, make_model
from writehead.util.extras import requires

Model = TranslationModel | LanguageModel
Generate = Callable[[int], None]  # translates a batch into that many tokens per sentence
NUM_SPECIAL_TOKENS = 3
# errors that another library may raise, such as out of memory or an API that its version lacks
PEER_ERRORS = (
    *(WriteheadError, ImportError, RuntimeError, ValueError, TypeError, LookupError),
    *(AttributeError, AssertionError, OSError, MemoryError),
)


def attempt(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns the result of a peer's `measure`, or the reason for its failure as "absent"."""
    try:
        if not torch.cuda.is_available():
            return measure()
        with torch.cuda.stream(torch.cuda.current_stream()):  # restored after a failed capture
            return measure()
    except PEER_ERRORS as error:
        text = " ".join(str(error).split())
        name = "" if isinstance(error, WriteheadError) else f"{type(error).__name__}: "
        return {"absent": f"{name}{text}"[:300]}


@dataclass(frozen=True)
class Subject:
    """The model to time: one with random weights or, if `run` is given, a run of that config."""

    config: ModelConfig
    run: Path | None = None  # or a Hugging Face model

    def load(self, device: torch.device, dtype: torch.dtype) -> Model:
        """Returns the model in evaluation mode; random weights are the same each time."""
        if self.run is not None:
            return load_run(self.run, device=device, dtype=dtype).model
        torch.manual_seed(0)
        with torch.device(device):
            model = make_model(self.config)
        return model.to(device=device, dtype=dtype).eval()


def random_tokens(model: Any, setting: Setting) -> Tensor:
    """Returns random sources [b, m], or prompts [b, 1] for a language model."""
    shape = (setting.batch, setting.source or 1)
    vocab_size = getattr(model.config, "source_vocab_size", None) or model.config.vocab_size
    return torch.randint(NUM_SPECIAL_TOKENS, vocab_size, shape, device=model.device)


def hugging_face_generate(
    subject: Subject, setting: Setting, device: torch.device, dtype: torch.dtype
) -> Generate:
    """Returns a call of Hugging Face's `generate`, for the run or for Marian with our sizes."""
    with requires("interop"):
        library: Any = importlib.import_module("transformers")
    library.logging.set_verbosity_error()
    config = subject.config
    special = {
        "pad_token_id": config.pad,
        "eos_token_id": config.eos,
        "decoder_start_token_id": config.bos,
    }
    if subject.run is None:
        model = _marian(library, config, setting, special, device)
    else:
        model = _their_model(library, subject.run)
    model = model.to(device=device, dtype=dtype).eval()
    source = random_tokens(model, setting)
    mask = torch.ones_like(source)

    @torch.no_grad()
    def run(n: int) -> None:
        lengths = {"min_new_tokens": n, "max_new_tokens": n}
        options = library.GenerationConfig(num_beams=setting.beam, **lengths, **special)
        tokens = model.generate(source, attention_mask=mask, generation_config=options)
        assert tokens.shape[1] == n + 1, "the output begins with the start token"

    return run


def _their_model(library: Any, run: Path) -> Any:
    """Loads a Hugging Face model, or a run after exporting it to one."""
    with TemporaryDirectory(prefix="writehead-huggingface-") as folder:
        if not is_pretrained(run):
            export_model(run, path := Path(folder) / "model")
            run = path
        library.utils.logging.disable_progress_bar()
        return library.AutoModelForSeq2SeqLM.from_pretrained(run)


def _marian(
    library: Any,
    config: ModelConfig,
    setting: Setting,
    special: Mapping[str, int],
    device: torch.device,
) -> Any:
    """Returns a Marian model of our sizes, with random weights."""
    if config.kind != "multi-head" or config.window is not None:
        raise BackendError("Marian supports only multi-head attention without a window")
    if (config.h * config.k, config.k) != (config.d, config.v):
        raise BackendError("Marian needs h × k = d and k = v")
    sizes = library.MarianConfig(
        vocab_size=config.vocab_size,
        d_model=config.d,
        encoder_layers=config.encoder_layers,
        decoder_layers=config.decoder_layers,
        encoder_attention_heads=config.h,
        decoder_attention_heads=config.h,
        encoder_ffn_dim=config.f,
        decoder_ffn_dim=config.f,
        max_position_embeddings=max(setting.source, setting.target) + 1,
        activation_function="relu",
        forced_eos_token_id=None,
        **special,
    )
    with torch.device(device):
        return library.MarianMTModel(sizes)


def ctranslate2_generate(
    subject: Subject,
    setting: Setting,
    device: torch.device,
    dtype: torch.dtype,
    compute_type: str | None = None,
) -> Generate:
    """Returns a call of CTranslate2's `translate_batch` with our weights, in one batch.

    compute_type: how CTranslate2 computes, such as "int8"; by default in `dtype`.
    """
    name = compute_type or str(dtype).removeprefix("torch.")
    translator = load_translator(_exported(subject, device, dtype).name, device, name)
    length = max(1, setting.source - 1)  # CTranslate2 appends eos
    vocab_size = subject.config.source_vocab_size or subject.config.vocab_size
    tokens = [f"t{i}" for i in range(NUM_SPECIAL_TOKENS, vocab_size)]
    sources = [random.choices(tokens, k=length) for _ in range(setting.batch)]

    def run(n: int) -> None:
        lengths = {"min_decoding_length": n, "max_decoding_length": n, "max_input_length": 0}
        results = translator.translate_batch(sources, beam_size=setting.beam, **lengths)
        assert all(len(result.hypotheses[0]) == n for result in results)

    return run


def load_translator(folder: str, device: torch.device, compute_type: str) -> Any:
    """Loads `folder`/model as a CTranslate2 translator, with as many threads as PyTorch."""
    with requires("interop"):
        library: Any = importlib.import_module("ctranslate2")
    return library.Translator(
        f"{folder}/model",
        device.type,
        device_index=device.index or 0,
        compute_type=compute_type,
        intra_threads=torch.get_num_threads(),
    )


@lru_cache(maxsize=4)
def _exported(
    subject: Subject, device: torch.device, dtype: torch.dtype
) -> TemporaryDirectory[str]:
    """Exports a model to `model` in a folder; returns the folder."""
    folder = TemporaryDirectory(prefix="writehead-ctranslate2-")
    model, name = subject.load(device, dtype), str(dtype).removeprefix("torch.")
    assert isinstance(model, TranslationModel)
    target, separate = subject.config.vocab_size, subject.config.source_vocab_size
    tokens = [f"t{i}" for i in range(max(target, separate or 0))]
    source = None if separate is None else tokens[:separate]
    vocabulary = Vocabulary(tokens[:target], source)
    export_ctranslate2(model, vocabulary, Path(folder.name) / "model", quantization=name)
    return folder
