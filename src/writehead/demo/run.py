"""What `writehead demo` does, from the bundled model to a page of results.

The model that comes with the package translates first. Then two models with the same number of
parameters, one multi-head and one multi-query, are trained on the same batches. Everything is kept
in one folder: run again, it goes on where it stopped.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from writehead import cost
from writehead.bench.record import environment, write_result
from writehead.config import ModelConfig, PrepareConfig, TrainConfig
from writehead.data.grammar import pairs
from writehead.data.prepare import prepare
from writehead.data.progress import Reporter
from writehead.data.sources import embedded
from writehead.decoding import Engine
from writehead.demo.opening import open_box, show_box
from writehead.demo.page import write_page
from writehead.demo.table import show_examples, show_results
from writehead.demo.timing import time_decoding, time_steps
from writehead.demo.together import Training, train_together
from writehead.paper.presets import preset, train_preset
from writehead.training.evaluate import SEARCHES, evaluate_translation, load_sacrebleu
from writehead.training.journal import read_log
from writehead.util.devices import find_device

KINDS = ("multi-head", "multi-query")
SHOWN = 5  # held-out sentences that are printed
TRAINING = replace(train_preset("tiny/multi-query"), log_every=25, keep=1)


@dataclass(frozen=True)
class Demo:
    """The sizes of a demo. The default ones are for two cores and a few minutes.

    Short sentences are what a model of a million parameters learns in a minute.
    """

    pairs: int = 40_000
    max_words: int = 7
    vocab_size: int = 1500
    held_out: int = 500
    train: TrainConfig = TRAINING


def run_demo(folder: Path, demo: Demo | None = None, *, device: str = "auto") -> Path:
    """Trains, decodes, scores and times both kinds; returns the page that shows it all."""
    load_sacrebleu("demo")  # raises if it is missing, before minutes of training
    demo = demo or Demo()
    console, out = Console(stderr=True, highlight=False), Console(highlight=False)
    results: dict[str, Any] = {"bundled": open_box(device, console), "models": {}}
    if results["bundled"] is not None:
        show_box(results["bundled"], out)
    console.print(f"[bold]2. A corpus[/] of {demo.pairs:,} sentence pairs, by our own grammar")
    dataset = folder / "data"
    prepare(
        dataset,
        embedded(demo.pairs, max_words=demo.max_words, held_out=demo.held_out),
        PrepareConfig(task="translation", vocab_size=demo.vocab_size),
        progress=Reporter(quiet=not console.is_terminal),
    )
    test = list(pairs("test", demo.held_out, max_words=demo.max_words))
    engines: dict[str, Engine] = {}
    _train(folder, dataset, demo.train, device, console)
    with _one_thread():
        console.print(f"[bold]4. Scoring[/]: {demo.held_out} held-out sentences, greedy and beam 4")
        for kind in KINDS:
            engines[kind] = Engine.load(folder / kind, device)
            results["models"][kind] = _judge(engines[kind], folder / kind, test)
        console.print("[bold]5. Decoding[/]: the same sentences by both, in turn")
        results["decoding"] = time_decoding(engines, [source for source, _ in test], SEARCHES)
        results["steps"] = time_steps({kind: engine.model for kind, engine in engines.items()})
        results["examples"] = _examples(engines, test[:SHOWN])
    results["test"] = {
        "sentences": demo.held_out,
        "max_words": demo.max_words,
        "train_pairs": demo.pairs,
    }
    results["environment"] = environment(engines[KINDS[0]].model.device)
    write_result(folder / "demo.json", results)
    show_examples(results, out)
    show_results(results, out)
    return write_page(folder / "report.html", results)


def _train(folder: Path, dataset: Path, config: TrainConfig, device: str, console: Console) -> None:
    """Trains both kinds, or goes on with them; a signal to stop comes out as KeyboardInterrupt.

    On a CPU with two threads or more they are trained at the same time, with half of them each.
    """
    trainings = {
        kind: Training(dataset, folder / kind, preset(f"tiny/{kind}"), config, device)
        for kind in KINDS
    }
    threads = torch.get_num_threads() // len(KINDS)
    together = find_device(device).type == "cpu" and threads >= 1
    how = "at the same time" if together else "one after the other"
    console.print(f"[bold]3. Training[/] of both kinds {how}, {config.steps:,} steps each")
    if together:
        done = train_together(trainings, threads, console)
    else:
        done = all(one.go().stopped_by is None for one in trainings.values())
    if not done:
        raise KeyboardInterrupt


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread of the CPU until the end of the block.

    Products this small gain little from a second one, and where another process wants its core
    they spend most of their time waiting for it.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _judge(engine: Engine, run: Path, test: list[tuple[str, str]]) -> dict[str, Any]:
    """What is known of one model: sizes, quality on held-out sentences, and its loss curve."""
    config: ModelConfig = engine.model.config
    sources, references = (list(side) for side in zip(*test, strict=True))
    scores = evaluate_translation(engine, sources, references)
    return {
        "config": config.to_json(),
        "parameters": sum(cost.parameters(config).values()),
        "ln_ppl": scores["ln_ppl"],
        "bleu": scores["bleu"],
        "log": read_log(run),
    }


def _examples(engines: dict[str, Engine], test: list[tuple[str, str]]) -> list[dict[str, str]]:
    sources = [source for source, _ in test]
    outputs = {
        kind: [output.text for output in engine.translate(sources, SEARCHES["beam-4"])]
        for kind, engine in engines.items()
    }
    return [
        {"source": source, "reference": reference, **{kind: outputs[kind][i] for kind in outputs}}
        for i, (source, reference) in enumerate(test)
    ]
