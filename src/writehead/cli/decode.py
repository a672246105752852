"""`writehead translate` and `writehead generate`."""

import dataclasses
import itertools
import os
import shlex
import sys
from typing import Annotated

import typer

from writehead.cli.app import Threads, app
from writehead.config import DecodeConfig
from writehead.errors import ConfigError

SHOWN = 40  # letters of what was typed that an error repeats
TextRun = Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run.")]
OptionalRun = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        help="The folder of a run; without it, the model in the box, English to German.",
    ),
]
Input = Annotated[str, typer.Option("--input", "-i", help="A file of lines; - is standard input.")]
OutputFile = Annotated[
    str, typer.Option("--output", "-o", help="A file to write; - is standard output.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace the output file if there is one.")]
Alpha = Annotated[float, typer.Option(help="Length penalty of the beam.")]
MaxLength = Annotated[int | None, typer.Option(help="Most tokens of an output, the end included.")]
MinLength = Annotated[int, typer.Option(help="Fewest tokens of an output, the end included.")]
Temperature = Annotated[
    float | None, typer.Option(help="Draw by softmax of logits / temperature; 1.0 is the model's.")
]
TopK = Annotated[int | None, typer.Option(help="Draw among the k likeliest tokens only.")]
TopP = Annotated[
    float | None, typer.Option(help="Draw among the fewest tokens of this probability together.")
]
Seed = Annotated[
    int | None, typer.Option(help="What draws depend on, 0 by default; line i draws by seed + i.")
]
BatchTokens = Annotated[
    int | None,
    typer.Option(help="Tokens decoded together, padding and beams counted; less takes less room."),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")]
Dtype = Annotated[
    str | None, typer.Option(help="float32, bfloat16, …; bfloat16 on a GPU by default.")
]


def _seed(given: int | None, temperature: float | None) -> int:
    """The seed of draws, where there are any."""
    if given is not None and temperature is None:
        raise ConfigError("--seed is for sampling, and nothing is drawn; set --temperature too")
    return given or 0


@app.command(name="translate")
def translate_command(
    run: OptionalRun = None,
    input_path: Input = "-",
    output_path: OutputFile = "-",
    beam: Annotated[
        int | None,
        typer.Option(help="Hypotheses per line; 4 unless sampling, 1 is greedy."),
    ] = None,
    alpha: Alpha = 0.6,
    n_best: Annotated[
        int | None, typer.Option(help="Print the N best, as: line ||| text ||| score.")
    ] = None,
    scores: Annotated[bool, typer.Option("--scores", help="Add a tab and the score.")] = False,
    max_length: MaxLength = None,
    min_length: MinLength = 0,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = None,
    prefix_file: Annotated[
        str | None, typer.Option(help="A file of what each translation must begin with.")
    ] = None,
    batch_tokens: BatchTokens = None,
    device: Device = "auto",
    threads: Threads = None,
    dtype: Dtype = None,
    force: Force = False,
) -> None:
    """Translate lines, in order; an empty line stays empty, a very long one is done in pieces.

    Example: writehead translate --input news.en --output news.de

    With a model of your own: writehead translate runs/en-de --input news.en --beam 1
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
    from writehead.decoding import Batching, Engine, textio  # brings PyTorch, which takes seconds

    interactive = textio.is_interactive(input_path)
    lines = textio.read_lines(input_path)
    prefixes = None if prefix_file is None else textio.read_lines(prefix_file)
    batching = Batching(tokens=batch_tokens, lines=1 if interactive else Batching.lines)
    with textio.writing(output_path, force, input_path) as write:
        engine = Engine.load(run, device, dtype, batching=batching)
        if interactive:
            box = "the model in the box, English to German; RUN names another; "
            typer.echo(f"{box if run is None else ''}type a line and Enter; Ctrl-D ends", err=True)
        shown = not interactive and _out_of_sight(output_path)
        with textio.tallying(output_path, shown, input_path, typed=interactive) as tally:
            outputs = engine.translate(lines, options, prefixes=prefixes, progress=tally.progress)
            for i, output in enumerate(outputs):
                for one in output.hypotheses:
                    text = textio.one_line(one.text)
                    if n_best is not None:
                        text = f"{i} ||| {text} ||| {one.score:.6f}"
                    elif scores:
                        text = f"{text}\t{one.score:.6f}"
                    write(text + "\n")
                tally.written += 1


@app.command(name="generate")
def generate_command(
    run: TextRun,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="What the text begins with; else it is read."),
    ] = None,
    input_path: Input = "-",
    output_path: OutputFile = "-",
    samples: Annotated[int, typer.Option(help="Texts for each prompt, one a line.")] = 1,
    beam: Annotated[
        int | None, typer.Option(help="Hypotheses per prompt; 1, the default, is greedy.")
    ] = None,
    alpha: Alpha = 0.6,
    max_length: MaxLength = None,
    min_length: MinLength = 0,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = None,
    echo: Annotated[bool, typer.Option(help="Print the prompt before what follows it.")] = True,
    batch_tokens: BatchTokens = None,
    device: Device = "auto",
    threads: Threads = None,
    dtype: Dtype = None,
    force: Force = False,
) -> None:
    """Go on from a prompt, token by token as they come; or from many, a line each, in order.

    Example: writehead generate runs/lm "The little dog" --temperature 0.8 --top-p 0.95
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
    from writehead.decoding import Batching, Engine, textio  # brings PyTorch, which takes seconds

    interactive = prompt is None and textio.is_interactive(input_path)
    prompts = textio.read_lines(input_path) if prompt is None else iter([textio.utf8(prompt)])
    batching = Batching(tokens=batch_tokens, lines=1 if interactive else Batching.lines)
    with textio.writing(output_path, force, input_path) as write:
        engine = Engine.load(run, device, dtype, batching=batching)
        if interactive:
            typer.echo("type a prompt and Enter; Ctrl-D ends", err=True)
        if (interactive or prompt is not None) and samples == 1 and options.width == 1:
            for i, begun in enumerate(prompts):
                own = dataclasses.replace(options, seed=options.seed + i)
                pieces = engine.stream(begun, own)
                write(begun.rstrip() if echo else "")
                for piece in pieces:
                    write(piece)
                write("\n")
            return
        shown = not interactive and _out_of_sight(output_path)
        with textio.tallying(output_path, shown, input_path, typed=interactive) as tally:
            asked, kept = itertools.tee(prompts)  # each is read when it is asked for
            outputs = engine.generate(asked, options, samples=samples, progress=tally.progress)
            for begun, output in zip(kept, outputs, strict=True):
                for one in output.hypotheses:
                    write(textio.one_line(begun.rstrip() * echo + one.text) + "\n")
                tally.written += 1


def _check_place(run: str | None) -> None:
    """Raises where what is to be translated stands in the place of RUN: a file, or text itself."""
    if run is None or os.path.isdir(run):
        return
    if os.path.exists(run):
        raise ConfigError(
            f"{run} is a file, and RUN is the folder of a model; if it is a file of text, pass "
            f"--input {shlex.quote(run)}"
        )
    shown = run if len(run) <= SHOWN else run[:SHOWN] + "…"
    raise ConfigError(
        f"there is no run at {shown!r}; check the path, and if that is text, pass it by standard "
        f"input, or as a file with --input"
    )


def _out_of_sight(output_path: str) -> bool:
    """Whether what is written does not appear on a terminal, where progress would disturb it."""
    return output_path != "-" or not sys.stdout.isatty()
