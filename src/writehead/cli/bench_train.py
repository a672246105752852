"""`writehead bench train`, and the group of benchmark commands."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from writehead.cli.app import Page, app
from writehead.cli.bench_output import check, keeping, telling
from writehead.cli.options import Device, Force, Preset, Settings, Threads, read_configs
from writehead.config import TrainConfig

BENCH = """Measure: ours beside the floor.

Example: writehead bench train --preset wmt14/multi-query
"""
bench_app = typer.Typer(no_args_is_help=True, help=BENCH)
app.add_typer(bench_app, name="bench")


@bench_app.command(name="train")
def bench_train_command(
    preset_name: Preset,
    dataset: Annotated[
        Path | None, typer.Option(help="Text to pack; the built-in grammar's by default.")
    ] = None,
    settings: Settings = None,
    steps: Annotated[int | None, typer.Option(help="Steps to time: 20, or 5 on a CPU.")] = None,
    warmup: Annotated[
        int | None, typer.Option(help="Steps before them: 8, on a GPU 5 or more; or 2 on a CPU.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the result as JSON.")] = None,
    force: Force = False,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Time training steps on packed batches: µs a token, and the share of the chip's matrix rate.

    A step reads train.rows rows: 128, or 8 on a CPU.

    Example: writehead bench train --preset wmt14/multi-query --dataset data/ende
    """
    model, config = read_configs(preset_name, settings, TrainConfig())
    from writehead.bench.train import ON_CPU, ON_GPU, bench_preset
    from writehead.decoding.devices import find_device

    place = find_device(device)
    sizes = ON_GPU if place.type == "cuda" else ON_CPU
    if not any(setting.startswith("train.rows=") for setting in settings or ()):
        parts = config.accumulate
        config = dataclasses.replace(config, rows=-(-sizes.rows // parts) * parts)
    file = check(output, force, "train")
    result: dict[str, Any] = {}
    with telling() as tell, keeping(result, file):
        result |= bench_preset(
            preset_name,
            model,
            config,
            dataset,
            device=place,
            steps=sizes.steps if steps is None else steps,
            warmup=sizes.warmup if warmup is None else warmup,
            tell=tell,
        )
    page = Page()
    page.print(
        f"{preset_name}: {result['us_per_token']:.3g} µs a token ({result['step_ms']:.4g} ms a "
        f"step), utilisation {result['utilisation']:.1%}, floor "
        f"{result['floor_us_per_token']:.3g} µs, rows {result['fill']:.1%} full",
        soft_wrap=True,
        highlight=False,
    )
