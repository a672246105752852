"""The test set first-lines: a hundred lines of the kind that people first type into a translator.

Each line of `bundled/first_lines.tsv` has three columns: the English source, its German references,
separated by `|`, and the numbers and names that a translation must keep, separated by `;`. A number
or name may have several spellings, separated by `~`.
"""

import re
from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from writehead.engine import Engine
from writehead.engine.engine import Progress
from writehead.errors import DataError
from writehead.model import TranslationModel
from writehead.training.evaluate import check_searches, load_sacrebleu

NAME = "first-lines"
FILE = Path(__file__).parents[1] / "bundled" / "first_lines.tsv"


class Line(NamedTuple):
    """A source, its references, and the numbers and names to keep, with all their spellings."""

    source: str
    references: list[str]
    kept: list[list[str]]

    def missing(self, translation: str) -> list[str]:
        """Returns the numbers and names that a translation lacks."""
        return [each[0] for each in self.kept if not any(_has(translation, one) for one in each)]


def read_first_lines() -> list[Line]:
    """Reads the test set."""
    lines = []
    for row in FILE.read_text(encoding="utf-8").splitlines():
        source, references, kept = row.split("\t")
        spellings = [each.split("~") for each in kept.split(";") if each]
        lines.append(Line(source, references.split("|"), spellings))
    return lines


def evaluate_first_lines(
    engine: Engine,
    searches: Iterable[str] | None = None,
    *,
    source_lang: str | None = None,
    target_lang: str | None = None,
    show: Progress | None = None,
) -> dict[str, Any]:
    """Returns the chrF, the kept numbers and names, and the translations of each search."""
    if not isinstance(engine.model, TranslationModel):
        raise DataError(f"{NAME} is for translation models, not for language models")
    chosen, metric, lines = check_searches(searches), load_sacrebleu().CHRF(), read_first_lines()
    streams = [*zip_longest(*(line.references for line in lines))]  # None where there are fewer
    sources, total = [line.source for line in lines], sum(len(line.kept) for line in lines)
    found = {}
    for name, options in chosen.items():
        translated = engine.translate(
            sources, options, source_lang=source_lang, target_lang=target_lang, progress=show
        )
        outputs = [one.text for one in translated]
        pairs = zip(lines, outputs, strict=True)
        missing = [one for line, output in pairs for one in line.missing(output)]
        found[name] = {
            "chrf": metric.corpus_score(outputs, streams).score,
            "kept": total - len(missing),
            "to_keep": total,
            "missing": missing,
            "translations": outputs,
        }
    return {
        "sentences": len(lines),
        "chrf_signature": str(metric.get_signature()),
        "first_lines": found,
    }


def _has(text: str, part: str) -> bool:
    """Returns whether a text contains a name, or a number that is not part of a longer one."""
    return re.search(rf"(?<!\d){re.escape(part)}(?!\d)", text) is not None
