"""Charts and the README table, drawn from the records of `bench decode` and `bench context`."""

import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from writehead.bench.context import OURS as OURS_AT_CONTEXT
from writehead.bench.decode import (
    COMPILED,
    CTRANSLATE2,
    HUGGING_FACE,
    OURS,
    PYTORCH,
    quickest,
    search_name,
)
from writehead.errors import ConfigError, RunError
from writehead.util.extras import requires

with requires("plot"):
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator
from writehead.util.files import write_file
from writehead.util.json_files import JsonError, check_shape

MULTI_HEAD, MULTI_QUERY = "multi-head", "multi-query"
COLOURS = {MULTI_HEAD: "#b5483a", MULTI_QUERY: "#2b6cb0", "grouped-query": "#6b46c1"}
FLOOR = "floor"
# the systems of the README's chart and table: label of the measurement, name, kinds
SYSTEMS = (
    (OURS["true"], "writehead", (MULTI_QUERY, MULTI_HEAD)),
    (CTRANSLATE2, "CTranslate2", (MULTI_QUERY, MULTI_HEAD)),
    (HUGGING_FACE, "Hugging Face", (MULTI_HEAD,)),
    (COMPILED, "PyTorch, torch.compile", (MULTI_QUERY, MULTI_HEAD)),
    (FLOOR, "hardware floor", (MULTI_QUERY,)),
)
# the text, the grid and the systems, in this order, on light and on dark pages
THEMES = {
    "light": ("#1f2328", "#d8dee4", "#0969da", "#bc4c00", "#9a6700", "#8250df", "#6e7781"),
    "dark": ("#e6edf3", "#30363d", "#58a6ff", "#ff9b5e", "#e3b341", "#bc8cff", "#9ea7b3"),
}
SAME_RATIO = 1.15  # kinds of a system whose times differ by less are drawn as one line
LABEL_GAP = 0.052  # of the height of the chart, between two labels

_SIZE = range(1, 2**63)
_ROW = {
    "preset": str,
    "kind": str,
    "model": dict,
    "floor": {"step_ms": (float, {"true": float})},
    "measured": {str: {"step_ms?": {"median": float}}},
}
_CONTEXTS = [_ROW | {"batch": _SIZE, "context": _SIZE}]
_DECODED = [_ROW | {"setting": dict.fromkeys(("batch", "source", "target", "beam"), _SIZE)}]
_HEADER = {"dtype": str, "environment": {"hardware": {"device": str}, "date": str}}

Points = list[tuple[int, float]]


@dataclass(frozen=True)
class Line:
    """A line of a chart, labelled at its right end."""

    label: str
    points: Points
    colour: str
    style: str
    width: float


def context_rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a record that are language models after contexts; [] if there are none."""
    if result.get("bench") == "context":
        return _checked(result, result.get("rows"), _CONTEXTS)
    sweeps = result.get("sweeps")  # of `bench decode` in version 0.1
    rows = sweeps.get("context") if isinstance(sweeps, dict) else None
    return _checked(result, rows, _CONTEXTS)


def decode_rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a record that are translation models; [] if there are none."""
    rows = result.get("rows") if result.get("bench") == "decode" else None
    return _checked(result, rows, _DECODED)


def _checked(result: dict[str, Any], rows: Any, shape: Any) -> list[dict[str, Any]]:
    try:
        check_shape({**result, "rows": rows or []}, {**_HEADER, "rows": shape})
    except JsonError as error:
        raise RunError(f"this record {error}; run the benchmark again") from error
    return rows or []


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """Draws a record as SVG, against the context or against the batch; returns the files."""
    figures = {}
    if context_rows(result):
        figures["decode-context"] = _context_figure(result)
    elif decode_rows(result):
        figures = {f"decoding-{theme}": _decoding_figure(result, theme) for theme in THEMES}
    if not figures:
        raise ConfigError("this record has nothing to draw; give one of bench decode or context")
    return [_save(figure, folder / f"{name}.svg") for name, figure in figures.items()]


def markdown_table(result: dict[str, Any]) -> str:
    """Milliseconds per decoding step at the smallest and the largest batch, as Markdown."""
    rows = decode_rows(result)
    if not rows:
        raise ConfigError("this record has no decoding steps; give one of bench decode")
    batches = [row["setting"]["batch"] for row in rows]
    beams = sorted({row["setting"]["beam"] for row in rows})
    cells = [(batch, beam) for batch in sorted({min(batches), max(batches)}) for beam in beams]
    heads = [f"batch {batch:,}, {search_name(beam)}" for batch, beam in cells]
    lines = [["ms per decoding step", *heads], ["-", *["-:"] * len(heads)]]
    for label, name, kinds in SYSTEMS:
        for kind in kinds:
            found = {beam: dict(_points(rows, label, kind, beam)) for beam in beams}
            numbers = [found[beam].get(batch) for batch, beam in cells]
            if any(numbers):
                shown = ["–" if ms is None else f"{ms:.3g}" for ms in numbers]
                lines.append([f"{name}, {kind}", *shown])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def _points(rows: list[dict[str, Any]], label: str, kind: str, beam: int) -> Points:
    """(batch, milliseconds per step) of a system."""
    return sorted(
        (int(row["setting"]["batch"]), ms)
        for row in rows
        if (row["kind"], row["setting"]["beam"]) == (kind, beam)
        and row["model"].get("window") is None
        and (ms := _step_ms(row, label)) is not None
    )


def _step_ms(row: dict[str, Any], label: str) -> float | None:
    if label == FLOOR:
        floor = row["floor"]["step_ms"]
        return float(floor["true"] if isinstance(floor, dict) else floor)
    found = quickest(row, label)
    return None if found is None else float(found["step_ms"]["median"])


def _decoding_figure(result: dict[str, Any], theme: str) -> Figure:
    """Milliseconds per greedy step against the batch, one line per system and kind."""
    rows = decode_rows(result)
    beam = min(row["setting"]["beam"] for row in rows)
    lines = []
    for (label, name, kinds), colour in zip(SYSTEMS, THEMES[theme][2:], strict=True):
        found = {kind: points for kind in kinds if (points := _points(rows, label, kind, beam))}
        if len(found) == 2 and _are_same(*found.values()):
            found = {"": found[MULTI_QUERY]}
        for kind, points in found.items():
            style = ":" if label == FLOOR else "--" if kind == MULTI_HEAD else "o-"
            width = 2.6 if label == OURS["true"] else 1.6
            lines.append(Line(f"{name}, {kind}".strip(", "), points, colour, style, width))
    setting = rows[0]["setting"]
    tokens = f"{setting['source']} + {setting['target']} tokens"
    title = f"{search_name(beam).capitalize()} decoding of {tokens}"
    axes = ("batch size (sentences)", "milliseconds per decoding step")
    return _figure(lines, result, title, *axes, theme)


def _are_same(one: Points, other: Points) -> bool:
    times = dict(other)
    ratios = [ms / times[batch] for batch, ms in one if batch in times]
    return all(1 / SAME_RATIO < ratio < SAME_RATIO for ratio in ratios)


def _context_figure(result: dict[str, Any]) -> Figure:
    """Microseconds per token against the context: ours, plain PyTorch and the floor."""
    rows, lines = context_rows(result), []
    for preset in dict.fromkeys(row["preset"] for row in rows):
        of_preset = [row for row in rows if row["preset"] == preset]
        colour = COLOURS.get(of_preset[0]["kind"], "#4a5568")
        for label, style in ((OURS_AT_CONTEXT, "o-"), (PYTORCH, "--"), (FLOOR, ":")):
            points = [
                (int(row["context"]), ms * 1e3 / row["batch"])
                for row in of_preset
                if (ms := _step_ms(row, label)) is not None
            ]
            if points:
                name = f"{preset.partition('/')[2] or preset}, {label}"
                lines.append(Line(name, points, colour, style, 1.6))
    title = f"{rows[0]['preset'].partition('/')[0]}, batch {rows[0]['batch']}"
    return _figure(lines, result, title, "context (tokens)", "microseconds per token", None)


def _figure(
    lines: list[Line], result: dict[str, Any], title: str, x: str, y: str, theme: str | None
) -> Figure:
    """A chart with logarithmic scales; without a theme on white, else transparent."""
    text, grid = THEMES[theme or "light"][:2]
    figure = Figure(figsize=(8.0, 4.6), layout="constrained")
    axes = figure.subplots()
    if theme is not None:
        figure.patch.set_alpha(0.0)
        axes.patch.set_alpha(0.0)
    for line in lines:
        points = zip(*line.points, strict=True)
        axes.plot(*points, line.style, color=line.colour, linewidth=line.width, markersize=4)
    ticks = sorted({x for line in lines for x, _ in line.points})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=8)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=20))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(x, color=text)
    axes.set_ylabel(y, color=text)
    axes.tick_params(colors=text, which="both")
    axes.grid(visible=True, which="major", color=grid, linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(text)
    facts = result["environment"]
    where = f"{facts['hardware']['device']}, {result['dtype']}, {facts['date'][:10]}"
    axes.set_title(f"{title}, {where}; lower is better", loc="left", fontsize=9.5, color=text)
    _label_lines(axes, sorted(lines, key=lambda line: line.points[-1][1]))
    return figure


def _label_lines(axes: Axes, lines: list[Line]) -> None:
    """Labels the right ends of lines, which come from low to high, without overlaps."""
    low, high = (math.log(limit) for limit in axes.get_ylim())
    heights = [(math.log(line.points[-1][1]) - low) / (high - low) for line in lines]
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + LABEL_GAP)
    ceiling = 0.99
    for i in reversed(range(len(heights))):
        heights[i] = min(heights[i], ceiling)
        ceiling = heights[i] - LABEL_GAP
    place: dict[str, Any] = {"transform": axes.transAxes, "va": "center", "size": 9}
    for height, line in zip(heights, lines, strict=True):
        axes.text(1.02, height, line.label, color=line.colour, **place)


def _save(figure: Figure, path: Path) -> Path:
    """Writes a figure as SVG; the same figure gives the same bytes."""
    content = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "writehead"}):
        figure.savefig(content, format="svg", metadata={"Date": None})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, content.getvalue())
    except OSError as error:
        raise RunError(f"{path} could not be written: {error.strerror}") from error
    return path
