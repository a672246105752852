"""Formats results as Markdown."""

import statistics
from collections.abc import Iterable, Sequence

from writehead.paper.results import Result

NONE = "–"


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Formats rows, of which the first is the heading, as a Markdown table."""
    lines = [rows[0], ["-"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"|{'|'.join(cells)}|" for cells in lines)


def figure(values: list[float] | None, digits: int, otherwise: str) -> str:
    """Formats the mean over seeds, with its standard deviation."""
    if not values:
        return otherwise
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def provenance(results: Iterable[Result]) -> str:
    """Names the hardware, dates, versions and commits of results."""
    made = [one["environment"] for one in results]
    dates = sorted(one["date"][:10] for one in made)
    commits = unique((one["commit"] or "unknown")[:7] for one in made)
    return (
        f"Measured on {unique(one['hardware']['device'] for one in made)}, "
        f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}, "
        f"PyTorch {unique(one['versions']['torch'] for one in made)}, "
        f"{'commits' if ',' in commits else 'commit'} {commits}."
    )


def unique(names: Iterable[str]) -> str:
    """Joins names, each once."""
    return ", ".join(dict.fromkeys(names))
