"""The demo's report: one HTML file that needs nothing else, its plots inside."""

import html
import io
from pathlib import Path
from typing import Any

from writehead.demo.frame import html_page
from writehead.demo.opening import how_long
from writehead.demo.table import table_rows
from writehead.errors import RunError
from writehead.util.extras import requires

with requires("demo"):
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
from writehead.util.files import write_file

COLOURS = {"multi-head": "#b5483a", "multi-query": "#2b6cb0"}
STYLE = """
body { max-width: 62rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
table { font-size: 0.9rem; } .text th, .text td { text-align: left; }
th, td { padding: 0.3rem 0.7rem; } figure { margin: 1rem 0; }
dl { display: grid; grid-template-columns: max-content auto; gap: 0 1rem; }
dt { font-weight: 600; } dd { margin: 0; } .wrong { color: #b5483a; }
"""
TITLE = "One write-head or eight"


def write_page(path: Path, results: dict[str, Any]) -> Path:
    """Writes the report; returns its path."""
    test, environment = results["test"], results["environment"]
    body = f"""
<h1>{TITLE}</h1>
<p>Two English–German models with {_parameters(results)} parameters each, trained on the same
{test["train_pairs"]:,} sentences in the same order. They differ in one thing: the keys and values
of <b>multi-head</b> attention have eight heads, those of <b>multi-query</b> attention have one,
and its feed-forward layers are wider to make up for it.</p>
{_bundled(results["bundled"])}
<h2>Results</h2>
<div class="wide">{_table(table_rows(results))}</div>
{_columns(test, results["steps"])}
<p class="note">The ratios are of multi-head to multi-query: above 1, one write-head gains. The
paper's are of 211M parameters on a TPUv2, 1,024 sentences of 128 tokens each. Models this small
spend most of a step elsewhere than in keys and values, and a time on a shared machine is worth
little by itself: look at ratios.</p>
<h2>Learning</h2>
{_figure(_loss, results, "Loss a token while training, and on held-out sentences (dots).")}
<h2>Quality</h2>
{_figure(_quality, results, "BLEU on held-out sentences, tokenized as in the paper.")}
<h2>Time against length</h2>
{_figure(_time, results, "A decoder step; dashed: the floor by bytes and operations here.")}
<h2>Sentences</h2>
{_examples(results["examples"])}
<p class="note">Held-out sentences, by beam 4: <b>source</b> is what was translated,
<b>reference</b> the translation that our grammar gives, then what either model made of it; in red
where that is another sentence.</p>
<footer><p>{html.escape(environment["hardware"]["device"])}, {environment["hardware"]["cores"]}
cores; writehead {environment["versions"]["writehead"]}, PyTorch
{environment["versions"]["torch"]}; {environment["date"]};
<code>{html.escape(environment["command"])}</code></p></footer>
"""
    try:
        write_file(path, html_page(TITLE, body, STYLE))
    except OSError as error:
        raise RunError(f"{path} could not be written: {error.strerror}") from error
    return path


def _parameters(results: dict[str, Any]) -> str:
    return " and ".join(
        sorted({f"{model['parameters'] / 1e6:.2f}M" for model in results["models"].values()})
    )


def _columns(test: dict[str, Any], steps: dict[str, Any]) -> str:
    """What each column of the table of results says."""
    meaning = {
        "attention": "which of the two models",
        "h": "read-heads: heads of queries",
        "k,v": "numbers in each key, and in each value",
        "d_ff": "width of the feed-forward layers",
        "ln PPL": f"loss a token on {test['sentences']} held-out sentences of up to "
        f"{test['max_words']} words, the logarithm of perplexity; less is better",
        "BLEU 1/4": "likeness of translations to the references of those sentences, by greedy "
        "search and by beam 4; 100 is all alike",
        "greedy": "microseconds a token, by one thread: translating those sentences greedily",
        "beam 4": "the same by beam search with four hypotheses",
        "long": f"microseconds a token of one step of {steps['batch']} sentences with "
        f"{steps['source']} source and {steps['positions'][-1]} target tokens behind it",
        "floor": "the least time that bytes and operations allow such a step here",
        "K/V": "bytes of keys and values that each target token adds, and each later step reads",
    }
    terms = "".join(f"<dt>{name}</dt><dd>{text}</dd>\n" for name, text in meaning.items())
    return f"<dl class='note'>{terms}</dl>"


def _table(rows: list[list[str]], kind: str = "") -> str:
    heading, *rest = rows
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in heading)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rest
    )
    return f"<table class='{kind}'><tr>{head}</tr>{body}</table>"


def _bundled(found: dict[str, Any] | None) -> str:
    """What the bundled model made of our sentences; nothing where there was none."""
    if found is None:
        return ""
    rows = [[one["source"], one["translation"]] for one in found["sentences"]]
    table = _table([["English", "German"], *rows], "text")
    return (
        f"<h2>The bundled model</h2>\n<p>A multi-query model that comes with writehead, trained "
        f"on real text and not by this demo. {how_long(found)}</p>\n{table}"
    )


def _examples(examples: list[dict[str, str]]) -> str:
    rows = []
    for example in examples:
        for name, text in example.items():
            wrong = name in COLOURS and text != example["reference"]
            cell = f"<td{' class=wrong' if wrong else ''}>{html.escape(text)}</td>"
            rows.append(f"<tr><td>{name}</td>{cell}</tr>")
        rows.append("<tr><td colspan=2>&nbsp;</td></tr>")
    return f"<table class='text'>{''.join(rows)}</table>"


def _figure(draw: Any, results: dict[str, Any], caption: str) -> str:
    """A plot as inline SVG."""
    figure = Figure(figsize=(7.2, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    draw(axes, results)
    text = io.StringIO()
    figure.savefig(text, format="svg")
    svg = text.getvalue()
    return f"<figure>{svg[svg.index('<svg') :]}<figcaption>{caption}</figcaption></figure>"


def _loss(axes: Axes, results: dict[str, Any]) -> None:
    for kind, model in results["models"].items():
        seen = [(entry["step"], entry["ln_ppl"]) for entry in model["log"] if "ln_ppl" in entry]
        dev = [
            (entry["step"], entry["dev_ln_ppl"]) for entry in model["log"] if "dev_ln_ppl" in entry
        ]
        axes.plot(*zip(*seen, strict=True), color=COLOURS[kind], label=kind)
        if dev:
            axes.plot(*zip(*dev, strict=True), "o", color=COLOURS[kind], markersize=4)
    axes.set(xlabel="step", ylabel="ln(PPL) a token", yscale="log")
    axes.legend(frameon=False)


def _quality(axes: Axes, results: dict[str, Any]) -> None:
    bars = [
        (f"{kind}\n{search}", model["bleu"][search]["intl"], COLOURS[kind])
        for search in ("greedy", "beam-4")
        for kind, model in results["models"].items()
    ]
    names, values, colours = zip(*bars, strict=True)
    drawn = axes.bar(names, values, color=colours, width=0.6)
    axes.bar_label(drawn, fmt="%.1f", padding=2)
    axes.set(ylabel="BLEU", ylim=(0, 105))


def _time(axes: Axes, results: dict[str, Any]) -> None:
    steps = results["steps"]
    positions = [position + 1 for position in steps["positions"]]
    for kind, step in steps["kinds"].items():
        axes.plot(positions, step["milliseconds"], "o-", color=COLOURS[kind], label=kind)
        axes.plot(positions, step["floor_milliseconds"], "--", color=COLOURS[kind], linewidth=1)
    axes.set(
        xlabel=f"target tokens so far; {steps['batch']} sentences of {steps['source']} tokens",
        ylabel="milliseconds a step",
    )
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
