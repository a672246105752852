"""`writehead bench attention`, `decode`, `translate`, `tokens` and `plot`; `train` is elsewhere."""

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from writehead.cli.app import Page, Threads
from writehead.cli.bench_output import begin, check, draw, keeping, telling
from writehead.cli.decode import Force
from writehead.cli.train import bench_app
from writehead.config import ModelConfig
from writehead.errors import ConfigError, nearest
from writehead.paper.presets import FAMILIES, preset, rows
from writehead.paper.tables import TABLE_2

Run = Annotated[
    Path | None, typer.Argument(help="The folder of a run; by default the bundled model.")
]
OutputFile = Annotated[Path | None, typer.Option(help="Write the result as JSON.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Dtype = Annotated[
    str | None, typer.Option(help="bfloat16, float32, …; bfloat16 on a GPU by default.")
]

TOKENS_DTYPES = ["bfloat16", "float32"]  # of `bench tokens`, on a GPU


@bench_app.command(name="attention")
def attention_command(
    shapes: Annotated[
        list[str] | None,
        typer.Option("--shape", help="b,m,g: rows, positions, write-heads; repeatable."),
    ] = None,
    heads: Annotated[int, typer.Option(help="Read-heads, h.")] = 8,
    depth: Annotated[int, typer.Option(help="Depth of keys and of values, k = v.")] = 128,
    repeats: Annotated[int | None, typer.Option(help="20, or 3 on a CPU, by default.")] = None,
    dtype: Dtype = None,
    output: OutputFile = None,
    force: Force = False,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Time attention of one new position a row: ours, SDPA, plain products, FlashInfer.

    Without --shape: eight sizes, each with one write-head and with one for each read-head. What is
    measured is written as it comes, marked as partial until all of it is there.

    Example: writehead bench attention --shape 1024,128,1 --shape 1024,128,8
    """
    asked = [_shape(text) for text in shapes or []]
    for option, number in (("--heads", heads), ("--depth", depth)):
        if number < 1:
            raise ConfigError(f"{option} {number} is too little; give 1 or more")
    from writehead.bench.attention import Shape, bench_attention, default_shapes
    from writehead.cli.bench_tables import show_attention

    place, kind = _find(device, dtype)
    times = _repeats(repeats, 20, 3, place.type)
    chosen = [Shape(b, m, g, heads, depth) for b, m, g in asked]
    file = check(output, force, "attention")
    with telling() as tell:
        result, chip = begin("attention", place, kind, tell)
        result["shapes"] = []
        wanted = chosen or default_shapes(place, heads, depth)
        with keeping(result, file) as save:
            for measured in bench_attention(wanted, chip, place, kind, repeats=times, tell=tell):
                result["shapes"].append(measured)
                save()
    show_attention(result, Page())


@bench_app.command(name="decode")
def decode_command(
    presets: Annotated[
        list[str] | None,
        typer.Option(
            "--preset",
            help="A preset, or a family for its rows of Table 2; repeatable. wmt14, or tiny on a "
            "CPU, by default.",
        ),
    ] = None,
    rows_wanted: Annotated[
        str | None,
        typer.Option("--rows", help="Of families, these rows only: multi-head,multi-query."),
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(help="Sentences; repeatable. 1024, or 16 on a CPU.")
    ] = None,
    source: Annotated[int | None, typer.Option(help="Source tokens: 128, or 64.")] = None,
    target: Annotated[int | None, typer.Option(help="Target tokens: 128, or 64.")] = None,
    beam: Annotated[list[int] | None, typer.Option(help="1 and 4 by default; repeatable.")] = None,
    vocab_size: Annotated[
        int | None, typer.Option(help="32768, or the preset's own on a CPU.")
    ] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(help="Positions behind a step of a language model; repeatable."),
    ] = None,
    padded: Annotated[
        bool | None,
        typer.Option(
            "--padded/--true-lengths",
            help="Read caches whole, as the paper's decoder did, or what is there; else both.",
        ),
    ] = None,
    peers: Annotated[bool, typer.Option(help="Measure plain PyTorch and Hugging Face too.")] = True,
    compiled: Annotated[
        bool,
        typer.Option(
            "--compiled", help="On a GPU, plain PyTorch under torch.compile too, which takes long."
        ),
    ] = False,
    repeats: Annotated[int | None, typer.Option(help="5, or 3 on a CPU, by default.")] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="A folder: sweep contexts and batches too, and draw them there."),
    ] = None,
    dtype: Dtype = None,
    output: OutputFile = None,
    force: Force = False,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Time whole decodings: Table 2's rows by greedy and beam-4 search, beside peers and the floor.

    What is measured is written as it comes, marked as partial until all of it is there. A partial
    file is replaced, from the beginning, by the next command; a whole one with --force only.

    Example: writehead bench decode --output results/decode.json

    A language model behind long contexts:
    writehead bench decode --preset lm1b --context 8192 --context 32768 --batch 16
    """
    models = _models(presets, rows_wanted)
    from writehead.bench.decode import ON_CPU, Place
    from writehead.cli.bench_runs import DecodePlan, run_decode
    from writehead.cli.bench_tables import show_decode

    if context and models and not any(model.task == "language" for model in models.values()):
        raise ConfigError("--context is for language models; name one, such as --preset lm1b")
    if models and not any(model.task == "translation" for model in models.values()):
        given: dict[str, object] = {"--beam": beam, "--padded or --true-lengths": padded}
        if plot is None:  # whose sweep over batches translates
            given |= {"--source": source, "--target": target}
        for option, value in given.items():
            if value is not None:
                raise ConfigError(
                    f"{option} is for translation models, and of a language model steps behind a "
                    f"context are timed; leave it out"
                )
    found, kind = _find(device, dtype)
    times = _repeats(repeats, 5, 3, found.type)
    gpu = found.type == "cuda"
    if compiled and not gpu:
        raise ConfigError("--compiled is of steps in a graph, and needs a GPU; leave it out")
    plan = DecodePlan(
        models=models or default_models(gpu, rows_wanted, language=bool(context)),
        batches=batch or [1024 if gpu else ON_CPU.batch],
        source=_either(source, 128, ON_CPU.source, found.type),
        target=_either(target, 128, ON_CPU.target, found.type),
        beams=beam or [1, 4],
        vocab_size=32_768 if vocab_size is None and gpu else vocab_size,
        contexts=context or [8192 if gpu else 256],
        language_batches=batch or [16],
        lengths=("padded", "true") if padded is None else ("padded" if padded else "true",),
        sweeps=plot is not None,
        gpu=gpu,
    )
    file = check(output, force, "decode", plot)
    with telling() as tell:
        result, chip = begin("decode", found, kind, tell)
        place = Place(chip, found, kind, times, peers, tell, compiled)
        with keeping(result, file) as save:
            run_decode(plan, result, place, save)
    show_decode(result, Page())
    if plot is not None:
        draw(result, plot)


@bench_app.command(name="translate")
def translate_command(
    input_path: Annotated[str, typer.Option("--input", "-i", help="A file of lines.")],
    run: Run = None,
    beam: Annotated[list[int] | None, typer.Option(help="1 and 4 by default; repeatable.")] = None,
    batch_tokens: Annotated[
        int | None, typer.Option(help="Tokens decoded together, padding and beams counted.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Passes over the file after the first.")] = 2,
    cold: Annotated[
        bool, typer.Option("--cold", help="Begin with an empty cache of compiled kernels.")
    ] = False,
    dtype: Dtype = None,
    output: OutputFile = None,
    force: Force = False,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Time a text file end to end: loading, the first sentence, sentences and tokens a second.

    Example: writehead bench translate runs/ende --input newstest2013.en --output translate.json
    """
    with ExitStack() as stack:
        if cold:
            # Triton reads it when it first compiles
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="writehead-"))
            os.environ["TRITON_CACHE_DIR"] = folder
        from writehead.bench.record import environment
        from writehead.bench.translate import Job, bench_translate
        from writehead.cli.bench_runs import check_beams
        from writehead.cli.bench_tables import show_translate
        from writehead.decoding import Batching
        from writehead.decoding.textio import read_lines
        from writehead.model.bundled import bundled_run
        from writehead.model.runs import read_config

        place, kind = _find(device, dtype)
        chosen, beams = run or bundled_run(), tuple(beam or (1, 4))
        file = check(output, force, "translate")
        check_beams(beams, read_config(chosen).vocab_size, chosen)
        tell = stack.enter_context(telling())
        job = Job(
            run=chosen,
            lines=list(read_lines(input_path)),
            device=place,
            dtype=kind,
            beams=beams,
            repeats=repeats,
            batching=Batching(tokens=batch_tokens),
            tell=tell,
        )
        result: dict[str, Any] = {"bench": "translate", "input": input_path, "cold": cold}
        with keeping(result, file):
            result |= bench_translate(job) | {"environment": environment(place)}
    show_translate(result, Page())


@bench_app.command(name="tokens")
def tokens_command(
    input_path: Annotated[str, typer.Option("--input", "-i", help="A file of lines.")],
    run: Run = None,
    lines: Annotated[int, typer.Option(help="How many of its lines with text.")] = 500,
    beam: Annotated[list[int] | None, typer.Option(help="1 and 4 by default; repeatable.")] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="bfloat16 and float32 by default, or float32 on a CPU; repeatable."),
    ] = None,
    output: OutputFile = None,
    force: Force = False,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Hold decoded tokens against those of float32 on the CPU, and one batch against another.

    Where tokens differ, a near-tie is one that rounding explains. What it cannot explain makes exit
    code 1. Counts are written as they come, marked as partial until all are there. A partial file
    is replaced, from the beginning, by the next command; a whole one with --force only.

    Example: writehead bench tokens runs/ende --input newstest2013.en --output tokens.json
    """
    from writehead.bench.record import environment
    from writehead.bench.tokens import bench_tokens
    from writehead.cli.bench_runs import tokens_plan
    from writehead.cli.bench_tables import show_tokens
    from writehead.model.bundled import bundled_run

    if lines < 1:
        raise ConfigError(f"--lines {lines} compares nothing; ask for 1 or more")
    kinds = dtype or (["float32"] if _find(device, None)[0].type == "cpu" else TOKENS_DTYPES)
    found = [_find(device, kind) for kind in dict.fromkeys(kinds)]
    file = check(output, force, "tokens")
    with telling() as tell:
        place, dtypes = found[0][0], tuple(kind for _, kind in found)
        plan = tokens_plan(
            run or bundled_run(), input_path, lines, tuple(beam or (1, 4)), place, dtypes, tell
        )
        result = {"bench": "tokens", "input": input_path, "environment": environment(place)}
        with keeping(result, file) as save:
            bench_tokens(plan, result, save)
    show_tokens(result, Page())
    if result["others"]:
        raise typer.Exit(1)


@bench_app.command(name="plot")
def plot_command(
    result: Annotated[Path, typer.Argument(help="What `bench decode --plot` wrote.")],
    folder: Annotated[Path, typer.Argument(help="Where to draw.")],
) -> None:
    """Draw the sweeps of a result once more: time a token against context and against batch.

    Example: writehead bench plot results/decode.json figures
    """
    from writehead.bench.record import read_result_file

    read = read_result_file(result, object, "give a file that `bench decode` wrote")
    draw(read if isinstance(read, dict) else {}, folder)


def default_models(
    gpu: bool, wanted: str | None = None, *, language: bool
) -> dict[str, ModelConfig]:
    """What is measured unless presets are named: Table 2, or a small family of the same rows."""
    families = ("lm1b", "tiny-lm") if language else ("wmt14", "tiny")
    return _models([families[0] if gpu else families[1]], wanted)


def _models(presets: list[str] | None, wanted: str | None) -> dict[str, ModelConfig]:
    """Presets by name, families spelt out; of those the wanted rows only."""
    known = [row.row for row in TABLE_2]
    chosen = known if wanted is None else wanted.split(",")
    for row in chosen:
        if row not in known:
            raise ConfigError(f"Table 2 has no row {row!r}; {nearest(row, known)}")
    if wanted is not None and presets and not any(name in FAMILIES for name in presets):
        raise ConfigError(f"--rows are a family's, and {presets[0]} is one row; leave them out")
    models = {}
    for name in presets or []:
        if name in FAMILIES:
            there = rows(name)
            models.update({f"{name}/{row}": there[row] for row in chosen if row in there})
        else:
            models[name] = preset(name)
    return models


def _shape(text: str) -> tuple[int, int, int]:
    try:
        b, m, g = (int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--shape {text} is not b,m,g, as 1024,128,1") from error
    return b, m, g


def _either(given: int | None, on_gpu: int, on_cpu: int, device: str) -> int:
    if given is not None:
        return given
    return on_gpu if device == "cuda" else on_cpu


def _repeats(given: int | None, on_gpu: int, on_cpu: int, device: str) -> int:
    repeats = _either(given, on_gpu, on_cpu, device)
    if repeats < 1:
        raise ConfigError(f"{repeats} repeats cannot be timed; ask for 1 or more")
    return repeats


def _find(device: str, dtype: str | None) -> tuple[Any, Any]:
    """The device and the type to measure with."""
    from writehead.util.devices import find_device, find_dtype

    place = find_device(device)
    return place, find_dtype(dtype, place)
