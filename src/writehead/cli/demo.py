"""`writehead demo`."""

from pathlib import Path
from typing import Annotated

import typer

from writehead.cli.app import Threads, app


@app.command(name="demo")
def demo_command(
    folder: Annotated[Path, typer.Option(help="Where to keep data, models and report.")] = Path(
        "demo"
    ),
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Threads = None,
) -> None:
    """Train a multi-head and a multi-query model side by side, and decode, score and time both.

    First the bundled model translates a few sentences. All takes a few minutes on two cores, and
    goes on where it stopped when run again.

    Example: writehead demo
    """
    from writehead.demo import run_demo

    try:
        page = run_demo(folder, device=device)
    except KeyboardInterrupt:
        typer.echo("interrupted; run the same command again to go on", err=True)
        raise typer.Exit(130) from None
    typer.echo(f"\nreport: {page}")
