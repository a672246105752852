"""`bench translate`: a text file end to end, from loading the run to the last translation."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch

from writehead.bench.peers import attempt, load_translator
from writehead.bench.record import run_facts
from writehead.bench.timing import Times, clocked
from writehead.config import DecodeConfig
from writehead.decoding import Batching, Engine
from writehead.decoding.devices import wait_for
from writehead.errors import ConfigError, DataError
from writehead.interop.ctranslate2 import export_ctranslate2
from writehead.model import TranslationModel
from writehead.model.bundled import name_of

OURS, PLAIN, FLOAT32, CTRANSLATE2 = "ours", "plain PyTorch", "ours, float32", "CTranslate2"
ALPHA = 0.6  # as in §4.2


@dataclass(frozen=True)
class Job:
    """What to translate, how, and how often; `report` is called with progress."""

    run: Path
    lines: list[str]
    device: torch.device
    dtype: torch.dtype
    beams: tuple[int, ...]
    repeats: int
    batching: Batching
    peers: bool
    report: Callable[[str], None]

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ConfigError(f"repeats={self.repeats} must be at least 1")
        if not any(line.strip() for line in self.lines):
            raise DataError("there is no line to translate; give a file with text in it")


class System(Protocol):
    """Whatever translates lines."""

    def translate(self, lines: list[str], beam: int) -> list[str]:
        """The translations of `lines`."""


class _Ours:
    """Our engine, with its graphs and kernels or by plain PyTorch."""

    def __init__(self, job: Job, dtype: torch.dtype, *, graphs: bool = True) -> None:
        self.engine = Engine.load(job.run, job.device, dtype, batching=job.batching, graphs=graphs)

    def translate(self, lines: list[str], beam: int) -> list[str]:
        outputs = self.engine.translate(lines, DecodeConfig(beam=beam, alpha=ALPHA))
        return [output.text for output in outputs]


class _CTranslate2:
    """CTranslate2 with the weights of the run, and with our tokenizer."""

    def __init__(self, job: Job) -> None:
        engine = Engine.load(job.run, "cpu", torch.float32)
        assert isinstance(engine.model, TranslationModel)
        self._tokenizer, config = engine.tokenizer, engine.model.config
        self._limits = config.source_positions - 1, config.target_positions
        self._batch_tokens = job.batching.budget(job.device.type)
        tokens = [str(i) for i in range(self._tokenizer.vocab_size)]
        with TemporaryDirectory(prefix="writehead-ctranslate2-") as folder:
            model = Path(folder) / "model"
            dtype = str(job.dtype).removeprefix("torch.")
            export_ctranslate2(engine.model, tokens, model, dtype=dtype)
            self._translator = load_translator(model, job.device, job.dtype)

    def translate(self, lines: list[str], beam: int) -> list[str]:
        longest, max_length = self._limits
        sources = [self._tokenizer.encode(line)[:longest] for line in lines]
        results = self._translator.translate_batch(
            [[str(token) for token in source] for source in sources if source],
            beam_size=beam,
            length_penalty=ALPHA,
            max_decoding_length=max_length,
            max_batch_size=max(1, self._batch_tokens // beam),
            batch_type="tokens",
        )
        found = iter(results)
        return [
            self._tokenizer.decode([int(token) for token in next(found).hypotheses[0]])
            if source
            else ""
            for source in sources
        ]


def bench_translate(job: Job) -> dict[str, Any]:
    """Seconds to load and to the first sentence, then sentences and tokens per second.

    `equal_lines` counts, by system and search, the translations that are equal to ours; "ours,
    float32" stands there if ours runs in another type.
    """
    engines: dict[str, Any] = {}
    texts: dict[str, dict[str, list[str]]] = {}
    for name, load in _systems(job).items():

        def measure(name: str = name, load: Callable[[], System] = load) -> dict[str, Any]:
            measured, texts[name] = _measure(job, name, load)
            return measured

        engines[name] = attempt(measure) if name == CTRANSLATE2 else measure()
        if job.device.type == "cuda":
            torch.cuda.empty_cache()
    equal = {
        name: {
            search: sum(map(str.__eq__, lines, texts[OURS][search]))
            for search, lines in found.items()
        }
        for name, found in texts.items()
        if name != OURS
    }
    return {
        "run": name_of(job.run),
        **run_facts(job.run),
        "sentences": len(job.lines),
        "dtype": str(job.dtype).removeprefix("torch."),
        "batch_tokens": job.batching.budget(job.device.type),
        "engines": engines,
        "equal_lines": equal,
    }


def _systems(job: Job) -> dict[str, Callable[[], System]]:
    systems: dict[str, Callable[[], System]] = {OURS: lambda: _Ours(job, job.dtype)}
    if job.dtype != torch.float32:
        systems[FLOAT32] = lambda: _Ours(job, torch.float32)
    if job.device.type == "cuda":  # on a CPU ours is plain PyTorch
        systems[PLAIN] = lambda: _Ours(job, job.dtype, graphs=False)
    if job.peers:
        systems[CTRANSLATE2] = lambda: _CTranslate2(job)
    return systems


def _measure(
    job: Job, name: str, load: Callable[[], System]
) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """The times of one system, and its translations by search."""
    job.report(f"{name}: loading {job.run}")
    began = time.perf_counter()
    system = load()
    wait_for(job.device)
    loaded = time.perf_counter() - began
    job.report(f"{name}: the first sentence")
    system.translate([next(line for line in job.lines if line.strip())], job.beams[-1])
    first = time.perf_counter() - began
    tokenizer = Engine.load(job.run, "cpu").tokenizer
    searches, texts = {}, {}
    for beam in job.beams:
        search = "greedy" if beam == 1 else f"beam-{beam}"

        def translate(beam: int = beam, search: str = search) -> None:
            texts[search] = system.translate(job.lines, beam)

        times = []
        for number in range(1, job.repeats + 2):
            passes = f"pass {number} of {job.repeats + 1}"
            job.report(f"{name}: {len(job.lines):,} lines, {search}, {passes}")
            times.append(clocked(translate, job.device))
        repeats = Times(tuple(times[1:]))  # the first pass may compile and capture
        tokens = sum(len(tokenizer.encode(text)) + 1 for text in texts[search])
        searches[search] = {
            "first_pass_s": times[0],
            "seconds": repeats.to_json(1.0),
            "tokens": tokens,
            "sentences_per_second": len(job.lines) / repeats.median,
            "tokens_per_second": tokens / repeats.median,
        }
    return {"load_s": loaded, "first_sentence_s": first, "searches": searches}, texts
