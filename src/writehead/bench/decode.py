"""`bench decode`: times the decoding steps of Table 2 (§4.3), beside peers and the floor.

Weights are random, or those of a run. A translation model decodes to the full length. A language
model is timed in the last steps before its cache, filled with random numbers, is full. Our times
are those of a lane of the engine, including the transfer of tokens and scores to the host.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch

from writehead import cost
from writehead.bench import peers
from writehead.bench.floor import decode_floor, timed_steps
from writehead.bench.peers import Model, Subject, random_tokens
from writehead.bench.plain_torch import PlainDecoder, check_plain
from writehead.bench.timing import Call, Times, clocked, time_work
from writehead.config import DecodeConfig
from writehead.cost import Setting
from writehead.engine.runner import Lane, Shape
from writehead.engine.scheduler import ADMIT_TOKENS
from writehead.engine.search import Options, Targets
from writehead.errors import BackendError, ConfigError
from writehead.model import TranslationModel
from writehead.ops.cpu_weights import why_not_int8

SLOW_SECONDS = 2.0  # a call that takes longer is timed once
ON_GPU = Setting(batch=1024, source=128, target=128)  # as in §4.3
ON_CPU = Setting(batch=16, source=64, target=64)  # takes seconds

# labels of the measurements in a row
OURS = {"padded": "ours, padded", "true": "ours, true lengths"}
OURS_INT8, CTRANSLATE2_INT8 = "ours, int8", "CTranslate2, int8"  # on CPUs
CTRANSLATE2, HUGGING_FACE, COMPILED = "CTranslate2", "Hugging Face", "PyTorch, torch.compile"
PEERS = (CTRANSLATE2, HUGGING_FACE, COMPILED)
GREEDY = DecodeConfig()
SAMPLED = {
    "ours, temperature 1": DecodeConfig(temperature=1.0),
    "ours, top-k 40": DecodeConfig(temperature=1.0, top_k=40),
    "ours, top-p 0.95": DecodeConfig(temperature=1.0, top_p=0.95),
}

Decode = tuple[Call, Call]  # the encoder, and all steps; each can be repeated

NOTES = [
    "Times exclude the encoder. CTranslate2 and Hugging Face: (T(n) - T(1)) / (n - 1), where T(n) "
    "is a whole call with n tokens per sentence. PyTorch reads the whole padded cache and, with "
    "beams, is compiled for the smallest and the largest batch only."
]


class Job(NamedTuple):
    """The name of a model, the model, and the workload."""

    name: str
    subject: Subject
    setting: Setting


@dataclass(frozen=True)
class Place:
    """The device to measure, the repeats and the peers; `report` is called with progress."""

    chip: cost.Chip
    device: torch.device
    dtype: torch.dtype
    repeats: int
    peers: Sequence[str]
    report: Callable[[str], None]
    sampling: bool = False  # measure sampling beside greedy search
    int8: bool = False  # measure int8 weights beside those of `dtype`

    @property
    def is_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    def free(self) -> None:
        """Frees the memory of the last measurement."""
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()


def plan(models: dict[str, Subject], settings: Sequence[Setting]) -> list[Job]:
    """Returns a job per model and setting; a language model has no source and no beams."""
    jobs = []
    for setting, (name, subject) in product(settings, models.items()):
        config = subject.config
        if config.task == "language":
            if setting.beam > 1:
                continue
            setting = replace(setting, source=0)
            if subject.run is None:
                positions = max(setting.target, config.target_positions)
                subject = Subject(replace(config, target_positions=positions))
            elif setting.target > config.target_positions:
                raise ConfigError(f"{name} has fewer positions than {setting.target} tokens")
        elif setting.target > min(config.source_positions, config.target_positions):
            raise ConfigError(f"{name} has fewer positions than {setting.target} tokens")
        check_beam(setting.beam, config.vocab_size, name)
        jobs.append(Job(name, subject, setting))
    return jobs


def check_beam(beam: int, vocab_size: int, name: object) -> None:
    """Raises ConfigError unless a model can be searched with `beam`."""
    if not 1 <= beam <= vocab_size:
        raise ConfigError(f"beam={beam} must be from 1 to {vocab_size}, the vocabulary of {name}")


def bench_decode(jobs: Sequence[Job], place: Place) -> Iterator[dict[str, Any]]:
    """Yields a row per job of a plan."""
    batches = [job.setting.batch for job in jobs]
    for job in jobs:
        setting = job.setting
        is_compiled = setting.beam == 1 or setting.batch in (min(batches), max(batches))
        chosen = [peer for peer in place.peers if is_compiled or peer != COMPILED]
        here = replace(place, peers=chosen if setting.source else ())
        yield decode_row(job, here, ("true",))


def decode_row(job: Job, place: Place, lengths: Sequence[str] = tuple(OURS)) -> dict[str, Any]:
    """Measures one model in one setting: ours, the peers and the floor, as JSON values."""
    name, subject, setting = job
    model = subject.config
    measured: dict[str, Any] = {}
    sampled = SAMPLED if place.sampling and setting.beam == 1 else ()
    labels = [*(OURS[kind] for kind in lengths), *sampled, *place.peers]
    if place.int8:
        labels += [OURS_INT8, *([CTRANSLATE2_INT8] if CTRANSLATE2 in place.peers else [])]
    for label in labels:
        place.report(f"{name}, batch {setting.batch:,}, beam {setting.beam}: {label}")
        if label in (*OURS.values(), OURS_INT8) or label in SAMPLED:
            config, int8 = SAMPLED.get(label, GREEDY), label == OURS_INT8
            padded = label == OURS["padded"]
            ours = partial(lane_search, padded=padded, config=config, int8=int8)
            reason = why_not_int8(torch.zeros(0, dtype=place.dtype)) if int8 else None
            measured[label] = {"absent": reason} if reason else _time_decode(ours, job, place)
        else:
            measured[label] = peers.attempt(partial(_time_peer, label, job, place))
        place.free()
    return {
        "preset": name,
        **({} if subject.run is None else {"run": str(subject.run)}),
        "model": model.to_json(),
        "kind": model.kind,
        "setting": asdict(setting),
        "floor": decode_floor(model, setting, place.chip),
        "measured": measured,
    }


def search_name(beam: int) -> str:
    """Returns the name of a search with `beam` hypotheses per sentence."""
    return "greedy" if beam == 1 else f"beam {beam}"


def lane_search(
    model: Model,
    setting: Setting,
    *,
    padded: bool,
    config: DecodeConfig = GREEDY,
    int8: bool = False,
) -> Decode:
    """Returns our decoder, a lane of the engine; `run` also copies the result to the host."""
    tokens, steps = random_tokens(model, setting), timed_steps(setting)
    b, m, skipped = setting.batch, tokens.shape[1], setting.target - steps
    shape = Shape(b, setting.beam, setting.source and m, setting.target, padded)
    targets = Targets(model.config.vocab_size, model.config.eos)
    lane = Lane(model.pack(int8=int8), shape, targets)
    # no sequence ends before the last step, whatever the model predicts
    fixed = replace(config, min_length=steps, max_length=steps)
    options = [Options(fixed, steps)] * b
    slots, sources = np.arange(b, dtype=np.int32), [*tokens.cpu().numpy()]
    most = max(1, ADMIT_TOKENS[model.device.type] // m)  # encoded together, as in the engine

    def start() -> None:
        if setting.source:
            for first in range(0, b, most):
                lane.encode(range(b)[first : first + most], sources[first : first + most])
        else:
            lane.cache.K.normal_()
            lane.cache.V.normal_()

    def run() -> object:
        lane.admit(range(b), options, model.config.bos, skipped)
        lane.step(slots, steps)
        return lane.collect(range(b), options).numpy()

    return start, run


def compiled_search(model: Model, setting: Setting) -> Decode:
    """Returns plain PyTorch with `torch.compile`, one CUDA graph per step."""
    assert isinstance(model, TranslationModel)
    source = random_tokens(model, setting)
    decoder = PlainDecoder(model, source, setting.target, setting.beam)
    return partial(decoder.encode, source), decoder.run


def _time_decode(
    make: Callable[[Model, Setting], Decode], job: Job, place: Place
) -> dict[str, Any]:
    """Times whole decodings back to back, and the encoder after each decoding."""
    _, subject, setting = job
    start, run = make(subject.load(place.device, place.dtype), setting)
    start()
    steps = _repeat(run, place).over(timed_steps(setting))
    result: dict[str, Any] = {"step_ms": steps.to_json(1e-3)}
    result["us_per_token"] = {"decoder": steps.median / setting.batch * 1e6}
    if setting.source:
        encoders = []
        for _ in steps.repeats:
            run()
            encoders.append(clocked(start, place.device))
        encoder = Times(tuple(encoders))
        result["encoder_ms"] = encoder.to_json(1e-3)
        tokens = setting.batch * setting.source
        result["us_per_token"]["encoder"] = encoder.median / tokens * 1e6
    return result


def _time_peer(label: str, job: Job, place: Place) -> dict[str, Any]:
    """Times a peer: PyTorch as ours, a library by its whole calls; see NOTES."""
    _, subject, setting = job
    n = setting.target
    if n < 2:
        raise BackendError("peers need at least 2 target tokens")
    if label == COMPILED:
        if not place.is_gpu:
            raise BackendError("CUDA graphs need a GPU; on a CPU, ours is plain PyTorch")
        check_plain(subject.config)
        return _time_decode(compiled_search, job, place)
    if label == HUGGING_FACE:
        generate = peers.hugging_face_generate(subject, setting, place.device, place.dtype)
    else:
        kind = "int8" if label == CTRANSLATE2_INT8 else None
        generate = peers.ctranslate2_generate(subject, setting, place.device, place.dtype, kind)
    generate(1)  # initializes the library
    whole, first = (_repeat(partial(generate, count), place) for count in (n, 1))
    steps = Times(tuple((seconds - first.median) / (n - 1) for seconds in whole.repeats))
    calls = {"call_ms": whole.to_json(1e-3), "one_token_call_ms": first.to_json(1e-3)}
    return {"step_ms": steps.to_json(1e-3), **calls}


def _repeat(work: Call, place: Place) -> Times:
    """Times work after a warm-up; only once if it is slow."""
    repeats = 1 if clocked(work, place.device) > SLOW_SECONDS else place.repeats
    return time_work(work, place.device, repeats=repeats)
