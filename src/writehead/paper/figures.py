"""The report's pictures, as SVG: quality against bytes of K and V, and what was learnt when."""

import io
import math

from writehead.bench.plots import COLOURS
from writehead.paper.claims import HEAD
from writehead.paper.presets import rows
from writehead.paper.sheets import Figures, Measure, Sheet, kv_bytes
from writehead.util.extras import requires

with requires("plot"):
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas
    from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

PAPER_FAMILY = {"table1": "wmt14", "table3": "lm1b"}
SMALL_HEADS = "#718096"  # of the rows with fewer or smaller heads
LINES = ("solid", "dashed", "dotted", "dashdot")
HEIGHT = 200  # points of a panel of `quality_svg`, about
LINE = 10  # points that a text takes


def quality_svg(sheet: Sheet) -> str:
    """The paper's argument: quality against K/V bytes a token, its figures and ours beside them."""
    measure = sheet.measures[0]
    canvas = Canvas(figsize=(9.4, 3.9), layout="constrained")
    left, right = canvas.subplots(1, 2)
    theirs = rows(PAPER_FAMILY[sheet.table])
    sizes = {row: kv_bytes(theirs[row]) for row in theirs}
    _quality(left, sheet.paper_figures(measure), sizes, {row: row for row in theirs}, measure)
    left.set_title("the paper's", loc="left", fontsize=11)
    sizes = {row: kv_bytes(config) for row, config in sheet.models.items()}
    _quality(right, sheet.figures(measure), sizes, sheet.names, measure)
    right.set_title(f"ours, {sheet.experiment.family}", loc="left", fontsize=11)
    return _svg(canvas)


def _quality(
    axes: Axes, figures: Figures, sizes: dict[str, float], names: dict[str, str], measure: Measure
) -> None:
    """One point a row; down and left is better. A bar shows the spread of several seeds."""
    means = {row: figure.mean for row, figure in figures.items()}
    raised = _raised(means)
    for row, figure in figures.items():
        axes.errorbar(
            sizes[row],
            figure.mean,
            yerr=figure.spread,
            fmt="s" if row.endswith("-local") else "o",
            color=_colour(row),
            markersize=6,
            capsize=3,
        )
        few = row in raised
        axes.annotate(
            names[row].removeprefix("multi-head-")
            if few
            else names[row].replace("-local", " local"),
            (sizes[row], figure.mean),
            xytext=(8, raised[row] - 3) if few else (0, 9 if _is_above(row, means) else -13),
            textcoords="offset points",
            fontsize=8,
            ha="left" if few else "center",
            color=_colour(row),
        )
    ticks = sorted({sizes[row] for row in figures})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks], fontsize=8)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.margins(x=0.22, y=0.18)
    axes.set_xlabel("bytes of K and V a token")
    axes.set_ylabel(measure.label)
    _plain(axes)


def _is_above(row: str, means: dict[str, float]) -> bool:
    """Whether a row is the upper of it and the same with a window, or without."""
    other = row.removesuffix("-local") if row.endswith("-local") else f"{row}-local"
    return means[row] >= means.get(other, means[row])


def _raised(means: dict[str, float]) -> dict[str, float]:
    """By how many points the texts of fewer or smaller heads are raised, so that none meet."""
    values = means.values() or [0.0]  # there may be no results
    scale = HEIGHT / ((max(values) - min(values)) * 1.4 or 1.0)
    raised, free = {}, -math.inf
    for row in sorted(means, key=lambda row: means[row]):
        if not _is_whole(row):
            at = max(means[row] * scale, free)
            raised[row], free = at - means[row] * scale, at + LINE
    return raised


def loss_svg(sheet: Sheet) -> str:
    """ln(PPL) of the dev set while training, and how far each row is behind multi-head by then."""
    # by the first seed that there is
    curves = {row: next(iter(sheet.curves(row).values()), {}) for row in sheet.names}
    curves = {row: curve for row, curve in curves.items() if curve}
    panels = 2 if HEAD in curves else 1
    canvas = Canvas(figsize=(4.7 * panels, 3.9), layout="constrained")
    left, *others = canvas.subplots(1, panels, squeeze=False)[0]
    for row, curve in curves.items():
        drawn = {"color": _colour(row), "linestyle": _style(row), "linewidth": 1.4}
        left.plot(list(curve), list(curve.values()), label=sheet.names[row], **drawn)
        behind, _ = sheet.behind(row)
        for axes in others:
            axes.plot(list(behind), list(behind.values()), marker=".", **drawn)
    left.set_yscale("log")
    left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    left.yaxis.set_minor_formatter(NullFormatter())
    last = [value for curve in curves.values() for value in curve.values()]
    if last:
        left.set_yticks(_ticks(min(last), max(last)))
        left.legend(frameon=False, fontsize=7.5)
    left.set(xlabel="step", ylabel="ln(PPL) a token, dev")
    for axes in others:
        axes.set(xlabel="step", ylabel="above multi-head's at that step")
    for axes in (left, *others):
        _plain(axes)
    return _svg(canvas)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from `low` to `high`, few enough to read."""
    steps = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
    step = next((one for one in steps if (high - low) / one <= 7), steps[-1])
    first = int(low / step)
    return [i * step for i in range(first, int(high / step) + 2) if i * step >= low] or [low]


def _is_whole(row: str) -> bool:
    """Whether a row has as many heads of the same size as the baseline."""
    return row.removesuffix("-local") in ("multi-head", "multi-query")


def _colour(row: str) -> str:
    kind = "multi-query" if row.startswith("multi-query") else "multi-head"
    return COLOURS[kind] if _is_whole(row) else SMALL_HEADS


def _style(row: str) -> str:
    """What tells rows of one colour apart."""
    if _is_whole(row):
        return "dashed" if row.endswith("-local") else "solid"
    sizes = ("1x128", "2x64", "4x32", "8x16")
    return LINES[sizes.index(row.removeprefix("multi-head-"))]


def _plain(axes: Axes) -> None:
    axes.grid(visible=True, which="major", color="#e2e8f0", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _svg(canvas: Canvas) -> str:
    """The picture as text, the same each time."""
    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "writehead"}):
        canvas.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()
