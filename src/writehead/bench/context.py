"""`bench context`: a language model's decoding step after a long context, and its attention alone.

The caches hold random numbers up to the context; the steps that are timed are the last before it.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from writehead import cost
from writehead.bench.decode import PYTORCH, Place
from writehead.bench.peers import Model, attempt, captured_greedy, stepped_greedy
from writehead.bench.timing import Call, bytes_past_cache, count_sets, time_calls, time_work
from writehead.config import DecodeConfig, ModelConfig
from writehead.cost import Setting
from writehead.decoding.search import Constraints
from writehead.errors import BackendError, ConfigError
from writehead.kernels import attend
from writehead.model import DecoderState, KVCache, LanguageModel

OURS = "ours"
MIN_CALLS = 24  # of attention in one graph
MAX_STEPS = 32
IN_CACHE = "no bandwidth, because all caches together fit into the cache of the device"

Make = Callable[[Model, "Context"], tuple[Call, str]]


@dataclasses.dataclass(frozen=True)
class Context:
    """`batch` rows that read `length` positions; the last `steps` of them are timed."""

    batch: int
    length: int
    steps: int = 0

    def __post_init__(self) -> None:
        if not self.steps:
            object.__setattr__(self, "steps", min(MAX_STEPS, self.length // 2))
        if self.batch < 1 or not 1 <= self.steps < self.length:
            raise ConfigError(
                f"{self.steps} steps of {self.batch} rows in a context of {self.length}: ask for "
                f"at least 1 row and a context of at least 2"
            )

    @property
    def begin(self) -> int:
        """The number of positions before the first timed step."""
        return self.length - self.steps


def language_row(name: str, config: ModelConfig, context: Context, place: Place) -> dict[str, Any]:
    """One language model at one context: ours, plain PyTorch and the floor, as JSON values."""
    check_language(name, config)
    step, attention = _floors(config, context, place)
    measured: dict[str, Any] = {}

    def measure(label: str, make: Make) -> None:
        place.report(f"{name}, batch {context.batch:,}, context {context.length:,}: {label}")

        def work() -> dict[str, Any]:
            run, how = make(place.build(config), context)
            return _timed(run, how, context, place, step)

        measured[label] = work() if label == OURS else attempt(work)
        place.free()

    measure(OURS, _ours if place.is_gpu else _stepped)
    if place.peers and place.is_gpu:
        measure(PYTORCH, _captured)
    place.report(f"{name}, batch {context.batch:,}, context {context.length:,}: attention")
    alone = _attention(config, context, place, attention)
    place.free()
    setting = Setting(context.batch, 0, context.length, element=place.dtype.itemsize)
    return {
        "preset": name,
        "model": config.to_json(),
        "kind": config.kind,
        "batch": context.batch,
        "context": context.length,
        "steps": context.steps,
        "kv_bytes": cost.kv_bytes(config, setting)["total"],
        "floor": {"step_ms": step * 1e3, "attention_us": attention * 1e6},
        "measured": measured,
        "attention": alone,
    }


def check_language(name: str, config: ModelConfig) -> None:
    """Raises ConfigError unless the model is a language model."""
    if config.task != "language":
        raise ConfigError(f"{name} is a translation model; choose a language model")


def _floors(config: ModelConfig, context: Context, place: Place) -> tuple[float, float]:
    """Least seconds of the mean timed step, and of one layer's attention at the context."""
    setting = Setting(context.batch, 0, context.length, element=place.dtype.itemsize)
    steps = [
        cost.decoder_step(config, setting, position).floor(place.chip)
        for position in range(context.begin, context.length)
    ]
    size = _layer_bytes(config, context, place.dtype)
    return sum(steps) / len(steps), size / place.chip.bandwidth


def _layer_bytes(config: ModelConfig, context: Context, dtype: torch.dtype) -> int:
    return context.batch * context.length * config.decoder_attention.kv_size * dtype.itemsize


def _ours(model: Model, context: Context) -> tuple[Call, str]:
    from writehead.decoding.buffers import Shape
    from writehead.decoding.captured import Captured
    from writehead.decoding.graphs import GraphDecoder  # imports Triton
    from writehead.model.fused import why_not

    if reason := why_not(model):
        raise BackendError(reason)
    shape = Shape(sentences=context.batch, beam=1, source=0, capacity=context.length)
    eos = model.config.eos
    decoder = GraphDecoder(model)
    captured = Captured(decoder.fused, shape, model.config.vocab_size, eos)
    _fill(captured.buffers.cache)
    search = DecodeConfig(min_length=context.steps, max_length=context.steps)
    constraints = Constraints.make(search, eos, None, None, context.batch, model.device)
    first = torch.full((context.batch,), model.config.bos, device=model.device)
    lengths = torch.full_like(first, context.begin)

    def run() -> None:
        captured.begin(first, lengths, constraints)
        decoder.run(captured, context.batch, constraints, search)

    return run, "GraphDecoder: one captured graph per step, tokens and scores read back"


def _captured(model: Model, context: Context) -> tuple[Call, str]:
    run = captured_greedy(model.step, _state(model, context), context.begin, context.steps)
    return run, "model.step and argmax in one graph"


def _stepped(model: Model, context: Context) -> tuple[Call, str]:
    run = stepped_greedy(model, _state(model, context), context.begin, context.steps)
    return run, "model.step and argmax, no graph"


def _timed(run: Call, how: str, context: Context, place: Place, floor: float) -> dict[str, Any]:
    times = time_work(run, place.device, repeats=place.repeats).over(context.steps)
    return {
        "how": how,
        "step_ms": times.to_json(1e-3),
        "us_per_token": times.median / context.batch * 1e6,
        "floor_step_ms": floor * 1e3,
        "share_of_floor": floor / times.median,
    }


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


def _attention(config: ModelConfig, context: Context, place: Place, floor: float) -> dict[str, Any]:
    """One layer's attention over the whole context, reading several caches in turn.

    A bandwidth is given only if the caches together exceed the cache of the device.
    """
    layer, size = config.decoder_attention, _layer_bytes(config, context, place.dtype)
    count = max(config.decoder_layers, count_sets(size, place.device))
    cache = KVCache(
        layer,
        layers=count,
        rows=context.batch,
        capacity=context.length,
        dtype=place.dtype,
        device=place.device,
    )
    _fill(cache)
    Q = torch.randn(context.batch, layer.h * layer.k, device=place.device, dtype=place.dtype)
    calls = [_attention_call(Q, cache, i, place) for i in range(count)]
    rounds = math.ceil(MIN_CALLS / count) if place.is_gpu else 1
    times = time_calls(calls * rounds, place.device, repeats=place.repeats)
    measured = {
        "us": times.to_json(1e-6),
        "kv_bytes": size,
        "sets": count,
        "bytes_in_turn": size * count,
    }
    if size * count < bytes_past_cache(place.device):
        return measured | {"left_out": IN_CACHE}
    return measured | {
        "bytes_per_second": size / times.median,
        "share_of_floor": floor / times.median,
    }


def _attention_call(Q: Tensor, cache: KVCache, layer: int, place: Place) -> Call:
    K, V, attention = cache.K[layer], cache.V[layer], cache.attention
    scale = attention.k**-0.5
    if not place.is_gpu:
        queries = Q.view(len(Q), attention.h, 1, attention.k)
        return lambda: attend(queries, K, V, scale=scale)
    from writehead.kernels.decode import attend_memory  # imports Triton

    lengths, growing = (torch.full((len(Q),), n, device=Q.device) for n in (cache.size, 1))
    return lambda: attend_memory(Q, K, V, lengths, growing, heads=attention.h, scale=scale)
