"""The demo's report: one HTML file that needs nothing else, its plots inside."""

import html
import io
import os
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from writehead.demo.opening import how_long
from writehead.demo.table import table_rows

COLOURS = {"multi-head": "#b5483a", "multi-query": "#2b6cb0"}
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
  color: #1a202c; background: #fff; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-size: 0.9rem; } .wide { overflow-x: auto; }
th, td { padding: 0.3rem 0.7rem; text-align: right; border-bottom: 1px solid #e2e8f0; }
th:first-child, td:first-child { text-align: left; } .text th, .text td { text-align: left; }
figure { margin: 1rem 0; } figcaption, footer { color: #4a5568; font-size: 0.88rem; }
svg { max-width: 100%; height: auto; } code { background: #edf2f7; padding: 0.1rem 0.3rem; }
.wrong { color: #b5483a; }
"""


def write_page(path: Path, results: dict[str, Any]) -> Path:
    """Writes the report; returns its path."""
    test, steps = results["test"], results["steps"]
    environment = results["environment"]
    body = f"""
<h1>One write-head or eight</h1>
<p>Two English–German models with {_parameters(results)} parameters each, trained on the same
{test["train_pairs"]:,} sentences in the same order. They differ in one thing: the keys and values
of <b>multi-head</b> attention have eight heads, those of <b>multi-query</b> attention have one,
and its feed-forward layers are wider to make up for it.</p>
{_boxed(results["boxed"])}
<h2>Results</h2>
<div class="wide">{_table(table_rows(results))}</div>
<p>Quality is on {test["sentences"]} held-out sentences of up to {test["max_words"]} words. Times
are microseconds a token, by one thread: of translating those sentences, and of one step of
{steps["batch"]} sentences with {steps["source"]} source tokens and {steps["positions"][-1]} target
tokens behind it, with the least time that bytes and operations allow here beside it. The paper's
ratios are of 211M parameters on a TPUv2, 1,024 sentences of 128 tokens each. Models this small
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
<footer><p>{html.escape(environment["hardware"]["device"])}, {environment["hardware"]["cores"]}
cores; writehead {environment["versions"]["writehead"]}, PyTorch
{environment["versions"]["torch"]}; {environment["date"]};
<code>{html.escape(environment["command"])}</code></p></footer>
"""
    page = (
        "<!doctype html>\n<html lang='en'><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width'>"
        f"<title>One write-head or eight</title><style>{STYLE}</style>{body}</html>\n"
    )
    fresh = path.with_name(f".{path.name}")
    fresh.write_text(page, encoding="utf-8")
    os.replace(fresh, path)
    return path


def _parameters(results: dict[str, Any]) -> str:
    return " and ".join(
        sorted({f"{model['parameters'] / 1e6:.2f}M" for model in results["models"].values()})
    )


def _table(rows: list[list[str]], kind: str = "") -> str:
    heading, *rest = rows
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in heading)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rest
    )
    return f"<table class='{kind}'><tr>{head}</tr>{body}</table>"


def _boxed(found: dict[str, Any] | None) -> str:
    """What the model in the box made of our sentences; nothing where there was none."""
    if found is None:
        return ""
    rows = [[one["source"], one["translation"]] for one in found["sentences"]]
    table = _table([["English", "German"], *rows], "text")
    return (
        f"<h2>The model in the box</h2>\n<p>A multi-query model that comes with writehead, trained "
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
    figure, axes = plt.subplots(figsize=(7.2, 3.2), layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    draw(axes, results)
    text = io.StringIO()
    figure.savefig(text, format="svg")
    plt.close(figure)
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
