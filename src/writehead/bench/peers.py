"""Other implementations of the same work: plain PyTorch, Hugging Face, CTranslate2.

Each has random weights and our sizes. A peer that is not installed or fails leaves its reason in
the result, and the benchmark goes on without it.
"""

import importlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from writehead.bench.timing import Call, capture
from writehead.config import DecodeConfig, ModelConfig
from writehead.cost import Setting
from writehead.decoding.beam import beam_search
from writehead.decoding.search import Hypothesis
from writehead.errors import BackendError, WriteheadError
from writehead.interop.ctranslate2 import export_ctranslate2
from writehead.kernels import Visibility
from writehead.model import DecoderState, KVCache, LanguageModel, TranslationModel, make_model
from writehead.util.extras import requires

Model = TranslationModel | LanguageModel
Step = Callable[[Tensor, DecoderState], Tensor]
Generate = Callable[[int], None]  # translates a batch into that many tokens per sentence
NUM_SPECIAL_TOKENS = 3
# whatever another library may raise, such as out of memory or a name that its version lacks
PEER_ERRORS = (
    *(WriteheadError, ImportError, RuntimeError, ValueError, TypeError, LookupError),
    *(AttributeError, AssertionError, OSError, MemoryError),
)


@dataclass(frozen=True)
class Decode:
    """A decoding in two parts, each of which can be repeated: the encoder, and all the steps."""

    start: Call
    run: Call


def attempt(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a peer's `measure` returns, or the reason of its failure as "absent"."""
    try:
        if not torch.cuda.is_available():
            return measure()
        with torch.cuda.stream(torch.cuda.current_stream()):  # restored after a failed capture
            return measure()
    except PEER_ERRORS as error:
        lines = str(error).strip().splitlines() or [""]
        name = "" if isinstance(error, WriteheadError) else f"{type(error).__name__}: "
        return {"absent": f"{name}{lines[0]}"[:300]}


def build(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Model:
    """A model with random weights, the same each time, ready to decode."""
    torch.manual_seed(0)
    with torch.device(device):
        model = make_model(config)
    return model.to(device=device, dtype=dtype).eval()


def random_source(model: Model, setting: Setting) -> Tensor:
    """[b, m], random tokens."""
    shape = (setting.batch, setting.source)
    return torch.randint(NUM_SPECIAL_TOKENS, model.config.vocab_size, shape, device=model.device)


def search_config(setting: Setting) -> DecodeConfig:
    """A search that takes `target` steps whatever the model predicts."""
    return DecodeConfig(beam=setting.beam, min_length=setting.target, max_length=setting.target)


def graph_decode(model: Model, setting: Setting, *, compiled: bool = False) -> Decode:
    """`model.step` over a padded cache in one CUDA graph, optionally under `torch.compile`.

    Greedy search is part of the graph; beam search runs around it.
    """
    assert isinstance(model, TranslationModel)
    source = random_source(model, setting)
    step = _compile(model) if compiled else model.step
    state = model.start(source, setting.target, beam=setting.beam, padded=True)
    if setting.beam == 1:
        run = captured_greedy(step, state, 0, setting.target)
    else:
        run = _captured_beams(step, state, search_config(setting), model.config.eos)

    def start() -> None:
        model.decoder.memorize(model.encode(source), Visibility())

    return Decode(torch.no_grad()(start), run)


def _compile(model: Model) -> Step:
    """`model.step`, compiled.

    The reset keeps the compiler below its limit of recompilations, past which it stops compiling.
    """
    torch.compiler.reset()
    step: Step = torch.compile(model.step, fullgraph=True)
    return step


def captured_greedy(step: Step, state: DecoderState, begin: int, steps: int) -> Call:
    """`steps` replays of one captured greedy step, the first at position `begin`."""
    fed = state.first.clone()
    graph = _capture_step(lambda: fed.copy_(step(fed, state).argmax(dim=1)), state.cache)

    def run() -> Tensor:
        state.cache.lengths.fill_(begin)
        fed.copy_(state.first)
        for _ in range(steps):
            graph.replay()
        return fed

    return run


def _captured_beams(step: Step, state: DecoderState, config: DecodeConfig, eos: int) -> Call:
    fed, logits = state.first.clone(), torch.empty(0)

    def take() -> None:
        nonlocal logits
        logits = step(fed, state)

    graph = _capture_step(take, state.cache)

    def replay(tokens: Tensor, state: DecoderState) -> Tensor:
        fed.copy_(tokens)
        graph.replay()
        return logits

    def run() -> list[list[Hypothesis]]:
        state.cache.clear()
        return beam_search(replay, state, config, eos=eos)

    return torch.no_grad()(run)


def _capture_step(take: Call, cache: KVCache) -> torch.cuda.CUDAGraph:
    """A graph of one step, with an empty cache after the warm-up and the capture."""

    def work() -> None:
        cache.bound = 0  # torch.compile guards on this number and would compile for each value
        take()

    graph = capture(work, cache.K.device)
    cache.clear()
    return graph


def marian_generate(
    config: ModelConfig, setting: Setting, device: torch.device, dtype: torch.dtype
) -> Generate:
    """`generate` of Hugging Face's Marian with random weights."""
    if config.kind != "multi-head" or config.window is not None:
        raise BackendError("Marian has no multi-query and no local attention")
    if config.h * config.k != config.d or config.k != config.v:
        raise BackendError(f"Marian needs h k = d; they are {config.h * config.k} and {config.d}")
    with requires("interop"):
        library: Any = importlib.import_module("transformers")
    marian = _marian(config, max(setting.source, setting.target), device, dtype)
    shape = (setting.batch, setting.source)
    source = torch.randint(NUM_SPECIAL_TOKENS, config.vocab_size, shape, device=device)
    mask = torch.ones_like(source)

    @torch.no_grad()
    def run(n: int) -> None:
        options = library.GenerationConfig(
            num_beams=setting.beam,
            do_sample=False,
            min_new_tokens=n,
            max_new_tokens=n,
            use_cache=True,
            pad_token_id=config.pad,
            eos_token_id=config.eos,
            decoder_start_token_id=config.bos,
        )
        tokens = marian.generate(source, attention_mask=mask, generation_config=options)
        assert tokens.shape[1] == n + 1, "the output begins with the start token"

    return run


@lru_cache(maxsize=1)
def _marian(config: ModelConfig, length: int, device: torch.device, dtype: torch.dtype) -> Any:
    library: Any = importlib.import_module("transformers")
    library.logging.set_verbosity_error()
    sides = {
        f"{side}_{name}": size
        for side in ("encoder", "decoder")
        for name, size in (
            ("layers", getattr(config, f"{side}_layers")),
            ("attention_heads", config.h),
            ("ffn_dim", config.f),
        )
    }
    sizes = library.MarianConfig(
        vocab_size=config.vocab_size,
        d_model=config.d,
        max_position_embeddings=length + 1,
        activation_function="relu",
        forced_eos_token_id=None,
        pad_token_id=config.pad,
        eos_token_id=config.eos,
        decoder_start_token_id=config.bos,
        **sides,
    )
    return library.MarianMTModel(sizes).to(device=device, dtype=dtype).eval()


def ctranslate2_generate(
    config: ModelConfig,
    setting: Setting,
    device: torch.device,
    dtype: torch.dtype,
    *,
    flash_attention: bool = False,
) -> Generate:
    """`translate_batch` of CTranslate2 with our random weights, the whole batch at once."""
    if flash_attention and device.type != "cuda":
        raise BackendError("flash attention needs a GPU")
    folder = Path(_exported(config, device, dtype).name) / "model"
    translator = load_translator(folder, device, dtype, flash_attention=flash_attention)
    length = max(1, setting.source - 1)  # CTranslate2 appends eos
    tokens = [f"t{i}" for i in range(NUM_SPECIAL_TOKENS, config.vocab_size)]
    sources = [random.choices(tokens, k=length) for _ in range(setting.batch)]

    def run(n: int) -> None:
        lengths = {"min_decoding_length": n, "max_decoding_length": n, "max_input_length": 0}
        results = translator.translate_batch(sources, beam_size=setting.beam, **lengths)
        assert all(len(result.hypotheses[0]) == n for result in results)

    return run


def load_translator(
    folder: Path, device: torch.device, dtype: torch.dtype, *, flash_attention: bool = False
) -> Any:
    """A CTranslate2 translator on a device, with as many threads as PyTorch has."""
    with requires("interop"):
        library: Any = importlib.import_module("ctranslate2")
    return library.Translator(
        str(folder),
        device.type,
        device_index=device.index or 0,
        compute_type=str(dtype).removeprefix("torch."),
        intra_threads=torch.get_num_threads(),
        flash_attention=flash_attention,
    )


@lru_cache(maxsize=4)
def _exported(
    config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> TemporaryDirectory[str]:
    """A folder with `model`, the CTranslate2 export of a model with random weights."""
    folder = TemporaryDirectory(prefix="writehead-ctranslate2-")
    model = build(config, device, dtype)
    assert isinstance(model, TranslationModel)
    tokens, name = [f"t{i}" for i in range(config.vocab_size)], str(dtype).removeprefix("torch.")
    export_ctranslate2(model, tokens, Path(folder.name) / "model", dtype=name)
    return folder
