"""`writehead train`, `writehead average` and `writehead evaluate`."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from writehead.cli import options
from writehead.cli.app import app
from writehead.config import TrainConfig
from writehead.errors import ConfigError
from writehead.interop.hub import find_folder
from writehead.paper.presets import preset, train_preset
from writehead.schema import with_settings


@app.command(name="train")
def train_command(
    dataset: Annotated[Path, Argument(help="Dataset made by `writehead prepare`.")],
    preset_name: Annotated[
        str | None,
        Option(
            "--preset",
            help="Model to train; see `writehead presets`. Default: the config of --init.",
        ),
    ] = None,
    run: Annotated[
        Path | None,
        Option(
            "--run",
            "--into",  # torchrun takes --run for its own --run-path
            help="Folder of the new run. Default: runs/DATASET/PRESET.",
        ),
    ] = None,
    init: Annotated[
        Path | None, Option(help="Run whose weights to start from, instead of random weights.")
    ] = None,
    teacher: Annotated[
        Path | None, Option(help="Teacher: run to distill from; see train.distill.")
    ] = None,
    settings: options.Settings = None,
    device: options.Device = "auto",
    threads: options.Threads = None,
) -> None:
    """Train a model. If training is interrupted, run the same command again to resume.

    Example: writehead train data/ende --preset wmt14-small/multi-query --set train.steps=20000

    To continue from a converted model: writehead train data/ende --init converted
    --teacher runs/ende/wmt14-small/multi-head --run uptrained --set train.steps=300

    To train on several GPUs, use torchrun and write --into instead of --run:
    torchrun --nproc-per-node 8 -m writehead train data/ende --preset wmt14/multi-query --into run
    """
    changes = options.read_settings(settings, ("train", "model"))
    init, teacher = (one and find_folder(one) for one in (init, teacher))
    if preset_name is not None:
        model, config = preset(preset_name), train_preset(preset_name)
        folder = run or Path("runs") / dataset.name / preset_name
    elif init is None or run is None:
        raise ConfigError("give --preset, or both --init and --run")
    elif "steps" not in changes["train"]:
        raise ConfigError("without --preset, give the number of steps: --set train.steps=N")
    else:
        from writehead.interop.pretrained import read_config

        model, config, folder = read_config(init), TrainConfig(), run
    model = with_settings(model, changes["model"])
    config = with_settings(config, changes["train"])
    distillation = [(one.distill, one.distill_temperature) for one in (config, TrainConfig())]
    if teacher is None and distillation[0] != distillation[1]:
        raise ConfigError("train.distill and train.distill_temperature need --teacher")
    if "vocab_size" in changes["model"]:
        raise ConfigError("to set model.vocab_size, prepare the dataset with another --vocab-size")
    from writehead.training.loop import train
    from writehead.training.origin import Origin

    outcome = train(dataset, folder, model, config, origin=Origin(init, teacher), device=device)
    if outcome.stopped_by is not None:
        if int(os.environ.get("RANK", "0")) == 0:
            saved = f"stopped after step {outcome.step} of {config.steps}; checkpoint saved"
            typer.echo(f"{saved}; run the same command again to resume", err=True)
        raise typer.Exit(128 + outcome.stopped_by)


@app.command(name="average")
def average_command(
    run: Annotated[Path, Argument(help="Folder of a training run.")],
    output: options.NewRun,
    last: Annotated[int, Option(help="Number of checkpoints to average; see train.keep.")] = 3,
    force: options.ForceRun = False,
    threads: options.Threads = None,
) -> None:
    """Average the weights of the last checkpoints of a training run into a new run.

    Example: writehead average runs/ende/wmt14-small/multi-query averaged --last 3
    """
    options.check_new_run(output, force)
    from writehead.training.checkpoint import average_run

    paths = average_run(run, output, last, overwrite=force)
    typer.echo(f"{output}: the mean of {', '.join(path.name for path in paths)}", err=True)


@app.command(name="evaluate")
def evaluate_command(
    run: Annotated[str | None, Argument(help=options.A_RUN + options.DEFAULT)] = None,
    source: Annotated[Path | None, Option(help="Sentences to translate.")] = None,
    reference: Annotated[Path | None, Option(help="Reference translations.")] = None,
    test_set: Annotated[
        str | None,
        Option(
            help="A sacrebleu test set, such as wmt14, or first-lines: a hundred English lines of "
            "the kind that people first type into a translator."
        ),
    ] = None,
    text: Annotated[Path | None, Option(help="Text to score with a language model.")] = None,
    dataset: Annotated[Path | None, Option(help="Dataset with the split to score.")] = None,
    split: Annotated[str | None, Option(help="With --dataset: test or dev. Default: test.")] = None,
    source_lang: options.SourceLang = None,
    target_lang: options.TargetLang = None,
    search: Annotated[list[str] | None, Option(help="greedy or beam-4. Default: both.")] = None,
    output: Annotated[Path | None, Option(help="Also write the result to a JSON file.")] = None,
    force: options.Force = False,
    as_json: options.Json = False,
    device: options.Device = "auto",
    threads: options.Threads = None,
    dtype: options.Dtype = None,
    quantize: options.Quantize = "auto",
) -> None:
    """Score a model: BLEU and ln(PPL) for translation, or perplexity for a language model.

    Example: writehead evaluate runs/ende --source newstest2013.en --reference newstest2013.de

    Example: writehead evaluate runs/grammar/tiny/multi-query --dataset data/grammar --split test
    """
    given = [str(name) for name in (source, test_set, text, dataset) if name is not None]
    if len(given) != 1 or (source is None) != (reference is None):
        raise ConfigError("give one of: --source with --reference, --test-set, --text, --dataset")
    if split is not None and dataset is None:
        raise ConfigError("--split needs --dataset")
    from writehead.bench.record import check_output, finite, run_facts
    from writehead.cli import textio
    from writehead.data.dataset import Dataset
    from writehead.engine import Engine
    from writehead.runs.bundled import bundled_run, name_of
    from writehead.runs.folder import FILES
    from writehead.training import evaluate, first_lines
    from writehead.util.environment import environment

    folder = bundled_run() if run is None else find_folder(run)
    inputs = [path for path in (source, reference, text) if path is not None]
    inputs += [folder / name for name in FILES] + list(dataset.glob("*") if dataset else ())
    same = (one for one in inputs if output and output.is_file() and one.is_file())
    if any(one.samefile(str(output)) for one in same):
        raise ConfigError(f"{output} is an input file; write the result to another file")
    file = check_output(output, force)  # fails before minutes of scoring
    data = None if dataset is None else Dataset.open(dataset)
    if data is not None and (split or "test") not in data.splits:
        choices = ", ".join(f"--split {name}" for name in reversed(data.splits))
        raise ConfigError(f"{dataset} has no split {split or 'test'!r}; choose one: {choices}")
    engine = Engine.load(folder, device, dtype, quantize=quantize)
    facts = run_facts(folder)
    if data is not None:
        given[0] += f", {split or 'test'}"
        sources, references = evaluate.split_texts(data, split or "test")
        if data.tokenizer.fingerprint == engine.tokenizer.fingerprint:
            source_lang = source_lang or data.vocabulary.source_lang
            target_lang = target_lang or data.vocabulary.target_lang
    elif test_set == first_lines.NAME:
        sources, references = [], []  # it has several references per line
    elif test_set is not None:
        sources, references = evaluate.named_test_set(test_set)
    else:
        sources = None if source is None else list(textio.read_lines(str(source)))
        references = list(textio.read_lines(str(text or reference)))
    used = engine.model.weights_name
    result: dict[str, Any] = {"run": name_of(folder), **facts, "dtype": used, "on": given[0]}
    languages = {"source_lang": source_lang, "target_lang": target_lang}
    if sources is None:
        result |= evaluate.evaluate_text(engine, references)
    else:
        with textio.counting(not as_json) as show:
            arguments: dict[str, Any] = {"searches": search, "show": show, **languages}
            if test_set == first_lines.NAME:
                result |= first_lines.evaluate_first_lines(engine, **arguments)
            else:
                result |= evaluate.evaluate_translation(engine, sources, references, **arguments)
    result |= environment(engine.model.device)
    if file is not None:
        file.write(result)
        typer.echo(f"written: {file.path}", err=True)
    if as_json:
        typer.echo(json.dumps(finite(result), indent=2, ensure_ascii=False))
    else:
        _print_scores(result)


def _print_scores(result: dict[str, Any]) -> None:
    rows = []
    if "ln_ppl" in result:
        details = f"per token, {result['tokens']:,} tokens"
        rows.append(("ln(PPL)", f"{result['ln_ppl']:.4f}", details))
    if "ppl_per_word" in result:
        words = f"per word, {result['words']:,} words including line ends"
        rows.append(("perplexity", f"{result['ppl_per_word']:.2f}", words))
    for search, scores in result.get("bleu", {}).items():
        for tokenizer in ("intl", "13a"):
            signature = scores[f"{tokenizer}_signature"]
            rows.append((f"BLEU, {search}", f"{scores[tokenizer]:.2f}", signature))
    for search, scores in result.get("first_lines", {}).items():
        rows.append((f"chrF, {search}", f"{scores['chrf']:.2f}", result["chrf_signature"]))
        details = f"of {scores['to_keep']} numbers and names are in the translations"
        rows.append((f"kept, {search}", str(scores["kept"]), details))
    if result.get("skipped"):
        rows.append(("skipped", str(result["skipped"]), "pairs too long for the model"))
    for name, value, details in rows:
        typer.echo(f"{name:<13} {value:>7}  {details}")
