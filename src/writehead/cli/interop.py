"""`writehead import` and `writehead export`."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from writehead import cost
from writehead.cli.app import app
from writehead.cli.options import A_RUN, ForceRun, NewRun, Threads, check_new_run
from writehead.errors import ConfigError, RunError, shown
from writehead.interop.families import FORMATS, TO_HUGGING_FACE


@app.command(name="import")
def import_command(
    model: Annotated[
        str, Argument(help="Folder of a Hugging Face model, or its name on the hub: OWNER/NAME.")
    ],
    output: NewRun,
    revision: Annotated[
        str | None, Option(help="Branch, tag or commit on the hub. Default: main.")
    ] = None,
    dtype: Annotated[
        str | None, Option(help="float32, bfloat16, … Default: the dtype of the model's files.")
    ] = None,
    force: ForceRun = False,
    threads: Threads = None,
) -> None:
    """Import a Hugging Face model as a run. Use the new run like any other.

    Families: Marian (OPUS-MT), M2M-100 and NLLB, T5 and mT5, GPT-2, GPT-BigCode, Llama, Mistral,
    Gemma.

    Example: writehead import Helsinki-NLP/opus-mt-en-de runs/opus-en-de

    Example: writehead import ./nllb-200-distilled-600M runs/nllb --dtype bfloat16
    """
    check_new_run(output, force)
    import torch  # takes seconds

    from writehead.interop.huggingface import import_model
    from writehead.util.devices import find_dtype

    chosen = None if dtype is None else find_dtype(dtype, torch.device("cpu"))
    config = import_model(model, output, revision=revision, dtype=chosen, overwrite=force)
    count = sum(cost.parameters(config).values())
    typer.echo(f"{output}: {config.kind} {config.task} model of {count:,} parameters", err=True)


@app.command(name="export")
def export_command(
    run: Annotated[str, Argument(help=A_RUN)],
    output: Annotated[Path, Argument(help="Folder of the exported model.")],
    to: Annotated[str, Option(help=f"Library that loads the model: {' or '.join(FORMATS)}.")],
    quantization: Annotated[
        str | None,
        Option(help="For CTranslate2: int8, int8_float16, int16, float16, … Default: float32."),
    ] = None,
    force: Annotated[
        bool, Option("--force", help="Replace the output folder if it exists.")
    ] = False,
    threads: Threads = None,
) -> None:
    """Export a run to Hugging Face transformers or CTranslate2.

    An imported model is written in its original format. Other models are exported if the library
    can express them exactly; otherwise, the reason is printed. To use T5 with CTranslate2, export
    it to Hugging Face and convert that with ct2-transformers-converter.

    Example: writehead export runs/lm lm-hf --to huggingface

    Example: writehead export runs/ende ende-ct2 --to ctranslate2 --quantization int8
    """
    if to not in FORMATS:
        raise ConfigError(f"--to must be {' or '.join(FORMATS)}, not {shown(to)}")
    if quantization is not None and to == TO_HUGGING_FACE:
        raise ConfigError("--quantization is for --to ctranslate2")
    if output.exists() and not force:
        raise RunError(f"{output} exists; choose another folder, or pass --force to replace it")
    from writehead.interop.huggingface import export_model  # imports PyTorch, which takes seconds

    export_model(run, output, to=to, quantization=quantization, overwrite=force)
    size = sum(path.stat().st_size for path in output.iterdir())
    typer.echo(f"{output}: {size:,} bytes", err=True)
