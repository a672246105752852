"""`bench decode`: the time per decoding step of Table 2 (§4.3), beside peers and the floor.

Weights are random, and every sentence is decoded to the full length. On a GPU ours is
`GraphDecoder`, including its reads of tokens and scores; on a CPU it is the engine's plain path.
"""

import dataclasses
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch

from writehead import cost
from writehead.bench.floor import decode_floor
from writehead.bench.peers import (
    Decode,
    Model,
    attempt,
    build,
    ctranslate2_generate,
    graph_decode,
    marian_generate,
    plain_decode,
    random_source,
    search_config,
)
from writehead.bench.timing import Times, clocked, time_work
from writehead.config import DecodeConfig, ModelConfig
from writehead.cost import Setting
from writehead.decoding.search import Constraints, Hypothesis
from writehead.errors import BackendError, ConfigError, nearest
from writehead.model import TranslationModel

SLOW_SECONDS = 2.0  # a call that takes longer is timed once
WARMUP_STEPS = 4  # of a library's first call
MIN_VOCAB_SIZE = 4  # padding, eos, unknown and one token
LENGTHS = ("padded", "true")
ON_CPU = Setting(batch=16, source=64, target=64)  # decoded there in seconds

# the names of measurements in a row
OURS = {"padded": "ours, padded", "true": "ours, true lengths"}
PYTORCH, COMPILED = "PyTorch", "torch.compile"
HUGGING_FACE, CTRANSLATE2 = "Hugging Face", "CTranslate2"
FLASH_ATTENTION = "CTranslate2, flash attention"
# the names by which peers are chosen
PEERS = {
    "ctranslate2": CTRANSLATE2,
    "ctranslate2-flash": FLASH_ATTENTION,
    "hugging-face": HUGGING_FACE,
    "torch-compile": COMPILED,
    "pytorch": PYTORCH,
}
DEFAULT_PEERS = ("ctranslate2", "ctranslate2-flash", "hugging-face", "torch-compile")

NOTES = (
    "step_ms of ours, PyTorch and torch.compile: all steps of one decoding over their number; "
    "the encoder is timed separately.",
    "step_ms of CTranslate2 and Hugging Face: (T(n) - T(1)) / (n - 1), where T(n) is their whole "
    "call with n tokens per sentence, so that the encoder and the start of a call are left out.",
    "PyTorch and torch.compile read the whole padded cache; the other systems read the positions "
    "that are filled, unless ours is marked as padded.",
    "torch.compile with beam search is timed at the smallest and the largest batch only.",
)


@dataclass(frozen=True)
class Place:
    """Where and how often to measure, beside which peers; `report` is called with progress."""

    chip: cost.Chip
    device: torch.device
    dtype: torch.dtype
    repeats: int
    peers: Sequence[str]
    report: Callable[[str], None]

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ConfigError(f"repeats={self.repeats} must be at least 1")

    @property
    def is_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    def build(self, config: ModelConfig) -> Model:
        """A model with random weights on this device."""
        return build(config, self.device, self.dtype)

    def free(self) -> None:
        """Frees the memory of the last measurement."""
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class DecodePlan:
    """Translation models by name, and the settings in which each is decoded."""

    models: dict[str, ModelConfig]
    batches: Sequence[int]
    source: int
    target: int
    beams: Sequence[int]
    lengths: Sequence[str] = LENGTHS
    peers: Sequence[str] = DEFAULT_PEERS

    def __post_init__(self) -> None:
        for name, numbers in (("batch", self.batches), ("beam", self.beams)):
            if min(numbers) < 1:
                raise ConfigError(f"{name}={min(numbers)} must be at least 1")
        for peer in self.peers:
            if peer not in PEERS:
                raise ConfigError(f"there is no peer {peer!r:.40}; {nearest(peer, PEERS)}")
        for name, config in self.models.items():
            if config.task != "translation":
                raise ConfigError(f"{name} is a language model; choose a translation model")
            check_beams(self.beams, config.vocab_size, name)
            for side in ("source", "target"):
                length, most = getattr(self, side), getattr(config, f"{side}_positions")
                if not 1 <= length <= most:
                    raise ConfigError(
                        f"{side}={length} must be from 1 to {most}, the learned positions of {name}"
                    )

    def to_json(self) -> dict[str, Any]:
        """The settings, without the models, which each row has."""
        fields = dataclasses.asdict(self)
        return fields | {"models": list(self.models)}


def check_beams(beams: Sequence[int], vocab_size: int, name: object) -> None:
    """Raises ConfigError unless a model can be searched with each of the beams."""
    for beam in beams:
        DecodeConfig(beam=beam)
        if beam > vocab_size:
            raise ConfigError(f"beam={beam} exceeds the {vocab_size} tokens of {name}")


def resized(config: ModelConfig, vocab_size: int | None, positions: int = 0) -> ModelConfig:
    """A config with another vocabulary, and with at least so many target positions."""
    if vocab_size is not None and vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError(f"vocab_size={vocab_size} must be at least {MIN_VOCAB_SIZE}")
    return dataclasses.replace(
        config,
        vocab_size=vocab_size or config.vocab_size,
        target_positions=max(positions, config.target_positions),
    )


def bench_decode(
    plan: DecodePlan, place: Place, result: dict[str, Any], save: Callable[[], None]
) -> None:
    """Adds a row per beam, batch and model to `result`, and saves it after each."""
    rows: list[dict[str, Any]] = []
    result |= {"config": plan.to_json(), "notes": list(NOTES), "rows": rows}
    peers = set(plan.peers)
    for beam, batch, (name, config) in product(plan.beams, plan.batches, plan.models.items()):
        left_out = set()
        if beam > 1 and batch not in (min(plan.batches), max(plan.batches)):
            left_out = {"torch-compile"}  # each compilation takes up to half a minute
        here = dataclasses.replace(
            place, peers=[peer for peer in plan.peers if peer in peers - left_out]
        )
        setting = Setting(batch, plan.source, plan.target, beam, place.dtype.itemsize)
        row = translation_row(name, config, setting, here, lengths=plan.lengths)
        if "absent" in row["measured"].get(FLASH_ATTENTION, {}):
            peers.discard("ctranslate2-flash")  # most builds of CTranslate2 do not have it
        rows.append(row)
        save()


def translation_row(
    name: str,
    config: ModelConfig,
    setting: Setting,
    place: Place,
    *,
    lengths: Sequence[str] = LENGTHS,
) -> dict[str, Any]:
    """One model in one setting: ours, its peers and the floor, as JSON values."""
    floor = decode_floor(config, setting, place.chip)
    measured: dict[str, Any] = {}

    def measure(label: str, work: Callable[[], dict[str, Any]]) -> None:
        place.report(f"{name}, batch {setting.batch:,}, beam {setting.beam}: {label}")
        measured[label] = work() if label in OURS.values() else attempt(work)
        place.free()

    for kind in lengths:
        ours = partial(graph_search if place.is_gpu else plain_decode, padded=kind == "padded")
        measure(OURS[kind], partial(_time_decode, ours, config, setting, floor, kind, place))
    for peer in place.peers:
        label = PEERS[peer]
        if label in (PYTORCH, COMPILED) and not place.is_gpu:
            measured[label] = {"absent": "CUDA graphs need a GPU; on a CPU ours is plain PyTorch"}
            continue
        if label in (PYTORCH, COMPILED):
            make = partial(graph_decode, compiled=label == COMPILED)
            work = partial(_time_decode, make, config, setting, floor, "padded", place)
        else:
            work = partial(_time_generate, label, config, setting, floor, place)
        measure(label, work)
    return {
        "preset": name,
        "model": config.to_json(),
        "kind": config.kind,
        "setting": dataclasses.asdict(setting),
        "floor": floor,
        "measured": measured,
    }


def quickest(row: dict[str, Any], label: str) -> dict[str, Any] | None:
    """The fastest measurement with a label or a variant of it ("label, variant"), or None."""
    timed = [
        measured
        for name, measured in row["measured"].items()
        if (name == label or name.startswith(f"{label}, ")) and "step_ms" in measured
    ]
    return min(timed, key=lambda one: float(one["step_ms"]["median"])) if timed else None


def search_name(beam: int) -> str:
    """The name of a search with `beam` hypotheses per sentence."""
    return "greedy" if beam == 1 else f"beam {beam}"


def graph_search(model: Model, setting: Setting, *, padded: bool) -> Decode:
    """Ours on a GPU: one captured graph per step; `run` reads tokens and scores back."""
    from writehead.decoding.captured import Captured
    from writehead.decoding.graphs import GraphDecoder  # imports Triton
    from writehead.model.fused import why_not

    if reason := why_not(model):
        raise BackendError(reason)
    assert isinstance(model, TranslationModel)
    decoder, source = GraphDecoder(model, padded=padded), random_source(model, setting)
    config, eos, lengths = search_config(setting), model.config.eos, [setting.source] * len(source)
    constraints = Constraints.make(config, eos, None, None, len(source), model.device)
    first = torch.full((len(source),), model.config.bos, device=model.device)
    held: list[Captured] = []

    def start() -> None:
        held[:] = [decoder.start(source, lengths, setting.target, config, constraints)]

    def run() -> Sequence[list[Hypothesis]]:
        held[0].begin(first, None, constraints)
        return decoder.run(held[0], len(source), constraints, config)

    how = "GraphDecoder: one captured graph per step, tokens and scores read back"
    return Decode(torch.no_grad()(start), run, setting.target, how)


def _time_decode(
    make: Callable[[Model, Setting], Decode],
    config: ModelConfig,
    setting: Setting,
    floor: dict[str, Any],
    lengths: str,
    place: Place,
) -> dict[str, Any]:
    """Times the steps of whole decodings, back to back, and the encoder after a decoding."""
    decode = make(place.build(config), setting)
    decode.start()
    once = clocked(decode.run, place.device)
    if place.is_gpu:  # leaves out what captures and autotuning allocated
        torch.cuda.reset_peak_memory_stats(place.device)
    repeats = 1 if once > SLOW_SECONDS else place.repeats
    steps = time_work(decode.run, place.device, repeats=repeats, warmup=0).over(decode.steps)
    encoder = Times(tuple(_time_encoder(decode, place.device) for _ in range(repeats)))
    memory = torch.cuda.max_memory_allocated(place.device) if place.is_gpu else None
    return _row(decode.how, steps, setting, floor, lengths) | {
        "encoder_ms": encoder.to_json(1e-3),
        "us_per_token": {
            "encoder": encoder.median / (setting.batch * setting.source) * 1e6,
            "decoder": steps.median / setting.batch * 1e6,
        },
        "peak_memory_bytes": memory,
    }


def _time_encoder(decode: Decode, device: torch.device) -> float:
    """Seconds of an encoder pass that follows a decoding, as in use."""
    decode.run()
    return clocked(decode.start, device)


def _time_generate(
    label: str, config: ModelConfig, setting: Setting, floor: dict[str, Any], place: Place
) -> dict[str, Any]:
    """Times a library's whole call with all tokens and with one token; see NOTES."""
    if setting.target < 2:
        raise BackendError("its steps are timed from 2 target tokens on")
    there, n = (config, setting, place.device, place.dtype), setting.target
    generate = (
        marian_generate(*there)
        if label == HUGGING_FACE
        else ctranslate2_generate(*there, flash_attention=label == FLASH_ATTENTION)
    )
    generate.run(min(WARMUP_STEPS, n))
    once = clocked(partial(generate.run, n), place.device)
    repeats = 1 if once > SLOW_SECONDS else place.repeats
    whole, first = (
        time_work(partial(generate.run, count), place.device, repeats=repeats, warmup=0)
        for count in (n, 1)
    )
    steps = Times(tuple((seconds - first.median) / (n - 1) for seconds in whole.repeats))
    return _row(generate.how, steps, setting, floor, "true") | {
        "call_ms": whole.to_json(1e-3),
        "one_token_call_ms": first.to_json(1e-3),
        "us_per_token": {"decoder": steps.median / setting.batch * 1e6},
    }


def _row(
    how: str, steps: Times, setting: Setting, floor: dict[str, Any], lengths: str
) -> dict[str, Any]:
    least = floor["step_ms"][lengths]
    return {
        "how": how,
        "lengths": lengths,
        "step_ms": steps.to_json(1e-3),
        "floor_step_ms": least,
        "share_of_floor": least / (steps.median * 1e3),
    }
