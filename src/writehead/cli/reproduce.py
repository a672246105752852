"""`writehead reproduce` and `writehead report`."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from writehead.cli.app import app
from writehead.cli.options import Threads, read_settings
from writehead.errors import ConfigError
from writehead.schema import with_settings

if TYPE_CHECKING:
    from writehead.paper.reproduce import Ending

CARD = Path("src/writehead/bundled/MODEL_CARD.md")

Results = Annotated[Path, typer.Option(help="The folder of results.")]


@app.command(name="reproduce")
def reproduce_command(
    table: Annotated[str, typer.Argument(help="table1, table2 or table3.")],
    scale: Annotated[
        str | None,
        typer.Option(
            help="small: our text and sizes; paper-size: the paper's sizes; paper: its experiment; "
            "tiny: a rehearsal. small by default; for table2, which reads no text, paper, or tiny "
            "on a CPU."
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="The folder of text; data by default. For paper: parquet files."),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="A row, as multi-query; repeatable, all by default.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of each row; the scale's own.")] = None,
    seeds: Annotated[
        str | None, typer.Option(help="How many, as 3, or which, as 0,1,2; 1 by default.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="train.NAME=VALUE for every row; repeatable.")
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(help="Stop when so much time has passed; the same command goes on."),
    ] = None,
    results: Results = Path("results"),
    runs: Annotated[Path, typer.Option(help="Where datasets and runs are kept.")] = Path("runs"),
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Threads = None,
) -> None:
    """Run a table of the paper row by row, all equal but the attention; go on where it stopped.

    Rows whose result is there are skipped. Stopped by Ctrl-C, SIGTERM or --minutes it exits with
    128 plus the signal's number, and the same command goes on. Several at once, as one a GPU, share
    the rows; one for which none is left says so and exits with 0.

    Example: writehead reproduce table1 --data data --only multi-head --only multi-query --seeds 3
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "reproduce trains a row on one device; without torchrun, start the same command once "
            "a GPU, and they share the rows"
        )
    if minutes is not None and not minutes >= 0:
        raise ConfigError(f"--minutes {minutes} is no time; give 0 or more")
    train = {"--data": data, "--steps": steps, "--seeds": seeds, "--set": settings}
    try:
        if table == "table2":
            for name, given in train.items():
                if given is not None:
                    raise ConfigError(f"{name} is for table1 and table3; leave it out for table2")
            ending = _speed(scale, only, results, runs, device, minutes)
        else:
            changes = read_settings(settings, ("train",))["train"]
            from writehead.paper.experiments import find_experiment, read_seeds
            from writehead.paper.reproduce import Job, reproduce

            experiment = find_experiment(table, scale or "small")
            job = Job(
                experiment=experiment,
                train=with_settings(experiment.with_steps(steps), changes),
                rows=experiment.choose_rows(only or []),
                seeds=read_seeds(seeds or "1"),
                data=data,
                results=results,
                runs=runs,
                device=device,
                minutes=minutes,
            )
            ending = reproduce(job)
    except KeyboardInterrupt:
        typer.echo("interrupted; run the same command again to go on", err=True)
        raise typer.Exit(130) from None
    _say_ending(ending, results)


@app.command(name="report")
def report_command(
    results: Results = Path("results"),
    output: Annotated[
        Path, typer.Option(help="The folder for report.html and its pictures.")
    ] = Path("docs/report"),
    readme: Annotated[
        Path | None,
        typer.Option(
            help="The file whose <!-- report --> is filled; README.md if the results are those "
            "beside it, and the report is made in its project."
        ),
    ] = None,
    card: Annotated[
        Path | None,
        typer.Option(
            help="The file whose <!-- figures --> is filled; the model card "
            f"{CARD} if the results are those of its project."
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Write nothing; exit 1 if README or card says otherwise."),
    ] = False,
) -> None:
    """Make the paper's tables of results: into README, one HTML file, and pictures as SVG.

    What was measured of the bundled model goes into all of them and into its card.

    Example: writehead report --results results --output docs/report
    """
    own = Path("README.md")
    if readme is None and own.is_file() and _are_beside(results, own):
        if check or Path(os.path.abspath(output)).is_relative_to(Path.cwd()):
            readme = own
        else:
            typer.echo(f"{own} is left alone, since the report is made elsewhere", err=True)
    if readme is None and card is None and check:
        raise ConfigError(
            "there is no README.md here to check beside these results; name one with --readme"
        )
    if card is None and readme is not None and _are_beside(results, readme):
        card = readme.parent / CARD if (readme.parent / CARD).is_file() else None
    from writehead.paper import report as reports
    from writehead.paper.page import write_page

    report = reports.make_report(results)
    texts = {}
    if readme is not None:
        tables = reports.markdown(report, reports.figures_link(readme, output))
        texts[readme] = reports.splice(readme, tables)
    if card is not None:
        texts[card] = reports.splice(card, reports.card_markdown(report), reports.FIGURES)
    stale = {path: new for path, (old, new) in texts.items() if old != new}
    if check:
        for path in stale:
            typer.echo(f"{path} does not say what {results} gives; run writehead report", err=True)
        raise typer.Exit(1 if stale else 0)
    pictures = reports.write_pictures(report, output)
    page = write_page(output / "report.html", report, pictures)
    for path, new in stale.items():
        reports.write_page_file(path, new)
        typer.echo(f"{path}: brought up to date", err=True)
    typer.echo(f"report: {page}")


def _are_beside(results: Path, readme: Path) -> bool:
    """Whether results are those of the project that a README is of, and not somebody's own."""
    return results.resolve() == (readme.parent / "results").resolve()


def _speed(
    scale: str | None,
    only: list[str] | None,
    results: Path,
    runs: Path,
    device: str,
    minutes: float | None,
) -> "Ending":
    from writehead.paper.speed import SpeedJob, choose_rows, choose_scale, reproduce_speed

    chosen = scale or choose_scale(device)
    rows = choose_rows(chosen, only or [])
    if scale is None and chosen != "paper":
        typer.echo(
            f"on a CPU table2 is timed at scale {chosen}; --scale paper is the paper's size, which "
            f"takes a CPU many hours",
            err=True,
        )
    return reproduce_speed(SpeedJob(chosen, rows, results, runs, device, minutes))


def _say_ending(ending: "Ending", results: Path) -> None:
    """How far it came; exits as training does where it was stopped."""
    have = f"{ending.done} of {ending.of} results are there"
    if ending.stopped_by is None:
        where = "" if results == Path("results") else f" --results {results}"
        rest = f"writehead report{where} makes tables of them"
        if ending.done < ending.of:
            rest = "other processes are at work on the rest, and none is left for this one"
        typer.echo(f"{have}; {rest}", err=True)
        return
    where = "" if ending.at is None else f" at {ending.at}"
    typer.echo(f"stopped{where}; {have}; run the same command again to go on", err=True)
    raise typer.Exit(128 + ending.stopped_by)
