"""`bench translate`: times a text file end to end, from loading the run to the last line."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

from writehead.bench.decode import CTRANSLATE2, check_beam, search_name
from writehead.bench.peers import attempt, load_translator
from writehead.bench.record import run_facts
from writehead.bench.timing import clocked, idle_fraction, time_work
from writehead.bulk.cluster import connected
from writehead.bulk.translator import BatchTranslator
from writehead.config import DecodeConfig
from writehead.data.tokenizer import load_tokenizer
from writehead.engine import Engine
from writehead.engine.runner import Lane
from writehead.engine.scheduler import Scheduler, Stats
from writehead.errors import BackendError, DataError
from writehead.interop.ctranslate2 import Vocabulary, export_ctranslate2
from writehead.interop.pretrained import read_config
from writehead.model import TranslationModel
from writehead.ops.cpu_weights import why_not_int8
from writehead.runs.bundled import name_of
from writehead.training.evaluate import bleu, load_sacrebleu
from writehead.util.devices import wait_for
from writehead.util.garbage import frozen_objects

OURS, FLOAT32, OURS_INT8, INT8 = "ours", "ours, float32", "ours, int8", f"{CTRANSLATE2}, int8"
RAY_DATA = "ours, Ray Data"
ALPHA = 0.6  # as in §4.2
ONE_LINE = 10  # repeats of the translation of one line
SAMPLE = 9_000  # lines to translate in float32 or to profile
PEER_BATCH_TOKENS = {"cpu": 16_384, "cuda": 131_072}
NOTES = [
    "CTranslate2 divides by length^0.6 in beam search, ours by ((5 + length) / 6)^0.6. Ours is "
    "at most 50 tokens longer than the source, CTranslate2 as long as the model allows."
]

Translate = Callable[[list[str], int], list[str]]  # arguments: lines and beam


class System(NamedTuple):
    """A system to time; `scheduler` is None for other libraries."""

    translate: Translate
    scheduler: Scheduler | None = None


@dataclass(frozen=True)
class TranslateJob:
    """A run, the lines to translate, their references, and how to time the translation."""

    run: Path
    lines: list[str]
    device: torch.device
    dtype: torch.dtype
    beams: tuple[int, ...]
    repeats: int
    peers: bool
    references: list[str] | None = None
    source_lang: str | None = None
    target_lang: str | None = None
    map_batches: int | None = None  # lines per batch; None: do not measure Ray Data

    def __post_init__(self) -> None:
        for beam in self.beams:
            check_beam(beam, read_config(self.run).vocab_size, self.run)
        if not any(line.strip() for line in self.lines):
            raise DataError("there is no line to translate; use a file with text in it")
        if self.map_batches is not None and self.map_batches >= len(self.lines):
            raise DataError(
                f"{len(self.lines):,} lines fit in one batch of {self.map_batches:,}, but the "
                f"first batch is not timed; use smaller batches"
            )
        if self.references is not None:
            load_sacrebleu()  # fails now, not after minutes of decoding
            if len(self.references) != len(self.lines):
                raise DataError(
                    f"{len(self.lines)} lines have {len(self.references)} references; pass one "
                    f"for each"
                )


def bench_translate(job: TranslateJob, report: Callable[[str], None]) -> dict[str, Any]:
    """Measures load time, time to the first sentence, and sentences and tokens per second.

    Our result adds the time of a single line, and statistics of the scheduler and the device.
    `equal_lines` counts the translations of each system that equal ours; references add `bleu`.
    `start_up` times new processes.
    Also measures our own decoder with int8 weights on a CPU, and in Ray Data if the job has
    `map_batches`. If the dtype is not float32, also counts how many of the first `SAMPLE` lines
    have the same translation in float32.
    """
    systems: dict[str, Callable[[], System]] = {OURS: partial(_load_ours, job, job.dtype)}
    if job.device.type == "cpu":
        systems[OURS_INT8] = partial(_load_ours, job, torch.float32, "int8")
    if job.peers:
        dtype = str(job.dtype).removeprefix("torch.")
        systems[CTRANSLATE2] = partial(_load_ctranslate2, job, dtype)
        systems[INT8] = partial(_load_ctranslate2, job, f"int8_{dtype}")
    engines: dict[str, Any] = {}
    ours: dict[str, list[str]] = {}
    for name, load in systems.items():
        report(f"{name}: {len(job.lines):,} lines of text")
        measure = partial(_measure, job, load, ours)
        if name == OURS_INT8 and (reason := why_not_int8(torch.zeros(0))):
            engines[name] = {"absent": reason}
        else:
            engines[name] = attempt(measure) if name in (CTRANSLATE2, INT8) else measure()
    if job.dtype != torch.float32:
        report(f"{FLOAT32}: {len(job.lines[:SAMPLE]):,} lines of text")
        engines[FLOAT32] = _compare_with_float32(job, ours)
    if job.map_batches is not None:
        report(f"{RAY_DATA}: {len(job.lines):,} lines of text")
        engines[RAY_DATA] = measure_ray_data(job, job.map_batches, ours)
    return {
        "run": name_of(job.run),
        **run_facts(job.run),
        "sentences": len(job.lines),
        "start_up": _start_up(job),
        "engines": engines,
        "notes": NOTES if job.peers else [],
    }


def _start_up(job: TranslateJob) -> dict[str, float]:
    """Returns the seconds of a new process that imports PyTorch, imports writehead, or translates.

    Two processes translate one line: the first has an empty cache of compiled kernels.
    """
    line, device = next(line for line in job.lines if line.strip()), str(job.device)
    arguments = ["-m", "writehead", "translate", str(job.run), "--device", device]
    for option, value in (("--source-lang", job.source_lang), ("--target-lang", job.target_lang)):
        arguments += [] if value is None else [option, value]
    with TemporaryDirectory(prefix="writehead-kernels-") as folder:

        def seconds(*arguments: str) -> float:
            environment = os.environ | {"TRITON_CACHE_DIR": folder}
            command = [sys.executable, *arguments]
            options: dict[str, Any] = {"input": line, "text": True, "encoding": "utf-8"}
            start = time.perf_counter()
            done = subprocess.run(command, env=environment, capture_output=True, **options)
            if done.returncode:
                raise BackendError(f"a new process failed: {done.stderr.strip()[-300:]}")
            return time.perf_counter() - start

        seconds("-c", "import torch")  # reads its files into the page cache
        return {
            "import_torch_s": seconds("-c", "import torch"),
            "import_writehead_s": seconds("-c", "import writehead.engine"),
            "empty_cache_s": seconds(*arguments),
            "filled_cache_s": seconds(*arguments),
        }


def _load_ours(job: TranslateJob, dtype: torch.dtype, quantize: str = "none") -> System:
    engine = Engine.load(job.run, job.device, dtype, quantize=quantize)

    def translate(lines: list[str], beam: int) -> list[str]:
        options = DecodeConfig(beam=beam, alpha=ALPHA)
        outputs = engine.translate(
            lines, options, source_lang=job.source_lang, target_lang=job.target_lang
        )
        return [output.text for output in outputs]

    return System(translate, engine.scheduler)


def _load_ctranslate2(job: TranslateJob, quantization: str) -> System:
    """Loads CTranslate2 with the run's weights and tokenizer; its tokens are our ids as text."""
    engine = Engine.load(job.run, "cpu", torch.float32)
    assert isinstance(engine.model, TranslationModel)
    tokenizer, config = engine.tokenizer, engine.model.config
    frame = tokenizer.frame(job.source_lang, job.target_lang)
    options: dict[str, Any] = {"quantization": quantization, "add_source_eos": False}
    with TemporaryDirectory(prefix="writehead-ctranslate2-") as folder:
        vocabulary = Vocabulary.of(tokenizer, ids=True)
        export_ctranslate2(engine.model, vocabulary, Path(folder) / "model", **options)
        translator = load_translator(folder, job.device, quantization)

    def translate(lines: list[str], beam: int) -> list[str]:
        limit = config.source_positions - len(frame.before) - len(frame.after)
        encoded = [tokenizer.encode(line)[:limit] for line in lines]
        sources = [[*frame.before, *source, *frame.after] for source in encoded]
        results = translator.translate_batch(
            [[str(token) for token in source] for source in sources],
            target_prefix=[[str(token) for token in frame.forced]] * len(lines),
            beam_size=beam,
            length_penalty=ALPHA,
            max_decoding_length=config.target_positions,
            max_batch_size=max(1, PEER_BATCH_TOKENS[job.device.type] // beam),
            batch_type="tokens",
        )
        texts = [[int(token) for token in result.hypotheses[0]] for result in results]
        return [
            tokenizer.decode(text) if source else ""
            for text, source in zip(texts, encoded, strict=True)
        ]

    return System(translate)


def _measure(
    job: TranslateJob, load: Callable[[], System], ours: dict[str, list[str]]
) -> dict[str, Any]:
    """Times one system; the first system that is timed stores its translations in `ours`."""
    start = time.perf_counter()
    translate, scheduler = load()
    wait_for(job.device)
    loaded = time.perf_counter() - start
    one_line = [next(line for line in job.lines if line.strip())]
    translate(one_line, job.beams[-1])
    result: dict[str, Any] = {"load_s": loaded, "first_sentence_s": time.perf_counter() - start}
    tokenizer, result["searches"] = load_tokenizer(job.run).target, {}
    for beam in job.beams:
        search, texts = search_name(beam).replace(" ", "-"), translate(job.lines, beam)
        work = partial(translate, job.lines, beam)
        stats = Stats()
        if scheduler is not None:
            scheduler.stats = stats
        with frozen_objects():  # as in `writehead translate`
            times = time_work(work, job.device, repeats=job.repeats)
        tokens = sum(len(tokenizer.encode(text)) + 1 for text in texts)
        result["searches"][search] = {
            "seconds": times.to_json(1.0),
            "tokens": tokens,
            "sentences_per_second": len(job.lines) / times.median,
            "tokens_per_second": tokens / times.median,
            "equal_lines": sum(map(str.__eq__, texts, ours.setdefault(search, texts))),
        }
        if job.references is not None:
            result["searches"][search]["bleu"] = bleu(texts, job.references)
        if scheduler is not None:
            scheduler.stats = Stats()
            alone = time_work(partial(translate, one_line, beam), job.device, repeats=ONE_LINE)
            result["searches"][search] |= {
                "one_line_ms": alone.to_json(1e-3),
                **_utilisation(stats, translate, job, beam),
            }
    return result


def _compare_with_float32(job: TranslateJob, ours: dict[str, list[str]]) -> dict[str, Any]:
    """Counts how many of the first `SAMPLE` lines have the same translation in float32."""
    lines, searches = job.lines[:SAMPLE], {}
    translate, _ = _load_ours(job, torch.float32)
    for beam in job.beams:
        search = search_name(beam).replace(" ", "-")
        equal = sum(map(str.__eq__, translate(lines, beam), ours[search]))
        searches[search] = {"lines": len(lines), "equal_lines": equal}
    return {"searches": searches}


def _utilisation(
    stats: Stats, translate: Translate, job: TranslateJob, beam: int
) -> dict[str, Any]:
    """Returns the steps of one pass, the sequences in them, and how long a GPU is idle.

    `step_share` is the time of the steps alone, as a fraction of the whole pass.
    """
    figures: dict[str, Any] = {
        "steps": stats.steps // job.repeats,
        "rows_per_step": stats.rows / max(stats.steps, 1),
        "occupancy": stats.loaded_rows / stats.loaded_slots if stats.loaded_slots else 1.0,
    }
    work = partial(translate, job.lines, beam)
    with frozen_objects(), step_clock(job.device) as step_seconds:
        seconds = clocked(work, job.device)
    figures["step_share"] = step_seconds() / seconds
    if job.device.type == "cuda":
        work = partial(translate, job.lines[:SAMPLE], beam)
        figures["device_idle"] = idle_fraction(work, job.device)
    return figures


@contextmanager
def step_clock(device: torch.device) -> Iterator[Callable[[], float]]:
    """Clocks all decoding steps in the block; yields a function that returns their total seconds.

    Steps include the search, but not the encoder. On a GPU, only time on the device counts.
    """
    seconds, events = [0.0], list[tuple[torch.cuda.Event, torch.cuda.Event]]()
    step = Lane.step

    def clocked_step(*arguments: Any) -> None:
        if device.type != "cuda":
            seconds[0] += clocked(partial(step, *arguments), device)
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        step(*arguments)
        end.record()
        events.append((start, end))

    def total() -> float:
        wait_for(device)
        return seconds[0] + sum(float(start.elapsed_time(end)) for start, end in events) / 1e3

    with mock.patch.object(Lane, "step", clocked_step):
        yield total


class _TimedTranslator(BatchTranslator):
    """Also adds columns with the times at which the batch began and ended."""

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        begin, result = time.time(), super().__call__(batch)
        times = {"begin": begin, "end": time.time()}
        count = len(batch["text"])
        return result | {name: np.full(count, value) for name, value in times.items()}


def measure_ray_data(job: TranslateJob, batch: int, ours: dict[str, list[str]]) -> dict[str, Any]:
    """Times `map_batches` of Ray Data with one worker, from the end of its first batch."""
    with connected():
        import ray

        searches = {}
        rows = [{"line": i, "text": line} for i, line in enumerate(job.lines)]
        for beam in job.beams:
            options: dict[str, Any] = {
                "run": str(job.run),
                "options": DecodeConfig(beam=beam, alpha=ALPHA),
                "source_lang": job.source_lang,
                "target_lang": job.target_lang,
                "device": job.device.type,
                "dtype": str(job.dtype).removeprefix("torch."),
                "threads": torch.get_num_threads(),
            }
            dataset = ray.data.from_items(rows).map_batches(
                _TimedTranslator,
                fn_constructor_kwargs=options,
                batch_size=batch,
                num_gpus=float(job.device.type == "cuda"),
                compute=ray.data.ActorPoolStrategy(size=1),
            )
            found = sorted(dataset.take_all(), key=lambda row: row["line"])
            search = search_name(beam).replace(" ", "-")
            first = min(row["end"] for row in found)
            timed = sum(row["end"] > first for row in found)  # lines of the other batches
            seconds = max(row["end"] for row in found) - first
            pairs = zip((row["translation"] for row in found), ours[search], strict=True)
            searches[search] = {
                "seconds": seconds,
                "lines": timed,
                "sentences_per_second": timed / seconds,
                "equal_lines": sum(one == other for one, other in pairs),
            }
    return {"batch": batch, "searches": searches}
