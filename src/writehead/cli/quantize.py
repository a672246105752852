"""`writehead quantize`."""

from pathlib import Path
from typing import Annotated

import typer

from writehead.cli.app import Threads, app
from writehead.cli.new_run import ForceRun, NewRun, check_free
from writehead.config import QuantizationConfig
from writehead.errors import RunError


@app.command(name="quantize")
def quantize_command(
    run: Annotated[Path, typer.Argument(help="The folder of a run, or a checkpoint.")],
    output: NewRun,
    bits: Annotated[int, typer.Option(help="Bits per stored weight: 8, 6, 5 or 4.")] = 8,
    group: Annotated[
        int | None,
        typer.Option(
            help="Columns to a scale, 0 for whole rows; by default whole rows in 8 bits, else 32."
        ),
    ] = None,
    force: ForceRun = False,
    threads: Threads = None,
) -> None:
    """Store a run's weight matrices in few bits; the new run is used like any other.

    Loading the run converts its weights to floating point. Quantizing therefore saves disk space,
    not memory or time.

    Example: writehead quantize runs/ende/wmt14-small/multi-query small --bits 6
    """
    config = QuantizationConfig.of(bits, group)
    from writehead.model import quantize_run  # brings PyTorch, which takes seconds

    _check_tokenizer(run)
    check_free(output, force)
    done = quantize_run(run, output, config, overwrite=force)
    typer.echo(
        f"{output}: {done.bytes_before:,} bytes are now {done.bytes_after:,}, in "
        f"{config.words}; largest relative error {done.error:.2%}, of {done.matrix}; "
        "loading the run converts its weights to floating point",
        err=True,
    )


def _check_tokenizer(run: Path) -> None:
    """Raises unless the run has a tokenizer that can be read: without it nothing could be decoded.

    The library quantizes a run without one too, since whoever saves such a run has it elsewhere.
    """
    from writehead.data.tokenizer import Tokenizer
    from writehead.model.runs import TOKENIZER, read_config

    read_config(run)  # where there is no run, that is what to say
    if not (run / TOKENIZER).exists():
        raise RunError(
            f"{run} has no {TOKENIZER}, so the new run would know no text; save it with its "
            f"tokenizer"
        )
    Tokenizer.load(run / TOKENIZER)
