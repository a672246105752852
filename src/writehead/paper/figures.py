"""Draws the paper's argument: the quality of each row, and the size of its KV cache."""

import io
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from writehead import cost
from writehead.config import ModelConfig
from writehead.paper.claims import MEASURES, NOT_RUN, SMALL_HEADS, Scores, Values, paper_values
from writehead.paper.presets import rows
from writehead.util.extras import requires

with requires("plot"):
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAPER_FAMILY = {"table1": "wmt14", "table3": "lm1b"}
RED, BLUE, GREY = "#b5483a", "#2b6cb0", "#718096"
CREATOR = "writehead report"  # in the SVG's metadata


def quality_svg(table: str, scales: Sequence[Scores]) -> str:
    """Draws one panel with the paper's figures and one per scale with ours."""
    measure, configs = MEASURES[table][0], rows(PAPER_FAMILY[table])
    panels = [("paper", paper_values(table, measure))]
    panels += [(scores.scale, scores.values(measure)) for scores in scales]
    size = (2.2 + 2.6 * len(panels), 0.9 + 0.28 * len(configs))
    figure = Figure(figsize=size, layout="constrained")
    drawn = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (title, values) in zip(drawn, panels, strict=True):
        _draw(axes, list(configs), values, measure.digits)
        axes.set_title(title, loc="left", fontsize=10)
    kv_bytes = {row: _kv_bytes(config) for row, config in configs.items()}
    labels = [f"{row} ({100 * kv_bytes[row] / kv_bytes['multi-head']:.3g}%)" for row in configs]
    drawn[0].set_yticks(range(len(configs)), labels, fontsize=9)
    drawn[0].invert_yaxis()
    caption = f"{measure.label}, lower is better; in brackets: K/V cache, relative"
    figure.supxlabel(caption, fontsize=9)
    return _svg(figure)


def _draw(axes: Axes, names: list[str], values: Values, digits: int) -> None:
    """Draws a dot per row with the standard deviation over its seeds."""
    small: Any = {"fontsize": 8, "va": "center"}
    for i, row in enumerate(names):
        if row not in values:
            axes.text(0.02, i, NOT_RUN, transform=axes.get_yaxis_transform(), **small)
            continue
        mean = statistics.mean(values[row])
        spread = statistics.stdev(values[row]) if values[row][1:] else None
        colour = GREY if row in SMALL_HEADS else BLUE if "query" in row else RED
        axes.errorbar(mean, i, xerr=spread, fmt="o", color=colour, markersize=5, capsize=3)
        label = f"{mean:.{digits}f}"
        axes.annotate(label, (mean, i), xytext=(7, 0), textcoords="offset points", **small)
    axes.margins(x=0.3, y=0.1)
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(visible=True, color="#e2e8f0", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _kv_bytes(config: ModelConfig) -> int:
    setting = cost.Setting(1, 128 if config.encoder_layers else 0, 128)  # §4.3
    return int(cost.kv_bytes(config, setting)["total"])


def conversion_svg(lines: Mapping[str, Mapping[int, float]]) -> str:
    """Draws BLEU against the bytes of K and V per token, a line per name."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for name, points in lines.items():
        xs = sorted(points)
        axes.plot(xs, [points[x] for x in xs], "o-", label=name, markersize=4, linewidth=1.4)
    ticks = sorted({x for points in lines.values() for x in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xlabel("bytes of K and V per token", fontsize=9)
    axes.set_ylabel("BLEU test, beam 4", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(visible=True, color="#e2e8f0", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    return _svg(figure)


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "writehead", "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": CREATOR})
    return text.getvalue()
