"""`writehead quantize`."""

from pathlib import Path
from typing import Annotated

import typer

from writehead.cli.app import app
from writehead.config import QuantizationConfig


@app.command(name="quantize")
def quantize_command(
    run: Annotated[Path, typer.Argument(help="The folder of a run, or a checkpoint.")],
    output: Annotated[Path, typer.Argument(help="The folder of the new run.")],
    bits: Annotated[int, typer.Option(help="Bits of a weight: 8, 6, 5 or 4.")] = 8,
    group: Annotated[
        int | None,
        typer.Option(
            help="Columns to a scale, 0 for whole rows; by default whole rows in 8 bits, else 32."
        ),
    ] = None,
) -> None:
    """Make a smaller run: its weight matrices in few bits, to be used as any other run.

    Example: writehead quantize runs/ende/wmt14-small/multi-query small --bits 6
    """
    config = QuantizationConfig.of(bits, group)
    from writehead.model.quantize import quantize_run  # brings PyTorch, which takes seconds

    done = quantize_run(run, output, config)
    typer.echo(
        f"{output}: {done.bytes_before:,} bytes are now {done.bytes_after:,}, in "
        f"{config.words}; largest relative error {done.error:.2%}, of {done.matrix}",
        err=True,
    )
