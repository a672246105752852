"""`bench decode`: the time per decoding step of Table 2 (§4.3), beside peers and the floor.

Weights are random, and every sentence is decoded to the full length. On a GPU ours is
`GraphDecoder`, including its reads of tokens and scores; on a CPU it is the engine's plain path.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch

from writehead import cost
from writehead.bench import peers
from writehead.bench.floor import decode_floor
from writehead.bench.peers import Decode, Model, random_source, search_config
from writehead.bench.timing import Times, clocked, time_work
from writehead.config import DecodeConfig, ModelConfig
from writehead.cost import Setting
from writehead.decoding.beam import beam_search
from writehead.decoding.search import Constraints, Hypothesis
from writehead.errors import BackendError, ConfigError, nearest
from writehead.model import DecoderState, TranslationModel

SLOW_SECONDS = 2.0  # a call that takes longer is timed once
WARMUP_STEPS = 4  # of a library's first call
MIN_VOCAB_SIZE = 4  # padding, eos, unknown and one token
LENGTHS = ("padded", "true")
ON_GPU = Setting(batch=1024, source=128, target=128)  # as in §4.3
ON_CPU = Setting(batch=16, source=64, target=64)  # decoded there in seconds

# the names of measurements in a row
OURS = {"padded": "ours, padded", "true": "ours, true lengths"}
PYTORCH, COMPILED, HUGGING_FACE = "PyTorch", "torch.compile", "Hugging Face"
CTRANSLATE2, FLASH_ATTENTION = "CTranslate2", "CTranslate2, flash attention"
# the names by which peers are chosen
PEERS = {
    "ctranslate2": CTRANSLATE2,
    "ctranslate2-flash": FLASH_ATTENTION,
    "hugging-face": HUGGING_FACE,
    "torch-compile": COMPILED,
    "pytorch": PYTORCH,
}
DEFAULT_PEERS = ("ctranslate2", "ctranslate2-flash", "hugging-face", "torch-compile")

NOTES = [
    "Ours, PyTorch and torch.compile: the time of all steps of a decoding over their number. "
    "CTranslate2 and Hugging Face: (T(n) - T(1)) / (n - 1), where T(n) is a whole call with n "
    "tokens per sentence. Neither includes the encoder.",
    "PyTorch and torch.compile read the whole padded cache. torch.compile with beam search is "
    "timed at the smallest and the largest batch only.",
]


@dataclass(frozen=True)
class Place:
    """Where and how often to measure, beside which peers; `report` is called with progress."""

    chip: cost.Chip
    device: torch.device
    dtype: torch.dtype
    repeats: int
    peers: Sequence[str]
    report: Callable[[str], None]

    @property
    def is_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    def build(self, config: ModelConfig) -> Model:
        """A model with random weights on this device."""
        return peers.build(config, self.device, self.dtype)

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
        for batch, beam in product(self.batches, self.beams):
            Setting(batch, self.source, self.target, beam)  # raises if a number is below 1
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


def check_beams(beams: Sequence[int], vocab_size: int, name: object) -> None:
    """Raises ConfigError unless a model can be searched with each of the beams."""
    for beam in beams:
        DecodeConfig(beam=beam)
        if beam > vocab_size:
            raise ConfigError(f"beam={beam} exceeds the {vocab_size} tokens of {name}")


def resized(config: ModelConfig, vocab_size: int | None, positions: int = 0) -> ModelConfig:
    """A config with another vocabulary, and with at least so many target positions."""
    vocab_size = config.vocab_size if vocab_size is None else vocab_size
    if vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError(f"vocab_size={vocab_size} must be at least {MIN_VOCAB_SIZE}")
    positions = max(positions, config.target_positions)
    return replace(config, vocab_size=vocab_size, target_positions=positions)


def bench_decode(plan: DecodePlan, place: Place) -> Iterator[dict[str, Any]]:
    """Yields a row per beam, batch and model."""
    chosen = list(plan.peers)
    for beam, batch, (name, config) in product(plan.beams, plan.batches, plan.models.items()):
        here = chosen
        if beam > 1 and batch not in (min(plan.batches), max(plan.batches)):
            here = [peer for peer in chosen if peer != "torch-compile"]  # it takes half a minute
        setting = Setting(batch, plan.source, plan.target, beam, place.dtype.itemsize)
        row = translation_row(
            name, config, setting, replace(place, peers=here), lengths=plan.lengths
        )
        if "absent" in row["measured"].get(FLASH_ATTENTION, {}):
            chosen.remove("ctranslate2-flash")  # most builds of CTranslate2 do not have it
        yield row


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
    for kind in lengths:
        ours = partial(graph_search if place.is_gpu else plain_decode, padded=kind == "padded")
        place.report(f"{name}, batch {setting.batch:,}, beam {setting.beam}: {OURS[kind]}")
        measured[OURS[kind]] = _time_decode(ours, kind, config, setting, place)
        place.free()
    for label in (PEERS[peer] for peer in place.peers):
        place.report(f"{name}, batch {setting.batch:,}, beam {setting.beam}: {label}")
        measured[label] = peers.attempt(partial(_time_peer, label, config, setting, place))
        place.free()
    for one in measured.values():
        if "step_ms" in one:
            one["floor_step_ms"] = floor["step_ms"][one["lengths"]]
            one["share_of_floor"] = one["floor_step_ms"] / one["step_ms"]["median"]
    return {
        "preset": name,
        "model": config.to_json(),
        "kind": config.kind,
        "setting": asdict(setting),
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


def plain_decode(model: Model, setting: Setting, *, padded: bool) -> Decode:
    """Ours on a CPU: `model.step` and the plain searches."""
    assert isinstance(model, TranslationModel)
    source = random_source(model, setting)
    held: list[DecoderState] = []

    def start() -> None:
        held[:] = [model.start(source, setting.target, beam=setting.beam, padded=padded)]

    def run() -> list[list[Hypothesis]]:
        held[0].cache.clear()
        return beam_search(model.step, held[0], search_config(setting), eos=model.config.eos)

    return Decode(start, run)


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

    return Decode(torch.no_grad()(start), run)


def _time_decode(
    make: Callable[[Model, Setting], Decode],
    lengths: str,
    config: ModelConfig,
    setting: Setting,
    place: Place,
) -> dict[str, Any]:
    """Times the steps of whole decodings, back to back, and the encoder after a decoding."""
    decode = make(place.build(config), setting)
    decode.start()
    once = clocked(decode.run, place.device)
    repeats = 1 if once > SLOW_SECONDS else place.repeats
    steps = time_work(decode.run, place.device, repeats=repeats, warmup=0).over(setting.target)
    encoders = []
    for _ in range(repeats):
        decode.run()
        encoders.append(clocked(decode.start, place.device))
    encoder = Times(tuple(encoders))
    return {
        "lengths": lengths,
        "step_ms": steps.to_json(1e-3),
        "encoder_ms": encoder.to_json(1e-3),
        "us_per_token": {
            "encoder": encoder.median / (setting.batch * setting.source) * 1e6,
            "decoder": steps.median / setting.batch * 1e6,
        },
    }


def _time_peer(label: str, config: ModelConfig, setting: Setting, place: Place) -> dict[str, Any]:
    """Times a peer: plain PyTorch as ours, a library by its whole calls; see NOTES."""
    if label in (PYTORCH, COMPILED):
        if not place.is_gpu:
            raise BackendError("CUDA graphs need a GPU; on a CPU ours is plain PyTorch")
        make = partial(peers.graph_decode, compiled=label == COMPILED)
        return _time_decode(make, "padded", config, setting, place)
    if setting.target < 2:
        raise BackendError("its steps are timed from 2 target tokens on")
    there, n = (config, setting, place.device, place.dtype), setting.target
    if label == HUGGING_FACE:
        generate = peers.marian_generate(*there)
    else:
        generate = peers.ctranslate2_generate(*there, flash_attention=label == FLASH_ATTENTION)
    generate(min(WARMUP_STEPS, n))
    once = clocked(partial(generate, n), place.device)
    repeats = 1 if once > SLOW_SECONDS else place.repeats
    whole, first = (
        time_work(partial(generate, count), place.device, repeats=repeats, warmup=0)
        for count in (n, 1)
    )
    steps = Times(tuple((seconds - first.median) / (n - 1) for seconds in whole.repeats))
    return {
        "lengths": "true",
        "step_ms": steps.to_json(1e-3),
        "call_ms": whole.to_json(1e-3),
        "one_token_call_ms": first.to_json(1e-3),
        "us_per_token": {"decoder": steps.median / setting.batch * 1e6},
    }
