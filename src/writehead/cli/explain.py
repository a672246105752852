"""`writehead presets` and `writehead explain`."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from writehead import cost
from writehead.cli.app import Page, app
from writehead.cli.settings import read_settings
from writehead.config import ModelConfig
from writehead.errors import ConfigError, nearest
from writehead.explain import Question, explain, render
from writehead.hugging_face_config import find_config, import_config
from writehead.paper.presets import FAMILIES, preset, preset_names, train_preset
from writehead.schema import with_settings


@app.command(name="presets")
def presets_command() -> None:
    """List the presets: every row of the paper's Tables 1 and 3, and smaller families.

    Example: writehead presets
    """
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("preset", style="cyan", no_wrap=True)
    for name in ("layers", "d", "h", "g", "k,v", "d_ff", "window", "parameters", "steps"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in preset_names():
        config = preset(name)
        layers = f"{config.encoder_layers}+" if config.encoder_layers else ""
        sizes = (config.d, config.h, config.g, config.k, config.f, config.window or "")
        total = f"{sum(cost.parameters(config).values()):,}"
        steps = str(train_preset(name).steps)
        table.add_row(name, f"{layers}{config.decoder_layers}", *map(str, sizes), total, steps)
    page = Page(highlight=False)
    page.print(table)
    page.print("h read-heads, g write-heads, training steps; wmt14: Table 1, lm1b: Table 3")


@app.command(name="explain")
def explain_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A preset, the folder of a run, a Hugging Face config.json, or the folder that "
            "contains it.",
        ),
    ],
    batch: Annotated[int, typer.Option(help="Sentences decoded together.")] = 1024,
    source: Annotated[
        int | None, typer.Option(help="Source tokens a sentence, for translation; 128 by default.")
    ] = None,
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
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="model.NAME=VALUE, to change a size; repeatable."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print exact JSON.")] = False,
) -> None:
    """Show what a model costs to train and decode, and the least time that takes on a chip.

    Example: writehead explain wmt14/multi-query --batch 1024 --source 128 --target 128 --chip h200

    Grouped-query attention has some write-heads; here two, and d_ff to keep 211M parameters:
    writehead explain wmt14/multi-head --set model.g=2 --set model.f=5248

    For a Hugging Face model, parts that a preset cannot express are approximated and listed.
    """
    changes = read_settings(settings, ("model",))["model"]
    file = None if model in preset_names() else find_config(Path(model))
    imported = None if file is None else import_config(file)
    config = with_settings(imported.config if imported else config_of(model), changes)
    question = Question(
        name=model,
        config=config,
        setting=cost.Setting(batch, _source(source, model, config), target, beam),
        chip=_chip(chip, bandwidth, flops, memory),
        position=position,
        approximations=() if imported is None else imported.approximations,
        longest=None if imported is None else imported.longest,
    )
    answer = explain(question)
    if as_json:
        typer.echo(json.dumps(answer, indent=2, ensure_ascii=False))
    else:
        render(answer, Page())


def config_of(model: str) -> ModelConfig:
    """The config of a run's folder where there is one, else of a preset."""
    if not Path(model).is_dir():
        if model not in [*preset_names(), *FAMILIES]:
            raise ConfigError(
                f"{model!r} is neither a preset nor the folder of a run or Hugging Face model; "
                f"{nearest(model, preset_names())}"
            )
        return preset(model)
    from writehead.model.runs import read_config  # brings PyTorch, which takes seconds

    return read_config(model)


def _source(given: int | None, name: str, config: ModelConfig) -> int:
    """Source tokens a sentence, which a language model has none of."""
    if config.task == "translation":
        return 128 if given is None else given
    if given is not None:
        raise ConfigError(f"--source is for translation, and {name} is a language model; drop it")
    return 0


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
