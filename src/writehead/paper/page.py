"""The report as one HTML file that needs nothing else, its pictures inside."""

import html
from pathlib import Path

from writehead.paper.claims import NOT_KNOWN, NOT_RUN, NOT_SEEN, SEEN, WITHIN
from writehead.paper.frame import html_page
from writehead.paper.layout import Grid
from writehead.paper.repeats import INSIDE, OUTSIDE
from writehead.paper.report import (
    SWEEP,
    SWEEP_CAPTION,
    SWEEP_TITLE,
    Picture,
    Report,
    Section,
    write_page_file,
)

TITLE = "Fast Transformer Decoding: its tables, run again"
STYLE = """
body { max-width: 76rem; }
h2 { font-size: 1.3rem; margin-top: 2.6rem; } h3 { font-size: 1.05rem; margin-top: 1.8rem; }
table { font-size: 0.82rem; } .paper { color: #718096; }
th, td { padding: 0.3rem 0.5rem; vertical-align: top; white-space: nowrap; }
thead th { border-bottom: 2px solid #a0aec0; white-space: normal; vertical-align: bottom; }
.claims td, .claims th { text-align: left; white-space: normal; }
.claims td:nth-last-child(-n+2) { white-space: nowrap; }
figure { margin: 1.2rem 0; }
.seen { color: #276749; font-weight: 600; } .not-seen { color: #b5483a; font-weight: 600; }
.within { color: #975a16; font-weight: 600; } .missing { color: #a0aec0; }
"""
CLASSES = {
    SEEN: "seen",
    INSIDE: "seen",
    NOT_SEEN: "not-seen",
    OUTSIDE: "not-seen",
    WITHIN: "within",
    NOT_KNOWN: "within",
}


def write_page(path: Path, report: Report, pictures: list[Path]) -> Path:
    """Writes the report; `pictures` are the files that were drawn, the sweep's among them."""
    body = [
        f"<h1>{TITLE}</h1>",
        "<p>The tables of <i>Fast Transformer Decoding: One Write-Head is All You Need</i> (Noam "
        "Shazeer, 2019) with the paper's figures beside ours, what differs, and what became of its "
        "claims. Every figure of ours is read from a file that "
        "<code>writehead</code> wrote when it was measured.</p>",
        *(_section(section) for section in report.sections),
    ]
    sweep = [path for path in pictures if path.name == f"{SWEEP}.svg"]
    if report.sweep is not None and sweep:
        svg = sweep[0].read_text(encoding="utf-8")
        body += [
            f"<h2>{SWEEP_TITLE}</h2>",
            _figure(Picture(SWEEP, svg, SWEEP_TITLE, SWEEP_CAPTION)),
        ]
    if report.not_run:
        body.append(f"<p class='note'>Not run: {html.escape('; '.join(report.not_run))}.</p>")
    if report.bundled is not None:
        body.append(_section(Section(report.bundled)))
    write_page_file(path, html_page(TITLE, "\n".join(body), STYLE))
    return path


def _section(section: Section) -> str:
    parts = [f"<h2>{html.escape(section.table.title)}</h2>", _table(section.table)]
    parts += [_figure(picture) for picture in section.pictures]
    for judged in (section.claims, section.repeats):
        if judged is not None:
            parts += [f"<h3>{html.escape(judged.title)}</h3>", _judged(judged)]
    return "\n".join(parts)


def _table(grid: Grid) -> str:
    """A table, the paper's columns paler than ours."""
    paper = [name == "paper" for name in grid.head]
    head = "".join(_cell("th", cell, "") for cell in grid.head)
    rows = [
        "".join(
            _cell("td", cell, "paper" if theirs else "missing" if cell == NOT_RUN else "")
            for cell, theirs in zip(row, paper, strict=True)
        )
        for row in grid.rows
    ]
    return _framed("", head, rows, grid.notes)


def _judged(grid: Grid) -> str:
    """A table whose last column has verdicts."""
    head = "".join(_cell("th", cell, "") for cell in grid.head)
    rows = [
        "".join(_cell("td", cell, "") for cell in row[:-1]) + _cell("td", row[-1], CLASSES[row[-1]])
        for row in grid.rows
    ]
    return _framed("claims", head, rows, grid.notes)


def _framed(kind: str, head: str, rows: list[str], notes: list[str]) -> str:
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    table = f"<table class='{kind}'><thead><tr>{head}</tr></thead>{body}</table>"
    note = html.escape(" ".join(notes)).replace("`", "")
    return f"<div class='wide'>{table}</div><p class='note'>{note}</p>"


def _cell(tag: str, text: str, kind: str) -> str:
    return f"<{tag}{f' class={kind}' if kind else ''}>{html.escape(text)}</{tag}>"


def _figure(picture: Picture) -> str:
    svg = picture.svg[picture.svg.index("<svg") :]
    return f"<figure>{svg}<figcaption>{html.escape(picture.caption)}</figcaption></figure>"
