"""`writehead reproduce` and `writehead report`."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from writehead.cli.app import app
from writehead.cli.options import Threads, read_settings
from writehead.errors import ConfigError
from writehead.schema import with_settings
from writehead.util.files import write_file

if TYPE_CHECKING:
    from writehead.paper.reproduce import Summary

RESULTS = Path("results")
CARD = Path("src/writehead/bundled/MODEL_CARD.md")

Results = Annotated[Path, typer.Option(help="Folder of the results.")]


@app.command(name="reproduce")
def reproduce_command(
    table: Annotated[str, typer.Argument(help="table1, table2 or table3.")],
    scale: Annotated[
        str | None,
        typer.Option(
            help="small: our text and sizes; paper-size: the paper's sizes; paper: its experiment; "
            "tiny: a rehearsal. Default: small; for table2, paper on a GPU and tiny on a CPU."
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of the text files; for scale paper, of parquet files."),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="A row, such as multi-query; repeatable. Default: all.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps per row.")] = None,
    seeds: Annotated[
        str | None, typer.Option(help="How many, as 3, or which, as 0,1,2. Default: 1.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="train.NAME=VALUE for every row; repeatable.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Stop after this time; the same command resumes.")
    ] = None,
    results: Results = RESULTS,
    runs: Annotated[Path, typer.Option(help="Folder of datasets and runs.")] = Path("runs"),
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Threads = None,
) -> None:
    """Reproduce a table of the paper row by row; rows differ in their attention only.

    Rows with a result are skipped. After Ctrl-C, SIGTERM or --minutes the exit code is 128 plus the
    signal's number, and the same command resumes. Several processes, such as one per GPU, share the
    rows.

    Example: writehead reproduce table1 --data data --only multi-head --only multi-query --seeds 3
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "a row is trained on one device; instead of torchrun, start the same command once per "
            "GPU"
        )
    if minutes is not None and not minutes >= 0:
        raise ConfigError(f"--minutes {minutes} must be 0 or more")
    from writehead.paper import experiments, reproduce, speed

    try:
        if table == "table2":
            for name, given in (
                ("data", data),
                ("steps", steps),
                ("seeds", seeds),
                ("set", settings),
            ):
                if given is not None:
                    raise ConfigError(f"--{name} is for table1 and table3; leave it out for table2")
            chosen = scale or speed.default_scale(device)
            experiments.check_scale(chosen)
            rows = experiments.choose_rows(table, speed.ROWS, only or [])
            summary = speed.reproduce_speed(
                speed.SpeedJob(chosen, rows, results, runs, device, minutes)
            )
        else:
            changes = read_settings(settings, ("train",))["train"]
            experiment = experiments.find_experiment(table, scale or "small")
            job = reproduce.Job(
                experiment=experiment,
                train=with_settings(experiment.with_steps(steps), changes),
                rows=experiments.choose_rows(experiment.name, tuple(experiment.rows), only or []),
                seeds=read_seeds(seeds or "1"),
                data=data,
                results=results,
                runs=runs,
                device=device,
                minutes=minutes,
            )
            summary = reproduce.reproduce_quality(job)
    except KeyboardInterrupt:
        typer.echo("interrupted; run the same command again to resume", err=True)
        raise typer.Exit(130) from None
    _print_summary(summary)


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


def _print_summary(summary: "Summary") -> None:
    """Prints how many results exist; exits with the signal's code if the work was stopped."""
    have = f"{summary.done} of {summary.total} results exist"
    if summary.stopped_by is not None:
        typer.echo(
            f"stopped at {summary.stopped_at}; {have}; run the same command again to resume",
            err=True,
        )
        raise typer.Exit(128 + summary.stopped_by)
    busy = "; other processes are working on the rest" if summary.done < summary.total else ""
    typer.echo(f"{have}{busy}", err=True)


@app.command(name="report")
def report_command(
    output: Annotated[
        Path | None,
        typer.Argument(
            metavar="[OUT]",
            help="The Markdown file to write; its figures go to the folder figures beside it. "
            "Default: docs/results.md, or report.md in another folder of results.",
        ),
    ] = None,
    results: Results = RESULTS,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit with 1 if the file is outdated.")
    ] = False,
) -> None:
    """Write the paper's tables, its claims and figures beside our results, as Markdown and SVG.

    In a checkout, the table of the bundled model also goes into its model card.

    Example: writehead report report.md --results results
    """
    from writehead.paper import report as reports

    if output is None:
        output = Path("docs/results.md") if results == RESULTS else results / "report.md"
    report, card = reports.make_report(results), results.parent / CARD
    texts = {output: report.text}
    if report.card and card.is_file():
        texts[card] = reports.fill_card(card, report.card)
    if check:
        outdated = [path for path, text in texts.items() if reports.read_text(path) != text]
        for path in outdated:
            typer.echo(f"{path} is outdated; run writehead report", err=True)
        raise typer.Exit(1 if outdated else 0)
    reports.write_report(report, output)
    if card in texts:
        write_file(card, texts[card])
    typer.echo(f"report: {output}")
