"""Translates lines or batches with fixed options; the model can be loaded in any process."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from writehead.config import Batching, DecodeConfig
from writehead.data.lines import plain_line
from writehead.data.records import RecordFormat, lines_of
from writehead.engine import Engine, Output
from writehead.engine.engine import BEAM
from writehead.errors import DataError
from writehead.interop.hub import find_folder
from writehead.interop.pretrained import RunFacts
from writehead.runs.bundled import bundled_run


@dataclass(frozen=True)
class Translation:
    """The arguments of `Engine.load` and `Engine.translate`: a model and how to translate."""

    run: Path | str | None = None
    options: DecodeConfig = field(default_factory=DecodeConfig)
    source_lang: str | None = None
    target_lang: str | None = None
    device: str = "auto"
    dtype: str | None = None
    threads: int | None = None
    batching: Batching | None = None
    quantize: str = "auto"

    def load(self) -> "Translator":
        """Loads the model; raises a WriteheadError if it does not support the options."""
        return Translator(self)

    def to_json(self) -> dict[str, Any]:
        """Returns the options that change translations, as JSON values."""
        languages = {"source_lang": self.source_lang, "target_lang": self.target_lang}
        return asdict(self.options.with_default_beam(BEAM)) | languages


class Translator:
    """A loaded model, which translates lines with fixed options."""

    def __init__(self, given: Translation) -> None:
        self._given = given
        self._engine = Engine.load(
            *(given.run, given.device, given.dtype),
            batching=given.batching,
            threads=given.threads,
            quantize=given.quantize,
        )
        self._translate = partial(
            self._engine.translate, source_lang=given.source_lang, target_lang=given.target_lang
        )
        list(self._translate([], given.options))  # checks the options

    def identity(self) -> dict[str, Any]:
        """Returns a description of the model, as JSON values; equal models have equal ones."""
        return model_identity(self._given.run, self._engine)

    def translate(
        self,
        lines: Iterable[str],
        first: int = 0,
        progress: Callable[[float], None] | None = None,
    ) -> Iterator[Output]:
        """Yields the outputs of lines, which are numbered from `first`."""
        return self._translate(lines, self._given.options, first=first, progress=progress)


class BatchTranslator:
    """Adds a column of translations to batches, for `ray.data.Dataset.map_batches`.

    A batch is a dict of columns, which are lists or NumPy arrays. Each worker loads the model once.
    A text with several lines is translated line by line; None stays None. `scores` adds a column of
    scores, named `output_column` with the suffix `_score`.
    """

    def __init__(
        self,
        run: Path | str | None = None,
        options: DecodeConfig | None = None,
        *,
        column: str = "text",
        output_column: str = "translation",
        scores: bool = False,
        source_lang: str | None = None,
        target_lang: str | None = None,
        device: str = "auto",
        dtype: str | None = None,
        threads: int | None = None,
        batching: Batching | None = None,
        quantize: str = "auto",
    ) -> None:
        given = Translation(
            *(run, options or DecodeConfig(), source_lang, target_lang),
            *(device, dtype, threads, batching),
            quantize=quantize,
        )
        self.__setstate__((given, RecordFormat(column, output_column, scores)))

    def __getstate__(self) -> tuple[Translation, RecordFormat]:
        return self._given, self._format

    def __setstate__(self, state: tuple[Translation, RecordFormat]) -> None:
        """Loads the model in the process that unpickles the translator."""
        self._given, self._format = state
        self._translator = self._given.load()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Returns the batch with the new columns, which are lists or arrays like the texts."""
        column, new = self._format.field, self._format.new_fields
        if not isinstance(batch, dict) or column not in batch:
            names = [*batch] if isinstance(batch, dict) else type(batch).__name__
            raise DataError(f"a batch must be a dict with the column {column!r}, not {names}")
        if clash := [name for name in new if name in batch]:
            raise DataError(
                f"a batch already has the column {clash[0]!r}; choose another output_column"
            )
        if isinstance(batch[column], str | bytes):
            raise DataError(f"column {column!r} of a batch must be a list of texts, not one text")
        texts = list(batch[column])
        for i, text in enumerate(texts, start=1):
            if not isinstance(text, str | None):
                raise DataError(f"text {i} of a batch must be a str, not {type(text).__name__}")
        parts = [lines_of(text) for text in texts]
        outputs = self._translator.translate(line for lines in parts for line in lines)
        lines = (output_line(output, self._format.scores) for output in outputs)
        values = [
            self._format.values(text, [*islice(lines, len(part))])
            for text, part in zip(texts, parts, strict=True)
        ]
        columns: dict[str, Any] = {name: [row[i] for row in values] for i, name in enumerate(new)}
        if isinstance(batch[column], np.ndarray):
            for name, kind in zip(new, (object, float), strict=False):
                columns[name] = np.array(columns[name], dtype=kind)
        return {**batch, **columns}


def model_identity(run: Path | str | None, engine: Engine) -> dict[str, Any]:
    """Returns a description of a loaded model, as JSON values.

    Hashing takes about a second per gigabyte of weights.
    """
    folder = bundled_run() if run is None else find_folder(run)
    return {
        "weights": RunFacts.read(folder).fingerprint,
        "model": engine.model.config.to_json(),
        "tokenizer": engine.tokenizer.fingerprint,
        "dtype": engine.model.weights_name,
    }


def output_line(output: Output, scores: bool) -> str:
    """Formats the best translation of a line; `scores` appends a tab and its score."""
    text = plain_line(output.text)
    return f"{text}\t{output.hypotheses[0].score:.6f}" if scores else text
