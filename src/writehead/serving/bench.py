"""Runs `bench serve`: starts a server if a run is given, and compares it with offline decoding."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from writehead.bench.record import run_facts
from writehead.bench.serve import (
    APIS,
    OPENAI,
    OURS,
    Load,
    Result,
    Target,
    at_equal_p95,
    check_server,
    find_model,
    goodput,
    measure,
    wait_until_ready,
)
from writehead.bench.static_batching import BATCHINGS, CONTINUOUS, STATIC
from writehead.config import DecodeConfig
from writehead.data.outputs import Output
from writehead.engine import Engine
from writehead.errors import ConfigError, nearest, shown
from writehead.model import TranslationModel
from writehead.runs.bundled import bundled_run, name_of
from writehead.serving.child import ChildOptions, child_server
from writehead.serving.models import Served, pair_of
from writehead.serving.run import limit_batch
from writehead.util.progress import Reporter

SERVER = "server"  # the batching of a server that somebody else has started
WARMUP = Load(seconds=3.0, concurrency=8)
# in low precision, offline decoding is repeated for this many texts, in batches this much smaller
NEAR_TIES_TEXTS, NEAR_TIES_FACTOR = 2000, 32


@dataclass(frozen=True, kw_only=True)
class ServeJob:
    """A URL or a run, the requests, how they arrive, and how a run is loaded and batched."""

    target: str | None  # None: the bundled model
    requests: Target
    loads: Sequence[Load]
    texts: Sequence[str]
    size: int  # texts per request
    batchings: Sequence[str]
    goodput_ms: float
    device: str
    dtype: str | None
    threads: int | None
    max_rows: int | None
    check: bool

    def __post_init__(self) -> None:
        for name, known in (
            (self.requests.api, APIS),
            *((one, BATCHINGS) for one in self.batchings),
        ):
            if name not in known:
                raise ConfigError(f"unknown value {shown(name)}; {nearest(name, known)}")
        if self.run is None and [*self.batchings] != [CONTINUOUS]:
            raise ConfigError("a server that already runs has its own batching; pass a run instead")

    @property
    def run(self) -> Path | None:
        """The run to serve; None if the target is a URL."""
        if self.target is None:
            return bundled_run()
        return None if self.target.startswith(("http://", "https://")) else Path(self.target)


def bench_serve(job: ServeJob, reporter: Reporter) -> dict[str, Any]:
    """Measures every load of every batching."""
    run = job.run
    result: dict[str, Any] = {"target": job.target if run is None else name_of(run)}
    if run is not None:
        result |= run_facts(run)
    result["texts_per_request"] = job.size
    result |= {"api": job.requests.api, "beam": job.requests.beam, "stream": job.requests.stream}
    rows: list[dict[str, Any]] = []
    for batching in [SERVER] if run is None else job.batchings:
        measured = _measure(job, batching, reporter)
        for row in measured:
            results: list[Result] = row.pop("results")
            row["goodput"] = goodput(results, row["seconds"], job.goodput_ms)
            if run is not None and job.check and batching != "ctranslate2":
                reporter.say(f"{batching}: decoding the same requests offline")
                row["offline"] = _offline(job, run, results)
            rows.append({"batching": batching, **row})
    result["rows"] = rows
    if STATIC in job.batchings and len(job.batchings) > 1:
        result["at_equal_p95"] = at_equal_p95(rows, STATIC)
        for one in result["at_equal_p95"]:
            for name, ratio in one["ratio"].items():
                rate = "a higher p95 at every load"
                if ratio is not None:
                    rate = f"{ratio:.2f} times the requests/s of {STATIC}"
                reporter.say(f"at a p95 of {one['p95_ms']:,.0f} ms: {name} has {rate}")
    return result


def _measure(job: ServeJob, batching: str, reporter: Reporter) -> list[dict[str, Any]]:
    rows = []
    with _server(job, batching) as url:
        target = replace(job.requests, url=url)
        asyncio.run(wait_until_ready(url))
        if target.api == OPENAI and target.model is None:
            target = replace(target, model=asyncio.run(find_model(url, target.key)))
        check_server(target, job.texts, job.size)
        measure(target, WARMUP, job.texts, lambda seconds: None, job.size)
        for load in job.loads:
            name = ", ".join(
                [f"{batching}: {load.concurrency or 'any number of'} clients"]
                + ([] if load.rate is None else [f"{load.rate:g} requests/s"])
            )
            with reporter.stage(name, int(load.seconds)) as report:
                rows.append(measure(target, load, job.texts, report, job.size))
    return rows


@contextmanager
def _server(job: ServeJob, batching: str) -> Iterator[str]:
    if job.run is None:
        assert job.target is not None
        yield job.target.rstrip("/")
        return
    source, target = job.requests.source, job.requests.target
    pair = (source, target) if source and target else None
    options = ChildOptions(
        job.run, job.device, job.dtype, job.threads, batching, job.max_rows, pair
    )
    with child_server(options) as url:
        yield url


def _offline(job: ServeJob, run: Path, results: Sequence[Result]) -> dict[str, Any]:
    """Decodes the answered requests in one call; returns how many answers are equal, and speeds.

    In low precision, also returns how many texts are decoded alike offline in smaller batches.
    """
    engine = Engine.load(run, job.device, job.dtype)
    limit_batch(engine, job.max_rows)  # as the server does
    done = [one for one in results if one.error is None]
    texts = [text for one in done for text in one.texts]
    answers = [answer for one in done for answer in one.answers]
    decode = _decoder(job, run, engine)
    list(decode(texts[:8]))
    start = time.perf_counter()
    outputs = [output.text for output in decode(texts)]
    seconds = time.perf_counter() - start
    wall = max(one.ended for one in results) - min(one.started for one in results)
    found: dict[str, Any] = {
        "seconds": seconds,
        "texts_per_second": len(texts) / seconds,
        "throughput_ratio": seconds / wall,
        "equal": sum(map(str.__eq__, outputs, answers)),
        "compared": len(texts),
    }
    if engine.model.dtype != torch.float32:
        # rounding, which depends on the batch size, decides between almost equally likely tokens
        engine.scheduler.max_rows = max(1, engine.scheduler.max_rows // NEAR_TIES_FACTOR)
        again = [output.text for output in decode(texts[:NEAR_TIES_TEXTS])]
        equal = sum(map(str.__eq__, outputs, again))
        found["smaller_batches"] = {"equal": equal, "compared": len(again)}
    return found


def _decoder(job: ServeJob, run: Path, engine: Engine) -> Callable[[list[str]], Iterator[Output]]:
    """Returns the call that decodes texts as the requests of a job do."""
    if not isinstance(engine.model, TranslationModel):
        most = min(job.requests.max_tokens, engine.model.config.target_positions)
        return partial(engine.generate, options=DecodeConfig(max_length=most))
    beam, name = job.requests.beam if job.requests.api == OURS else None, run.resolve().name
    codes = Served(name, engine, pair_of(name)).codes(job.requests.source, job.requests.target)
    source, target = (codes or {}).get("source_lang"), (codes or {}).get("target_lang")
    options = DecodeConfig(beam=beam)
    return partial(engine.translate, options=options, source_lang=source, target_lang=target)
