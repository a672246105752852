"""Charts and the README table, drawn from the records of `bench decode` and `bench context`."""

import io
import math
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

COLOURS = {"multi-head": "#b5483a", "multi-query": "#2b6cb0", "grouped-query": "#6b46c1"}
MULTI_HEAD, MULTI_QUERY = "multi-head", "multi-query"
FLOOR = "floor"
# the systems of the README's chart and table: label of the measurement, name, kinds
SYSTEMS = (
    (OURS["true"], "writehead", (MULTI_QUERY, MULTI_HEAD)),
    (CTRANSLATE2, "CTranslate2", (MULTI_QUERY, MULTI_HEAD)),
    (HUGGING_FACE, "Hugging Face", (MULTI_HEAD,)),
    (COMPILED, "PyTorch, torch.compile", (MULTI_QUERY, MULTI_HEAD)),
    (FLOOR, "hardware floor", (MULTI_QUERY,)),
)
THEMES = {
    "light": {
        "text": "#1f2328",
        "grid": "#d8dee4",
        OURS["true"]: "#0969da",
        CTRANSLATE2: "#bc4c00",
        HUGGING_FACE: "#9a6700",
        COMPILED: "#8250df",
        FLOOR: "#6e7781",
    },
    "dark": {
        "text": "#e6edf3",
        "grid": "#30363d",
        OURS["true"]: "#58a6ff",
        CTRANSLATE2: "#ff9b5e",
        HUGGING_FACE: "#e3b341",
        COMPILED: "#bc8cff",
        FLOOR: "#9ea7b3",
    },
}
SAME_RATIO = 1.15  # kinds of a system whose times differ by less are drawn as one line
LABEL_GAP = 0.052  # of the height of the chart, between two labels

_SIZE = range(1, 2**63)
_ROW = {
    "preset": str,
    "kind": str,
    "model": {"task": str},
    "floor": {"step_ms": (float, {"true": float})},
    "measured": {str: {"step_ms?": {"median": float}}},
}
_CONTEXTS = [_ROW | {"batch": _SIZE, "context": _SIZE}]
_DECODED = [_ROW | {"setting": dict.fromkeys(("batch", "source", "target", "beam"), _SIZE)}]
_HEADER = {
    "dtype": str,
    "environment": {"hardware": {"device": str}, "versions": {"torch": str}, "date": str},
}


def context_rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a record that are language models after contexts; [] if there are none."""
    if result.get("bench") == "context":
        rows = result.get("rows")
    else:  # of `bench decode` in version 0.1
        sweeps = result.get("sweeps")
        rows = sweeps.get("context") if isinstance(sweeps, dict) else None
    return _checked(result, rows, _CONTEXTS) if rows else []


def decode_rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a record that are translation models; [] if there are none."""
    rows = result.get("rows") if result.get("bench") == "decode" else None
    return _checked(result, rows, _DECODED) if rows else []


def _checked(result: dict[str, Any], rows: Any, shape: Any) -> list[dict[str, Any]]:
    try:
        check_shape({**result, "rows": rows}, {**_HEADER, "rows": shape})
    except JsonError as error:
        raise RunError(f"this record {error}; run the benchmark again") from error
    return list(rows)


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """Draws the charts that a record has rows for, as SVG; returns the files."""
    files = []
    if context_rows(result):
        files.append(_save(_context_figure(result), folder / "decode-context.svg"))
    if decode_rows(result):
        files += [
            _save(_decoding_figure(result, colours), folder / f"decoding-{theme}.svg")
            for theme, colours in THEMES.items()
        ]
    if not files:
        raise ConfigError("this record has nothing to draw; give one of bench decode or context")
    return files


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


def _points(
    rows: list[dict[str, Any]], label: str, kind: str, beam: int
) -> list[tuple[int, float]]:
    """(batch, milliseconds per step) of a system."""
    points = []
    for row in rows:
        is_local = row["model"].get("window") is not None
        if (row["kind"], row["setting"]["beam"]) != (kind, beam) or is_local:
            continue
        if (ms := _step_ms(row, label)) is not None:
            points.append((int(row["setting"]["batch"]), ms))
    return sorted(points)


def _step_ms(row: dict[str, Any], label: str) -> float | None:
    if label == FLOOR:
        floor = row["floor"]["step_ms"]
        return float(floor["true"] if isinstance(floor, dict) else floor)
    found = quickest(row, label)
    return None if found is None else float(found["step_ms"]["median"])


def _decoding_figure(result: dict[str, Any], colours: dict[str, str]) -> Figure:
    """Milliseconds per greedy step against the batch, one line per system and kind."""
    rows = decode_rows(result)
    beam = min(row["setting"]["beam"] for row in rows)
    figure = Figure(figsize=(8.0, 4.6), layout="constrained")
    axes = figure.subplots()
    figure.patch.set_alpha(0.0)
    axes.patch.set_alpha(0.0)
    labels: list[tuple[float, str, str]] = []
    for label, name, kinds in SYSTEMS:
        lines = {kind: _points(rows, label, kind, beam) for kind in kinds}
        lines = {kind: points for kind, points in lines.items() if points}
        if len(lines) == 2 and _are_same(*lines.values()):
            lines = {"": lines[MULTI_QUERY]}
        for kind, points in lines.items():
            style = ":" if label == FLOOR else "--" if kind == MULTI_HEAD else "-"
            axes.plot(
                *zip(*points, strict=True),
                color=colours[label],
                linestyle=style,
                linewidth=2.6 if label == OURS["true"] else 1.6,
                marker=None if label == FLOOR else "o",
                markersize=4,
            )
            labels.append((points[-1][1], f"{name}, {kind}" if kind else name, colours[label]))
    batches = sorted({row["setting"]["batch"] for row in rows})
    _set_scales(axes, batches, "batch size (sentences)", "milliseconds per decoding step", colours)
    _label_lines(axes, labels)
    setting = rows[0]["setting"]
    facts = result["environment"]
    axes.set_title(
        f"{search_name(beam).capitalize()} decoding of {setting['source']} + {setting['target']} "
        f"tokens, {facts['hardware']['device']}, {result['dtype']}; lower is better",
        loc="left",
        fontsize=9.5,
        color=colours["text"],
    )
    return figure


def _are_same(one: list[tuple[int, float]], other: list[tuple[int, float]]) -> bool:
    times = dict(other)
    ratios = [ms / times[batch] for batch, ms in one if batch in times]
    return all(1 / SAME_RATIO < ratio < SAME_RATIO for ratio in ratios)


def _label_lines(axes: Axes, labels: list[tuple[float, str, str]]) -> None:
    """Writes each label beside the right end of its line, moved apart where they would overlap."""
    low, high = (math.log(limit) for limit in axes.get_ylim())
    heights = [(math.log(ms) - low) / (high - low) for ms, _, _ in sorted(labels)]
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + LABEL_GAP)
    shift = max(0.0, heights[-1] - 0.99)
    for i in reversed(range(len(heights))):  # back down where the top has no room
        above = heights[i + 1] - LABEL_GAP if i + 1 < len(heights) else heights[i] - shift
        heights[i] = min(heights[i], above)
    for height, (_, text, colour) in zip(heights, sorted(labels), strict=True):
        axes.text(1.02, height, text, color=colour, transform=axes.transAxes, va="center", size=9)


def _context_figure(result: dict[str, Any]) -> Figure:
    """Microseconds per token against the context: ours, plain PyTorch and the floor."""
    rows = context_rows(result)
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.subplots()
    systems = {OURS_AT_CONTEXT: "ours", PYTORCH: "plain PyTorch in a graph", FLOOR: FLOOR}
    for preset in dict.fromkeys(row["preset"] for row in rows):
        of_preset = [row for row in rows if row["preset"] == preset]
        for (label, name), style in zip(systems.items(), ("-", ":", "--"), strict=True):
            points = [
                (row["context"], ms * 1e3 / row["batch"])
                for row in of_preset
                if (ms := _step_ms(row, label)) is not None
            ]
            if points:
                axes.plot(
                    *zip(*points, strict=True),
                    color=COLOURS.get(of_preset[0]["kind"], "#4a5568"),
                    linestyle=style,
                    linewidth=2.2 if label == OURS_AT_CONTEXT else 1.2,
                    label=f"{preset.partition('/')[2] or preset}, {name}",
                )
    contexts = sorted({row["context"] for row in rows})
    colours = {"text": "black", "grid": "#e2e8f0"}
    _set_scales(axes, contexts, "context (tokens)", "microseconds per token", colours)
    axes.legend(frameon=False, fontsize=8)
    facts = result["environment"]
    axes.set_title(
        f"{rows[0]['preset'].partition('/')[0]}, batch {rows[0]['batch']}: time per token after a "
        f"context; {facts['hardware']['device']}, {result['dtype']}",
        loc="left",
        fontsize=9.5,
    )
    return figure


def _set_scales(
    axes: Axes, ticks: list[int], xlabel: str, ylabel: str, colours: dict[str, str]
) -> None:
    """Logarithmic scales with plain numbers, in the colours of a theme."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=8)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=20))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(xlabel, color=colours["text"])
    axes.set_ylabel(ylabel, color=colours["text"])
    axes.tick_params(colors=colours["text"], which="both")
    axes.grid(visible=True, which="major", color=colours["grid"], linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(colours["text"])


def _save(figure: Figure, path: Path) -> Path:
    """Writes a figure as SVG; the same figure gives the same bytes."""
    content = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "writehead"}):
        figure.savefig(content, format="svg", metadata={"Date": None})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, content.getvalue())
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}") from error
    return path
