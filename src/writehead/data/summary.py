"""What a dataset is, as tables to look at."""

from rich.console import Console
from rich.table import Table

from writehead.data.dataset import SIDES, Dataset


def render(dataset: Dataset, console: Console) -> None:
    """Prints the splits, and what was left out and why."""
    info = dataset.info
    splits = Table("split", title=f"{dataset.directory.name}: {dataset.task}", title_justify="left")
    sides = SIDES[dataset.task]
    for heading in ("lines", "sequences", *(f"{side} tokens" for side in sides), "a line"):
        splits.add_column(heading, justify="right")
    for name, counts in info["splits"].items():
        target = counts["target_tokens"] / max(counts["sequences"], 1)
        splits.add_row(
            name,
            f"{counts['lines']:,}" if counts["lines"] else "from train",
            f"{counts['sequences']:,}",
            *(f"{counts[f'{side}_tokens']:,}" for side in sides),
            f"{target:.1f}",
        )
    console.print(splits)
    lines = sum(counts["lines"] for counts in info["splits"].values())
    dropped = Table("left out", title_justify="left")
    dropped.add_column("lines", justify="right")
    dropped.add_column("share", justify="right")
    for reason, count in info["dropped"].items():
        dropped.add_row(reason, f"{count:,}", f"{count / lines:.2%}")
    total = sum(info["dropped"].values())
    dropped.add_row("in all", f"{total:,}", f"{total / lines:.2%}")
    console.print(dropped)
    size = sum(file.stat().st_size for file in dataset.directory.iterdir())
    normalised = sum(counts["normalised"] for counts in info["splits"].values())
    console.print(
        f"white space or invisible characters put right in {normalised:,} lines\n"
        f"vocabulary {dataset.vocab_size:,}; {size / 1e6:,.1f} MB on disk",
        highlight=False,
    )
