"""`writehead train`, `writehead average`, `writehead evaluate` and `writehead bench`."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from writehead.cli.app import Page, Threads, app
from writehead.cli.bench_output import check, keeping, telling
from writehead.cli.decode import Force
from writehead.cli.new_run import ForceRun, NewRun, check_free
from writehead.cli.settings import read_settings
from writehead.config import ModelConfig, TrainConfig
from writehead.errors import ConfigError
from writehead.paper.presets import preset, train_preset
from writehead.schema import with_settings

BENCH = """Measure: ours beside the floor.

Example: writehead bench train --preset wmt14/multi-query
"""
bench_app = typer.Typer(no_args_is_help=True, help=BENCH)
app.add_typer(bench_app, name="bench")

WIDE = 1_000  # columns where there is no terminal: whoever reads the lines wants them whole

Preset = Annotated[str, typer.Option(help="What to train; see `writehead presets`.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="train.NAME=VALUE or model.NAME=VALUE; repeatable."),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]


@app.command(name="train")
def train_command(
    dataset: Annotated[Path, typer.Argument(help="A folder that `prepare` made.")],
    preset_name: Annotated[str, typer.Option("--preset", help="See `writehead presets`.")],
    run: Annotated[
        Path | None,
        typer.Option(
            "--run",
            "--into",  # torchrun takes --run for its own --run-path
            help="The folder to train into; runs/DATASET/PRESET by default.",
        ),
    ] = None,
    settings: Settings = None,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Train a model, or go on with one: the same command again goes on where it stopped.

    Many processes train one model under torchrun, where --run must be called --into:
    torchrun --nproc-per-node 8 -m writehead train data/ende --preset wmt14/multi-query --into run

    Example: writehead train data/ende --preset wmt14-small/multi-query --set train.steps=20000
    """
    model, config = _configs(preset_name, settings, train_preset(preset_name))
    if any(setting.startswith("model.vocab_size=") for setting in settings or ()):
        raise ConfigError(
            "--set model.vocab_size would change nothing, since the vocabulary is the dataset's; "
            "prepare the dataset with another --vocab-size"
        )
    folder = run or Path("runs") / dataset.name / preset_name
    from writehead.training.loop import train

    outcome = train(dataset, folder, model, config, device=device)
    if outcome.stopped_by is None:
        return
    if int(os.environ.get("RANK", "0")) == 0:
        typer.echo(
            f"stopped after step {outcome.step} of {config.steps}, which is saved; run the same "
            f"command again to go on",
            err=True,
        )
    raise typer.Exit(128 + outcome.stopped_by)


@app.command(name="average")
def average_command(
    run: Annotated[Path, typer.Argument(help="The folder of a training.")],
    output: NewRun,
    last: Annotated[
        int, typer.Option(help="How many of the last checkpoints; train.keep says how many stay.")
    ] = 3,
    force: ForceRun = False,
    threads: Threads = None,
) -> None:
    """Make a run whose weights are the mean of a training's last checkpoints.

    Example: writehead average runs/ende/wmt14-small/multi-query averaged --last 3
    """
    check_free(output, force)
    from writehead.training.checkpoint import average_run

    paths = average_run(run, output, last, overwrite=force)
    typer.echo(f"{output}: the mean of {', '.join(path.name for path in paths)}", err=True)


@app.command(name="evaluate")
def evaluate_command(
    run: Annotated[
        Path | None, typer.Argument(help="Folder of a run. Default: the bundled model.")
    ] = None,
    source: Annotated[Path | None, typer.Option(help="Sentences to translate.")] = None,
    reference: Annotated[Path | None, typer.Option(help="Their translations.")] = None,
    test_set: Annotated[
        str | None, typer.Option(help="A test set by name, as sacrebleu has it: wmt13, wmt14.")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Text, for a language model.")] = None,
    dataset: Annotated[
        Path | None, typer.Option(help="A folder that `prepare` made, of which a split is scored.")
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="With --dataset: test, which is the default, or dev.")
    ] = None,
    search: Annotated[
        list[str] | None, typer.Option(help="greedy or beam-4; both by default, repeatable.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the result as JSON too.")] = None,
    force: Force = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    device: Device = "auto",
    threads: Threads = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, ….")] = None,
) -> None:
    """Score a model: BLEU and ln(PPL) of translations, or perplexity of text.

    Without RUN, the bundled English-to-German model is scored.

    Example: writehead evaluate runs/ende --source newstest2013.en --reference newstest2013.de

    Example: writehead evaluate runs/grammar/tiny/multi-query --dataset data/grammar --split test
    """
    from writehead.bench.record import check_output, environment, finite, run_facts
    from writehead.decoding import Engine, textio
    from writehead.model.bundled import bundled_run, name_of
    from writehead.model.runs import FILES
    from writehead.training.evaluate import evaluate_text, evaluate_translation

    chosen = [name for name in (source, test_set, text, dataset) if name is not None]
    if len(chosen) != 1 or (source is None) != (reference is None):
        raise ConfigError(
            "give --source with --reference, or --test-set, or --text, or --dataset; one of them"
        )
    if split is not None and dataset is None:
        raise ConfigError("--split is a dataset's; give the dataset too, with --dataset")
    folder = bundled_run() if run is None else run
    read = [path for path in (source, reference, text) if path is not None]
    read += [folder / name for name in FILES] + list(dataset.glob("*") if dataset else ())
    _check_not_read(output, read)
    file = check_output(output, force)  # before minutes of scoring, not after
    engine, facts = Engine.load(folder, device, dtype), run_facts(folder)
    on = str(chosen[0]) if dataset is None else f"{dataset}, {split or 'test'}"
    given, wanted = _to_score(source, reference, test_set, text, dataset, split or "test")
    used = str(engine.model.dtype).removeprefix("torch.")
    result: dict[str, Any] = {"run": name_of(folder), **facts, "dtype": used, "on": on}
    with keeping(result, file):
        if given is None:
            result |= evaluate_text(engine, wanted)
        else:
            with textio.counting(not as_json) as progress:
                result |= evaluate_translation(engine, given, wanted, search or None, show=progress)
        result |= environment(engine.model.device)
    if as_json:
        typer.echo(json.dumps(finite(result), indent=2, ensure_ascii=False))
    else:
        page = Page()
        if not page.is_terminal:
            page.width = WIDE
        page.print(_score_table(result))


@bench_app.command(name="train")
def bench_train_command(
    preset_name: Annotated[str, typer.Option("--preset", help="See `writehead presets`.")],
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
    model, config = _configs(preset_name, settings, TrainConfig())
    from writehead.bench.train import ON_CPU, ON_GPU, bench_preset
    from writehead.util.devices import find_device

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


def _check_not_read(output: Path | None, read: list[Path]) -> None:
    """Raises ConfigError if the output would replace an input, also through a link."""
    if output is None or not output.is_file():
        return
    if any(path.is_file() and path.samefile(output) for path in read):
        raise ConfigError(f"{output} is an input file; write the result to another file")


def _to_score(
    source: Path | None,
    reference: Path | None,
    test_set: str | None,
    text: Path | None,
    dataset: Path | None,
    split: str,
) -> tuple[list[str] | None, list[str]]:
    """Sources and references, or None and text, of whichever was given."""
    from writehead.decoding.textio import read_lines
    from writehead.training.evaluate import named_test_set, split_texts

    if dataset is not None:
        return split_texts(dataset, split)
    if test_set is not None:
        return named_test_set(test_set)
    if text is not None:
        return None, list(read_lines(str(text)))
    return list(read_lines(str(source))), list(read_lines(str(reference)))


def _configs(
    name: str, settings: list[str] | None, training: TrainConfig
) -> tuple[ModelConfig, TrainConfig]:
    """Returns the sizes of a preset and the training settings, both changed by `--set`."""
    changes = read_settings(settings, ("train", "model"))
    model = with_settings(preset(name), changes["model"])
    return model, with_settings(training, changes["train"])


def _score_table(result: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("score", style="cyan")
    table.add_column("value", justify="right")
    table.add_column("how", overflow="fold")  # a signature is there to be quoted whole
    table.add_row("ln(PPL)", f"{result['ln_ppl']:.4f}", f"a subword token, {result['tokens']:,}")
    if "ppl_per_word" in result:
        words = f"a word, {result['words']:,} with line ends"
        table.add_row("perplexity", f"{result['ppl_per_word']:.2f}", words)
    for search, scores in result.get("bleu", {}).items():
        for tokenization in ("intl", "13a"):
            how = scores[f"{tokenization}_signature"]
            table.add_row(f"BLEU, {search}", f"{scores[tokenization]:.2f}", how)
    if result.get("skipped"):
        table.add_row("left out", str(result["skipped"]), "pairs longer than its positions")
    return table
