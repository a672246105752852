"""`bench decode`: §4.3 and Table 2, the time of a decoder step in whole decodings.

A time is that of a whole decoding between two waits for the device, the host's part included,
over its steps; the encoder is timed apart. Weights are random and no sentence ends early. On a
GPU ours is `GraphDecoder`, with its looks at what still grows and with reading tokens and scores
back; on a CPU it is the engine's plain path there.
"""

import dataclasses
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from writehead import cost
from writehead.bench.floor import decode_floor
from writehead.bench.peers import (
    Decode,
    Model,
    graph_decode,
    marian_decode,
    plain_decode,
    random_source,
    search_config,
    tried,
    why_not_marian,
)
from writehead.bench.timing import Times, clocked, time_work
from writehead.config import ModelConfig
from writehead.cost import Setting
from writehead.decoding.search import Constraints, Hypothesis
from writehead.errors import BackendError, ConfigError
from writehead.model import TranslationModel, make_model

SLOW = 3.0  # seconds of a decoding from which on it is not repeated
LONG = 0.75  # from which on it is not repeated for the sake of the encoder behind it
LENGTHS = ("padded", "true")
ON_CPU = Setting(batch=16, source=64, target=64)  # what is decoded there in seconds
# the names under which a row has its measurements
OURS = {"padded": "ours, padded", "true": "ours, true lengths"}
GRAPH, BEAM_GRAPH, FREE_GRAPH = "PyTorch", "PyTorch, beam search", "PyTorch, no reordering"
COMPILED = ", compiled"  # after one of these
MARIAN = "Hugging Face"
BACKENDS = ("sdpa", "eager")  # of attention in plain PyTorch: the quicker one counts

Make = Callable[[Model], Decode]


@dataclass(frozen=True)
class Place:
    """Where to measure, beside what, how often, and whom to tell."""

    chip: cost.Chip
    device: torch.device
    dtype: torch.dtype
    repeats: int
    peers: bool
    tell: Callable[[str], None]
    compiled: bool = False  # whether plain PyTorch is measured under torch.compile too

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ConfigError(f"{self.repeats} repeats cannot be timed; ask for 1 or more")

    @property
    def is_gpu(self) -> bool:
        """Whether there are graphs."""
        return self.device.type == "cuda"

    def free(self) -> None:
        """Gives back what the last measurement left."""
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()


def fitted(config: ModelConfig, vocab_size: int | None, context: int = 0) -> ModelConfig:
    """A config with another vocabulary, and with positions for a context past its own."""
    return dataclasses.replace(
        config,
        vocab_size=vocab_size or config.vocab_size,
        target_positions=max(context, config.target_positions),
    )


def build(config: ModelConfig, place: Place, backend: str = "auto") -> Model:
    """A model with random weights, ready to decode; the same ones each time."""
    torch.manual_seed(0)
    with torch.device(place.device):
        model = make_model(config, backend)
    return model.to(device=place.device, dtype=place.dtype).eval()


def translation_row(
    name: str,
    config: ModelConfig,
    setting: Setting,
    place: Place,
    *,
    lengths: tuple[str, ...] = LENGTHS,
    marian: bool = True,
) -> dict[str, Any]:
    """One model in one setting: ours, its peers and the floor, as JSON values."""
    floor = decode_floor(config, setting, place.chip)
    found: dict[str, Any] = {}

    def measure(label: str, kind: str, make: Make, backend: str = "auto") -> None:
        place.tell(f"{name}, batch {setting.batch:,}, beam {setting.beam}: {label}")

        def timed() -> dict[str, Any]:
            return _timed(make(build(config, place, backend)), setting, floor, kind, place)

        found[label] = timed() if label in OURS.values() else tried(timed)
        place.free()

    for kind in lengths:
        ours = graph_search if place.is_gpu else plain_decode
        measure(OURS[kind], kind, partial(ours, setting=setting, padded=kind == "padded"))
    for label, reorders in _graph_peers(setting, place):
        for compiled in (False, True) if place.compiled else (False,):
            make = partial(graph_decode, setting=setting, reorders=reorders, compiled=compiled)
            for backend in BACKENDS:
                measure(f"{label}{COMPILED * compiled}, {backend}", "padded", make, backend)
    if place.peers and not place.is_gpu:
        found[GRAPH] = {"absent": "on a CPU it is what ours is"}
    if place.peers and marian and (sentence := why_not_marian(config)):
        found[MARIAN] = {"absent": sentence}
    elif place.peers and marian:
        # its cache grows with what is there
        measure(MARIAN, "true", partial(marian_decode, setting=setting))
    return {
        "preset": name,
        "model": config.to_json(),
        "kind": config.kind,
        "setting": dataclasses.asdict(setting),
        "floor": floor,
        "measured": found,
    }


def _graph_peers(setting: Setting, place: Place) -> tuple[tuple[str, bool], ...]:
    """Labels of plain PyTorch, and whether it reorders rows; on a CPU that is what ours is."""
    if not (place.peers and place.is_gpu):
        return ()
    return ((GRAPH, False),) if setting.beam == 1 else ((BEAM_GRAPH, True), (FREE_GRAPH, False))


def quickest(row: dict[str, Any], label: str) -> dict[str, Any] | None:
    """The measurement under a label, or the quickest of those that add a backend to it."""
    timed = [
        one
        for name, one in row["measured"].items()
        if (name == label or name.removeprefix(f"{label}, ") in BACKENDS) and "step_ms" in one
    ]
    return min(timed, key=lambda one: float(one["step_ms"]["median"])) if timed else None


def graph_search(model: Model, setting: Setting, *, padded: bool) -> Decode:
    """Ours on a GPU: every step one launch; `run` answers when the host has what was found.

    That is as arrays, of which hypotheses can be made.
    """
    from writehead.decoding.captured import Captured
    from writehead.decoding.graphs import GraphDecoder  # brings Triton
    from writehead.model.fused import why_not

    if sentence := why_not(model):
        raise BackendError(sentence)
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

    def whole() -> None:
        decoder.search(source, lengths, setting.target, config, eos=eos)

    how = "GraphDecoder: one captured graph a step, tokens and scores read back"
    return Decode(torch.no_grad()(start), run, setting.target, how, whole)


def _timed(
    decode: Decode, setting: Setting, floor: dict[str, Any], lengths: str, place: Place
) -> dict[str, Any]:
    """Milliseconds of the encoder and of a mean step, and what share of the time the floor is.

    Decodings follow one another: right behind an encoder, which takes the most power, a chip is
    slower for a while. An encoder follows a decoding, as it does in use; encoders that follow one
    another are timed too.
    """
    decode.start()
    once = clocked(decode.run, place.device)
    if place.is_gpu:  # what was captured, and tried for that, is not what a decoding takes
        torch.cuda.reset_peak_memory_stats(place.device)
    repeats, turns = (1 if once > limit else place.repeats for limit in (SLOW, LONG))
    step = time_work(decode.run, place.device, repeats=repeats, warmup=0).over(decode.steps)
    encoders = time_work(decode.start, place.device, repeats=repeats, warmup=0)
    encoder = Times(tuple(_behind(decode, place.device) for _ in range(turns)))
    least = floor["step_ms"][lengths]
    result: dict[str, Any] = {
        "how": decode.how,
        "lengths": lengths,
        "encoder_ms": encoder.to_json(1e-3),
        "encoder_after_encoder_ms": encoders.to_json(1e-3),
        "step_ms": step.to_json(1e-3),
        "us_per_token": {
            "encoder": encoder.median / (setting.batch * setting.source) * 1e6,
            "decoder": step.median / setting.batch * 1e6,
        },
        "floor_step_ms": least,
        "share_of_floor": least / (step.median * 1e3),
        "peak_memory_bytes": None,
    }
    if place.is_gpu:
        result["peak_memory_bytes"] = torch.cuda.max_memory_allocated(place.device)
    if decode.whole is not None:
        whole = time_work(decode.whole, place.device, repeats=repeats)
        result["search_ms"] = whole.to_json(1e-3)
    return result


def _behind(decode: Decode, device: torch.device) -> float:
    """Seconds of an encoder that comes after a decoding."""
    decode.run()
    return clocked(decode.start, device)


def batch_sweep(
    models: dict[str, ModelConfig], batches: list[int], source: int, target: int, place: Place
) -> list[dict[str, Any]]:
    """Greedy search by true length at each batch, without Hugging Face: what a plot needs."""
    return [
        translation_row(
            name,
            config,
            Setting(batch, source, target, element=place.dtype.itemsize),
            place,
            lengths=("true",),
            marian=False,
        )
        for name, config in models.items()
        for batch in batches
    ]
