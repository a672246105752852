"""`writehead presets`, `writehead explain` and `writehead quantize`."""

import dataclasses
import difflib
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from typer import Argument, Option

from writehead import cost
from writehead.cli.app import Page, app
from writehead.cli.options import (
    A_RUN,
    ForceRun,
    Json,
    NewRun,
    Threads,
    check_new_run,
    read_settings,
)
from writehead.config import ModelConfig, QuantizationConfig
from writehead.errors import ConfigError, nearest
from writehead.explain import Question, explain, render
from writehead.interop.families import describe, find_config
from writehead.interop.hub import find_folder
from writehead.paper.presets import FAMILIES, WINDOW, preset, preset_names, train_preset
from writehead.schema import with_settings


@app.command(name="presets")
def presets_command() -> None:
    """List the presets: every row of the paper's Tables 1 and 3, and smaller families.

    The number of parameters is that with the preset's vocabulary; train uses the dataset's.

    Example: writehead presets
    """
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("preset", style="cyan", no_wrap=True)
    for name in ("layers", "d", "h", "g", "k,v", "d_ff", "parameters", "steps"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in preset_names():
        config = preset(name)
        layers = f"{config.encoder_layers}+" if config.encoder_layers else ""
        sizes = (config.d, config.h, config.g, config.k, config.f)
        total = f"{sum(cost.parameters(config).values()):,}"
        steps = str(train_preset(name).steps)
        table.add_row(name, f"{layers}{config.decoder_layers}", *map(str, sizes), total, steps)
    page = Page(highlight=False)
    page.print(table)
    page.print("h: read-heads, g: write-heads (KV heads); wmt14: Table 1, lm1b: Table 3")
    page.print(f"-local: the decoder's self-attention is limited to {WINDOW} positions")
    page.print("parameters: with the preset's vocabulary; train uses that of the dataset")


@app.command(name="explain")
def explain_command(
    model: Annotated[str, Argument(help="Preset, folder of a run, or Hugging Face config.json.")],
    batch: Annotated[int, Option(help="Batch size.")] = 1024,
    source: Annotated[int | None, Option(help="Source tokens per sentence. Default: 128.")] = None,
    target: Annotated[int, Option(help="Target tokens per sentence.")] = 128,
    beam: Annotated[int, Option(help="Beam size.")] = 1,
    position: Annotated[
        int | None, Option(help="Decoding step to show. Default: the last.")
    ] = None,
    chip: Annotated[str, Option(help=f"One of {', '.join(cost.CHIPS)}.")] = "h200",
    bandwidth: Annotated[
        float | None, Option(help="Override the chip's bandwidth, in bytes per second.")
    ] = None,
    flops: Annotated[
        float | None, Option(help="Override the chip's matrix throughput, in FLOP per second.")
    ] = None,
    memory: Annotated[float | None, Option(help="Override the chip's memory, in bytes.")] = None,
    settings: Annotated[
        list[str] | None, Option("--set", help="model.NAME=VALUE. Repeatable.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the cost of training and decoding a model, and the minimum time on a chip.

    Example: writehead explain wmt14/multi-query --batch 1024 --source 128 --target 128 --chip h200

    Features of a Hugging Face model that writehead does not have are approximated and listed.
    """
    changes = read_settings(settings, ("model",))["model"]
    is_preset = model.partition("/")[0] in FAMILIES
    if not is_preset and not Path(model).exists():
        _suggest_preset(model)  # before querying the hub
    file = None if is_preset else find_config(find_folder(model, config_only=True))
    described = None if file is None else describe(file)
    config = with_settings(described.config if described else _find_model(model), changes)
    if config.task == "language" and source is not None:
        raise ConfigError(f"--source is for translation; {model} is a language model")
    length = 0 if config.task == "language" else 128 if source is None else source
    figures = {"bandwidth": bandwidth, "flops": flops, "memory": memory}
    given: dict[str, Any] = {name: value for name, value in figures.items() if value is not None}
    if given:
        given |= {"name": f"{chip}, modified", "source": "from the command line"}
    answer = explain(
        Question(
            name=model,
            config=config,
            setting=cost.Setting(batch, length, target, beam),
            chip=dataclasses.replace(cost.find_chip(chip), **given),
            position=position,
            approximations=() if described is None else described.approximations,
        )
    )
    if as_json:
        typer.echo(json.dumps(answer, indent=2, ensure_ascii=False))
    else:
        render(answer, Page())


def _suggest_preset(name: str) -> None:
    """Raises ConfigError if a name closely resembles that of a preset."""
    if close := difflib.get_close_matches(name[:100], preset_names(), n=1, cutoff=0.8):
        raise ConfigError(f"there is no preset or folder {name}; did you mean {close[0]!r}?")


def _find_model(name: str) -> ModelConfig:
    """Returns the config of a run if the folder exists, else that of a preset."""
    if Path(name).is_dir():
        from writehead.runs.folder import read_config  # imports PyTorch

        return read_config(name)
    if name not in [*preset_names(), *FAMILIES]:
        raise ConfigError(
            f"{name!r} is neither a preset nor the folder of a run or Hugging Face model; "
            f"{nearest(name, preset_names())}"
        )
    return preset(name)


@app.command(name="quantize")
def quantize_command(
    run: Annotated[str, Argument(help=A_RUN)],
    output: NewRun,
    bits: Annotated[int, Option(help="Bits per weight: 8, 6, 5 or 4.")] = 8,
    group: Annotated[
        int | None,
        Option(help="Columns per scale; 0 is a whole row. Default: 32, or 0 for 8 bits."),
    ] = None,
    force: ForceRun = False,
    threads: Threads = None,
) -> None:
    """Store the weight matrices of a run in fewer bits. Use the new run like any other.

    On a CPU, the new run is decoded with int8 weights by default, which saves memory. On other
    devices, loading converts the weights to floating point, so this saves only disk space.

    Example: writehead quantize runs/ende/wmt14-small/multi-query small --bits 6
    """
    config = QuantizationConfig.of(bits, group)
    from writehead.interop.quantize import quantize_run  # imports PyTorch, which takes seconds

    check_new_run(output, force)
    done = quantize_run(run, output, config, overwrite=force)
    typer.echo(
        f"{output}: {done.bytes_before:,} bytes reduced to {done.bytes_after:,}, {config.words}; "
        f"largest relative error {done.error:.2%}, in {done.matrix}",
        err=True,
    )
