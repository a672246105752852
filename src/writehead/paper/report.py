"""results/*.json -> the paper's tables beside ours, its claims, and pictures: for README and docs.

Nothing is said here that is not in the results or in `tables.py`.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from writehead.bench.plots import context_rows, draw
from writehead.bench.record import read_result_file
from writehead.errors import RunError
from writehead.paper.bundled import FOLDER, bundled_grid, read_bundled, what_is_not_run
from writehead.paper.captions import kv_caption, loss_caption
from writehead.paper.experiments import REHEARSAL, TABLES
from writehead.paper.figures import loss_svg, quality_svg
from writehead.paper.layout import TITLES, Grid, claims_grid, quality_grid, speed_grid
from writehead.paper.repeats import read_repeats, repeats_grid
from writehead.paper.results import Result, read_results
from writehead.paper.sheets import Sheet
from writehead.util import files

BEGIN, END = "<!-- report -->", "<!-- /report -->"
FIGURES = "<!-- figures -->", "<!-- /figures -->"  # of the model's card
SWEEP = "decode-context"  # the picture of `bench decode --plot` that belongs to the argument
SWEEP_TITLE = "Time against context"
SWEEP_CAPTION = "Microseconds a token against the context behind it, both scales logarithmic."


@dataclass(frozen=True)
class Picture:
    """An SVG, its file's name without the ending, and what it shows, in short and at length."""

    name: str
    svg: str
    title: str
    caption: str


@dataclass(frozen=True)
class Section:
    """One table at one scale, what became of the paper's claims about it, its pictures, repeats."""

    table: Grid
    claims: Grid | None = None
    pictures: tuple[Picture, ...] = ()
    repeats: Grid | None = None


@dataclass(frozen=True)
class Report:
    """All tables that were run, those that were not, the newest sweep over contexts, and the box.

    Where the figures of the box are not there, it is what `not_run` names last.
    """

    sections: tuple[Section, ...]
    not_run: tuple[str, ...]
    sweep: dict[str, Any] | None = None
    bundled: Grid | None = None


def make_report(results: Path) -> Report:
    """What a folder of results shows."""
    found, again = _without_rehearsals(read_results(results)), read_repeats(results)
    sections = [
        Section(speed_grid(scale, read))
        if table == "table2"
        else _quality(Sheet(table, scale, read), again.get((table, scale), []))
        for (table, scale), read in sorted(found.items(), key=_most_rows_first)
    ]
    tables = {table for table, _ in found}
    not_run = [TITLES[table] for table in TABLES if table not in tables]
    bundled, sweep = read_bundled(results), _newest_sweep(results)
    if not (found or sweep or (results / FOLDER).is_dir()):
        raise RunError(
            f"there is no result in {results}; give the folder that `writehead reproduce` writes "
            f"to, which holds table1, table2 and table3"
        )
    if bundled is None:
        not_run.append(what_is_not_run(results))
    return Report(
        sections=tuple(sections),
        not_run=tuple(not_run),
        sweep=sweep,
        bundled=None if bundled is None else bundled_grid(bundled),
    )


def _without_rehearsals(
    found: dict[tuple[str, str], list[Result]],
) -> dict[tuple[str, str], list[Result]]:
    """The results but for those at scale tiny of tables that have others."""
    larger = {table for table, scale in found if scale != REHEARSAL}
    return {
        (table, scale): read
        for (table, scale), read in found.items()
        if scale != REHEARSAL or table not in larger
    }


def _most_rows_first(found: tuple[tuple[str, str], list[Result]]) -> tuple[int, int]:
    """What to sort results by: the tables as the paper has them, of each the fullest scale first.

    Of equals the order stays as it is, the paper's own scale first.
    """
    (table, _), read = found
    return TABLES.index(table), -len({one["row"] for one in read})


def _quality(sheet: Sheet, again: list[Result]) -> Section:
    stem = f"{sheet.table}-{sheet.scale}"
    pictures = (
        Picture(
            f"{stem}-quality", quality_svg(sheet), "Quality against K and V", kv_caption(sheet)
        ),
        Picture(f"{stem}-loss", loss_svg(sheet), "Loss by step", loss_caption(sheet)),
    )
    repeats = repeats_grid(sheet, again) if again else None
    return Section(quality_grid(sheet), claims_grid(sheet), pictures, repeats)


def _newest_sweep(results: Path) -> dict[str, Any] | None:
    """The last whole result of `bench decode --plot` that swept contexts, or None."""
    found = []
    for path in sorted(results.rglob("*.json")):
        try:
            one = read_result_file(path, {"bench": str})
            has_contexts = bool(context_rows(one))
        except RunError:
            continue  # what `reproduce` wrote was read and checked; the rest is others' business
        if has_contexts and not one.get("partial"):
            found.append(one)
    return max(found, key=lambda one: str(one["environment"]["date"]), default=None)


def markdown(report: Report, figures: str) -> str:
    """The report for README, with links to pictures in the folder `figures`."""
    parts = [
        "## The paper's tables",
        "Made by `writehead report` from the files of results: the paper's figures beside ours, "
        "and what differs. [docs/reproducing.md](docs/reproducing.md) says how to run them.",
    ]
    for section in report.sections:
        parts += [f"### {section.table.title}", _grid(section.table), " ".join(section.table.notes)]
        for one in section.pictures:
            parts += [_link(one.name, one.title, figures), one.caption]
        for judged in (section.claims, section.repeats):
            if judged is not None:
                bold = [[*row[:-1], f"**{row[-1]}**"] for row in judged.rows]
                grid = Grid(judged.title, judged.head, bold)
                parts += [f"#### {judged.title}", _grid(grid), " ".join(judged.notes)]
    if report.sweep is not None:
        parts += [f"### {SWEEP_TITLE}", _link(SWEEP, SWEEP_TITLE, figures), SWEEP_CAPTION]
    if report.not_run:
        parts.append(f"Not run: {'; '.join(report.not_run)}.")
    if report.bundled is not None:
        parts += [
            f"## {report.bundled.title}",
            _grid(report.bundled),
            " ".join(report.bundled.notes),
        ]
    return "\n\n".join(parts) + "\n"


def card_markdown(report: Report) -> str:
    """The figures for the card of the bundled model."""
    if report.bundled is None:
        return f"Not run: {report.not_run[-1]}.\n"
    return "\n\n".join([_grid(report.bundled), *report.bundled.notes]) + "\n"


def _grid(grid: Grid) -> str:
    lines = [grid.head, ["-"] * len(grid.head), *grid.rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _link(name: str, title: str, figures: str) -> str:
    return f"![{title}]({figures}/{name}.svg)"


def write_pictures(report: Report, folder: Path) -> list[Path]:
    """Writes the pictures; returns their files."""
    files = []
    for picture in (one for section in report.sections for one in section.pictures):
        path = folder / f"{picture.name}.svg"
        write_page_file(path, picture.svg)
        files.append(path)
    if report.sweep is not None:
        files += draw(report.sweep, folder)
    return files


def write_page_file(path: Path, text: str) -> None:
    """Writes a file, whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_file(path, text)
    except OSError as error:
        raise RunError(f"{path} could not be written: {error.strerror}") from error


def splice(page: Path, block: str, marks: tuple[str, str] = (BEGIN, END)) -> tuple[str, str]:
    """A page's text as it is, and with `block` between its marks."""
    begin, end = marks
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise RunError(f"{page} cannot be read: {error.strerror}; check the path") from error
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise RunError(
            f"{page} must have {begin} and {end} once each, in this order; add them where the "
            f"tables shall stand"
        )
    before, _, rest = text.partition(begin)
    after = rest.partition(end)[2]
    return text, f"{before}{begin}\n{block}{end}{after}"


def figures_link(readme: Path, folder: Path) -> str:
    """How README points to the folder of pictures."""
    return Path(os.path.relpath(folder, readme.parent)).as_posix()
