"""Time a token against context length and against batch, drawn from a result of `bench decode`."""

import io
from pathlib import Path
from typing import Any

from writehead.bench.context import OURS as OURS_AT_CONTEXT
from writehead.bench.decode import GRAPH, OURS, quickest
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
FORMATS: dict[str, dict[str, str | None]] = {"svg": {"Date": None}, "png": {}}  # and metadata


# the fields of a result that are read
SIZE = range(1, 2**63)
_ROW = {
    "preset": str,
    "kind": str,
    "model": {"task": str},
    "floor": {"step_ms": (float, {"true": float})},
    "measured": {str: {"step_ms?": {"median": float}}},
}
SWEPT = {
    "dtype": str,
    "environment": {"hardware": {"device": str}, "versions": {"torch": str}, "date": str},
    "sweeps": {
        "context?": [_ROW | {"batch": SIZE, "context": SIZE}],
        "batch?": [_ROW | {"setting": dict.fromkeys(("batch", "source", "target"), SIZE)}],
    },
}


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """Draws what a result has sweeps of, as SVG and PNG; returns the files."""
    sweeps = result.get("sweeps") or {}
    if not isinstance(sweeps, dict) or not any(map(sweeps.get, ("context", "batch"))):
        raise ConfigError("this result has no sweeps to draw; make one by bench decode --plot")
    try:
        check_shape(result, SWEPT)
    except JsonError as error:
        raise RunError(f"this result {error}; run the benchmark again") from error
    files = []
    if rows := sweeps.get("context"):
        title = f"{_family(rows)}, {rows[0]['batch']} rows: the time of a token behind a context"
        figure = _figure(rows, "context", OURS_AT_CONTEXT, "context, tokens", title, result)
        files += _save(figure, folder / "decode-context")
    if rows := sweeps.get("batch"):
        setting = rows[0]["setting"]
        lengths = f"{setting['source']} + {setting['target']} tokens"
        title = f"{_family(rows)}, {lengths}, greedy: the time of a token"
        flat = [{**row, "batch": row["setting"]["batch"]} for row in rows]
        figure = _figure(flat, "batch", OURS["true"], "sentences decoded together", title, result)
        files += _save(figure, folder / "decode-batch")
    return files


def _family(rows: list[dict[str, Any]]) -> str:
    """What all rows are models of: "wmt14 translation", "lm1b language"."""
    families = dict.fromkeys(row["preset"].partition("/")[0] for row in rows)
    return f"{', '.join(families)} ({rows[0]['model']['task']})"


def _figure(
    rows: list[dict[str, Any]], over: str, ours: str, label: str, title: str, result: dict[str, Any]
) -> Figure:
    """Ours, plain PyTorch and the floor of each model against `over`, both scales logarithmic."""
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(row["preset"] for row in rows):
        one = [row for row in rows if row["preset"] == name]
        colour = COLOURS.get(one[0]["kind"], "#4a5568")
        row_name = name.partition("/")[2] or name
        for what, style in ((ours, "solid"), (GRAPH, "dotted"), ("floor", "dashed")):
            points = [(row[over], us) for row in one if (us := _microseconds(row, what))]
            if not points:
                continue
            axes.plot(
                *zip(*points, strict=True),
                color=colour,
                linestyle=style,
                linewidth=2.2 if what == ours else 1.2,
                marker="o" if what == ours else None,
                markersize=4,
                label=f"{row_name}{_said(what, ours)}",
            )
    _finish(axes, sorted({row[over] for row in rows}), label)
    axes.set_title(title, loc="left", fontsize=11)
    figure.supxlabel(_caption(result), fontsize=7.5, color="#4a5568", x=0.01, ha="left")
    return figure


def _microseconds(row: dict[str, Any], what: str) -> float | None:
    """Microseconds a token of a row, measured or least; None where that was not measured."""
    if what == "floor":
        floor = row["floor"]["step_ms"]
        step = floor["true"] if isinstance(floor, dict) else floor
    elif found := quickest(row, what):
        step = found["step_ms"]["median"]
    else:
        return None
    return float(step) * 1e3 / float(row["batch"])


def _said(what: str, ours: str) -> str:
    if what == ours:
        return ", ours"
    return ", floor" if what == "floor" else ", plain PyTorch in a graph, padded"


def _finish(axes: Axes, ticks: list[int], label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=8)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=20))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(label)
    axes.set_ylabel("microseconds a token")
    axes.grid(visible=True, which="major", color="#e2e8f0", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)


def _caption(result: dict[str, Any]) -> str:
    facts = result["environment"]
    return (
        f"{facts['hardware']['device']}, {result['dtype']}, torch {facts['versions']['torch']}, "
        f"{facts['date'][:10]}; the floor: bytes and operations over rates measured just before"
    )


def _save(figure: Figure, stem: Path) -> list[Path]:
    """Writes a figure in each format, whole or not at all."""
    files = []
    for kind, metadata in FORMATS.items():
        path, content = stem.with_suffix(f".{kind}"), io.BytesIO()
        with matplotlib.rc_context({"svg.hashsalt": "writehead"}):  # same picture, same bytes
            figure.savefig(content, format=kind, dpi=160, metadata=metadata)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, content.getvalue())
        except OSError as error:
            raise RunError(f"{path} could not be written: {error.strerror}") from error
        files.append(path)
    return files
