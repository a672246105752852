"""`writehead bench attention`, `decode`, `translate`, `train`, `serve` and `plot`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from writehead.cli.app import Page, app
from writehead.cli.options import (
    A_RUN,
    DEFAULT,
    Device,
    Dtype,
    Force,
    Settings,
    SourceLang,
    TargetLang,
    Threads,
    read_configs,
)
from writehead.config import ModelConfig, TrainConfig
from writehead.cost import Setting
from writehead.errors import ConfigError
from writehead.paper.presets import FAMILIES, preset, rows
from writehead.paper.tables import TABLE_2
from writehead.util.progress import Reporter

if TYPE_CHECKING:
    from writehead.bench.decode import Place

HELP = """Measure the speed of writehead and other libraries, and the hardware floor.

Example: writehead bench decode --batch 1024 --output decode.json
"""
GPU_VOCAB_SIZE = 32_768
bench_app = typer.Typer(no_args_is_help=True, help=HELP)
app.add_typer(bench_app, name="bench")

Output = Annotated[Path | None, typer.Option(help="Also write the results to a JSON file.")]
Beams = Annotated[list[int] | None, typer.Option(help="Beam size. Repeatable. Default: 1 and 4.")]
Peers = Annotated[bool, typer.Option(help="Also measure other libraries.")]
Repeats = Annotated[int, typer.Option(min=1, help="Number of repeats of each measurement.")]


@bench_app.command(name="attention")
def attention_command(
    shapes: Annotated[
        list[str] | None,
        typer.Option("--shape", help="b,m,g: rows, positions, write-heads (KV heads). Repeatable."),
    ] = None,
    repeats: Repeats = 5,
    output: Output = None,
    force: Force = False,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Time attention in one decoding step: writehead, PyTorch's SDPA and plain matrix products.

    Example: writehead bench attention --shape 1024,128,1 --shape 1024,128,8
    """
    from writehead.bench.attention import bench_attention, check_shape, default_shapes

    record = _Record("attention", device, output, force)
    chosen = [_read_shape(text) for text in shapes or []] or default_shapes(record.device)
    for shape in chosen:
        check_shape(*shape)
    record.measure(partial(bench_attention, chosen), repeats)


@bench_app.command(name="decode")
def decode_command(
    presets: Annotated[
        list[str] | None,
        typer.Option("--preset", help="A preset, or a family for its rows in Table 2. Repeatable."),
    ] = None,
    runs: Annotated[
        list[str] | None,
        typer.Option("--run", help=f"{A_RUN} Repeatable. Default: presets, with random weights."),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(help="Batch size. Repeatable. Default: 1024, or 16 on a CPU."),
    ] = None,
    length: Annotated[
        list[int] | None,
        typer.Option(
            help="Source and target tokens, or a language model's context length. Repeatable. "
            "Default: 128, or 64 on a CPU."
        ),
    ] = None,
    beam: Beams = None,
    peers: Peers = True,
    sampling: Annotated[bool, typer.Option(help="Also measure sampling.")] = False,
    repeats: Repeats = 5,
    output: Output = None,
    force: Force = False,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Time decoding steps of Table 2's models in writehead, CTranslate2, Hugging Face and PyTorch.

    With --run, time other models. The output file is updated after each row. An incomplete file is
    replaced without --force.

    Example: writehead bench decode --batch 1 --batch 1024 --output results/decode.json
    """
    from writehead.bench import decode
    from writehead.bench.peers import Subject
    from writehead.interop.hub import find_folder
    from writehead.interop.pretrained import read_config

    record = _Record("decode", device, output, force, notes=decode.NOTES)
    default, family = (decode.ON_GPU, "wmt14") if record.on_gpu else (decode.ON_CPU, "tiny")
    sizes = product(length or [default.target], batch or [default.batch], beam or [1, 4])
    element = record.dtype.itemsize
    settings = [Setting(b, n, n, width, element) for n, b, width in sizes]
    known = _models(presets or ([] if runs else [family]), record.on_gpu)
    models = {name: Subject(config) for name, config in known.items()}
    for folder in map(find_folder, runs or []):
        if models.setdefault(folder.name, one := Subject(read_config(folder), folder)) != one:
            raise ConfigError(f"two models are named {folder.name}; rename one of the folders")
    jobs = decode.plan(models, settings)
    int8 = record.device.type == "cpu"
    record.measure(partial(decode.bench_decode, jobs), repeats, peers, sampling, int8)


@bench_app.command(name="translate")
def translate_command(
    input_path: Annotated[str, typer.Option("--input", "-i", help="Text file to translate.")],
    run: Annotated[str | None, typer.Argument(help=A_RUN + DEFAULT)] = None,
    reference: Annotated[
        Path | None, typer.Option(help="Text file with one reference per line, for BLEU.")
    ] = None,
    source_lang: SourceLang = None,
    target_lang: TargetLang = None,
    beam: Beams = None,
    repeats: Annotated[
        int, typer.Option(min=1, help="Number of timed passes after the first pass.")
    ] = 2,
    peers: Peers = True,
    map_batches: Annotated[
        int | None,
        typer.Option(min=1, help="Also measure Ray Data, with this number of lines per batch."),
    ] = None,
    dtype: Dtype = None,
    output: Output = None,
    force: Force = False,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Time the translation of a file, and compare the output with CTranslate2 and with float32.

    Example: writehead bench translate runs/ende --input newstest2013.en --output translate.json
    """
    from writehead.bench.translate import TranslateJob, bench_translate
    from writehead.cli.textio import read_lines
    from writehead.interop.hub import find_folder
    from writehead.runs.bundled import bundled_run

    record = _Record("translate", device, output, force, dtype=dtype, input=input_path)
    job = TranslateJob(
        run=bundled_run() if run is None else find_folder(run),
        lines=list(read_lines(input_path)),
        device=record.device,
        dtype=record.dtype,
        beams=tuple(beam or (1, 4)),
        repeats=repeats,
        peers=peers,
        references=list(read_lines(str(reference))) if reference else None,
        source_lang=source_lang,
        target_lang=target_lang,
        map_batches=map_batches,
    )
    with record.writing() as report:
        record.result |= bench_translate(job, report)


@bench_app.command(name="train")
def train_command(
    preset_name: Annotated[str, typer.Option("--preset", help="See `writehead presets`.")],
    dataset: Annotated[
        Path | None, typer.Option(help="Dataset to train on. Default: the built-in grammar.")
    ] = None,
    settings: Settings = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of timed steps.")] = 20,
    output: Output = None,
    force: Force = False,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Time training steps on packed batches: µs per token, and utilisation of matrix throughput.

    Example: writehead bench train --preset wmt14/multi-query --dataset data/ende
    """
    from writehead.bench.train import TrainJob, bench_train

    record = _Record("train", device, output, force)
    batch_rows, warmup = (128, 8) if record.on_gpu else (8, 2)
    model, config = read_configs(preset_name, settings, TrainConfig(rows=batch_rows))
    job = TrainJob(preset_name, model, config, record.device, steps, warmup)
    with record.writing() as report:
        record.result["rows"] = [bench_train(job, dataset, report)]


@bench_app.command(name="serve")
def serve_command(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="URL|RUN",
            help="URL of a server, or a run to serve. Default: the bundled model.",
        ),
    ] = None,
    api: Annotated[
        str, typer.Option(help="API of the server: writehead, openai or libretranslate.")
    ] = "writehead",
    model: Annotated[
        str | None, typer.Option(help="Model name. Default: the server's first.")
    ] = None,
    key: Annotated[str | None, typer.Option("--api-key", help="API key of the server.")] = None,
    pair: Annotated[
        str | None,
        typer.Option(
            "--languages",
            help="Language pair, such as en-de. Default: en-de with LibreTranslate's API, else "
            "the languages of the model.",
        ),
    ] = None,
    input_path: Annotated[
        str | None,
        typer.Option(
            "--input", "-i", help="Text file with one text per line. Default: built-in texts."
        ),
    ] = None,
    words: Annotated[
        str, typer.Option(help="Range of words per built-in text, on a logarithmic scale.")
    ] = "3-60",
    count: Annotated[int, typer.Option(min=1, help="Number of different built-in texts.")] = 1000,
    size: Annotated[
        int, typer.Option("--texts-per-request", min=1, help="Texts in each request.")
    ] = 1,
    beam: Annotated[int, typer.Option(min=1, help="Beam size for translations.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens per completion.")] = 64,
    stream: Annotated[bool, typer.Option("--stream", help="Stream the responses.")] = False,
    duration: Annotated[float, typer.Option(help="Seconds per measurement.")] = 30.0,
    concurrency: Annotated[
        list[int] | None,
        typer.Option("--max-concurrency", help="Concurrent requests. Repeatable. Default: 16."),
    ] = None,
    rates: Annotated[
        list[float] | None,
        typer.Option("--request-rate", help="Requests per second, at random times. Repeatable."),
    ] = None,
    goodput_ms: Annotated[
        float,
        typer.Option(help="Maximum latency, in ms, of a request that counts towards goodput."),
    ] = 1000.0,
    batchings: Annotated[
        list[str] | None,
        typer.Option(
            "--batching",
            help="How a RUN is batched: continuous, static or ctranslate2. Repeatable.",
        ),
    ] = None,
    max_batch: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum sequences × beams of a RUN decoded together."),
    ] = None,
    check: Annotated[
        bool, typer.Option(help="Compare a RUN's output and throughput with offline decoding.")
    ] = True,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    dtype: Dtype = None,
    output: Output = None,
    plot: Annotated[
        Path | None, typer.Option(help="Also plot throughput and latency to an SVG file.")
    ] = None,
    force: Force = False,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Measure a server: throughput, goodput, errors and latency percentiles.

    Example: writehead bench serve http://127.0.0.1:8000 --max-concurrency 64 --duration 60
    """
    from writehead.bench import serve
    from writehead.cli.textio import read_lines
    from writehead.serving.bench import ServeJob, bench_serve
    from writehead.serving.models import parse_pair

    record = _Record("serve", device, output, force, dtype=dtype, goodput_ms=goodput_ms)
    if input_path is not None:
        texts = [line for line in read_lines(input_path) if line.strip()]
    else:
        texts = serve.mixed_texts(count, *_read_range(words), seed)
    rate_list: list[float | None] = [*rates] if rates else [None]
    limits: list[int | None] = [*concurrency] if concurrency else [None if rates else 16]
    loads = [
        serve.Load(seconds=duration, concurrency=limit, rate=rate, seed=seed)
        for rate, limit in product(rate_list, limits)
    ]
    source, language = (None, None) if pair is None else parse_pair(pair)
    job = ServeJob(
        target=target,
        requests=serve.Target(
            url=target or "",
            api=api,
            model=model,
            key=key,
            beam=beam,
            max_tokens=max_tokens,
            source=source,
            target=language,
            stream=stream,
        ),
        loads=loads,
        texts=texts,
        size=size,
        batchings=batchings or ["continuous"],
        goodput_ms=goodput_ms,
        device=device,
        dtype=dtype,
        threads=threads,
        max_rows=max_batch,
        check=check,
    )
    record.result["texts"] = {"file": input_path, "words": None if input_path else words}
    with record.writing():
        record.result |= bench_serve(job, Reporter())
    if plot is not None:
        from writehead.bench.plots import draw_latencies

        typer.echo(f"written: {draw_latencies(record.result, plot)}", err=True)


@bench_app.command(name="plot")
def plot_command(
    record: Annotated[Path, typer.Argument(help="JSON file written by `bench decode`.")],
    folder: Annotated[Path, typer.Argument(help="Folder for the SVG files.")],
    table: Annotated[
        bool, typer.Option("--table", help="Also print the times as a Markdown table.")
    ] = False,
) -> None:
    """Plot the time per decoding step by batch size, for light and dark pages.

    Example: writehead bench plot results/decoding/decode.json docs --table
    """
    from writehead.bench import plots

    result = plots.read_record(record)
    for path in plots.draw(result, folder):
        typer.echo(f"written: {path}", err=True)
    if table:
        typer.echo(plots.markdown_table(result), nl=False)


class _Record:
    """The results of a benchmark: a table on standard output and an optional JSON file."""

    def __init__(
        self, bench: str, device: str, output: Path | None, force: bool, **facts: Any
    ) -> None:
        from writehead.bench.record import check_output
        from writehead.util.devices import find_device, find_dtype
        from writehead.util.environment import environment

        self.device = find_device(device)
        self.dtype = find_dtype(facts.pop("dtype", None), self.device)
        self.on_gpu = self.device.type == "cuda"
        self.file = check_output(output, force, bench)
        self.result = {"bench": bench, "environment": environment(self.device), **facts}
        self.result["dtype"] = str(self.dtype).removeprefix("torch.")

    @contextmanager
    def writing(self) -> Iterator[Callable[[str], None]]:
        """Yields a function that reports progress; writes and prints the results at the end."""
        from writehead.bench.tables import show

        try:
            yield Reporter().say
        except KeyboardInterrupt:
            kept = "; the output file has the rows so far" if self.result.get("rows") else ""
            typer.echo(f"interrupted{kept if self.file else ''}", err=True)
            raise typer.Exit(130) from None
        if self.file is not None:
            self.file.write(self.result)
            typer.echo(f"written: {self.file.path}", err=True)
        show(self.result, Page())

    def measure(
        self,
        bench: Callable[["Place"], Iterator[dict[str, Any]]],
        repeats: int,
        peers: bool = False,
        sampling: bool = False,
        int8: bool = False,
    ) -> None:
        """Measures the chip and runs a benchmark; writes the results after each row."""
        from writehead.bench.decode import PEERS, Place
        from writehead.bench.floor import measure_chip

        with self.writing() as report:
            report("measuring bandwidth and matrix throughput")
            chip = measure_chip(self.device, self.dtype)
            self.result |= {"chip": asdict(chip), "rows": []}
            chosen = PEERS if peers else ()
            place = Place(chip, self.device, self.dtype, repeats, chosen, report, sampling, int8)
            for row in bench(place):
                self.result["rows"].append(row)
                if self.file is not None:
                    self.file.write({**self.result, "partial": True})


def _models(presets: list[str], on_gpu: bool) -> dict[str, ModelConfig]:
    """Returns presets by name; a family stands for its rows in Table 2."""
    models: dict[str, ModelConfig] = {}
    for name in presets:
        known = rows(name) if name in FAMILIES else {}
        found = {f"{name}/{one.row}": known[one.row] for one in TABLE_2 if one.row in known}
        models |= found or {name: preset(name)}
    if not on_gpu:
        return models
    return {name: replace(one, vocab_size=GPU_VOCAB_SIZE) for name, one in models.items()}


def _read_range(text: str) -> tuple[int, int]:
    try:
        least, most = (int(part) for part in text.split("-"))
    except ValueError as error:
        raise ConfigError(f"--words {text} must have the form 3-60") from error
    return least, most


def _read_shape(text: str) -> tuple[int, int, int]:
    try:
        b, m, g = (int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--shape {text} must have the form b,m,g, such as 1024,128,1") from error
    return b, m, g
