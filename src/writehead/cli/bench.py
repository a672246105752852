"""`writehead bench attention`, `context`, `decode`, `translate`, `train` and `plot`."""

import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from writehead.cli.app import Page, Threads, app
from writehead.cli.decode import Force
from writehead.cli.settings import read_settings
from writehead.config import ModelConfig, TrainConfig
from writehead.errors import ConfigError, nearest
from writehead.paper.presets import FAMILIES, preset, rows
from writehead.paper.tables import TABLE_2
from writehead.schema import with_settings

if TYPE_CHECKING:
    from writehead.bench.record import ResultFile

HELP = """Measure speed: ours, its peers and the floor of the hardware, in one run.

Example: writehead bench decode --output decode.json
"""
bench_app = typer.Typer(no_args_is_help=True, help=HELP)
app.add_typer(bench_app, name="bench")

Output = Annotated[Path | None, typer.Option(help="Write the record as JSON.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Dtype = Annotated[
    str | None, typer.Option(help="bfloat16, float32, …. Default: bfloat16 on a GPU.")
]
Presets = Annotated[
    list[str] | None,
    typer.Option("--preset", help="A preset, or a family for its rows of Table 2; repeatable."),
]
Rows = Annotated[
    str | None,
    typer.Option("--rows", help="Only these rows of a family, such as multi-head,multi-query."),
]
Beams = Annotated[list[int] | None, typer.Option(help="Repeatable. Default: 1 and 4.")]
Peers = Annotated[bool, typer.Option(help="Measure other systems too.")]
VocabSize = Annotated[
    int | None, typer.Option(help="Default: 32768, or the preset's own on a CPU.")
]


@bench_app.command(name="attention")
def attention_command(
    shapes: Annotated[
        list[str] | None,
        typer.Option("--shape", help="b,m,g: rows, positions, write-heads; repeatable."),
    ] = None,
    heads: Annotated[int, typer.Option(min=1, help="Read-heads, h.")] = 8,
    depth: Annotated[int, typer.Option(min=1, help="Depth of keys and values, k = v.")] = 128,
    repeats: Annotated[int | None, typer.Option(help="Default: 20, or 3 on a CPU.")] = None,
    dtype: Dtype = None,
    output: Output = None,
    force: Force = False,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Time the attention of one decoding step: ours, SDPA, plain products, FlashInfer.

    Example: writehead bench attention --shape 1024,128,1 --shape 1024,128,8
    """
    asked = [_shape(text) for text in shapes or []]
    from writehead.bench.attention import Shape, bench_attention, default_shapes

    place, kind = _find(device, dtype)
    count = _default(repeats, 20, 3, place)
    if count < 1:
        raise ConfigError(f"--repeats {count} must be at least 1")
    chosen = [Shape(b, m, g, heads, depth) for b, m, g in asked]
    file = _check(output, force, "attention")
    with reporting() as report:
        result, chip = _begin("attention", place, kind, report)
        wanted = chosen or default_shapes(place, heads, depth)
        result["rows"] = []
        with keeping(result, file) as save:
            for row in bench_attention(wanted, chip, place, kind, repeats=count, report=report):
                result["rows"].append(row)
                save()
    _show(result)


@bench_app.command(name="decode")
def decode_command(
    presets: Presets = None,
    rows_wanted: Rows = None,
    batch: Annotated[
        list[int] | None, typer.Option(help="Sentences; repeatable. Default: 1024, or 16 on a CPU.")
    ] = None,
    source: Annotated[int | None, typer.Option(help="Default: 128, or 64 on a CPU.")] = None,
    target: Annotated[int | None, typer.Option(help="Default: 128, or 64 on a CPU.")] = None,
    beam: Beams = None,
    vocab_size: VocabSize = None,
    padded: Annotated[
        bool | None,
        typer.Option(
            "--padded/--true-lengths",
            help="Read whole caches, as the paper's decoder did, or filled positions. "
            "Default: both.",
        ),
    ] = None,
    peers: Peers = True,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="Measure this one: ctranslate2, ctranslate2-flash, hugging-face, torch-compile, "
            "pytorch; repeatable. Default: all but pytorch, which is not compiled."
        ),
    ] = None,
    repeats: Annotated[int | None, typer.Option(help="Default: 5, or 3 on a CPU.")] = None,
    dtype: Dtype = None,
    output: Output = None,
    force: Force = False,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Time decoding steps of Table 2's models, beside CTranslate2, Hugging Face and PyTorch.

    The record is written after each row. A partial record is replaced by the next command.

    Example: writehead bench decode --batch 1 --batch 1024 --output results/decode.json
    """
    models = _models(presets, rows_wanted)
    from writehead.bench.decode import (
        DEFAULT_PEERS,
        LENGTHS,
        ON_CPU,
        DecodePlan,
        Place,
        bench_decode,
        resized,
    )

    place, kind = _find(device, dtype)
    gpu = place.type == "cuda"
    models = models or _models(["wmt14" if gpu else "tiny"], rows_wanted)
    vocab_size = 32_768 if vocab_size is None and gpu else vocab_size
    if peer and not peers:
        raise ConfigError("--peer and --no-peers exclude each other; leave one out")
    plan = DecodePlan(
        models={name: resized(config, vocab_size) for name, config in models.items()},
        batches=batch or [1024 if gpu else ON_CPU.batch],
        source=_default(source, 128, ON_CPU.source, place),
        target=_default(target, 128, ON_CPU.target, place),
        beams=beam or [1, 4],
        lengths=LENGTHS if padded is None else ("padded" if padded else "true",),
        peers=(peer or DEFAULT_PEERS) if peers else (),
    )
    count = _default(repeats, 5, 3, place)
    if count < 1:
        raise ConfigError(f"--repeats {count} must be at least 1")
    file = _check(output, force, "decode")
    with reporting() as report:
        result, chip = _begin("decode", place, kind, report)
        there = Place(chip, place, kind, count, plan.peers, report)
        with keeping(result, file) as save:
            bench_decode(plan, there, result, save)
    _show(result)


@bench_app.command(name="context")
def context_command(
    presets: Presets = None,
    rows_wanted: Rows = None,
    context: Annotated[
        list[int] | None,
        typer.Option(help="Positions before a step; repeatable. Default: 8192, or 256 on a CPU."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 16,
    vocab_size: VocabSize = None,
    peers: Peers = True,
    repeats: Annotated[int | None, typer.Option(help="Default: 5, or 3 on a CPU.")] = None,
    dtype: Dtype = None,
    output: Output = None,
    force: Force = False,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Time a language model's decoding step after long contexts, and its attention alone.

    Example: writehead bench context --preset lm1b --context 8192 --context 32768
    """
    models = _models(presets, rows_wanted)
    from writehead.bench.context import Context, check_language, language_row
    from writehead.bench.decode import Place, resized

    place, kind = _find(device, dtype)
    gpu = place.type == "cuda"
    models = models or _models(["lm1b" if gpu else "tiny-lm"], rows_wanted)
    vocab_size = 32_768 if vocab_size is None and gpu else vocab_size
    contexts = [Context(batch, length) for length in context or [8192 if gpu else 256]]
    most = max(one.length for one in contexts)
    models = {name: resized(config, vocab_size, most) for name, config in models.items()}
    for name, config in models.items():
        check_language(name, config)
    count = _default(repeats, 5, 3, place)
    if count < 1:
        raise ConfigError(f"--repeats {count} must be at least 1")
    file = _check(output, force, "context")
    with reporting() as report:
        result, chip = _begin("context", place, kind, report)
        there = Place(chip, place, kind, count, ["pytorch"] if peers else [], report)
        result["rows"] = []
        with keeping(result, file) as save:
            for one in contexts:
                for name, config in models.items():
                    result["rows"].append(language_row(name, config, one, there))
                    save()
    _show(result)


@bench_app.command(name="translate")
def translate_command(
    input_path: Annotated[str, typer.Option("--input", "-i", help="A text file, line by line.")],
    run: Annotated[
        Path | None, typer.Argument(help="The folder of a run. Default: the bundled model.")
    ] = None,
    beam: Beams = None,
    batch_tokens: Annotated[
        int | None, typer.Option(help="Tokens decoded together, padding and beams included.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Passes over the file after the first.")] = 2,
    peers: Peers = True,
    cold: Annotated[
        bool, typer.Option("--cold", help="Start with an empty cache of compiled kernels.")
    ] = False,
    dtype: Dtype = None,
    output: Output = None,
    force: Force = False,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Time a text file end to end, and count the lines that are equal in float32.

    Example: writehead bench translate runs/ende --input newstest2013.en --output translate.json
    """
    with ExitStack() as stack:
        if cold:  # Triton reads the variable when it first compiles
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="writehead-"))
            os.environ["TRITON_CACHE_DIR"] = folder
        from writehead.bench.decode import check_beams
        from writehead.bench.translate import Job, bench_translate
        from writehead.decoding import Batching
        from writehead.decoding.textio import read_lines
        from writehead.model.bundled import bundled_run
        from writehead.model.runs import read_config
        from writehead.util.environment import environment

        place, kind = _find(device, dtype)
        chosen, beams = run or bundled_run(), tuple(beam or (1, 4))
        file = _check(output, force, "translate")
        check_beams(beams, read_config(chosen).vocab_size, chosen)
        job = Job(
            run=chosen,
            lines=list(read_lines(input_path)),
            device=place,
            dtype=kind,
            beams=beams,
            repeats=repeats,
            batching=Batching(tokens=batch_tokens),
            peers=peers,
            report=stack.enter_context(reporting()),
        )
        result: dict[str, Any] = {"bench": "translate", "input": input_path, "cold": cold}
        with keeping(result, file):
            result |= bench_translate(job) | {"environment": environment(place)}
    _show(result)


@bench_app.command(name="train")
def train_command(
    preset_name: Annotated[str, typer.Option("--preset", help="See `writehead presets`.")],
    dataset: Annotated[
        Path | None, typer.Option(help="Text to pack. Default: the built-in grammar's.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="train.NAME=VALUE or model.NAME=VALUE; repeatable."),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Default: 20, or 5 on a CPU.")] = None,
    warmup: Annotated[int | None, typer.Option(help="Default: 8, or 2 on a CPU.")] = None,
    output: Output = None,
    force: Force = False,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Time training steps on packed batches: µs per token, and the share of the matrix rate.

    A step reads train.rows rows: 128, or 8 on a CPU.

    Example: writehead bench train --preset wmt14/multi-query --dataset data/ende
    """
    changes = read_settings(settings, ("train", "model"))
    model = with_settings(preset(preset_name), changes["model"])
    config = with_settings(TrainConfig(), changes["train"])
    from writehead.bench.train import ON_CPU, ON_GPU, bench_preset

    place, _ = _find(device, None)
    sizes = ON_GPU if place.type == "cuda" else ON_CPU
    if "rows" not in changes["train"]:
        parts = config.accumulate
        config = dataclasses.replace(config, rows=-(-sizes.rows // parts) * parts)
    file = _check(output, force, "train")
    result: dict[str, Any] = {"bench": "train"}
    with reporting() as report, keeping(result, file):
        row = bench_preset(
            preset_name,
            model,
            config,
            dataset,
            device=place,
            steps=sizes.steps if steps is None else steps,
            warmup=sizes.warmup if warmup is None else warmup,
            report=report,
        )
        result |= {"environment": row.pop("environment"), "rows": [row]}
    _show(result)


@bench_app.command(name="plot")
def plot_command(
    record: Annotated[Path, typer.Argument(help="A record of bench decode or bench context.")],
    folder: Annotated[Path, typer.Argument(help="Where to write the SVG files.")],
    table: Annotated[
        bool, typer.Option("--table", help="Also print the table of decoding steps as Markdown.")
    ] = False,
) -> None:
    """Draw a record: time per step against the batch, or time per token against the context.

    Example: writehead bench plot results/decoding/decode.json docs --table
    """
    from writehead.bench import plots
    from writehead.bench.record import read_result_file

    result = read_result_file(record, {"bench": str}, "give a record of bench decode or context")
    for path in plots.draw(result, folder):
        typer.echo(f"drawn: {path}", err=True)
    if table:
        typer.echo(plots.markdown_table(result), nl=False)


@contextmanager
def keeping(result: dict[str, Any], file: "ResultFile | None") -> Iterator[Callable[[], None]]:
    """Yields a function that writes the result so far, marked as partial until the block ends.

    If the block is interrupted before the first call, an existing file stays as it is.
    """
    calls = 0

    def save() -> None:
        nonlocal calls
        calls += 1
        if file is not None:
            file.write({**result, "partial": True})

    try:
        yield save
    except KeyboardInterrupt:
        if file is None:
            kept = "nothing is kept" + (", since no --output was given" if calls else "")
        elif calls:
            kept = f"{file.path} has the results so far, marked as partial"
        else:
            fate = "is unchanged" if file.path.exists() else "was not created"
            kept = f"there is no result yet, and {file.path} {fate}"
        typer.echo(f"interrupted; {kept}", err=True)
        raise typer.Exit(130) from None
    if file is not None:
        file.write(result)
        typer.echo(f"written: {file.path}", err=True)


@contextmanager
def reporting() -> Iterator[Callable[[str], None]]:
    """Yields a function that shows progress on standard error, in place on a terminal."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    if not console.is_terminal:
        yield lambda text: console.print(text, markup=False)
        return
    with console.status("") as status:
        yield status.update


def _begin(
    name: str, place: Any, dtype: Any, report: Callable[[str], None]
) -> tuple[dict[str, Any], Any]:
    """The header of a record, and the measured chip."""
    from writehead.bench.floor import measure_chip
    from writehead.util.environment import environment

    report("bandwidth and matrix rate")
    chip = measure_chip(place, dtype)
    result = {
        "bench": name,
        "environment": environment(place),
        "device": place.type,
        "dtype": str(dtype).removeprefix("torch."),
        "chip": dataclasses.asdict(chip),
    }
    return result, chip


def _check(output: Path | None, force: bool, bench: str) -> "ResultFile | None":
    from writehead.bench.record import check_output

    return check_output(output, force, bench)


def _show(result: dict[str, Any]) -> None:
    from writehead.bench.tables import show

    show(result, Page())


def _models(presets: list[str] | None, wanted: str | None) -> dict[str, ModelConfig]:
    """Presets by name; a family stands for its rows of Table 2, or for the wanted ones."""
    known = [row.row for row in TABLE_2]
    chosen = known if wanted is None else wanted.split(",")
    for row in chosen:
        if row not in known:
            raise ConfigError(f"Table 2 has no row {row!r}; {nearest(row, known)}")
    if wanted is not None and presets and not any(name in FAMILIES for name in presets):
        raise ConfigError(f"--rows is for a family, and {presets[0]} is one row; leave it out")
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
        raise ConfigError(f"--shape {text} is not b,m,g, such as 1024,128,1") from error
    return b, m, g


def _default(given: int | None, on_gpu: int, on_cpu: int, place: Any) -> int:
    if given is not None:
        return given
    return on_gpu if place.type == "cuda" else on_cpu


def _find(device: str, dtype: str | None) -> tuple[Any, Any]:
    """The device and the type to measure with."""
    from writehead.decoding.devices import find_device, find_dtype

    place = find_device(device)
    return place, find_dtype(dtype, place)
