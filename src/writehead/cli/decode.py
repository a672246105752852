"""`writehead translate` and `writehead generate`."""

import dataclasses
import os
import shlex
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from writehead import __version__
from writehead.cli.app import Threads, app
from writehead.cli.streams import output_is_closed
from writehead.config import DecodeConfig
from writehead.errors import ConfigError, DataError, shown

if TYPE_CHECKING:  # these modules import PyTorch, which takes seconds
    from writehead.decoding import Engine, textio
    from writehead.decoding.resumable import Source
    from writehead.decoding.worker import Progress

ADVICE = "convert the text, or pass --errors replace or --errors skip"
# lines decoded together on a CPU, in the first group and at most; an interruption loses one group
CPU_LINES = (32, 1024)


class Errors(StrEnum):
    """How to treat an input line that is not UTF-8."""

    STRICT = "strict"
    REPLACE = "replace"
    SKIP = "skip"


TextRun = Annotated[str, typer.Argument(metavar="RUN", help="Folder of a trained model.")]
OptionalRun = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        help="Folder of a trained model. Default: the bundled model, English to German.",
    ),
]
Input = Annotated[
    str, typer.Option("--input", "-i", help="File to read, one text per line; - is standard input.")
]
OutputFile = Annotated[
    str,
    typer.Option(
        "--output",
        "-o",
        help="File to write; - is standard output. After an interruption, the same command "
        "resumes.",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace the output file if it exists.")]
BadText = Annotated[
    Errors,
    typer.Option(
        "--errors",
        help="If a line is not UTF-8: stop, replace invalid bytes with U+FFFD, or treat the line "
        "as empty.",
    ),
]
Alpha = Annotated[float, typer.Option(help="Length penalty of beam search; 0 turns it off.")]
MaxLength = Annotated[
    int | None, typer.Option(help="Maximum number of output tokens, including the end token.")
]
MinLength = Annotated[
    int, typer.Option(help="Minimum number of output tokens, including the end token.")
]
Temperature = Annotated[
    float | None,
    typer.Option(help="Sample from softmax(logits / temperature) instead of searching."),
]
TopK = Annotated[int | None, typer.Option(help="Sample from the k most likely tokens only.")]
TopP = Annotated[
    float | None,
    typer.Option(help="Sample from the smallest set of tokens with this total probability."),
]
Seed = Annotated[
    int | None,
    typer.Option(help="Seed for sampling; line i, from 0, uses seed + i. Default: 0."),
]
BatchTokens = Annotated[
    int | None,
    typer.Option(help="Tokens per batch, including padding and beams; fewer use less memory."),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.")]
Dtype = Annotated[
    str | None,
    typer.Option(help="float32, bfloat16, … Default: bfloat16 on a GPU, else float32."),
]


def _seed(given: int | None, temperature: float | None) -> int:
    """Returns the seed for sampling, 0 by default."""
    if given is not None and temperature is None:
        raise ConfigError("--seed is for sampling; set --temperature too")
    return given or 0


@app.command(name="translate")
def translate_command(
    run: OptionalRun = None,
    input_path: Input = "-",
    output_path: OutputFile = "-",
    beam: Annotated[
        int | None, typer.Option(help="Beam size; 1 is greedy. Default: 4, or 1 for sampling.")
    ] = None,
    alpha: Alpha = 0.6,
    n_best: Annotated[
        int | None,
        typer.Option(help="Print the N best translations: line number ||| text ||| score."),
    ] = None,
    scores: Annotated[
        bool, typer.Option("--scores", help="Append a tab and the score to each line.")
    ] = False,
    max_length: MaxLength = None,
    min_length: MinLength = 0,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = None,
    prefix_file: Annotated[
        str | None,
        typer.Option(help="File with the beginning of each translation, one per input line."),
    ] = None,
    errors: BadText = Errors.STRICT,
    batch_tokens: BatchTokens = None,
    device: Device = "auto",
    threads: Threads = None,
    dtype: Dtype = None,
    force: Force = False,
) -> None:
    """Translate each line of a file or of standard input, in order.

    Example: writehead translate --input news.en --output news.de

    With a model of your own: writehead translate runs/en-de --input news.en --beam 1

    An empty line stays empty. A line longer than the model's maximum input is translated in pieces.
    A program that writes lines to standard input can wait for each translation.
    """
    options = DecodeConfig(
        max_length=max_length,
        min_length=min_length,
        beam=beam,
        alpha=alpha,
        n_best=1 if n_best is None else n_best,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=_seed(seed, temperature),
    )
    _check_place(run)
    _check_files(input_path, output_path, prefix_file, force)
    from writehead.decoding import Batching, Engine, textio  # imports PyTorch, which takes seconds

    reader = textio.LineReader(input_path, errors, ADVICE)
    prefixes = None if prefix_file is None else textio.LineReader(prefix_file, errors, ADVICE)
    batching = Batching(tokens=batch_tokens)
    engine = Engine.load(run, device, dtype, batching=batching)

    def answer(group: "list[Source]", first: int, progress: "Progress | None") -> Iterator[str]:
        outputs = engine.translate(
            [line for line, _ in group],
            options,
            prefixes=[prefix for _, prefix in group],
            progress=progress,
            first=first,
        )
        for i, output in enumerate(outputs, first):
            lines = ((textio.plain_line(one.text), one.score) for one in output.hypotheses)
            if n_best is not None:
                yield "".join(f"{i} ||| {text} ||| {score:.6f}\n" for text, score in lines)
            elif scores:
                yield "".join(f"{text}\t{score:.6f}\n" for text, score in lines)
            else:
                yield "".join(f"{text}\n" for text, _ in lines)

    list(answer([], 0, None))  # checks the options before a line is read
    if reader.typed:
        bundled = "using the bundled model, English to German; pass RUN to use another; "
        textio.say(f"{bundled if run is None else ''}type a line and press Enter; Ctrl-D exits")
    manifest = _manifest("translate", engine, run, options, n_best=n_best, scores=scores)
    with _writing(output_path, manifest, force) as output:
        groups = textio.paired(reader.groups(*_window(engine)), prefixes)
        counted = _is_counted(reader.typed, output_path)
        textio.decode_lines(groups, answer, output, input_path, typed=reader.typed, shown=counted)
    for one in (reader, prefixes):
        if one is not None:
            one.report()


@app.command(name="generate")
def generate_command(
    run: TextRun,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="Text to continue. Default: each line of the input."),
    ] = None,
    input_path: Input = "-",
    output_path: OutputFile = "-",
    samples: Annotated[int, typer.Option(help="Number of texts for each prompt.")] = 1,
    beam: Annotated[
        int | None, typer.Option(help="Beam size. Default: 1, which is greedy.")
    ] = None,
    alpha: Alpha = 0.6,
    max_length: MaxLength = None,
    min_length: MinLength = 0,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = None,
    echo: Annotated[bool, typer.Option(help="Print the prompt before its continuation.")] = True,
    errors: BadText = Errors.STRICT,
    batch_tokens: BatchTokens = None,
    device: Device = "auto",
    threads: Threads = None,
    dtype: Dtype = None,
    force: Force = False,
) -> None:
    """Continue a prompt token by token, or each line of a file or of standard input, in order.

    Example: writehead generate runs/lm "The little dog" --temperature 0.8 --top-p 0.95

    With many prompts: writehead generate runs/lm --input prompts.txt --output texts.txt
    """
    options = DecodeConfig(
        max_length=max_length,
        min_length=min_length,
        beam=beam,
        alpha=alpha,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=_seed(seed, temperature),
    )
    if prompt is not None and input_path != "-":
        raise ConfigError("give a prompt or a file of prompts with --input, not both")
    _check_files(input_path if prompt is None else None, output_path, None, force)
    from writehead.decoding import Batching, Engine, textio  # imports PyTorch, which takes seconds

    reader = None if prompt is not None else textio.LineReader(input_path, errors, ADVICE)
    typed = reader is not None and reader.typed
    batching = Batching(tokens=batch_tokens)
    engine = Engine.load(run, device, dtype, batching=batching)

    def answer(group: "list[Source]", first: int, progress: "Progress | None") -> Iterator[str]:
        prompts = [line for line, _ in group]
        outputs = engine.generate(prompts, options, samples=samples, progress=progress, first=first)
        for begun, output in zip(prompts, outputs, strict=True):
            begun = begun.rstrip() * echo
            yield "".join(textio.plain_line(begun + one.text) + "\n" for one in output.hypotheses)

    list(answer([], 0, None))  # checks the options before a line is read
    if typed:
        textio.say("type a prompt and press Enter; Ctrl-D exits")
    manifest = _manifest("generate", engine, run, options, samples=samples, echo=echo)
    with _writing(output_path, manifest, force) as output:
        lines = [[prompt or ""]] if reader is None else reader.groups(*_window(engine))
        groups = textio.paired(lines, None)
        at_once = typed or reader is None
        if at_once and samples == 1 and options.width == 1 and isinstance(output, textio.Stream):
            for i, [(begun, _)] in enumerate(groups):
                own = dataclasses.replace(options, seed=options.seed + i)
                pieces = engine.stream(begun, own)
                output.write(textio.plain_line(begun.rstrip()) if echo else "")
                for piece in pieces:
                    output.write(textio.plain_line(piece))
                output.write("\n")
        else:
            counted = _is_counted(typed, output_path)
            textio.decode_lines(groups, answer, output, input_path, typed=typed, shown=counted)
    if reader is not None:
        reader.report()


def _window(engine: "Engine") -> tuple[int, int]:
    """Returns how many lines to decode together: at most, and in the first group."""
    from writehead.decoding import Batching

    if engine.model.device.type != "cpu":
        return Batching.lines, Batching.lines
    first, most = CPU_LINES
    return min(most, Batching.lines), first


def _manifest(
    verb: str, engine: "Engine", run: str | None, options: DecodeConfig, **form: object
) -> Callable[[], dict[str, Any]]:
    """Returns a function that collects everything the output depends on, except the input."""
    from writehead.model.bundled import bundled_run
    from writehead.model.runs import run_fingerprint

    return lambda: {
        "writehead": __version__,
        "verb": verb,
        "weights": run_fingerprint(bundled_run() if run is None else Path(run)),
        "model": engine.model.config.to_json(),
        "tokenizer": engine.tokenizer.fingerprint,
        "dtype": str(engine.model.dtype),
        "options": dataclasses.asdict(options),
        "form": form,
    }


@contextmanager
def _writing(
    path: str, manifest: Callable[[], dict[str, Any]], force: bool
) -> "Iterator[textio.Output]":
    """Opens the output; a file that another process has created in the meantime is kept."""
    from writehead.decoding import textio

    try:
        with textio.writing(path, manifest, replace=force) as output:
            yield output
    except FileExistsError as error:
        raise DataError(
            f"another process has created {path}; all lines are done and kept: to replace the "
            f"file, run the same command with --force"
        ) from error


def _check_files(
    input_path: str | None, output_path: str, prefix_file: str | None, force: bool
) -> None:
    """Raises ConfigError if an input or output cannot be used; runs first because it is fast."""
    read = [path for path in (input_path, prefix_file) if path is not None]
    if read == ["-", "-"]:
        raise ConfigError(
            "standard input cannot be both the text and its prefixes; name a file with --input or "
            "--prefix-file"
        )
    if "-" in read and sys.stdin is None:
        raise ConfigError("standard input is closed; name a file of text with --input")
    if output_path == "-" and output_is_closed():
        raise ConfigError("standard output is closed; name a file with --output")
    written = _regular_file(output_path, sys.stdout)
    for path in read:
        source = _regular_file(path, sys.stdin)
        if written is not None and source is not None and os.path.samestat(source, written):
            names = {"-": "standard output"}
            raise ConfigError(
                f"{names.get(output_path, output_path)} is also being read; write to another file"
            )
    if output_path == "-":
        return
    place = Path(output_path)
    if written is not None and not force:
        raise ConfigError(
            f"{output_path} exists; choose another file, or pass --force to replace it"
        )
    if place.is_dir():
        raise ConfigError(f"{output_path} is a folder; give the name of a file")
    if written is not None or not place.exists():
        folder = Path(os.path.realpath(place)).parent
        if not folder.is_dir():
            raise ConfigError(f"{output_path} cannot be written: there is no folder {folder}")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(f"{output_path} cannot be written: {folder} is read-only for you")


def _regular_file(path: str, standard: IO[str]) -> os.stat_result | None:
    """Returns the status of the file at a path or behind a standard stream if it is regular."""
    try:
        known = os.fstat(standard.fileno()) if path == "-" else os.stat(path)
    except (OSError, ValueError):
        return None
    return known if stat.S_ISREG(known.st_mode) else None


def _check_place(run: str | None) -> None:
    """Raises ConfigError if RUN is not a folder, such as a file of text or the text itself."""
    if run is None or os.path.isdir(run):
        return
    if os.path.exists(run):
        raise ConfigError(
            f"{run} is a file, but RUN must be the folder of a model; to translate the file, pass "
            f"--input {shlex.quote(run)}"
        )
    raise ConfigError(
        f"there is no run at {shown(run)}; check the path, or pass text on standard input or as a "
        f"file with --input"
    )


def _is_counted(typed: bool, output_path: str) -> bool:
    """Whether to show a line counter: not if the output itself appears on the terminal."""
    return not typed and (output_path != "-" or not sys.stdout.isatty())
