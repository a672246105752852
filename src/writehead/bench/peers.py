"""Other implementations of the same work: plain PyTorch, Hugging Face, CTranslate2, FlashInfer.

Each has random weights and our sizes. A peer that is not installed or fails leaves its reason in
the result, and the benchmark goes on without it.
"""

import importlib
import math
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
from writehead.util.environment import version_of
from writehead.util.extras import requires

Model = TranslationModel | LanguageModel
Step = Callable[[Tensor, DecoderState], Tensor]
FLASHINFER_PAGE = 64  # positions
FLASHINFER_WORKSPACE = 128 << 20  # bytes
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
    steps: int
    how: str


@dataclass(frozen=True)
class Generate:
    """A library's call that translates a batch into n tokens per sentence: `run(n)`."""

    run: Callable[[int], object]
    how: str


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


def plain_decode(model: Model, setting: Setting, *, padded: bool) -> Decode:
    """`model.step` and the plain searches, which the engine uses on a CPU."""
    assert isinstance(model, TranslationModel)
    source = random_source(model, setting)
    held: list[DecoderState] = []

    def start() -> None:
        held[:] = [model.start(source, setting.target, beam=setting.beam, padded=padded)]

    def run() -> list[list[Hypothesis]]:
        held[0].cache.clear()
        return beam_search(model.step, held[0], search_config(setting), eos=model.config.eos)

    return Decode(start, run, setting.target, "model.step and the plain search, no graph")


def stepped_greedy(model: Model, state: DecoderState, begin: int, steps: int) -> Call:
    """`steps` greedy steps of `model.step`, the first at position `begin`."""

    def run() -> None:
        state.cache.lengths.fill_(begin)
        tokens = state.first
        for _ in range(steps):
            tokens = model.step(tokens, state).argmax(dim=1)

    return run


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
        run = _beam_run(step, state, search_config(setting), model.config.eos)

    def start() -> None:
        model.decoder.memorize(model.encode(source), Visibility())

    search = "argmax" if setting.beam == 1 else "beam_search around it"
    how = f"model.step{' under torch.compile' * compiled} in a CUDA graph, {search}"
    return Decode(torch.no_grad()(start), run, setting.target, how)


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

    def take() -> None:
        fed.copy_(step(fed, state).argmax(dim=1))

    graph = _capture_step(take, state.cache)

    def run() -> Tensor:
        state.cache.lengths.fill_(begin)
        fed.copy_(state.first)
        for _ in range(steps):
            graph.replay()
        return fed

    return run


def _beam_run(step: Step, state: DecoderState, config: DecodeConfig, eos: int) -> Call:
    fed = state.first.clone()
    logits: list[Tensor] = []

    def take() -> None:
        logits[:] = [step(fed, state)]

    graph = _capture_step(take, state.cache)

    def replay(tokens: Tensor, state: DecoderState) -> Tensor:
        fed.copy_(tokens)
        graph.replay()
        return logits[0]

    def run() -> list[list[Hypothesis]]:
        state.cache.clear()
        with torch.no_grad():
            return beam_search(replay, state, config, eos=eos)

    return run


def _capture_step(take: Call, cache: KVCache) -> torch.cuda.CUDAGraph:
    """A graph of one step, with an empty cache after the warm-up and the capture."""

    def work() -> None:
        cache.bound = 0  # torch.compile guards on this number and would compile for each value
        take()

    graph = capture(work, cache.K.device)
    cache.clear()
    return graph


def check_marian(config: ModelConfig) -> None:
    """Raises BackendError if Hugging Face's Marian has no model of these sizes."""
    if config.kind != "multi-head" or config.window is not None:
        raise BackendError("Marian has no multi-query and no local attention")
    if config.h * config.k != config.d or config.k != config.v:
        raise BackendError(f"Marian needs h k = d; they are {config.h * config.k} and {config.d}")


def marian_generate(
    config: ModelConfig, setting: Setting, device: torch.device, dtype: torch.dtype
) -> Generate:
    """`generate` of Hugging Face's Marian with random weights."""
    check_marian(config)
    with requires("interop"):
        library: Any = importlib.import_module("transformers")
    marian = _marian(config, max(setting.source, setting.target), device, dtype)
    source = torch.randint(
        NUM_SPECIAL_TOKENS, config.vocab_size, (setting.batch, setting.source), device=device
    )
    mask = torch.ones_like(source)

    @torch.no_grad()
    def run(n: int) -> None:
        options = library.GenerationConfig(
            num_beams=setting.beam,
            do_sample=False,
            min_new_tokens=n,
            max_new_tokens=n,
            pad_token_id=config.pad,
            eos_token_id=config.eos,
            decoder_start_token_id=config.bos,
            use_cache=True,
        )
        tokens = marian.generate(source, attention_mask=mask, generation_config=options)
        assert tokens.shape[1] == n + 1, "the output begins with the start token"

    return Generate(run, f"transformers {version_of('transformers')}, Marian, dynamic cache")


@lru_cache(maxsize=1)
def _marian(config: ModelConfig, length: int, device: torch.device, dtype: torch.dtype) -> Any:
    library: Any = importlib.import_module("transformers")
    library.logging.set_verbosity_error()
    sizes = library.MarianConfig(
        vocab_size=config.vocab_size,
        d_model=config.d,
        encoder_layers=config.encoder_layers,
        decoder_layers=config.decoder_layers,
        encoder_attention_heads=config.h,
        decoder_attention_heads=config.h,
        encoder_ffn_dim=config.f,
        decoder_ffn_dim=config.f,
        max_position_embeddings=length + 1,
        activation_function="relu",
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        pad_token_id=config.pad,
        bos_token_id=config.bos,
        eos_token_id=config.eos,
        decoder_start_token_id=config.bos,
        forced_eos_token_id=None,
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
    draw = random.Random(0)
    # CTranslate2 appends eos to each source
    sources = [
        [f"t{draw.randrange(NUM_SPECIAL_TOKENS, config.vocab_size)}" for _ in range(setting.source)]
        for _ in range(setting.batch)
    ]
    if setting.source > 1:
        sources = [source[1:] for source in sources]

    def run(n: int) -> None:
        results = translator.translate_batch(
            sources,
            beam_size=setting.beam,
            min_decoding_length=n,
            max_decoding_length=n,
            max_input_length=0,
        )
        assert all(len(result.hypotheses[0]) == n for result in results)

    how = f"ctranslate2 {version_of('ctranslate2')}, {', flash attention' * flash_attention}"
    return Generate(run, how.rstrip(", "))


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
    tokens = [f"t{i}" for i in range(config.vocab_size)]
    export_ctranslate2(
        model, tokens, Path(folder.name) / "model", dtype=str(dtype).removeprefix("torch.")
    )
    return folder


def flashinfer_workspace(device: torch.device) -> Tensor:
    """Memory that FlashInfer's calls share."""
    return torch.zeros(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=device)


def flashinfer_call(
    Q: Tensor, K: Tensor, V: Tensor, scale: float, workspace: Tensor, *, tensor_cores: bool
) -> Call:
    """FlashInfer's decode attention of Q [b, h, 1, k] over K [b, g, m, k] and V in pages."""
    try:
        library: Any = importlib.import_module("flashinfer")
    except ImportError as error:
        raise BackendError("flashinfer is not installed; pip install flashinfer-python") from error
    b, h, _, k = Q.shape
    g, m = K.shape[1:3]
    page = math.gcd(m, FLASHINFER_PAGE)
    pages = m // page
    # FlashInfer's layout: [b pages, g, page, k]
    paged = tuple(
        T.view(b, g, pages, page, -1).transpose(1, 2).reshape(b * pages, g, page, -1)
        for T in (K, V)
    )

    def every(step: int, end: int) -> Tensor:
        return torch.arange(0, end, step, dtype=torch.int32, device=Q.device)

    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "HND", use_tensor_cores=tensor_cores
    )
    wrapper.plan(
        every(pages, b * pages + 1),
        every(1, b * pages),
        torch.full_like(every(1, b), page),
        *(h, g, k, page),
        pos_encoding_mode="NONE",
        sm_scale=scale,
        q_data_type=Q.dtype,
        kv_data_type=K.dtype,
    )
    queries = Q.view(b, h, k)
    return lambda: wrapper.run(queries, paged)
