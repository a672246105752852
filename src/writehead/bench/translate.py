"""`bench translate`: a text file end to end, from loading the run to the last translation."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from writehead.bench.decode import check_beams
from writehead.bench.peers import attempt, load_translator
from writehead.bench.record import run_facts
from writehead.bench.timing import Times, clocked
from writehead.config import DecodeConfig
from writehead.data.tokenizer import Tokenizer
from writehead.decoding import Batching, Engine
from writehead.errors import DataError
from writehead.interop.ctranslate2 import export_ctranslate2
from writehead.model import TranslationModel
from writehead.model.bundled import name_of
from writehead.model.runs import TOKENIZER, read_config
from writehead.util.devices import wait_for

OURS, PLAIN, FLOAT32, CTRANSLATE2 = "ours", "plain PyTorch", "ours, float32", "CTranslate2"
ALPHA = 0.6  # as in §4.2
NOTES = ["CTranslate2 divides by length^0.6 in beam search, ours by ((5 + length) / 6)^0.6."]

Translate = Callable[[list[str], int], list[str]]  # of lines, with a beam


@dataclass(frozen=True)
class TranslateJob:
    """What to translate, how, and how often."""

    run: Path
    lines: list[str]
    device: torch.device
    dtype: torch.dtype
    beams: tuple[int, ...]
    repeats: int
    batching: Batching
    peers: bool

    def __post_init__(self) -> None:
        check_beams(self.beams, read_config(self.run).vocab_size, self.run)
        if not any(line.strip() for line in self.lines):
            raise DataError("there is no line to translate; give a file with text in it")


def bench_translate(job: TranslateJob, report: Callable[[str], None]) -> dict[str, Any]:
    """Seconds to load and to the first sentence, then sentences and tokens per second.

    `equal_lines` counts the translations of each system that are equal to ours. In a type other
    than float32, ours in float32 is one of the systems.
    """
    systems: dict[str, Callable[[], Translate]] = {OURS: partial(_load_ours, job, job.dtype)}
    if job.dtype != torch.float32:
        systems[FLOAT32] = partial(_load_ours, job, torch.float32)
    if job.device.type == "cuda":  # on a CPU ours is plain PyTorch
        systems[PLAIN] = partial(_load_ours, job, job.dtype, graphs=False)
    if job.peers:
        systems[CTRANSLATE2] = partial(_load_ctranslate2, job)
    engines: dict[str, Any] = {}
    texts: dict[str, dict[str, list[str]]] = {name: {} for name in systems}
    for name, load in systems.items():
        measure = partial(_measure, job, name, load, texts[name], report)
        engines[name] = attempt(measure) if name == CTRANSLATE2 else measure()
        if job.device.type == "cuda":
            torch.cuda.empty_cache()
    equal = {
        name: {
            search: sum(map(str.__eq__, lines, texts[OURS][search]))
            for search, lines in translations.items()
        }
        for name, translations in texts.items()
        if name != OURS
    }
    return {
        "run": name_of(job.run),
        **run_facts(job.run),
        "sentences": len(job.lines),
        "batch_tokens": job.batching.budget(job.device.type),
        "engines": engines,
        "equal_lines": equal,
        "notes": NOTES if job.peers else [],
    }


def _load_ours(job: TranslateJob, dtype: torch.dtype, *, graphs: bool = True) -> Translate:
    engine = Engine.load(job.run, job.device, dtype, batching=job.batching, graphs=graphs)

    def translate(lines: list[str], beam: int) -> list[str]:
        outputs = engine.translate(lines, DecodeConfig(beam=beam, alpha=ALPHA))
        return [output.text for output in outputs]

    return translate


def _load_ctranslate2(job: TranslateJob) -> Translate:
    """CTranslate2 with the weights and the tokenizer of the run; its tokens are our ids."""
    engine = Engine.load(job.run, "cpu", torch.float32)
    assert isinstance(engine.model, TranslationModel)
    tokenizer, config = engine.tokenizer, engine.model.config
    with TemporaryDirectory(prefix="writehead-ctranslate2-") as folder:
        path, dtype = Path(folder) / "model", str(job.dtype).removeprefix("torch.")
        tokens = [str(i) for i in range(tokenizer.vocab_size)]
        export_ctranslate2(engine.model, tokens, path, dtype=dtype)
        translator = load_translator(path, job.device, job.dtype)

    def translate(lines: list[str], beam: int) -> list[str]:
        encoded = [tokenizer.encode(line)[: config.source_positions - 1] for line in lines]
        results = translator.translate_batch(
            [[str(token) for token in source] for source in encoded],
            beam_size=beam,
            length_penalty=ALPHA,
            max_decoding_length=config.target_positions,
            max_batch_size=max(1, job.batching.budget(job.device.type) // beam),
            batch_type="tokens",
        )
        found = [[int(token) for token in result.hypotheses[0]] for result in results]
        return [
            tokenizer.decode(ids) if source else ""
            for ids, source in zip(found, encoded, strict=True)
        ]

    return translate


def _measure(
    job: TranslateJob,
    name: str,
    load: Callable[[], Translate],
    texts: dict[str, list[str]],
    report: Callable[[str], None],
) -> dict[str, Any]:
    """The times of one system; its translations are put into `texts` by search."""
    report(f"{name}: loading {job.run}")
    began = time.perf_counter()
    translate = load()
    wait_for(job.device)
    loaded = time.perf_counter() - began
    translate([next(line for line in job.lines if line.strip())], job.beams[-1])
    first = time.perf_counter() - began
    tokenizer, searches = Tokenizer.load(job.run / TOKENIZER), {}
    for beam in job.beams:
        search, times = "greedy" if beam == 1 else f"beam-{beam}", []

        def work(beam: int = beam, search: str = search) -> None:
            texts[search] = translate(job.lines, beam)

        for i in range(job.repeats + 1):  # the first pass may compile and capture
            passes = f"pass {i + 1} of {job.repeats + 1}"
            report(f"{name}: {len(job.lines):,} lines, {search}, {passes}")
            times.append(clocked(work, job.device))
        repeats = Times(tuple(times[1:]))
        tokens = sum(len(tokenizer.encode(text)) + 1 for text in texts[search])
        searches[search] = {
            "first_pass_s": times[0],
            "seconds": repeats.to_json(1.0),
            "tokens": tokens,
            "sentences_per_second": len(job.lines) / repeats.median,
            "tokens_per_second": tokens / repeats.median,
        }
    return {"load_s": loaded, "first_sentence_s": first, "searches": searches}
