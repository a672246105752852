"""What ours is measured beside: plain PyTorch in a graph, Hugging Face's Marian, FlashInfer.

Each is made with random weights or numbers and the sizes of ours. One that is not installed, or
that fails, leaves a sentence in its place: a benchmark of ours does not end for want of a peer.
"""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from writehead.bench.record import version_of
from writehead.bench.timing import WARM_CALLS, Call, capture
from writehead.config import DecodeConfig, ModelConfig
from writehead.cost import Setting
from writehead.decoding.beam import beam_search
from writehead.decoding.search import Hypothesis
from writehead.errors import BackendError
from writehead.kernels import Visibility
from writehead.model import DecoderState, KVCache, LanguageModel, TranslationModel

Model = TranslationModel | LanguageModel
Step = Callable[[Tensor, DecoderState], Tensor]
PAGE = 64  # positions of a page of FlashInfer's caches, at most
WORKSPACE = 128 << 20  # bytes that FlashInfer asks for


@dataclass(frozen=True)
class Decode:
    """A whole decoding in two pieces: `start`, the encoder's, and `run`, all steps after it.

    Either can be done again and again.
    """

    start: Call
    run: Call
    steps: int
    how: str
    whole: Call | None = None  # a search from tokens to what was found, where it is more than both


def tried(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a peer's `measure` finds, or the sentence that says why it found nothing, as "absent".

    Ours is not tried: where it fails, the benchmark does.
    """
    try:
        if not torch.cuda.is_available():
            return measure()
        with torch.cuda.stream(torch.cuda.current_stream()):  # where a failed capture leads back to
            return measure()
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        name = "" if isinstance(error, BackendError) else f"{type(error).__name__}: "
        return {"absent": f"{name}{lines[0]}"[:300]}


def random_source(model: Model, setting: Setting) -> Tensor:
    """[b, m], sentences that mean nothing."""
    shape = (setting.batch, setting.source)
    return torch.randint(3, model.config.vocab_size, shape, device=model.device)


def search_config(setting: Setting) -> DecodeConfig:
    """A search that takes `target` steps whatever the model says."""
    return DecodeConfig(beam=setting.beam, min_length=setting.target, max_length=setting.target)


def plain_decode(model: Model, setting: Setting, *, padded: bool) -> Decode:
    """`model.step` and the plain searches, step by step: what the engine does on a CPU."""
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
    """`steps` greedy steps by `model.step` as it is, the first at position `begin`."""

    def run() -> None:
        state.cache.lengths.fill_(begin)
        tokens = state.first
        for _ in range(steps):
            tokens = model.step(tokens, state).argmax(dim=1)

    return run


def graph_decode(
    model: Model, setting: Setting, *, reorders: bool, compiled: bool = False
) -> Decode:
    """`model.step` over a padded cache in one CUDA graph, under `torch.compile` if asked for.

    Greedy search is part of the graph. With beams the search is `beam_search`, step by step, with
    the rows reordered through the table of ancestors; or, without `reorders`, every row goes on by
    itself: what a beam's attention and products cost where the search costs nothing.
    """
    assert isinstance(model, TranslationModel)
    source = random_source(model, setting)
    step = _compiled(model) if compiled else model.step

    def start() -> None:
        model.decoder.memorize(model.encode(source), Visibility())

    if reorders and setting.beam > 1:
        state = model.start(source, setting.target, beam=setting.beam, padded=True)
        run = _beam_run(step, state, search_config(setting), model.config.eos)
        how = "model.step in one graph, beam_search around it"
    else:
        state = _without_ancestors(model.start(source, setting.target, padded=True), setting.beam)
        run = captured_greedy(step, state, 0, setting.target)
        how = "model.step and argmax in one graph" + (", no reordering" * (setting.beam > 1))
    how += ", torch.compile" * compiled
    return Decode(torch.no_grad()(start), run, setting.target, how)


def _compiled(model: Model) -> Step:
    """`model.step` compiled whole; what was compiled for other models is forgotten first.

    Else the compiler would come to its limit of versions, and go on without compiling.
    """
    torch.compiler.reset()
    step: Step = torch.compile(model.step, fullgraph=True)
    return step


def _without_ancestors(state: DecoderState, beam: int) -> DecoderState:
    """A fresh state as one with `beam` rows a sentence that will never trade places."""
    if beam == 1:
        return state
    old = state.cache
    cache = KVCache(
        old.attention,
        layers=old.K.shape[0],
        rows=len(old.rows) * beam,
        capacity=old.capacity,
        padded=old.padded,
        dtype=old.K.dtype,
        device=old.K.device,
    )
    return DecoderState(cache, state.memories, state.first.repeat_interleave(beam), beam)


def captured_greedy(step: Step, state: DecoderState, begin: int, steps: int) -> Call:
    """`steps` launches of one captured greedy step, the first at position `begin`.

    It answers with the last tokens.
    """
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
    out: list[Tensor] = []

    def take() -> None:
        out[:] = [step(fed, state)]

    graph = _capture_step(take, state.cache)

    def replay(tokens: Tensor, state: DecoderState) -> Tensor:
        fed.copy_(tokens)
        graph.replay()
        return out[0]

    def run() -> list[list[Hypothesis]]:
        state.cache.clear()
        with torch.no_grad():
            return beam_search(replay, state, config, eos=eos)

    return run


def _capture_step(take: Call, cache: KVCache) -> torch.cuda.CUDAGraph:
    """A graph of one step; the steps before it and its own are taken back on the host's side."""
    graph = capture(take, cache.K.device)
    cache.rewind(WARM_CALLS + 1)
    return graph


def why_not_marian(config: ModelConfig) -> str | None:
    """None, or why Hugging Face's Marian is no model of these sizes."""
    if config.task != "translation":
        return "Marian is a translation model"
    if config.kind != "multi-head" or config.window is not None:
        return "there is no multi-query or local Marian"
    if config.h * config.k != config.d or config.k != config.v:
        return f"Marian needs h k = d; they are {config.h * config.k} and {config.d}"
    return None


def marian_decode(model: Model, setting: Setting) -> Decode:
    """Hugging Face's Marian with the sizes of `model`, random weights, and its `generate`."""
    config, device = model.config, model.device
    if why_not := why_not_marian(config):
        raise BackendError(why_not)
    try:
        library: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise BackendError("transformers is not installed; pip install transformers") from error
    library.logging.set_verbosity_error()
    marian = library.MarianMTModel(_marian_config(library, config, setting))
    marian = marian.to(device=device, dtype=model.dtype).eval()
    source = random_source(model, setting)
    mask = torch.ones_like(source)
    options = library.GenerationConfig(
        num_beams=setting.beam,
        do_sample=False,
        min_new_tokens=setting.target,
        max_new_tokens=setting.target,
        pad_token_id=config.pad,
        eos_token_id=config.eos,
        decoder_start_token_id=config.bos,
        use_cache=True,
    )
    held: list[Any] = []

    def start() -> None:
        held[:] = [marian.get_encoder()(input_ids=source, attention_mask=mask)]

    def run() -> None:
        # generate repeats what it is given in place, once for every beam
        encoded = type(held[0])(last_hidden_state=held[0].last_hidden_state)
        found = marian.generate(
            encoder_outputs=encoded, attention_mask=mask, generation_config=options
        )
        assert found.shape[1] == setting.target + 1  # it begins with the start token

    how = f"transformers {version_of('transformers')}, Marian, dynamic cache"
    return Decode(torch.no_grad()(start), torch.no_grad()(run), setting.target, how)


def _marian_config(library: Any, config: ModelConfig, setting: Setting) -> Any:
    return library.MarianConfig(
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
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        pad_token_id=config.pad,
        bos_token_id=config.bos,
        eos_token_id=config.eos,
        decoder_start_token_id=config.bos,
        forced_eos_token_id=None,
    )


def flashinfer_workspace(device: torch.device) -> Tensor:
    """Memory for what FlashInfer keeps between two kernels of a call; calls in turn share it."""
    return torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)


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
    page = math.gcd(m, PAGE)
    pages = m // page
    # its own layout, a page of all write-heads after another: [b pages, g, page, k]
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
        h,
        g,
        k,
        page,
        pos_encoding_mode="NONE",
        sm_scale=scale,
        q_data_type=Q.dtype,
        kv_data_type=K.dtype,
    )
    queries = Q.view(b, h, k)
    return lambda: wrapper.run(queries, paged)
