"""`writehead prepare`: turns text into a dataset."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from typer import Option

from writehead.cli.app import Page, app
from writehead.cli.options import SourceLang, TargetLang, Threads, resumable
from writehead.config import PrepareConfig
from writehead.errors import ConfigError

if TYPE_CHECKING:
    from writehead.data.dataset import Dataset
    from writehead.data.prepare import ModelTokenizer
    from writehead.data.sources import Inputs

Paths = list[Path] | None
FILES = "--source and --target"
# options that need another option
NEEDS = {"dev_source": FILES, "dev_target": FILES, "dev_text": "--text", "pair": "--hub"}
NEEDS["max_words"] = "--embedded"


@app.command(name="prepare")
def prepare_command(
    context: typer.Context,
    dataset: Annotated[Path, typer.Argument(help="Folder of the new dataset.")],
    source: Annotated[Paths, Option(help="Source text, plain or compressed. Repeatable.")] = None,
    target: Annotated[
        Paths, Option(help="Translation of --source, line by line. Repeatable.")
    ] = None,
    dev_source: Annotated[Paths, Option(help="Source text of the dev split. Repeatable.")] = None,
    dev_target: Annotated[Paths, Option(help="Translation of --dev-source. Repeatable.")] = None,
    text: Annotated[Paths, Option(help="Text for a language model. Repeatable.")] = None,
    dev_text: Annotated[Paths, Option(help="Dev text for a language model. Repeatable.")] = None,
    repeat: Annotated[
        list[int] | None,
        Option(
            help="Number of times to include each --source or --text, in their order. Repeatable. "
            "Default: 1."
        ),
    ] = None,
    exclude: Annotated[
        Paths,
        Option(
            help="Text whose lines are dropped from the training text, such as a test set. Case "
            "and punctuation are ignored. Repeatable."
        ),
    ] = None,
    hub: Annotated[
        str | None,
        Option(help="wmt14, lm1b, another Hugging Face dataset, or a folder of parquet files."),
    ] = None,
    pair: Annotated[str | None, Option(help="With --hub: language pair, such as en-de.")] = None,
    embedded: Annotated[bool, Option("--embedded", help="Use the built-in grammar.")] = False,
    pairs: Annotated[int, Option(help="With --embedded: number of training pairs.")] = 200_000,
    max_words: Annotated[
        int | None, Option(help="With --embedded: maximum words per sentence.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        Option(help="Use the tokenizer of this run or Hugging Face model instead of training one."),
    ] = None,
    source_lang: SourceLang = None,
    target_lang: TargetLang = None,
    vocab_size: Annotated[
        int | None, Option(help="Default: 32000 (2000 with --embedded), or less for little text.")
    ] = None,
    sample: Annotated[int, Option(help="Number of lines to train the tokenizer on.")] = 500_000,
    max_tokens: Annotated[
        int | None,
        Option(help="Maximum tokens per line. Default: 255 for translation, else no limit."),
    ] = None,
    max_ratio: Annotated[float, Option(help="Maximum length ratio of a sentence pair.")] = 2.0,
    keep_duplicates: Annotated[bool, Option("--keep-duplicates", help="Keep duplicates.")] = False,
    split_digits: Annotated[
        bool,
        Option(
            "--split-digits",
            help="Make each digit a token, so that models copy numbers more reliably.",
        ),
    ] = False,
    vary_case: Annotated[
        float,
        Option(help="Share of training pairs in which to change the case of letters."),
    ] = 0.0,
    vary_copies: Annotated[
        float,
        Option(
            help="Share of training pairs in which to replace a number or name on both sides, or "
            "to add a name, number, e-mail address, URL or emoji to both."
        ),
    ] = 0.0,
    dev: Annotated[
        int, Option(help="Lines to hold out if no dev text is given, at most 5%.")
    ] = 2000,
    seed: Annotated[int, Option(help="Seed for --sample and --dev.")] = 0,
    threads: Threads = None,
) -> None:
    """Clean text, train a tokenizer and encode the text into a dataset.

    Example: writehead prepare data/ende --source train.en.xz --target train.de.xz
    --dev-source dev.en --dev-target dev.de --vocab-size 16000

    To fine-tune an imported model: writehead prepare data/ende --source train.en --target train.de
    --tokenizer Helsinki-NLP/opus-mt-en-de
    """
    inputs = _find_inputs(context.params)
    given = _find_tokenizer(context.params)
    from writehead.data.prepare import prepare
    from writehead.util.progress import Reporter

    names = (
        *("sample", "max_tokens", "max_ratio", "keep_duplicates", "dev", "seed"),
        *("split_digits", "vary_case", "vary_copies"),
    )
    config = PrepareConfig(
        task="translation" if inputs.sides == 2 else "language",
        vocab_size=(2_000 if embedded else 32_000) if vocab_size is None else vocab_size,
        **{name: context.params[name] for name in names},
    )
    fit, progress = vocab_size is None, Reporter()
    with resumable():
        made = prepare(
            *(dataset, inputs, config),
            threads=threads,
            progress=progress,
            fit_vocab_size=fit,
            tokenizer=given,
        )
    _print_summary(made, Page(highlight=False))


def _find_inputs(given: dict[str, Any]) -> "Inputs":
    """Returns the text to prepare, with its repeat counts and the text to exclude from it."""
    from writehead.data.sources import text_files

    excluded = text_files(given["exclude"] or (), ()).train
    return replace(_find_text(given), repeat=tuple(given["repeat"] or ()), excluded=excluded)


def _find_text(given: dict[str, Any]) -> "Inputs":
    """Returns the text to prepare; raises ConfigError unless exactly one kind of text is given."""
    from writehead.data import sources
    from writehead.data.hub import hub_inputs

    kinds = {
        FILES: given["source"] or given["target"],
        "--text": given["text"],
        "--hub": given["hub"],
        "--embedded": given["embedded"],
    }
    chosen = [kind for kind, value in kinds.items() if value]
    if len(chosen) != 1:
        got = f"both {' and '.join(chosen)}" if chosen else "no text"
        raise ConfigError(f"{got} given; give one of {', '.join(kinds)}")
    for name, kind in NEEDS.items():
        if given[name] and kind != chosen[0]:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} requires {kind}, not {chosen[0]}; leave {option} out")
    if given["hub"]:
        return hub_inputs(given["hub"], given["pair"])
    if given["embedded"]:
        return sources.embedded(given["pairs"], max_words=given["max_words"])
    if given["text"]:
        return sources.text_files(given["text"], given["dev_text"] or ())
    files = (given[name] or () for name in ("source", "target", "dev_source", "dev_target"))
    return sources.parallel_files(*files)


def _find_tokenizer(given: dict[str, Any]) -> "ModelTokenizer | None":
    """Returns the tokenizer of a model, if one is given."""
    name, languages = given["tokenizer"], (given["source_lang"], given["target_lang"])
    if name is None:
        if languages != (None, None):
            raise ConfigError("--source-lang and --target-lang require --tokenizer")
        return None
    for option in ("vocab_size", "split_digits"):
        if given[option]:
            flag = f"--{option.replace('_', '-')}"
            raise ConfigError(f"--tokenizer has its own vocabulary; leave {flag} out")
    from writehead.data.prepare import ModelTokenizer
    from writehead.data.tokenizer import load_tokenizer
    from writehead.interop.hub import find_folder
    from writehead.interop.pretrained import read_config

    folder = find_folder(name)
    model = read_config(folder)
    return ModelTokenizer.of(load_tokenizer(folder), model, *languages)


def _print_summary(dataset: "Dataset", page: Page) -> None:
    """Prints the size of each split, and how many lines were dropped and why."""
    splits = Table("split", "lines", "sequences", "target tokens", box=None, pad_edge=False)
    for name, counts in dataset.info["splits"].items():
        lines, *sizes = (f"{counts[key]:,}" for key in ("lines", "sequences", "target_tokens"))
        splits.add_row(name, lines if counts["lines"] else "held out of train", *sizes)
    page.print(splits, "")
    for reason, count in dataset.info["dropped"].items():
        page.print(f"dropped ({reason}): {count:,}")
    page.print(f"vocabulary: {dataset.vocab_size:,} tokens")
