"""The paper's tables with its figures beside ours, and its claims with what was seen: as text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from writehead.bench.decode import OURS, quickest
from writehead.paper.captions import quality_caption, speed_caption
from writehead.paper.claims import NOT_RUN, Finding, Verdict, judge
from writehead.paper.results import Result
from writehead.paper.sheets import PAPER, Figures, Measure, Sheet
from writehead.paper.tables import TABLE_2, Table2Row

NONE = "–"
TITLES = {
    "table1": "Table 1, English to German",
    "table2": "Table 2, microseconds a token",
    "table3": "Table 3, language models",
}
TWINS = (("multi-head", "multi-query"), ("multi-head-local", "multi-query-local"))


@dataclass(frozen=True)
class Grid:
    """A table as text: a title, a heading, rows of as many cells, and sentences beneath."""

    title: str
    head: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)


def quality_grid(sheet: Sheet) -> Grid:
    """Table 1 or 3: every row of the paper's, with our figures where it was run."""
    head = ["attention", "h", "k, v", "d_ff"]
    columns = _columns(sheet)
    for title, _, printed in columns:
        head += [title, "paper"] if printed else [title]
    rows = [[*_sizes(sheet, row), *_cells(sheet, row), _seeds(sheet, row)] for row in sheet.names]
    title = f"{TITLES[sheet.table]}: {sheet.scale}"
    return Grid(title, [*head, "seeds"], rows, quality_caption(sheet))


def _columns(sheet: Sheet) -> list[tuple[str, tuple[Measure, ...], bool]]:
    """A column's heading, the measures in it, and whether the paper has them too."""
    if sheet.table == "table3":
        return [(one.label, (one,), one.in_paper) for one in sheet.measures]
    ppl, dev, greedy, beam, *other = sheet.measures
    return [
        (ppl.label, (ppl,), True),
        (dev.label, (dev,), True),
        ("BLEU test, beam 1 / 4", (greedy, beam), True),
        ("BLEU test, 13a", tuple(other), False),
    ]


def _sizes(sheet: Sheet, row: str) -> list[str]:
    """The name and sizes of a row; in brackets the paper's, where they are others."""
    paper = next(one for one in PAPER[sheet.table] if one.row == row)
    config = sheet.models[row]
    name = sheet.names[row]
    if config.h != sheet.models["multi-head"].h or config.k != sheet.models["multi-head"].k:
        name = "multi-head"  # the sizes beside it tell the rest, as in the paper
    pairs = ((config.h, paper.h), (config.k, paper.k), (config.f, paper.f))
    sizes = [str(ours) if ours == theirs else f"{ours} ({theirs})" for ours, theirs in pairs]
    return [name.replace("-local", " local"), *sizes]


def _cells(sheet: Sheet, row: str) -> list[str]:
    cells = []
    for _, measures, printed in _columns(sheet):
        cells.append(_joined(row, [(one, sheet.figures(one)) for one in measures], NOT_RUN))
        if printed:
            cells.append(_printed(sheet, row, measures))
    return cells


def _joined(row: str, figures: list[tuple[Measure, Figures]], otherwise: str) -> str:
    """The figures of a row with their spread, or another word where there is none."""
    words = []
    for measure, found in figures:
        if row in found:
            spread = found[row].spread
            more = "" if spread is None else f" ± {measure.show(spread)}"
            words.append(measure.show(found[row].mean) + more)
    return " / ".join(words) or otherwise


def _printed(sheet: Sheet, row: str, measures: tuple[Measure, ...]) -> str:
    """The paper's figures of a row, with its digits."""
    paper = next(one for one in PAPER[sheet.table] if one.row == row)
    values = [getattr(paper, one.key) for one in measures]
    known = [measures[0].show_printed(value) for value in values if value is not None]
    return " / ".join(known) or NONE


def _seeds(sheet: Sheet, row: str) -> str:
    return str(len(sheet.of_row(row)))


def claims_grid(sheet: Sheet) -> Grid:
    """The claims about a sheet's table, with the paper's margin, ours, the noise and a verdict.

    Those about rows that were not run are counted only.
    """
    head = ["the paper says", "held to", "figure", "paper", "ours", "noise", "verdict"]
    verdicts = judge(sheet)
    rows = [_claim_cells(one, sheet) for one in verdicts if one.word != NOT_RUN]
    left = len(verdicts) - len(rows)
    notes = [
        "A margin is above 0 where the claim holds. Noise: how far from 0 chance alone takes it, "
        "19 times in 20, by the spread over seeds, pooled over the rows that have several; a claim "
        "is seen where the margin is above it, not seen where it is below minus it. Margins are of "
        "figures before they are rounded.",
        *([f"Not run: {left} of {len(verdicts)}, about rows that were not."] if left else []),
        *_names(sheet),
    ]
    return Grid(f"{TITLES[sheet.table]}: {sheet.scale}, and what the paper says", head, rows, notes)


def _names(sheet: Sheet) -> list[str]:
    """A sentence on rows that have other names here, since a name has a row's own sizes."""
    other = [f"{theirs} is our {ours}" for theirs, ours in sheet.names.items() if theirs != ours]
    return [f"The paper's {', '.join(other)}."] if other else []


def _claim_cells(verdict: Verdict, sheet: Sheet) -> list[str]:
    claim, measure = verdict.claim, verdict.measure
    return [
        f"{claim.section}: “{claim.words}”",
        claim.reading,
        measure.label,
        _finding(verdict.paper, measure.show_printed, {row: row for row in sheet.names}),
        _finding(verdict.ours, measure.show, sheet.names),
        NONE if verdict.noise is None else f"± {measure.show(verdict.noise)}",
        verdict.word,
    ]


def _finding(finding: Finding | None, show: Callable[[float], str], names: dict[str, str]) -> str:
    """A margin with its sign, and the figures that it was made of."""
    if finding is None:
        return NONE
    figures = ", ".join(f"{names[row]} {show(value)}" for row, value in finding.figures.items())
    sign = "−" if finding.margin < 0.0 else "+"
    return f"{sign}{show(abs(finding.margin))} ({figures})"


def speed_grid(scale: str, results: list[Result]) -> Grid:
    """Table 2: training, and decoding by greedy and beam-4 search, padded and by true lengths."""
    head = ["attention", "training", "paper"]
    for search in ("greedy", "beam 4"):
        head += [f"{search}, padded", "true lengths", "paper"]
    by_row = {one["row"]: one for one in results}
    rows = [_speed_cells(paper, by_row.get(paper.row)) for paper in TABLE_2]
    rows += [_gains(slow, fast, by_row) for slow, fast in TWINS]
    return Grid(f"{TITLES['table2']}: {scale}", head, rows, speed_caption(results))


def _speed_cells(paper: Table2Row, result: Result | None) -> list[str]:
    name = paper.row.replace("-local", " local")
    cells = [name, _microseconds(_training_us(result)), f"{paper.training:.1f}"]
    for beam, theirs in ((1, _greedy(paper)), (4, _beam(paper))):
        for lengths in ("padded", "true"):
            cells.append(_decode_cell(_decoded(result, beam, lengths), result is not None))
        cells.append(f"{theirs[0]:.1f} + {theirs[1]:g}")
    return cells


def _decode_cell(found: dict[str, Any] | None, run: bool) -> str:
    if found is None:
        return NONE if run else NOT_RUN
    us = found["us_per_token"]
    return (
        f"{_microseconds(us['encoder'])} + {_microseconds(us['decoder'])} "
        f"({found['share_of_floor']:.0%})"
    )


def _gains(slow: str, fast: str, by_row: dict[str, Result]) -> list[str]:
    """How many times as fast the second row of a pair trains and decodes, the encoder left out."""
    rows = [by_row.get(name) for name in (slow, fast)]
    papers = [next(one for one in TABLE_2 if one.row == name) for name in (slow, fast)]
    cells = [f"gain of {fast.replace('-local', ' local')}"]
    cells += [_ratio([_training_us(one) for one in rows], 2)]
    cells += [_ratio([one.training for one in papers], 2)]
    for beam, theirs in ((1, _greedy), (4, _beam)):
        for lengths in ("padded", "true"):
            found = [_decoded(one, beam, lengths) for one in rows]
            cells.append(_ratio([_decoder_us(one) for one in found]))
        cells.append(_ratio([theirs(one)[1] for one in papers]))
    return cells


def _greedy(paper: Table2Row) -> tuple[float, float]:
    return paper.encoder, paper.decoder


def _beam(paper: Table2Row) -> tuple[float, float]:
    return paper.beam4_encoder, paper.beam4_decoder


def _training_us(result: Result | None) -> float | None:
    return None if result is None else float(result["training"]["us_per_token"])


def _decoded(result: Result | None, beam: int, lengths: str) -> dict[str, Any] | None:
    """What was measured of a search; None where it was not."""
    if result is None:
        return None
    for row in result["decode"]:
        if row["setting"]["beam"] == beam:
            return quickest(row, OURS[lengths])
    return None


def _decoder_us(found: dict[str, Any] | None) -> float | None:
    return None if found is None else float(found["us_per_token"]["decoder"])


def _ratio(pair: Sequence[float | None], digits: int = 1) -> str:
    slow, fast = pair
    return f"{slow / fast:.{digits}f}×" if slow and fast else NONE


def _microseconds(value: float | None) -> str:
    if value is None:
        return NOT_RUN
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
