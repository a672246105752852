"""`writehead bench attention`, `context`, `decode`, `translate`, `train` and `plot`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from writehead.cli.app import Page, app
from writehead.cli.options import Force, Threads, read_settings
from writehead.config import ModelConfig, TrainConfig
from writehead.errors import ConfigError, nearest
from writehead.paper.presets import FAMILIES, preset, rows
from writehead.paper.tables import TABLE_2
from writehead.schema import with_settings

if TYPE_CHECKING:
    from writehead.bench.decode import Place
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
Repeats = Annotated[int, typer.Option(min=1, help="How often each measurement is repeated.")]
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
    repeats: Repeats = 5,
    dtype: Dtype = None,
    output: Output = None,
    force: Force = False,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Time the attention of one decoding step: ours, PyTorch's SDPA and plain products.

    Example: writehead bench attention --shape 1024,128,1 --shape 1024,128,8
    """
    from writehead.bench.attention import Shape, bench_attention, default_shapes

    place, kind = _find(device, dtype)
    chosen = [Shape(*_numbers(text), heads, depth) for text in shapes or []]
    chosen = chosen or default_shapes(place, heads, depth)
    with _measuring("attention", place, kind, repeats, (), output, force) as (there, add):
        for row in bench_attention(chosen, there):
            add(row)


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
            help="Read whole caches, as in the paper, or filled positions. Default: both.",
        ),
    ] = None,
    peers: Peers = True,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="Measure only ctranslate2, ctranslate2-flash, hugging-face, torch-compile or "
            "pytorch; repeatable. Default: all but pytorch, which is not compiled."
        ),
    ] = None,
    repeats: Repeats = 5,
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
    from writehead.bench import decode

    place, kind = _find(device, dtype)
    sizes = decode.ON_GPU if place.type == "cuda" else decode.ON_CPU
    family = "wmt14" if place.type == "cuda" else "tiny"
    plan = decode.DecodePlan(
        models=_models(presets or [family], rows_wanted, vocab_size, place),
        batches=batch or [sizes.batch],
        source=sizes.source if source is None else source,
        target=sizes.target if target is None else target,
        beams=beam or [1, 4],
        lengths=decode.LENGTHS if padded is None else ("padded" if padded else "true",),
        peers=(peer or decode.DEFAULT_PEERS) if peers else (),
    )
    header = {"config": asdict(plan) | {"models": list(plan.models)}, "notes": decode.NOTES}
    run = _measuring("decode", place, kind, repeats, plan.peers, output, force, **header)
    with run as (there, add):
        for row in decode.bench_decode(plan, there):
            add(row)


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
    repeats: Repeats = 5,
    dtype: Dtype = None,
    output: Output = None,
    force: Force = False,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Time a language model's decoding step after long contexts.

    Example: writehead bench context --preset lm1b --context 8192 --context 32768
    """
    from writehead.bench.context import Context, bench_context, check_language

    place, kind = _find(device, dtype)
    family, length = ("lm1b", 8192) if place.type == "cuda" else ("tiny-lm", 256)
    contexts = [Context(batch, one) for one in context or [length]]
    most = max(one.length for one in contexts)
    models = _models(presets or [family], rows_wanted, vocab_size, place, most)
    check_language(models)
    chosen = ["pytorch"] if peers else []
    with _measuring("context", place, kind, repeats, chosen, output, force) as (there, add):
        for row in bench_context(models, contexts, there):
            add(row)


@bench_app.command(name="translate")
def translate_command(
    input_path: Annotated[str, typer.Option("--input", "-i", help="A text file.")],
    run: Annotated[
        Path | None, typer.Argument(help="The folder of a run. Default: the bundled model.")
    ] = None,
    beam: Beams = None,
    batch_tokens: Annotated[
        int | None, typer.Option(help="Tokens decoded together, padding and beams included.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Passes over the file after the first.")] = 2,
    peers: Peers = True,
    dtype: Dtype = None,
    output: Output = None,
    force: Force = False,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Time a text file end to end, and count the lines that are equal in float32.

    Example: writehead bench translate runs/ende --input newstest2013.en --output translate.json
    """
    from writehead.bench.translate import TranslateJob, bench_translate
    from writehead.decoding import Batching
    from writehead.decoding.textio import read_lines
    from writehead.model.bundled import bundled_run

    place, kind = _find(device, dtype)
    job = TranslateJob(
        run=run or bundled_run(),
        lines=list(read_lines(input_path)),
        device=place,
        dtype=kind,
        beams=tuple(beam or (1, 4)),
        repeats=repeats,
        batching=Batching(tokens=batch_tokens),
        peers=peers,
    )
    record = _recording("translate", place, kind, output, force, input=input_path)
    with record as (result, _), reporting() as report:
        result |= bench_translate(job, report)


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
    from writehead.bench.train import TrainJob, bench_train

    place, kind = _find(device, None)
    few, before = (20, 8) if place.type == "cuda" else (5, 2)
    if place.type != "cuda" and "rows" not in changes["train"]:
        config = replace(config, rows=-(-8 // config.accumulate) * config.accumulate)
    steps, warmup = few if steps is None else steps, before if warmup is None else warmup
    job = TrainJob(preset_name, model, config, place, steps, warmup)
    with _recording("train", place, kind, output, force) as (result, _), reporting() as report:
        result["rows"] = [bench_train(job, dataset, report)]


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
            kept = "no result is kept"
        elif calls:
            kept = f"{file.path} has the results so far, marked as partial"
        else:
            kept = f"{file.path} {'is unchanged' if file.path.exists() else 'was not created'}"
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


@contextmanager
def _recording(
    name: str, place: Any, dtype: Any, output: Path | None, force: bool, **header: Any
) -> Iterator[tuple[dict[str, Any], Callable[[], None]]]:
    """Yields a record to fill and a function that saves it; prints its table at the end."""
    from writehead.bench.record import check_output
    from writehead.bench.tables import show
    from writehead.util.environment import environment

    file = check_output(output, force, name)
    result = {"bench": name, "environment": environment(place), "device": place.type}
    result |= {"dtype": str(dtype).removeprefix("torch."), **header}
    with keeping(result, file) as save:
        yield result, save
    show(result, Page())


@contextmanager
def _measuring(
    name: str,
    place: Any,
    dtype: Any,
    repeats: int,
    peers: Any,
    output: Path | None,
    force: bool,
    **header: Any,
) -> Iterator[tuple["Place", Callable[[dict[str, Any]], None]]]:
    """Measures the chip; yields where to measure, and a function that adds a row and saves it."""
    from writehead.bench.decode import Place
    from writehead.bench.floor import measure_chip

    record = _recording(name, place, dtype, output, force, **header)
    with record as (result, save), reporting() as report:
        report("bandwidth and matrix rate")
        chip = measure_chip(place, dtype)
        result |= {"chip": asdict(chip), "rows": []}

        def add(row: dict[str, Any]) -> None:
            result["rows"].append(row)
            save()

        yield Place(chip, place, dtype, repeats, peers, report), add


def _models(
    presets: list[str], wanted: str | None, vocab_size: int | None, place: Any, positions: int = 0
) -> dict[str, ModelConfig]:
    """Presets by name; a family stands for its rows of Table 2, or for the wanted ones."""
    from writehead.bench.decode import resized

    known = [row.row for row in TABLE_2]
    chosen = known if wanted is None else wanted.split(",")
    for row in chosen:
        if row not in known:
            raise ConfigError(f"Table 2 has no row {row!r}; {nearest(row, known)}")
    if wanted is not None and not any(name in FAMILIES for name in presets):
        raise ConfigError(f"--rows is for a family, and {presets[0]} is one row; leave it out")
    models: dict[str, ModelConfig] = {}
    for name in presets:
        if name in FAMILIES:
            models |= {f"{name}/{row}": one for row, one in rows(name).items() if row in chosen}
        else:
            models[name] = preset(name)
    if vocab_size is None and place.type == "cuda":
        vocab_size = 32_768
    return {name: resized(config, vocab_size, positions) for name, config in models.items()}


def _numbers(text: str) -> tuple[int, int, int]:
    try:
        b, m, g = (int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--shape {text} is not b,m,g, such as 1024,128,1") from error
    return b, m, g


def _find(device: str, dtype: str | None) -> tuple[Any, Any]:
    """The device and the type to measure with."""
    from writehead.util.devices import find_device, find_dtype

    place = find_device(device)
    return place, find_dtype(dtype, place)
