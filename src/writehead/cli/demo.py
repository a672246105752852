"""`writehead demo`."""

from pathlib import Path
from typing import Annotated

import typer

from writehead.cli.app import app
from writehead.cli.options import Device, Threads, resumable


@app.command(name="demo")
def demo_command(
    folder: Annotated[Path, typer.Option(help="Folder for the data, models and page.")] = Path(
        "demo"
    ),
    device: Device = "auto",
    threads: Threads = 1,
) -> None:
    """Train a multi-head and a multi-query model, and compare their quality and speed.

    First, the bundled model translates a few sentences. The demo takes about five minutes on two
    CPU cores. If it is interrupted, the same command resumes.

    Example: writehead demo
    """
    from writehead.demo import run_demo

    with resumable():
        page = run_demo(folder, device=device)
    typer.echo(f"\nresults: {page}")
