"""`writehead translate` and `writehead generate`."""

import dataclasses
import os
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from itertools import chain, tee
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from writehead import __version__
from writehead.cli.app import app
from writehead.cli.bulk import (
    Cluster,
    Devices,
    Field,
    OutputField,
    Shard,
    Shards,
    is_bulk,
    translate_files,
)
from writehead.cli.options import (
    A_RUN,
    DEFAULT,
    Device,
    Dtype,
    Force,
    Quantize,
    SourceLang,
    TargetLang,
    Threads,
)
from writehead.config import Batching, DecodeConfig
from writehead.errors import ConfigError, DataError
from writehead.interop.hub import find_folder

if TYPE_CHECKING:  # these modules import PyTorch, which takes seconds
    from writehead.cli import textio
    from writehead.cli.resumable import Source
    from writehead.engine import Engine
    from writehead.engine.engine import Progress

ADVICE = "convert the text, or pass --errors replace or --errors skip"
# lines decoded together on a CPU: in the first group, and in the largest
CPU_LINES = (32, 1024)


class Errors(StrEnum):
    """How to treat an input line that is not UTF-8."""

    STRICT = "strict"
    REPLACE = "replace"
    SKIP = "skip"


Input = Annotated[
    str, Option("--input", "-i", help="File to read, one text per line. - is standard input.")
]
Output = Annotated[
    str, Option("--output", "-o", help="File to write; can be resumed. - is standard output.")
]
Inputs = Annotated[
    str,
    Option(
        "--input",
        "-i",
        metavar="PATH",
        help="File to read, one text per line. - is standard input. Or a folder or a pattern such "
        "as 'data/*.gz', with a folder as --output.",
    ),
]
Outputs = Annotated[
    str,
    Option(
        "--output",
        "-o",
        metavar="PATH",
        help="File or folder to write; can be resumed. - is standard output.",
    ),
]
OnErrors = Annotated[
    Errors,
    Option("--errors", help="On invalid UTF-8: stop, replace it with U+FFFD, or skip the line."),
]
Alpha = Annotated[float, Option(help="Length penalty of beam search. 0 turns it off.")]
MaxLength = Annotated[int | None, Option(help="Maximum output tokens, including the end token.")]
MinLength = Annotated[int, Option(help="Minimum output tokens, including the end token.")]
Temperature = Annotated[
    float | None, Option(help="Sample from softmax(logits / temperature) instead of searching.")
]
TopK = Annotated[int | None, Option(help="Sample from the k most likely tokens only.")]
TopP = Annotated[
    float | None, Option(help="Sample from the smallest set of tokens with this total probability.")
]
MinP = Annotated[
    float | None,
    Option(help="Sample only tokens at least this fraction as likely as the likeliest."),
]
RepetitionPenalty = Annotated[
    float | None,
    Option(help="Penalty for tokens already in the output. 1 turns it off."),
]
Seed = Annotated[
    int | None, Option(help="Seed for sampling. Line i, counted from 0, uses seed + i.")
]
BatchTokens = Annotated[
    int | None,
    Option(
        help="Maximum tokens per batch, including padding and beams. A batch of one is always "
        "allowed."
    ),
]


@app.command(name="translate")
def translate_command(
    context: typer.Context,
    run: Annotated[str | None, Argument(metavar="RUN", help=A_RUN + DEFAULT)] = None,
    input_path: Inputs = "-",
    output_path: Outputs = "-",
    source_lang: SourceLang = None,
    target_lang: TargetLang = None,
    beam: Annotated[
        int | None, Option(help="Beam size. Default: 4; 1 for sampling or with a penalty.")
    ] = None,
    alpha: Alpha = 0.6,
    n_best: Annotated[
        int | None, Option(help="Print N translations per line, as: line ||| text ||| score.")
    ] = None,
    scores: Annotated[
        bool, Option("--scores", help="Append a tab and the score to each line.")
    ] = False,
    max_length: MaxLength = None,
    min_length: MinLength = 0,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Seed = None,
    prefix_file: Annotated[
        str | None, Option(help="File with one forced prefix per translation.")
    ] = None,
    errors: OnErrors = Errors.STRICT,
    batch_tokens: BatchTokens = None,
    device: Device = "auto",
    threads: Threads = None,
    dtype: Dtype = None,
    quantize: Quantize = "auto",
    force: Force = False,
    shards: Shards = None,
    shard: Shard = None,
    devices: Devices = None,
    cluster: Cluster = None,
    field: Field = None,
    output_field: OutputField = None,
) -> None:
    """Translate each line of a file or of standard input, in order.

    Example: writehead translate --input news.en --output news.de

    A line that is too long for the model is translated in pieces. A program that pipes lines to
    this command can wait for each translation before it writes the next line.

    Many files: writehead translate --input data/ --output translated/ --devices 0,1. See
    docs/bulk.md.
    """
    config = _decode_config(context.params)
    bulk = is_bulk(context.params)
    folder = None if run is None else find_folder(run)
    if folder is not None and not os.path.isdir(folder):  # a file of text, or the text itself
        raise ConfigError(
            f"there is no run at {run!r}; RUN must be the folder of a run: pass text on "
            f"standard input, or a file with --input"
        )
    if bulk:
        translate_files(context.params, config)
        return
    _check_files([input_path, *([] if prefix_file is None else [prefix_file])], output_path, force)
    from writehead.cli import textio
    from writehead.data.lines import plain_line
    from writehead.engine import Engine  # imports PyTorch

    reader = textio.LineReader(input_path, errors, ADVICE)
    prefixes = None if prefix_file is None else textio.LineReader(prefix_file, errors, ADVICE)
    batching = Batching(tokens=batch_tokens)
    engine = Engine.load(folder, device, dtype, batching=batching, quantize=quantize)
    languages = {"source_lang": source_lang, "target_lang": target_lang}
    form = "{text}\t{score:.6f}\n" if scores else "{text}\n"
    form = form if n_best is None else "{i} ||| {text} ||| {score:.6f}\n"

    def answer(group: "Iterable[Source]", first: int, progress: "Progress | None") -> Iterator[str]:
        lines, starts = _unzip(group)
        outputs = engine.translate(
            lines, config, prefixes=starts, **languages, progress=progress, first=first
        )
        for i, output in enumerate(outputs, first):
            yield "".join(
                form.format(i=i, text=plain_line(one.text), score=one.score)
                for one in output.hypotheses
            )

    list(answer([], 0, None))  # checks the options before a line is read
    if reader.typed:
        bundled = "using the bundled model, English to German; pass RUN to use another; "
        textio.say(f"{bundled if run is None else ''}type a line and press Enter; Ctrl-D exits")
    with _open_output(context, folder, engine, config, form=form, **_given(languages)) as output:
        groups = textio.paired(reader.groups(*_group_sizes(engine)), prefixes)
        textio.decode_lines(
            groups,
            answer,
            output,
            input_path,
            typed=reader.typed,
            shown=not reader.typed and _is_counted(output_path),
            continuous=reader.is_file and engine.model.device.type != "cpu",
        )
    for one in (reader, prefixes):
        if one is not None:
            one.report()


@app.command(name="generate")
def generate_command(
    context: typer.Context,
    run: Annotated[str, Argument(metavar="RUN", help=A_RUN)],
    prompt: Annotated[
        str | None, Argument(metavar="PROMPT", help="Text to continue. Default: each input line.")
    ] = None,
    input_path: Input = "-",
    output_path: Output = "-",
    samples: Annotated[int, Option(help="Number of continuations per prompt.")] = 1,
    beam: Annotated[int | None, Option(help="Beam size. Default: 1, greedy search.")] = None,
    alpha: Alpha = 0.6,
    max_length: MaxLength = None,
    min_length: MinLength = 0,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Seed = None,
    echo: Annotated[bool, Option(help="Print the prompt before its continuation.")] = True,
    errors: OnErrors = Errors.STRICT,
    batch_tokens: BatchTokens = None,
    device: Device = "auto",
    threads: Threads = None,
    dtype: Dtype = None,
    quantize: Quantize = "auto",
    force: Force = False,
) -> None:
    """Continue a prompt, or each line of a file or of standard input, with a language model.

    Example: writehead generate runs/lm "The little dog" --temperature 0.8 --top-p 0.95
    """
    config = _decode_config(context.params)
    if prompt is not None and input_path != "-":
        raise ConfigError("give either a prompt or a file of prompts with --input, not both")
    _check_files([input_path] if prompt is None else [], output_path, force)
    from writehead.cli import textio
    from writehead.data.lines import plain_line
    from writehead.engine import Engine  # imports PyTorch

    folder = find_folder(run)
    reader = textio.LineReader(input_path, errors, ADVICE) if prompt is None else None
    typed = reader is not None and reader.typed
    batching = Batching(tokens=batch_tokens)
    engine = Engine.load(folder, device, dtype, batching=batching, quantize=quantize)

    def answer(group: "Iterable[Source]", first: int, progress: "Progress | None") -> Iterator[str]:
        prompts, starts = tee(line for line, _ in group)
        outputs = engine.generate(prompts, config, samples=samples, progress=progress, first=first)
        for output, start in zip(outputs, starts, strict=True):
            start = textio.echo(engine.tokenizer, start) * echo
            yield "".join(plain_line(start + one.text) + "\n" for one in output.hypotheses)

    list(answer([], 0, None))  # checks the options before a line is read
    if typed:
        textio.say("type a prompt and press Enter; Ctrl-D exits")
    with _open_output(context, folder, engine, config, samples=samples, echo=echo) as output:
        lines = [[prompt or ""]] if reader is None else reader.groups(*_group_sizes(engine))
        groups = textio.paired(lines, None)
        one_at_a_time = (typed or reader is None) and samples == 1 and config.width == 1
        if one_at_a_time and isinstance(output, textio.Stream):
            for i, [(start, _)] in enumerate(groups):
                pieces = engine.stream(start, dataclasses.replace(config, seed=config.seed + i))
                for piece in chain([textio.echo(engine.tokenizer, start) * echo], pieces):
                    output.write(plain_line(piece))
                output.write("\n")
        else:
            textio.decode_lines(
                groups,
                answer,
                output,
                input_path,
                typed=typed,
                shown=not typed and _is_counted(output_path),
                continuous=reader is not None
                and reader.is_file
                and engine.model.device.type != "cpu",
            )
    if reader is not None:
        reader.report()


def _unzip(group: "Iterable[Source]") -> tuple[Iterator[str], Iterator[str]]:
    """Returns the lines and the prefixes of sources, each as an iterator."""
    sources, others = tee(group)
    return (line for line, _ in sources), (prefix for _, prefix in others)


def _given(options: dict[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in options.items() if value is not None}


def _decode_config(given: dict[str, Any]) -> DecodeConfig:
    """Returns the search options from the command line."""
    if given["seed"] is not None and given["temperature"] is None:
        raise ConfigError("--seed is for sampling; set --temperature too")
    names = {field.name for field in dataclasses.fields(DecodeConfig)} & given.keys()
    return DecodeConfig(**{name: given[name] for name in names if given[name] is not None})


def _group_sizes(engine: "Engine") -> tuple[int, int]:
    """Returns the maximum number of lines to decode together, and the number in the first group."""

    if engine.model.device.type != "cpu":
        return Batching.lines, Batching.lines
    return min(CPU_LINES[1], Batching.lines), CPU_LINES[0]


@contextmanager
def _open_output(
    context: typer.Context,
    folder: Path | None,
    engine: "Engine",
    config: DecodeConfig,
    **form: object,
) -> "Iterator[textio.Output]":
    """Opens the output; keeps finished lines of an earlier attempt if its manifest is the same."""
    from writehead.bulk.translator import model_identity
    from writehead.cli import textio

    path, force = (context.params[name] for name in ("output_path", "force"))

    def manifest() -> dict[str, Any]:
        """Returns everything the output depends on, except the input."""
        return {
            "writehead": __version__,
            "verb": context.command.name,
            **model_identity(folder, engine),
            "options": dataclasses.asdict(config),
            "form": form,
        }

    try:
        with textio.writing(path, manifest, replace=force) as output:
            yield output
    except FileExistsError as error:
        raise DataError(
            f"another process has created {path}; all lines are finished and saved: to replace the "
            f"file, run the same command with --force"
        ) from error


def _is_counted(output: str) -> bool:
    return output != "-" or not sys.stdout.isatty()  # a counter would mix with the output


def _check_files(read: list[str], output: str, force: bool) -> None:
    """Raises ConfigError if the output would replace an input, or a file without --force."""
    if read == ["-", "-"]:
        raise ConfigError("standard input cannot be both the text and its prefixes; name a file")
    written = _regular_file(output, sys.stdout)
    if written is None:
        return
    for path in read:
        source = _regular_file(path, sys.stdin)
        if source is not None and os.path.samestat(source, written):
            name = "standard output" if output == "-" else output
            raise ConfigError(f"{name} is also being read; write to another file")
    if output != "-" and not force:
        raise ConfigError(f"{output} exists; choose another file, or pass --force to replace it")


def _regular_file(path: str, standard: IO[str] | None) -> os.stat_result | None:
    """Returns the status of the file at a path, or behind a standard stream, if it is regular."""
    try:
        if path == "-":
            status = os.fstat(-1 if standard is None else standard.fileno())
        else:
            status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status if stat.S_ISREG(status.st_mode) else None
