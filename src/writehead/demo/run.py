"""Runs the demo: the bundled model translates, then two models are trained, scored and timed."""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from writehead import cost
from writehead.bench.floor import measure_chip
from writehead.bench.record import write_result
from writehead.config import PrepareConfig, TrainConfig
from writehead.data.corpus import pairs
from writehead.data.prepare import prepare
from writehead.data.sources import embedded
from writehead.demo.page import example_rows, result_rows, write_page
from writehead.engine import Engine
from writehead.paper.presets import preset, train_preset
from writehead.training.evaluate import SEARCHES, bleu, load_sacrebleu, text_likelihood
from writehead.training.journal import read_log
from writehead.training.loop import train
from writehead.util.devices import wait_for
from writehead.util.environment import environment
from writehead.util.progress import Reporter

KINDS = ("multi-head", "multi-query")
TRAINING = replace(train_preset("tiny/multi-query"), steps=1300, log_every=50, keep=1)
SAMPLES = (
    "The committee will vote on the report tomorrow.",
    "We must do more to protect our rivers and forests.",
    "Tom asked Mary whether she wanted to go swimming.",
    "Could you tell me where the nearest station is?",
)


@dataclass(frozen=True)
class Demo:
    """The sizes of the demo. The defaults take about five minutes on two CPU cores."""

    pairs: int = 40_000
    max_words: int = 7
    vocab_size: int = 1500
    test_pairs: int = 500
    examples: int = 5
    train: TrainConfig = TRAINING
    repeats: int = 3
    # a decoder step is timed at these positions; the batch and the source make K and V matter
    batch: int = 64
    source: int = 256
    positions: tuple[int, ...] = (15, 63, 127, 255)


def run_demo(folder: Path, demo: Demo | None = None, *, device: str = "auto") -> Path:
    """Runs the demo in a folder and returns the page of results; run again, it resumes."""
    demo = demo or Demo()
    load_sacrebleu("demo")  # fails before the training if it is not installed
    log, out = Console(stderr=True, highlight=False), Console(highlight=False)
    if not out.is_terminal:
        out.width = 120  # the table must not be cut in a log
    log.print("This takes about five minutes on two CPU cores. Ctrl-C stops; run again to resume.")
    log.print("\n[bold]1. The bundled model[/] translates English to German")
    outputs = Engine.load(device=device).translate(SAMPLES)
    translations = [[source, output.text] for source, output in zip(SAMPLES, outputs, strict=True)]
    _print_table(out, [["English", "German"], *translations])
    log.print(f"\n[bold]2. Preparing[/] {demo.pairs:,} pairs of the built-in corpus")
    prepare(
        folder / "data",
        embedded(demo.pairs, max_words=demo.max_words, held_out=demo.test_pairs),
        PrepareConfig(task="translation", vocab_size=demo.vocab_size),
        progress=Reporter(quiet=not log.is_terminal),
    )
    for number, kind in enumerate(KINDS, 3):
        log.print(f"\n[bold]{number}. Training[/] the {kind} model")
        model = preset(f"tiny/{kind}")
        outcome = train(folder / "data", folder / kind, model, demo.train, device=device)
        if outcome.stopped_by is not None:
            raise KeyboardInterrupt
    log.print(f"\n[bold]5. Scoring and timing[/] both on {demo.test_pairs} held-out sentences")
    results = _compare(folder, demo, device)
    write_result(folder / "demo.json", results)
    _print_table(out, example_rows(results))
    _print_table(out, result_rows(results))
    return write_page(folder / "report.html", results)


def _compare(folder: Path, demo: Demo, device: str) -> dict[str, Any]:
    """Scores and times both models on held-out sentences."""
    test = list(pairs("test", demo.test_pairs, max_words=demo.max_words))
    sources, references = map(list, zip(*test, strict=True))
    engines = {kind: Engine.load(folder / kind, device) for kind in KINDS}
    model = engines[KINDS[0]].model
    chip = measure_chip(model.device, model.dtype)
    results: dict[str, Any] = {
        "pairs": demo.pairs,
        "test_pairs": demo.test_pairs,
        "step": {"batch": demo.batch, "source": demo.source, "positions": demo.positions},
        "environment": environment(model.device),
        "examples": {"source": sources[: demo.examples], "reference": references[: demo.examples]},
        "models": {},
    }
    for kind, engine in engines.items():
        scores, times = {}, {}
        for search, options in SEARCHES.items():
            seconds = []
            for _ in range(demo.repeats):
                start = time.perf_counter()
                outputs = [output.text for output in engine.translate(sources, options)]
                seconds.append(time.perf_counter() - start)
            tokens = sum(len(ids) + 1 for ids in engine.tokenizer.encode_all(outputs))
            scores[search] = bleu(outputs, references)["intl"]
            times[search] = min(seconds) / tokens * 1e6
            results["examples"][kind] = outputs[: demo.examples]  # of the last search, beam 4
        results["models"][kind] = {
            "config": engine.model.config.to_json(),
            "parameters": sum(cost.parameters(engine.model.config).values()),
            "ln_ppl": text_likelihood(engine, references, sources).ln_ppl,
            "bleu": scores,
            "us_per_token": times,
            **_time_steps(engine.model, demo, chip),
            "log": read_log(folder / kind),
        }
    return results


@torch.inference_mode()
def _time_steps(model: Any, demo: Demo, chip: cost.Chip) -> dict[str, Any]:
    """Returns milliseconds per decoder step at several positions, and the floor on this device."""
    length = demo.positions[-1] + 1
    shape = (demo.batch, max(length, demo.source))
    tokens = torch.randint(3, model.config.vocab_size, shape).to(model.device)
    state = model.start(tokens[:, : demo.source], length)
    fastest, start_at = [], 0
    for position in demo.positions:
        model.extend(tokens[:, start_at:position], state)
        start_at, times = position, list[float]()
        for _ in range(3 * demo.repeats):
            wait_for(model.device)
            start = time.perf_counter()
            model.step(tokens[:, position], state)
            wait_for(model.device)
            times.append(time.perf_counter() - start)
            state.cache.clear(position)
        fastest.append(min(times) * 1e3)
    setting = cost.Setting(demo.batch, demo.source, length, element=model.dtype.itemsize)
    steps = (cost.decoder_step(model.config, setting, position) for position in demo.positions)
    return {
        "step_ms": fastest,
        "floor_ms": [step.floor(chip) * 1e3 for step in steps],
        "kv_bytes_per_token": cost.kv_bytes(model.config, setting)["target_token"],
    }


def _print_table(out: Console, rows: list[list[str]]) -> None:
    table = Table(*rows[0], box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for row in rows[1:]:
        table.add_row(*map(Text, row))
    out.print("", table)
