"""`writehead reproduce` and `writehead report`."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from writehead.cli.app import app
from writehead.cli.options import Threads, read_settings, resumable
from writehead.errors import ConfigError, RunError, nearest
from writehead.schema import with_settings
from writehead.util.files import write_file

RESULTS = Path("results")
CARD = Path("src/writehead/bundled/MODEL_CARD.md")
CONVERTING = "converting.md"  # next to the report

Results = Annotated[Path, Option(help="Folder with the results.")]


@app.command(name="reproduce")
def reproduce_command(
    table: Annotated[str, Argument(help="table1, table2, table3 or conversion.")],
    scale: Annotated[
        str | None,
        Option(
            help="small: smaller models, our text; paper-size: the paper's model sizes, our text; "
            "paper: the paper's experiment; tiny: a quick test. Default: small; for table2, paper "
            "on a GPU and tiny on a CPU."
        ),
    ] = None,
    data: Annotated[Path | None, Option(help="Folder with text or parquet files.")] = None,
    only: Annotated[
        list[str] | None,
        Option(help="Row to run, or a pattern, such as '*-query'. Repeatable. Default: all."),
    ] = None,
    steps: Annotated[int | None, Option(help="Training steps per row.")] = None,
    seeds: Annotated[
        str | None, Option(help="Number of seeds (3) or list of seeds (0,1,2). Default: 1.")
    ] = None,
    settings: Annotated[
        list[str] | None, Option("--set", help="train.NAME=VALUE for every row. Repeatable.")
    ] = None,
    results: Results = RESULTS,
    runs: Annotated[Path, Option(help="Folder for datasets and runs.")] = Path("runs"),
    device: Annotated[str, Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
    threads: Threads = None,
) -> None:
    """Reproduce a table of the paper row by row. Rows differ only in their attention.

    Rows that already have a result are skipped. After Ctrl-C or SIGTERM, run the same command
    again to resume. Several processes, such as one per GPU, divide the rows, except for table2.

    `conversion` trains Table 1's multi-head model if necessary, converts it to fewer write-heads,
    and trains the results for 1 to 10% of the steps. --set changes this last training.

    Example: writehead reproduce table1 --data data --only multi-head --only multi-query --seeds 3
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "a row is trained on one GPU; start the same command once per GPU, without torchrun"
        )
    from writehead.paper import conversion, experiments, reproduce, speed

    if table == "table2":
        given = {"data": data, "steps": steps, "seeds": seeds, "set": settings}
        for name in (name for name, value in given.items() if value is not None):
            raise ConfigError(f"--{name} is for table1 and table3; leave it out for table2")
        scale = scale or speed.default_scale(device)
        if scale not in speed.WORKLOADS:
            raise ConfigError(f"unknown scale {scale!r}; {nearest(scale, speed.WORKLOADS)}")
        rows = experiments.choose_rows(table, speed.ROWS, only or [])
        with resumable():
            paths = speed.reproduce_speed(scale, rows, results, runs, device)
    else:
        is_conversion = table == conversion.TABLE
        experiment = experiments.find_experiment(
            "table1" if is_conversion else table, scale or "small"
        )
        changes = read_settings(settings, ("train",))["train"]
        known = conversion.ROWS if is_conversion else tuple(experiment.rows)
        job = reproduce.Job(
            experiment=experiment,
            train=with_settings(experiment.with_steps(steps), {} if is_conversion else changes),
            rows=experiments.choose_rows(table, known, only or []),
            seeds=read_seeds(seeds or "1"),
            data=data,
            results=results,
            runs=runs,
            device=device,
        )
        with resumable():
            if is_conversion:
                paths = conversion.reproduce_conversion(conversion.Conversion(job, changes))
            else:
                paths = reproduce.reproduce_quality(job)
    typer.echo(f"{sum(map(Path.is_file, paths))} of {len(paths)} results exist", err=True)


def read_seeds(text: str) -> tuple[int, ...]:
    """Parses "3", which means 0, 1 and 2, or a list such as "0,2" or "2,"."""
    try:
        listed = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        listed = []
    seeds = tuple(dict.fromkeys(listed)) if "," in text else tuple(range(*listed))
    if not seeds or min(seeds) < 0:
        raise ConfigError(f"--seeds {text} must be a count, such as 3, or a list, such as 0,1,2")
    return seeds


@app.command(name="report")
def report_command(
    output: Annotated[
        Path | None,
        Argument(
            metavar="[OUT]",
            help="Markdown file to write. Figures go to a folder `figures` next to it. Default: "
            "report.md in the folder of --results; without --results, docs/results.md.",
        ),
    ] = None,
    results: Annotated[
        Path | None, Option(help="Folder with the results. Default: results.")
    ] = None,
    check: Annotated[
        bool, Option("--check", help="Write nothing; exit with code 1 if a file is outdated.")
    ] = False,
) -> None:
    """Compare our results with the paper's tables and claims; write Markdown and SVG figures.

    In a checkout, this also updates the tables in the model card of the bundled model and in
    docs/converting.md.

    Example: writehead report report.md --results results
    """
    from writehead.paper import report as reports

    if output is None:
        output = _own_page() if results is None else results / "report.md"
    results = results or RESULTS
    report, card = reports.make_report(results), results.parent / CARD
    page, section = output.with_name(CONVERTING), report.conversion
    if section is not None and not page.is_file():
        report = replace(report, text=f"{report.text}\n{section}\n")
    texts = {output: report.text}
    if report.card and card.is_file():
        texts[card] = reports.fill(card, report.card)
    if page.is_file():
        content = section or reports.NO_CONVERSIONS
        texts[page] = reports.fill(page, content, reports.CONVERSION_MARKS)
    if check:
        texts |= {output.parent / "figures" / name: svg for name, svg in report.figures.items()}
        outdated = [path for path, text in texts.items() if reports.read_text(path) != text]
        for path in outdated:
            typer.echo(f"{path} is outdated; run writehead report", err=True)
        raise typer.Exit(1 if outdated else 0)
    reports.write_report(report, output)
    for path in texts.keys() - {output}:
        write_file(path, texts[path])
    typer.echo(f"report: {output}")


def _own_page() -> Path:
    """Returns docs/results.md; raises RunError if there is no docs/, as outside a checkout."""
    page = Path("docs/results.md")
    if not page.parent.is_dir():
        raise RunError(
            f"there is no folder {page.parent} to write {page.name} to; name a file, such as "
            f"report.md, or pass --results {RESULTS} to write {RESULTS / 'report.md'}"
        )
    return page
