"""`writehead prepare`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from writehead.cli.app import Page, app
from writehead.config import PrepareConfig
from writehead.errors import ConfigError

if TYPE_CHECKING:
    from writehead.data.dataset import Dataset


@app.command(name="prepare")
def prepare_command(
    dataset: Annotated[Path, typer.Argument(help="The folder to create.")],
    source: Annotated[
        list[Path] | None, typer.Option(help="Source text, plain or .gz, .xz, .bz2; repeatable.")
    ] = None,
    target: Annotated[
        list[Path] | None, typer.Option(help="Its translation, line by line; repeatable.")
    ] = None,
    dev_source: Annotated[list[Path] | None, typer.Option(help="Held-out source text.")] = None,
    dev_target: Annotated[list[Path] | None, typer.Option(help="Its translation.")] = None,
    text: Annotated[
        list[Path] | None, typer.Option(help="Text for a language model; repeatable.")
    ] = None,
    dev_text: Annotated[list[Path] | None, typer.Option(help="Held-out text.")] = None,
    hub: Annotated[
        str | None,
        typer.Option(help="wmt14, lm1b, a dataset on the hub, or a folder of parquet files."),
    ] = None,
    pair: Annotated[
        str | None, typer.Option(help="With --hub: source-target, such as en-de.")
    ] = None,
    embedded: Annotated[
        bool, typer.Option("--embedded", help="English and German from the built-in grammar.")
    ] = False,
    pairs: Annotated[
        int, typer.Option(help="With --embedded: number of training pairs.")
    ] = 200_000,
    max_words: Annotated[
        int | None, typer.Option(help="With --embedded: maximum words per sentence.")
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            help="Vocabulary size, shared by source and target. Default: 32000, or 2000 with "
            "--embedded; less if the text is too small."
        ),
    ] = None,
    sample: Annotated[int, typer.Option(help="Lines to train the tokenizer on.")] = 500_000,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Maximum tokens per line. Default: 255 for translation, otherwise no limit."
        ),
    ] = None,
    max_ratio: Annotated[
        float, typer.Option(help="Maximum length ratio of a pair, in tokens.")
    ] = 2.0,
    keep_duplicates: Annotated[
        bool, typer.Option("--keep-duplicates", help="Keep duplicate lines.")
    ] = False,
    dev: Annotated[
        int,
        typer.Option(
            help="Lines to hold out if no dev text is given: at most a twentieth of the text."
        ),
    ] = 2000,
    seed: Annotated[int, typer.Option(help="Seed of the sample and the held-out lines.")] = 0,
    workers: Annotated[
        int | None, typer.Option(help="Number of processes. Default: one per core.")
    ] = None,
) -> None:
    """Make a dataset from text: clean it, train a tokenizer, encode it on all cores.

    Example: writehead prepare data/ende --source train.en.xz --target train.de.xz
    --dev-source dev.en --dev-target dev.de --vocab-size 16000
    """
    from writehead.data.hub import hub_inputs
    from writehead.data.prepare import prepare
    from writehead.data.sources import embedded as embedded_corpus
    from writehead.data.sources import parallel_files, text_files
    from writehead.util.progress import Reporter

    kinds = {
        "--source and --target": bool(source or target),
        "--text": bool(text),
        "--hub": bool(hub),
        "--embedded": embedded,
    }
    chosen = [kind for kind, given in kinds.items() if given]
    if len(chosen) != 1:
        problem = f"both {' and '.join(chosen)}" if chosen else "no text"
        raise ConfigError(f"{problem} given; give one of {', '.join(kinds)}")
    for option, value, kind in (
        ("--dev-source", dev_source, "--source and --target"),
        ("--dev-target", dev_target, "--source and --target"),
        ("--dev-text", dev_text, "--text"),
        ("--pair", pair, "--hub"),
        ("--max-words", max_words, "--embedded"),
    ):
        if value and kind != chosen[0]:
            raise ConfigError(f"{option} requires {kind}, but {chosen[0]} is given; leave it out")
    if hub:
        inputs = hub_inputs(hub, pair)
    elif embedded:
        inputs = embedded_corpus(pairs, max_words=max_words)
    elif text:
        inputs = text_files(text, dev_text or [])
    else:
        inputs = parallel_files(source or [], target or [], dev_source or [], dev_target or [])
    config = PrepareConfig(
        task="translation" if inputs.sides == 2 else "language",
        vocab_size=(2_000 if embedded else 32_000) if vocab_size is None else vocab_size,
        sample=sample,
        max_tokens=max_tokens,
        max_ratio=max_ratio,
        keep_duplicates=keep_duplicates,
        dev=dev,
        seed=seed,
    )
    try:
        made = prepare(
            dataset,
            inputs,
            config,
            workers=workers,
            progress=Reporter(),
            fit_vocab_size=vocab_size is None,
        )
    except KeyboardInterrupt:
        typer.echo("interrupted; run the same command again to resume", err=True)
        raise typer.Exit(130) from None
    _print_summary(made)


def _print_summary(dataset: "Dataset") -> None:
    """Prints the sizes of the splits, and the number of dropped lines by reason."""
    console, info = Page(), dataset.info
    sides = [name for name in info["splits"]["train"] if name.endswith("_tokens")]
    table = Table("split", title=f"{dataset.directory.name}: {dataset.task}", title_justify="left")
    for heading in ("lines", "sequences", *(side.replace("_", " ") for side in sides)):
        table.add_column(heading, justify="right")
    for name, counts in info["splits"].items():
        lines = f"{counts['lines']:,}" if counts["lines"] else "from train"
        table.add_row(name, lines, *(f"{counts[size]:,}" for size in ("sequences", *sides)))
    console.print(table)
    total = sum(counts["lines"] for counts in info["splits"].values())
    dropped = Table("dropped because", title_justify="left")
    for heading in ("lines", "share"):
        dropped.add_column(heading, justify="right")
    for reason, count in (*info["dropped"].items(), ("total", sum(info["dropped"].values()))):
        dropped.add_row(reason, f"{count:,}", f"{count / total:.2%}")
    console.print(dropped)
    normalised = sum(counts["normalised"] for counts in info["splits"].values())
    console.print(
        f"{normalised:,} lines were normalised; the vocabulary has {dataset.vocab_size:,} tokens",
        highlight=False,
    )
