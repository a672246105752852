"""The report on conversions: quality by method and training, K/V bytes, and time per token."""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from writehead import cost
from writehead.bench.decode import OURS
from writehead.config import ModelConfig
from writehead.interop.convert import METHODS
from writehead.paper.claims import MEASURES, Measure
from writehead.paper.conversion import (
    BASE,
    PERCENTS,
    SCRATCH,
    SPEED,
    TABLE,
    VARIANTS,
    WRITE_HEADS,
    Variant,
    check_base,
    read_row,
)
from writehead.paper.experiments import SCALES
from writehead.paper.figures import conversion_svg
from writehead.paper.markdown import NONE, figure, markdown_table, provenance
from writehead.paper.results import Result

SUMMARIZED = (0, 5)  # percent of the steps
LOSS, DEV, GREEDY, BEAM = MEASURES["table1"]
TOKENS = cost.Setting(batch=1, source=1, target=1)


@dataclass(frozen=True)
class ConversionReport:
    """A section in Markdown and its figure."""

    text: str
    svg: str


@dataclass(frozen=True)
class Converted:
    """The results at one scale by row, one per seed, and the timings, if they were measured."""

    rows: dict[str, list[Result]]
    speed: Result | None

    def values(self, row: str, measure: Measure) -> list[float]:
        """Returns a figure of a row for each seed."""
        found = [measure.of(one) for one in self.rows.get(row, ())]
        return [value for value in found if value is not None]

    def cell(self, row: str, measure: Measure) -> str:
        """Returns a figure of a row as text; BLEU has two digits."""
        return figure(self.values(row, measure), 3 if measure is LOSS else 2, NONE)

    def best(self, g: int, percent: int) -> Variant | None:
        """Returns the variant with the highest BLEU on the dev set."""
        scored = [
            (statistics.mean(values), name)
            for name, one in VARIANTS.items()
            if (one.g, one.percent) == (g, percent) and (values := self.values(name, DEV))
        ]
        return VARIANTS[max(scored)[1]] if scored else None

    def model(self, row: str) -> ModelConfig:
        """Returns the config of a row."""
        return ModelConfig.from_json(self.rows[row][0]["model"])


def conversion_report(
    results: Path, tables: Mapping[tuple[str, str], list[Result]]
) -> ConversionReport | None:
    """Returns the report on one scale, `small` if it has results; None without results."""
    for scale in ("small", *reversed(SCALES)):
        folder, rows = results / TABLE / scale, dict[str, list[Result]]()
        check_base(results, scale)
        for path in sorted(folder.glob("*-seed*.json")):
            one = read_row(path)
            rows.setdefault(one["row"], []).append(one)
        if BASE in rows:
            base, timings = rows[BASE][0], folder / f"{SPEED}.json"
            scratch = [
                one
                for one in tables.get(("table1", scale), ())
                if one["row"] == SCRATCH
                and one["data"]["fingerprint"] == base["data"]["fingerprint"]
                and one["train"]["steps"] == base["base_steps"]
            ]
            rows |= {SCRATCH: scratch} if scratch else {}
            found = Converted(rows, read_row(timings) if timings.is_file() else None)
            return ConversionReport(_section(found), conversion_svg(dict(_lines(found))))
    return None


def _section(found: Converted) -> str:
    base = found.rows[BASE][0]
    parts = [
        "## Quality and speed",
        f"A multi-head `{base['family']}` model, trained for {base['base_steps']:,} steps, was "
        f"converted to fewer write-heads and trained for a part of these steps. BLEU on the test "
        f"set, beam 4:",
        markdown_table(list(_methods(found))),
        "The conversion with the highest BLEU on the dev set for each number of write-heads and "
        "steps, multi-head, and multi-query trained from scratch with as many parameters:",
        markdown_table(list(_summary(found))),
        _caption(found),
        "![BLEU against bytes of K and V per token](figures/conversion.svg)",
    ]
    return "\n\n".join(parts)


def _methods(found: Converted) -> Iterator[list[str]]:
    """Yields a row per number of write-heads, method and teacher, with a column per percentage."""
    percents = sorted((0, *PERCENTS))
    yield ["write-heads", "method", "teacher", *(f"{percent}% of steps" for percent in percents)]
    for g, method, teacher in product(reversed(WRITE_HEADS), METHODS, (False, True)):
        names = [Variant(g, method, percent, teacher).name for percent in percents]
        if found.rows.keys() & set(names[1:] if teacher else names):
            cells = [found.cell(name, BEAM) for name in names]
            yield [str(g), method, "yes" if teacher else "no", *cells]


def _summary(found: Converted) -> Iterator[list[str]]:
    """Yields all measures of multi-head, the best conversions, and multi-query from scratch."""
    times = _times(found.speed)
    head = ["model", "K/V bytes per token", LOSS.label, DEV.label, GREEDY.label, BEAM.label]
    yield [*head, "µs per token, greedy", "µs per token, beam 4"]
    rows = {"multi-head": (BASE, BASE)}
    for g, percent in product(reversed(WRITE_HEADS), SUMMARIZED):
        if best := found.best(g, percent):
            teacher = ", teacher" if best.teacher else ""
            label = f"{g} write-head{'s' * (g > 1)}, {best.method}, {percent}%{teacher}"
            rows[label] = best.name, f"g{g}"
    if SCRATCH in found.rows:
        rows["multi-query from scratch"] = SCRATCH, SCRATCH
    for label, (row, timed) in rows.items():
        cells = [found.cell(row, measure) for measure in MEASURES["table1"]]
        kv = f"{_kv_bytes(found.model(row)):,}"
        yield [label, kv, *cells, *(times.get((timed, beam), NONE) for beam in (1, 4))]


def _times(speed: Result | None) -> dict[tuple[str, int], str]:
    """Returns the measured and the predicted time per token of each model and beam."""
    times = {}
    for one in speed["decode"] if speed else ():
        batch, beam = one["setting"]["batch"], one["setting"]["beam"]
        step = one["measured"][OURS["true"]]["step_ms"]["median"]
        floor = one["floor"]["step_ms"]["true"]
        shown = (f"{ms * 1e3 / batch:.3g}" for ms in (step, floor))
        times[one["preset"], beam] = "{} (≥ {})".format(*shown)
    return times


def _caption(found: Converted) -> str:
    text = (
        "The encoder keeps its write-heads. K/V bytes are those of a source or target token in "
        "bfloat16. ± is the standard deviation over seeds of the training after the conversion. "
    )
    results = [one for rows in found.rows.values() for one in rows]
    if found.speed is not None:
        setting = found.speed["decode"][0]["setting"]
        text += (
            f"Times are those of a decoding step with {setting['batch']:,} sentences of "
            f"{setting['source']} + {setting['target']} tokens, in brackets the minimum that "
            f"`explain` predicts for the measured bandwidth and matrix rate. "
        )
        results.append(found.speed)
    return text + provenance(results)


def _lines(found: Converted) -> Iterator[tuple[str, dict[int, float]]]:
    """Yields the lines of the figure: BLEU by K/V bytes, for each percentage of steps."""
    head = {_kv_bytes(found.model(BASE)): statistics.mean(found.values(BASE, BEAM))}
    for percent in sorted((0, *PERCENTS), reverse=True):
        variants = [one for g in WRITE_HEADS if (one := found.best(g, percent))]
        points = {
            _kv_bytes(found.model(one.name)): statistics.mean(found.values(one.name, BEAM))
            for one in variants
        }
        if points:
            yield f"converted, {percent}% of steps", points | head
    yield "multi-head", head
    if SCRATCH in found.rows:
        bleu = statistics.mean(found.values(SCRATCH, BEAM))
        yield "multi-query from scratch", {_kv_bytes(found.model(SCRATCH)): bleu}


def _kv_bytes(config: ModelConfig) -> int:
    return int(cost.kv_bytes(config, TOKENS)["target_token"])
