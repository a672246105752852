"""`bench translate`: a text file end to end, from loading the run to the last translation."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from writehead.bench.record import run_facts
from writehead.bench.timing import Times, clocked
from writehead.config import DecodeConfig
from writehead.decoding import Batching, Engine
from writehead.errors import ConfigError, DataError
from writehead.model.bundled import name_of
from writehead.util.devices import wait_for

OURS, PLAIN = "ours", "plain PyTorch"
ALPHA = 0.6  # as in §4.2


@dataclass(frozen=True)
class Job:
    """What to translate with what, how often, and whom to tell."""

    run: Path
    lines: list[str]
    device: torch.device
    dtype: torch.dtype
    beams: tuple[int, ...]
    repeats: int
    batching: Batching
    tell: Callable[[str], None]

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ConfigError(f"{self.repeats} repeats cannot be timed; ask for 1 or more")
        if not any(line.strip() for line in self.lines):
            raise DataError("there is no line to translate; give a file with text in it")


def bench_translate(job: Job) -> dict[str, Any]:
    """Seconds to load and to the first sentence, and sentences and tokens a second after that.

    Ours is the engine as it is; beside it stands the same engine without graphs and kernels of
    ours, which on a CPU is what it is anyway.
    """
    facts = run_facts(job.run)
    engines: dict[str, Any] = {}
    texts: dict[str, dict[str, list[str]]] = {}
    for name in (OURS, PLAIN) if job.device.type == "cuda" else (OURS,):
        engines[name], texts[name] = _measure(job, name)
        if job.device.type == "cuda":
            torch.cuda.empty_cache()
    result: dict[str, Any] = {
        "run": name_of(job.run),
        **facts,
        "sentences": len(job.lines),
        "dtype": str(job.dtype).removeprefix("torch."),
        "batch_tokens": job.batching.budget(job.device.type),
        "engines": engines,
    }
    if PLAIN in texts:
        result["same_text"] = {
            search: sum(map(str.__eq__, found, texts[PLAIN][search]))
            for search, found in texts[OURS].items()
        }
    return result


def _load(job: Job, name: str) -> Engine:
    if name == OURS:
        return Engine.load(job.run, job.device, job.dtype, batching=job.batching)
    return Engine.load(job.run, job.device, job.dtype, batching=job.batching, graphs=False)


def _measure(job: Job, name: str) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """What one engine takes, and what it says, by search."""
    job.tell(f"{name}: loading {job.run}")
    began = time.perf_counter()
    engine = _load(job, name)
    wait_for(job.device)
    loaded = time.perf_counter() - began
    job.tell(f"{name}: the first sentence")
    line = next(line for line in job.lines if line.strip())
    list(engine.translate([line], _options(job.beams[-1])))
    first = time.perf_counter() - began
    searches, texts = {}, {}
    for beam in job.beams:
        search = "greedy" if beam == 1 else f"beam-{beam}"
        told = f"{name}: {len(job.lines):,} lines, {search}"
        searches[search], texts[search] = _time_search(job, engine, beam, told)
    return {"load_s": loaded, "first_sentence_s": first, "searches": searches}, texts


def _time_search(
    job: Job, engine: Engine, beam: int, told: str
) -> tuple[dict[str, Any], list[str]]:
    """The whole file once, which may compile and capture, and then as often as asked."""
    texts: list[str] = []

    def work() -> None:
        texts[:] = [output.text for output in engine.translate(job.lines, _options(beam))]

    def timed(number: int) -> float:
        job.tell(f"{told}, pass {number} of {job.repeats + 1}")
        return clocked(work, job.device)

    once = timed(1)
    times = Times(tuple(timed(number) for number in range(2, job.repeats + 2)))
    tokens = sum(len(engine.tokenizer.encode(text)) + 1 for text in texts)
    return {
        "first_pass_s": once,
        "seconds": times.to_json(1.0),
        "tokens": tokens,
        "sentences_per_second": len(job.lines) / times.median,
        "tokens_per_second": tokens / times.median,
    }, list(texts)


def _options(beam: int) -> DecodeConfig:
    return DecodeConfig(beam=beam, alpha=ALPHA)
