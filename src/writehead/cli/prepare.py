"""`writehead prepare`."""

from pathlib import Path
from typing import Annotated

import typer

from writehead.cli.app import Page, app
from writehead.config import PrepareConfig


@app.command(name="prepare")
def prepare_command(
    dataset: Annotated[Path, typer.Argument(help="The folder to make.")],
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
        str | None, typer.Option(help="With --hub: source-target, as in en-de for into German.")
    ] = None,
    embedded: Annotated[
        bool, typer.Option("--embedded", help="English and German from the built-in grammar.")
    ] = False,
    pairs: Annotated[int, typer.Option(help="With --embedded: how many to train on.")] = 200_000,
    max_words: Annotated[
        int | None, typer.Option(help="With --embedded: only sentences of so many words or fewer.")
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            help="Vocabulary size, shared by source and target. Default: 32000, or 2000 with "
            "--embedded; less if the text is too small."
        ),
    ] = None,
    sample: Annotated[int, typer.Option(help="Lines to learn the tokenizer from.")] = 500_000,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Longest line kept; 255 for translation, any for a language model."),
    ] = None,
    max_ratio: Annotated[float, typer.Option(help="Most that lengths of a pair differ by.")] = 2.0,
    keep_duplicates: Annotated[
        bool, typer.Option("--keep-duplicates", help="Keep lines that come again.")
    ] = False,
    dev: Annotated[
        int,
        typer.Option(
            help="Lines to hold out where no dev text is given: at most a twentieth of the text."
        ),
    ] = 2000,
    seed: Annotated[int, typer.Option(help="Of the sample and the held-out lines.")] = 0,
    workers: Annotated[int | None, typer.Option(help="Processes; one a core by default.")] = None,
) -> None:
    """Make a dataset of text: clean it, learn a tokenizer, encode it on all cores.

    Example: writehead prepare data/ende --source train.en.xz --target train.de.xz
    --dev-source dev.en --dev-target dev.de --vocab-size 16000
    """
    from writehead.data.choosing import Choice
    from writehead.data.prepare import prepare
    from writehead.data.progress import Reporter
    from writehead.data.summary import render as render_dataset

    choice = Choice(
        source=tuple(source or ()),
        target=tuple(target or ()),
        dev_source=tuple(dev_source or ()),
        dev_target=tuple(dev_target or ()),
        text=tuple(text or ()),
        dev_text=tuple(dev_text or ()),
        hub=hub,
        pair=pair,
        embedded=embedded,
        pairs=pairs,
        max_words=max_words,
    )
    inputs = choice.inputs()
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
        typer.echo("interrupted; run the same command again to go on", err=True)
        raise typer.Exit(130) from None
    render_dataset(made, Page())
