"""Rows that were trained again by the same command: whether they come out alike."""

from collections.abc import Iterator
from pathlib import Path

from writehead.errors import RunError
from writehead.paper.claims import NOT_KNOWN
from writehead.paper.layout import NONE, TITLES, Grid
from writehead.paper.results import AGAIN, Result, check_alike, read_results
from writehead.paper.sheets import Measure, Sheet

INSIDE, OUTSIDE = "within the noise", "outside the noise"


def read_repeats(results: Path) -> dict[tuple[str, str], list[Result]]:
    """The repeats in a folder of results, by table and scale."""
    folder = results / AGAIN
    return read_results(folder) if folder.is_dir() else {}


def repeats_grid(sheet: Sheet, again: list[Result]) -> Grid:
    """The figures of repeats beside those of the first runs of the same row and seed."""
    head = ["trained again", "seed", "figure", "first", "again", "difference", "noise", "verdict"]
    rows = [
        [one["row"], str(one["seed"]), measure.label, *_cells(sheet, measure, first, one)]
        for one in again
        for first in [_first(sheet, one)]
        for measure in _measured(sheet, first, one)
    ]
    notes = [
        "Noise: how far apart chance alone brings two runs, 19 times in 20, by the spread over "
        "seeds, pooled over the rows that have several; a repeat has the same seed, so it should "
        "be nearer than that."
    ]
    return Grid(f"{TITLES[sheet.table]}: {sheet.scale}, rows trained again", head, rows, notes)


def _first(sheet: Sheet, again: Result) -> Result:
    """The result that another repeats."""
    for one in sheet.results:
        if (one["row"], one["seed"]) == (again["row"], again["seed"]):
            check_alike(f"the repeat of {one['row']}, seed {one['seed']},", again, one)
            return one
    raise RunError(
        f"{again['row']}, seed {again['seed']}, of {sheet.table} was trained again, and there is "
        f"no first result of it; run it without `--results`, or move the repeat"
    )


def _measured(sheet: Sheet, first: Result, again: Result) -> Iterator[Measure]:
    for measure in sheet.measures:
        if measure.of(first) is not None and measure.of(again) is not None:
            yield measure


def _cells(sheet: Sheet, measure: Measure, first: Result, again: Result) -> list[str]:
    before, after = measure.of(first), measure.of(again)
    assert before is not None
    assert after is not None
    noise, difference = sheet.noise(measure), after - before
    sign = "−" if difference < 0.0 else "+"
    cells = [measure.show(before), measure.show(after), f"{sign}{measure.show(abs(difference))}"]
    if noise is None:
        return [*cells, NONE, NOT_KNOWN]
    allowed = noise.between_two
    verdict = INSIDE if abs(difference) <= allowed else OUTSIDE
    return [*cells, f"± {measure.show(allowed)}", verdict]
