"""`writehead demo`."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from writehead.cli.app import app
from writehead.cli.options import Device, resumable
from writehead.util.threads import use_threads


@app.command(name="demo")
def demo_command(
    folder: Annotated[
        Path, Option(help="Folder for the dataset, the models and the results page.")
    ] = Path("demo"),
    device: Device = "auto",
    threads: Annotated[
        int, Option(help="CPU threads. More than 1 rarely helps for models this small.")
    ] = 1,
) -> None:
    """Train a multi-head and a multi-query model, and compare their quality and speed.

    The demo takes about five minutes on two CPU cores. If interrupted, run it again to resume.

    Example: writehead demo
    """
    use_threads(threads)
    from writehead.demo import run_demo

    with resumable():
        page = run_demo(folder, device=device)
    typer.echo(f"\nresults: {page}")
