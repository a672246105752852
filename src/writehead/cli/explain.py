"""`writehead presets` and `writehead explain`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from writehead import cost
from writehead.cli.app import Page, app
from writehead.config import ModelConfig
from writehead.errors import ConfigError, nearest
from writehead.explain import Question, explain, render
from writehead.paper.presets import preset, preset_names


@app.command(name="presets")
def presets_command() -> None:
    """List the presets: every row of the paper's Tables 1 and 3, and smaller families.

    Example: writehead presets
    """
    for name in preset_names():
        config = preset(name)
        local = f" window={config.window}" if config.window else ""
        typer.echo(
            f"{name:30} h={config.h} g={config.g} k={config.k} d_ff={config.f}{local} "
            f"parameters={sum(cost.parameters(config).values()):,}"
        )


@app.command(name="explain")
def explain_command(
    model: Annotated[
        str, typer.Argument(metavar="PRESET", help="A preset's name, or the folder of a run.")
    ],
    batch: Annotated[int, typer.Option(help="Sentences decoded together.")] = 1024,
    source: Annotated[int, typer.Option(help="Source tokens a sentence.")] = 128,
    target: Annotated[int, typer.Option(help="Target tokens a sentence.")] = 128,
    beam: Annotated[int, typer.Option(help="Hypotheses a sentence.")] = 1,
    position: Annotated[
        int | None,
        typer.Option(help="Where to look at a decoder step, from 0; the last by default."),
    ] = None,
    chip: Annotated[str, typer.Option(help=f"One of {', '.join(cost.CHIPS)}.")] = "h200",
    bandwidth: Annotated[
        float | None, typer.Option(help="Bytes a second, instead of the chip's: 3.35e12.")
    ] = None,
    flops: Annotated[
        float | None, typer.Option(help="Operations a second, instead of the chip's: 989e12.")
    ] = None,
    memory: Annotated[
        float | None, typer.Option(help="Bytes of memory, instead of the chip's: 80e9.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print exact JSON.")] = False,
) -> None:
    """Show what a model costs to train and decode, and the least time that takes on a chip.

    Example: writehead explain wmt14/multi-query --batch 1024 --source 128 --target 128 --chip h200
    """
    config = config_of(model)
    question = Question(
        name=model,
        config=config,
        setting=cost.Setting(batch, source if config.encoder_layers else 0, target, beam),
        chip=_chip(chip, bandwidth, flops, memory),
        position=position,
    )
    answer = explain(question)
    if as_json:
        typer.echo(json.dumps(answer, indent=2, ensure_ascii=False))
    else:
        render(answer, Page())


def config_of(model: str) -> ModelConfig:
    """The config of a run's folder where there is one, else of a preset."""
    if not Path(model).is_dir():
        if model not in preset_names():
            raise ConfigError(
                f"{model!r} is neither a preset nor the folder of a run; "
                f"{nearest(model, preset_names())}"
            )
        return preset(model)
    from writehead.model.runs import read_config  # brings PyTorch, which takes seconds

    return read_config(model)


def _chip(
    name: str, bandwidth: float | None, flops: float | None, memory: float | None
) -> cost.Chip:
    chip = cost.find_chip(name)
    if bandwidth is None and flops is None and memory is None:
        return chip
    return cost.Chip(
        name=f"{name}, changed",
        memory=chip.memory if memory is None else memory,
        bandwidth=chip.bandwidth if bandwidth is None else bandwidth,
        flops=chip.flops if flops is None else flops,
        source="as given",
    )
