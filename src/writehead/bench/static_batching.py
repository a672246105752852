"""Baselines for the server benchmark: static batches that run to completion.

They replace an engine's scheduler, so they are served through the same HTTP layer.
"""

import threading
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from writehead.bench.peers import load_translator
from writehead.engine import Engine
from writehead.engine.scheduler import Load, Request, Scheduler
from writehead.engine.search import Hypothesis
from writehead.errors import ConfigError
from writehead.interop.ctranslate2 import Vocabulary, export_ctranslate2
from writehead.model import TranslationModel

CONTINUOUS, STATIC, CTRANSLATE2 = "continuous", "static", "ctranslate2"
BATCHINGS = (CONTINUOUS, STATIC, CTRANSLATE2)


class StaticScheduler(Scheduler):
    """Decodes the waiting requests as one batch; requests that arrive meanwhile wait for the next.

    A batch has one beam size and up to `max_rows` rows. `step` decodes one batch to completion.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.model, engine.scheduler.targets)
        self._arrived: list[Request] = []
        self._mutex = threading.Lock()

    def submit(self, requests: Iterable[Request]) -> None:
        """Queues requests for a later batch."""
        with self._mutex:
            self._arrived += requests

    def cancel(self, request: Request) -> None:
        """Cancels a request; it is still decoded if its batch has started."""
        if not request.is_done:
            request.is_cancelled = request.is_done = True

    def step(self, times: int = 1) -> bool:
        """Decodes one batch; returns whether requests are waiting."""
        with self._mutex:
            waiting = [one for one in self._arrived if not one.is_cancelled]
            beam = waiting[0].config.width if waiting else 1
            batch = [one for one in waiting if one.config.width == beam]
            batch = batch[: max(1, self.max_rows // beam)]
            chosen = set(batch)
            self._arrived = [one for one in waiting if one not in chosen]
        if batch:
            self.decode(batch)
        return bool(self._arrived)

    def decode(self, batch: list[Request]) -> None:
        """Decodes a batch with our own scheduler."""
        super().submit(batch)
        while super().step():
            pass

    @property
    def load(self) -> Load:
        """The requests waiting for a batch."""
        return Load(waiting=len(self._arrived))


class CTranslate2Scheduler(StaticScheduler):
    """Decodes batches with CTranslate2, in the dtype of the engine's model or with int8 weights."""

    def __init__(self, engine: Engine, *, int8: bool = False) -> None:
        super().__init__(engine)
        model = engine.model
        if not isinstance(model, TranslationModel):
            raise ConfigError(
                "CTranslate2 only benchmarks translation models; choose another batching"
            )
        with TemporaryDirectory(prefix="writehead-ctranslate2-") as folder:
            vocabulary, dtype = Vocabulary.of(engine.tokenizer, ids=True), str(model.dtype)[6:]
            dtype = f"int8_{dtype}" if int8 else dtype
            options: dict[str, Any] = {"quantization": dtype, "add_source_eos": False}
            export_ctranslate2(model, vocabulary, Path(folder) / "model", **options)
            self._translator: Any = load_translator(folder, model.device, dtype)

    def decode(self, batch: list[Request]) -> None:
        """Decodes a batch. Scores are 0, because CTranslate2 uses a different length penalty."""
        for request in batch:
            if request.on_start is not None:
                request.on_start()
        config = batch[0].config
        results = self._translator.translate_batch(
            [[str(token) for token in request.tokens] for request in batch],
            target_prefix=[[str(token) for token in request.prefix] for request in batch],
            beam_size=config.width,
            num_hypotheses=config.n_best,
            length_penalty=config.alpha,
            max_decoding_length=max(request.max_length for request in batch),
        )
        for request, result in zip(batch, results, strict=True):
            ids = [[int(token) for token in one] for one in result.hypotheses]
            request.finish([Hypothesis(one, 0.0, 0.0, True) for one in ids])


def load_engine(name: str, run: Path, device: str, dtype: str | None) -> Engine:
    """Loads a run with the scheduler of a batching.

    CTranslate2 uses int8 weights if our own engine does by default.
    """
    engine = Engine.load(run, device, dtype)
    int8 = engine.model.is_int8
    if name == CTRANSLATE2 and int8:  # int8 weights cannot be exported
        engine = Engine.load(run, device, dtype, quantize="none")
    baseline(name, engine, int8=int8)
    return engine


def baseline(name: str, engine: Engine, *, int8: bool = False) -> None:
    """Replaces the scheduler of an engine with a baseline; `continuous` keeps it."""
    rows = engine.scheduler.max_rows
    if name == STATIC:
        engine.scheduler = StaticScheduler(engine)
    elif name == CTRANSLATE2:
        engine.scheduler = CTranslate2Scheduler(engine, int8=int8)
    elif name != CONTINUOUS:
        raise ConfigError(f"batching={name!r} must be one of {', '.join(BATCHINGS)}")
    engine.scheduler.max_rows = rows
