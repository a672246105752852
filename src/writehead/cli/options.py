"""Options that several commands share, and functions that read their values."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from writehead.config import ModelConfig, TrainConfig
from writehead.errors import ConfigError, RunError
from writehead.paper.presets import preset
from writehead.schema import with_settings
from writehead.util.threads import use_threads


def _use_threads(threads: int | None) -> int | None:
    use_threads(threads)
    return threads


Device = Annotated[str, Option(help="auto, cpu, cuda, cuda:1 or mps.")]
Dtype = Annotated[
    str | None, Option(help="float32, bfloat16, … Default: bfloat16 on a GPU, else float32.")
]
Quantize = Annotated[
    str,
    Option(help="Weights on a CPU: int8, none, or auto. auto is int8 for quantized runs only."),
]
Threads = Annotated[
    int | None, Option(callback=_use_threads, help="CPU threads. Default: one per available core.")
]
Force = Annotated[bool, Option("--force", help="Replace the output file if it exists.")]
ForceRun = Annotated[bool, Option("--force", help="Replace the output run if it exists.")]
SourceLang = Annotated[
    str | None,
    Option(help="Source language of a multilingual model: a code such as en or eng_Latn."),
]
TargetLang = Annotated[
    str | None,
    Option(help="Target language of a multilingual model: a code such as de or deu_Latn."),
]
Json = Annotated[bool, Option("--json", help="Print JSON.")]
A_RUN = "Folder of a run or a Hugging Face model, or a name on the hub."
DEFAULT = " Default: the bundled model."
NewRun = Annotated[Path, Argument(help="Folder of the new run.")]
Preset = Annotated[str, Option("--preset", help="Model to train; see `writehead presets`.")]
Settings = Annotated[
    list[str] | None, Option("--set", help="train.NAME=VALUE or model.NAME=VALUE. Repeatable.")
]


def read_settings(
    settings: list[str] | None, configs: tuple[str, ...]
) -> dict[str, dict[str, str]]:
    """Returns the values of `--set` by config, such as "model" or "train", and by field."""
    changes: dict[str, dict[str, str]] = {config: {} for config in configs}
    for setting in settings or []:
        path, equals, value = setting.partition("=")
        config, dot, field = path.partition(".")
        if not (equals and dot and config in changes):
            form = " or ".join(f"{config}.NAME=VALUE" for config in configs)
            raise ConfigError(f"--set {setting} is not {form}")
        changes[config][field] = value
    return changes


def read_configs(
    name: str, settings: list[str] | None, training: TrainConfig
) -> tuple[ModelConfig, TrainConfig]:
    """Returns the model of a preset and the training config, both changed by `--set`."""
    changes = read_settings(settings, ("train", "model"))
    model = with_settings(preset(name), changes["model"])
    return model, with_settings(training, changes["train"])


def check_new_run(output: Path, force: bool) -> None:
    """Raises RunError if the folder of a new run exists and must not be replaced."""
    if output.exists() and not force:
        hint = ", or pass --force to replace it" if (output / "config.json").is_file() else ""
        raise RunError(f"{output} exists; choose another folder{hint}")


@contextmanager
def resumable() -> Iterator[None]:
    """On Ctrl-C, prints that the command can be resumed and exits with code 130."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("interrupted; run the same command again to resume", err=True)
        raise typer.Exit(130) from None
