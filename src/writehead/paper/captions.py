"""What differs from the paper, in words, from what the results themselves say."""

import re
from collections.abc import Iterable
from typing import Any

from writehead.paper.results import Result
from writehead.paper.sheets import LENGTHS, Sheet
from writehead.paper.tables import TABLE_2_TIMING

MOST_STEPS = 8  # that a caption gives figures of

PER_TOKEN = (
    "ln(PPL) is a subword token's, of this vocabulary: hold rows against one another by it, and "
    "not against the paper's or another scale's."
)


def quality_caption(sheet: Sheet) -> list[str]:
    """Sentences on a sheet of Table 1 or 3: size, text, steps, chip, scoring, noise."""
    paper, results = sheet.training, sheet.results
    one = results[0]
    return [
        f"Ours: presets {sheet.experiment.family}, {millions(one['parameters'])} parameters in "
        f"every row "
        f"(the paper: {millions(paper.parameters)}).",
        f"Text: {_text(one['data'])} (the paper: {paper.data}).",
        f"Training: {_training(one)} (the paper: {paper.steps:,} steps of {paper.tokens:,} tokens, "
        f"about {paper.epochs} epochs), every row alike and on the same batches.",
        f"Chip: {_listed(r['environment']['hardware']['device'] for r in results)}, "
        f"{_minutes(results)} from a row's first step to its last, whether or not others shared "
        f"the chip (the paper: {paper.chip}).",
        *(["In brackets: the paper's sizes."] if sheet.has_other_sizes else []),
        *([PER_TOKEN] if sheet.table == "table1" else []),
        _scored(sheet, one),
        "±: the standard deviation over seeds."
        if len({r["seed"] for r in results}) > 1
        else "One seed a row, so the noise is not known.",
        made(results),
    ]


def _text(data: dict[str, Any]) -> str:
    train, vocab_size = data["splits"]["train"], data["vocab_size"]
    unit = "pairs" if data["task"] == "translation" else "lines"
    names = _listed(name for one in data["sources"] if one["split"] == "train" for name in _of(one))
    return (
        f"{train['sequences']:,} {unit}, {millions(train['target_tokens'])} target tokens, of "
        f"{names}; a vocabulary of {vocab_size:,}"
    )


def _of(source: dict[str, Any]) -> list[str]:
    """What a source of a dataset is called."""
    if "embedded" in source:
        return ["the built-in grammar"]
    if "hub" in source:
        return [source["hub"]]
    return [file["name"] for file in source["files"]]


def _training(one: Result) -> str:
    train, split = one["train"], one["data"]["splits"]["train"]
    tokens = train["rows"] * train["target_length"]
    epochs = train["steps"] * tokens / (split["target_tokens"] + split["sequences"])
    return (
        f"{train['steps']:,} steps of {tokens:,} tokens, about {epochs:.2g} epochs, "
        f"{train['optimizer']}, learning rate {train['learning_rate']:g} after {train['warmup']:,} "
        f"steps, falling to 0 over the last {train['decay']:.0%}"
    )


def _scored(sheet: Sheet, one: Result) -> str:
    scores, paper = one["scores"], sheet.training
    if sheet.table == "table3":
        words = f"dev: {scores['dev']['name']}, {scores['dev']['words']:,} words with line ends"
        if "other" in scores:
            words += f"; other text: {scores['other']['name']}, {scores['other']['words']:,}"
        return f"Perplexity a word; {words} (the paper: {paper.dev})."
    signature = scores["test"]["bleu"]["greedy"]["intl_signature"]
    return (
        f"dev: {scores['dev']['name']}, {scores['dev']['sentences']:,} sentences; test: "
        f"{scores['test']['name']}, {scores['test']['sentences']:,} (the paper: `{paper.dev}`, "
        f"`{paper.test}`); BLEU {signature}, and 13a beside it; dev by greedy search."
    )


def speed_caption(results: list[Result]) -> list[str]:
    """Sentences on Table 2: what was timed, on what, and what the paper timed."""
    one, paper = results[0], TABLE_2_TIMING
    setting = one["decode"][0]["setting"]
    rows, length = one["training"]["train"]["rows"], one["training"]["train"]["target_length"]
    return [
        "µs a token: the encoder's time over source tokens + a decoder step's over sentences.",
        f"Ours: presets {one['family']}, batch {setting['batch']:,}, {setting['source']} + "
        f"{setting['target']} tokens, {one['dtype']}, "
        f"{_listed(r['environment']['hardware']['device'] for r in results)} (the paper: "
        f"{millions(paper.parameters)} parameters, batch {paper.batch:,}, {paper.source} + "
        f"{paper.target} tokens, {paper.chip}); another chip, so compare gains.",
        "Padded, as the paper's decoder was; by true lengths a step reads what is there. In "
        "brackets: the least time by bytes and operations, over the time. A gain in decoding is "
        "the decoder's, the encoder left out.",
        f"Training: steps of {rows} × {length} target tokens on {one['training']['dataset']}.",
        made(results),
    ]


def kv_caption(sheet: Sheet) -> str:
    """What the picture of quality against K and V shows."""
    length = f"{LENGTHS.source} + {LENGTHS.target} tokens"
    if sheet.table == "table3":
        length = f"{LENGTHS.target} tokens"
    return (
        f"{sheet.measures[0].label} against bytes of K and V a token in 16 bits, of {length}; down "
        f"and left is better. Blue: multi-query; red: multi-head; grey: fewer or smaller heads; "
        f"squares: local."
    )


def loss_caption(sheet: Sheet) -> str:
    """What the picture of losses shows, and in figures how multi-query comes up with training."""
    shown = "ln(PPL) of the dev set by step, by the first seed of each row, on a logarithmic scale"
    if not sheet.of_row("multi-head"):
        return f"{shown}; colours as above."
    shown += (
        ", and how far each row is above multi-head by then, the mean over the seeds of both; "
        "colours as above."
    )
    behind, count = sheet.behind("multi-query")
    if not behind:
        return shown
    steps = list(behind)
    some = steps[:: -len(steps) // MOST_STEPS][::-1]  # the last of them for certain
    gaps = ", ".join(f"{behind[step]:+.3f} after {step:,}" for step in some)
    seeds = f", the mean of {count} seeds" if count > 1 else ""
    gaps = gaps.replace("-", "−")
    return f"{shown} Multi-query's less multi-head's: {gaps} steps{seeds}."


def _minutes(results: list[Result]) -> str:
    minutes = [one["timings"]["training_s"] / 60 for one in results]
    low, high = (f"{value:.2g}" for value in (min(minutes), max(minutes)))
    return f"{low} min" if low == high else f"{low} to {high} min"


def made(results: list[Result]) -> str:
    """A sentence on when results were made, and by which code."""
    dates = sorted(one["environment"]["date"][:10] for one in results)
    days = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    commits = _listed(_short(one["environment"]["commit"]) for one in results)
    versions = _listed(f"torch {one['environment']['versions']['torch']}" for one in results)
    return f"Made {days}, {versions}, commit {commits}."


def _short(commit: str | None) -> str:
    """A commit by ten digits, with whatever is said of it after them."""
    return re.sub(r"^([0-9a-f]{10})[0-9a-f]+", r"\1", commit or "not known")


def _listed(names: Iterable[str]) -> str:
    """Each name once, in order."""
    return ", ".join(dict.fromkeys(names))


def millions(count: float) -> str:
    """A number in millions, to three digits."""
    return f"{count / 1e6:.3g}M"
