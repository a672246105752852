"""`bench context`: a language model's decoding step after a long context.

The caches hold random numbers up to the context; the steps that are timed are the last before it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch

from writehead import cost
from writehead.bench.decode import PYTORCH, Place
from writehead.bench.peers import Model, attempt, captured_greedy
from writehead.bench.timing import Call, time_work
from writehead.config import DecodeConfig, ModelConfig
from writehead.cost import Setting
from writehead.decoding.search import Constraints
from writehead.errors import BackendError, ConfigError
from writehead.model import DecoderState, KVCache, LanguageModel

OURS = "ours"
MAX_STEPS = 32


@dataclass(frozen=True)
class Context:
    """`batch` rows that read `length` positions; the last `steps` of them are timed."""

    batch: int
    length: int

    def __post_init__(self) -> None:
        if self.batch < 1 or self.length < 2:
            raise ConfigError(
                f"batch={self.batch} must be at least 1, and context={self.length} at least 2"
            )

    @property
    def steps(self) -> int:
        """The number of timed steps."""
        return min(MAX_STEPS, self.length // 2)


def check_language(models: dict[str, ModelConfig]) -> None:
    """Raises ConfigError unless all models are language models."""
    for name, config in models.items():
        if config.task != "language":
            raise ConfigError(f"{name} is a translation model; choose a language model")


def bench_context(
    models: dict[str, ModelConfig], contexts: Sequence[Context], place: Place
) -> Iterator[dict[str, Any]]:
    """Yields a row per context and model: ours, plain PyTorch and the floor."""
    for context, (name, config) in product(contexts, models.items()):
        yield _row(name, config, context, place)


def _row(name: str, config: ModelConfig, context: Context, place: Place) -> dict[str, Any]:
    setting = Setting(context.batch, 0, context.length, element=place.dtype.itemsize)
    positions = range(context.length - context.steps, context.length)
    steps = [cost.decoder_step(config, setting, p).floor(place.chip) for p in positions]
    floor = sum(steps) / len(steps)
    measured: dict[str, Any] = {}
    systems: dict[str, Callable[[Model, Context], Call]] = {
        OURS: _ours if place.is_gpu else _stepped
    }
    if place.peers and place.is_gpu:
        systems[PYTORCH] = _captured
    for label, make in systems.items():
        place.report(f"{name}, batch {context.batch:,}, context {context.length:,}: {label}")
        work = partial(_time, make, config, context, place, floor)
        measured[label] = work() if label == OURS else attempt(work)
        place.free()
    return {
        "preset": name,
        "model": config.to_json(),
        "kind": config.kind,
        "batch": context.batch,
        "context": context.length,
        "steps": context.steps,
        "kv_bytes": cost.kv_bytes(config, setting)["total"],
        "floor": {"step_ms": floor * 1e3},
        "measured": measured,
    }


def _time(
    make: Callable[[Model, Context], Call],
    config: ModelConfig,
    context: Context,
    place: Place,
    floor: float,
) -> dict[str, Any]:
    run = make(place.build(config), context)
    times = time_work(run, place.device, repeats=place.repeats).over(context.steps)
    return {
        "step_ms": times.to_json(1e-3),
        "us_per_token": times.median / context.batch * 1e6,
        "floor_step_ms": floor * 1e3,
        "share_of_floor": floor / times.median,
    }


def _ours(model: Model, context: Context) -> Call:
    from writehead.decoding.buffers import Shape
    from writehead.decoding.captured import Captured
    from writehead.decoding.graphs import GraphDecoder  # imports Triton
    from writehead.model.fused import why_not

    if reason := why_not(model):
        raise BackendError(reason)
    shape = Shape(sentences=context.batch, beam=1, source=0, capacity=context.length)
    eos, decoder = model.config.eos, GraphDecoder(model)
    captured = Captured(decoder.fused, shape, model.config.vocab_size, eos)
    _fill(captured.buffers.cache)
    search = DecodeConfig(min_length=context.steps, max_length=context.steps)
    constraints = Constraints.make(search, eos, None, None, context.batch, model.device)
    first = torch.full((context.batch,), model.config.bos, device=model.device)
    lengths = torch.full_like(first, context.length - context.steps)

    def run() -> None:
        captured.begin(first, lengths, constraints)
        decoder.run(captured, context.batch, constraints, search)

    return run


def _captured(model: Model, context: Context) -> Call:
    begin = context.length - context.steps
    return captured_greedy(model.step, _state(model, context), begin, context.steps)


def _stepped(model: Model, context: Context) -> Call:
    """Ours on a CPU: greedy steps of `model.step`."""
    state = _state(model, context)

    def run() -> None:
        state.cache.lengths.fill_(context.length - context.steps)
        tokens = state.first
        for _ in range(context.steps):
            tokens = model.step(tokens, state).argmax(dim=1)

    return run


def _state(model: Model, context: Context) -> DecoderState:
    """A state whose padded cache is full of random numbers."""
    assert isinstance(model, LanguageModel)
    prompt = torch.full((context.batch, 1), model.config.bos, device=model.device)
    state = model.start(prompt, context.length, padded=True)
    _fill(state.cache)
    return state


def _fill(cache: KVCache) -> None:
    cache.K.normal_()
    cache.V.normal_()
