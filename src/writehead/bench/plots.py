"""Makes the charts and tables of README and docs from records of benchmarks."""

import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from writehead.bench.decode import (
    COMPILED,
    CTRANSLATE2,
    CTRANSLATE2_INT8,
    HUGGING_FACE,
    OURS,
    OURS_INT8,
    search_name,
)
from writehead.bench.tables import median
from writehead.errors import ConfigError, RunError
from writehead.util.extras import requires
from writehead.util.files import write_file
from writehead.util.json_files import read_json

with requires("plot"):
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

FLOOR, MULTI_HEAD, MULTI_QUERY = "hardware floor", "multi-head", "multi-query"
# label in the record, name in the chart, kinds of attention
SYSTEMS = (
    (OURS["true"], "writehead", (MULTI_QUERY, MULTI_HEAD)),
    (OURS_INT8, "writehead, int8", (MULTI_QUERY, MULTI_HEAD)),
    (CTRANSLATE2, CTRANSLATE2, (MULTI_QUERY, MULTI_HEAD)),
    (CTRANSLATE2_INT8, CTRANSLATE2_INT8, (MULTI_QUERY, MULTI_HEAD)),
    (HUGGING_FACE, HUGGING_FACE, (MULTI_HEAD,)),
    (COMPILED, COMPILED, (MULTI_QUERY, MULTI_HEAD)),
    (FLOOR, FLOOR, (MULTI_QUERY,)),
)
# colours of the text, the grid and the systems, in this order
THEMES = {
    "light": (
        "#1f2328",
        "#d8dee4",
        "#0969da",
        "#1b7c83",
        "#bc4c00",
        "#cf222e",
        "#9a6700",
        "#8250df",
        "#6e7781",
    ),
    "dark": (
        "#e6edf3",
        "#30363d",
        "#58a6ff",
        "#39c5cf",
        "#ff9b5e",
        "#ff7b72",
        "#e3b341",
        "#bc8cff",
        "#9ea7b3",
    ),
}
COLUMNS = ("sentences/s", "BLEU")
LABEL_GAP = 0.056  # of the height of the chart, between two labels
FONT_SIZE = 10  # points
ROW = {
    "preset": str,
    "run?": str,
    "kind": str,
    "model": dict,
    "setting": dict.fromkeys(("batch", "source", "target", "beam"), range(2**63)),
    "floor": {"step_ms": {"true": float}},
    "measured": {str: {"step_ms?": {"median": float}}},
}
ADVICE = "use a record of bench decode"
RECORD = {"dtype": str, "environment": {"hardware": {"device": str}}, "rows": [ROW]}

Points = dict[int, float]  # milliseconds per step by batch
Label = tuple[float, str, str]  # the last point of a line, its name and its colour


def read_record(path: Path) -> dict[str, Any]:
    """Reads a record of `bench decode`."""
    record: dict[str, Any] = read_json(path, RECORD, RunError, ADVICE)
    if not record["rows"]:
        raise ConfigError(f"{path} has no rows; {ADVICE}")
    return record


def markdown_table(record: dict[str, Any]) -> str:
    """Returns milliseconds per step as a Markdown table.

    If there are more than three batch sizes, it shows only the smallest and the largest.
    """
    settings = [row["setting"] for row in record["rows"]]
    batches, beams = (sorted({s[name] for s in settings}) for name in ("batch", "beam"))
    if len(batches) > 3:
        batches = [batches[0], batches[-1]]
    cells = [(batch, beam) for batch in batches for beam in beams]
    heads = [f"batch {batch:,}, {search_name(beam)}" for batch, beam in cells]
    lines = [["ms per decoding step", *heads], ["-", *["-:"] * len(heads)]]
    for label, name, model in _lines(record):
        times = [_points(record, label, model, beam).get(batch) for batch, beam in cells]
        if any(times):
            texts = ["–" if ms is None else f"{ms:.3g}" for ms in times]
            lines.append([name, *texts])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def translate_table(record: dict[str, Any]) -> str:
    """Returns the speed and BLEU of each system in a record of `bench translate`, as Markdown."""
    engines, dtype = record["engines"], record["dtype"]
    names = {
        "ours": f"writehead, {dtype}",
        OURS_INT8: "writehead, int8",
        CTRANSLATE2: f"CTranslate2, {dtype}",
        CTRANSLATE2_INT8: CTRANSLATE2_INT8,
    }
    searches = list(engines["ours"]["searches"])
    heads = [f"{search.replace('-', ' ')}, {what}" for search in searches for what in COLUMNS]
    lines = [["system", *heads], ["-", *["-:"] * len(heads)]]
    for label, name in names.items():
        found = [engines[label]["searches"][search] for search in searches]
        cells = [
            (f"{one['sentences_per_second']:.3g}", f"{one['bleu']['intl']:.2f}") for one in found
        ]
        lines.append([name, *(cell for pair in cells for cell in pair)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def draw(record: dict[str, Any], folder: Path) -> list[Path]:
    """Draws a record for light and dark pages as SVG; returns the files."""
    paths = []
    for theme in THEMES:
        path, content = folder / f"decoding-{theme}.svg", io.BytesIO()
        with matplotlib.rc_context({"svg.hashsalt": "writehead", "font.size": FONT_SIZE}):
            _figure(record, theme).savefig(content, metadata={"Date": None}, format="svg")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_file(path, content.getvalue())
        except OSError as error:
            raise RunError(f"{path} could not be written: {error.strerror}") from error
        paths.append(path)
    return paths


def draw_latencies(record: dict[str, Any], path: Path) -> Path:
    """Plots the p95 latency of a server benchmark against its throughput, as SVG."""
    figure, content = Figure(figsize=(7, 4), layout="constrained"), io.BytesIO()
    axes = figure.subplots()
    for batching in dict.fromkeys(row["batching"] for row in record["rows"]):
        rows = [row for row in record["rows"] if row["batching"] == batching and row["e2el_ms"]]
        points = sorted((row["requests_per_second"], row["e2el_ms"]["p95"]) for row in rows)
        axes.plot(*zip(*points, strict=True), "o-", label=batching, markersize=4)
    axes.set(xlabel="requests per second", ylabel="p95 latency, ms", ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    with matplotlib.rc_context({"svg.hashsalt": "writehead"}):
        figure.savefig(content, metadata={"Date": None}, format="svg")
    try:
        write_file(path, content.getvalue())
    except OSError as error:
        raise RunError(f"{path} could not be written: {error.strerror}") from error
    return path


def _lines(record: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yields the label of a system, the name of a line, and its model as in `_model_name`."""
    names = dict.fromkeys(_model_name(row) for row in record["rows"] if "run" in row)
    for label, system, kinds in SYSTEMS:
        for model in (*kinds, *names):
            yield label, f"{system}, {model}", model


def _model_name(row: dict[str, Any]) -> str | None:
    """Returns the name of a run, or a preset's kind of attention; None if it is local."""
    if "run" in row:
        return str(row["preset"])
    return None if row["model"].get("window") is not None else str(row["kind"])


def _points(record: dict[str, Any], label: str, model: str, beam: int) -> Points:
    points = {}
    for row in record["rows"]:
        if (_model_name(row), row["setting"]["beam"]) == (model, beam):
            ms = row["floor"]["step_ms"]["true"] if label == FLOOR else median(row, label)
            if ms is not None:
                points[row["setting"]["batch"]] = ms
    return dict(sorted(points.items()))


def _figure(record: dict[str, Any], theme: str) -> Figure:
    """Plots milliseconds per step with the smallest beam against the batch, transparently."""
    text, grid, *colours = THEMES[theme]
    setting = min((row["setting"] for row in record["rows"]), key=lambda each: each["beam"])
    figure = Figure(figsize=(8.4, 4.8), layout="constrained")
    axes = figure.subplots()
    for patch in (figure.patch, axes.patch):
        patch.set_alpha(0.0)
    axes.set(xscale="log", yscale="log")
    ticks = sorted({row["setting"]["batch"] for row in record["rows"]})
    labels: list[Label] = []
    colour_of = dict(zip((label for label, _, _ in SYSTEMS), colours, strict=True))
    kinds = {_model_name(row): row["kind"] for row in record["rows"]}
    for label, name, model in _lines(record):
        if points := _points(record, label, model, setting["beam"]):
            dash = "s--" if kinds[model] == MULTI_HEAD else "o-"
            style, times = ":" if label == FLOOR else dash, [points.get(n, math.nan) for n in ticks]
            width = 2.8 if label == OURS["true"] else 1.6
            axes.plot(ticks, times, style, color=colour_of[label], linewidth=width, ms=4)
            labels.append((points[max(points)], name, colour_of[label]))
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=20))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("batch size (sentences)", color=text)
    axes.set_ylabel("milliseconds per decoding step", color=text)
    axes.tick_params(colors=text)
    axes.grid(color=grid, linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(text)
    work = f"decoding of {setting['source']} + {setting['target']} tokens, {record['dtype']}"
    search, chip = search_name(setting["beam"]), record["environment"]["hardware"]["device"]
    title = f"{search.capitalize()} {work}, {chip}; lower is better"
    axes.set_title(title, loc="left", size=FONT_SIZE, color=text)
    _label_lines(axes, sorted(labels))
    return figure


def _label_lines(axes: Axes, labels: list[Label]) -> None:
    """Labels the right ends of lines without overlaps; `labels` are sorted from low to high."""
    low, high = (math.log(limit) for limit in axes.get_ylim())
    heights = [(math.log(end) - low) / (high - low) for end, _, _ in labels]
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + LABEL_GAP)
    ceiling = 0.99
    for i in reversed(range(len(heights))):
        heights[i] = min(heights[i], ceiling)
        ceiling = heights[i] - LABEL_GAP
    for height, (_, name, colour) in zip(heights, labels, strict=True):
        axes.text(1.02, height, name, color=colour, transform=axes.transAxes, va="center")
