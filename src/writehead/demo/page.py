"""Makes the demo's tables and its page, one HTML file that contains the plots."""

import html
import io
from pathlib import Path
from typing import Any

from writehead.util.extras import requires
from writehead.util.files import write_file

with requires("demo"):
    from matplotlib.figure import Figure

COLORS = {"multi-head": "#c2410c", "multi-query": "#1d4ed8"}
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
th, td { padding: 0.3rem 0.9rem 0.3rem 0; border-bottom: 1px solid #e2e8f0; text-align: left; }
svg { max-width: 100%; height: auto; } .note, footer { color: #4a5568; font-size: 0.88rem; }
"""


def result_rows(results: dict[str, Any]) -> list[list[str]]:
    """Returns the comparison as text: the column names, a row per model, and their ratios."""
    searches = ("greedy", "beam 4")
    rows = [["attention", "d_ff", "ln PPL", *(f"BLEU {search}" for search in searches)]]
    rows[0] += [*(f"µs/token {search}" for search in searches), "ms/step", "KV B/token"]
    costs = []
    for kind, model in results["models"].items():
        times = (*model["us_per_token"].values(), model["step_ms"][-1])
        costs.append((*times, model["kv_bytes_per_token"]))
        scores = (f"{model['ln_ppl']:.3f}", *(f"{score:.1f}" for score in model["bleu"].values()))
        rows.append([kind, str(model["config"]["f"]), *scores, *(f"{x:.4g}" for x in costs[-1])])
    ratios = (slow / fast for slow, fast in zip(*costs, strict=True))
    return [*rows, ["ratio", *[""] * 4, *(f"{ratio:.1f}×" for ratio in ratios)]]


def example_rows(results: dict[str, Any]) -> list[list[str]]:
    """Returns held-out sentences as text; ✗ marks a translation other than the reference."""
    examples = results["examples"]
    return [list(examples)] + [
        [source, reference, *(text if text == reference else f"{text} ✗" for text in translations)]
        for source, reference, *translations in zip(*examples.values(), strict=True)
    ]


def write_page(path: Path, results: dict[str, Any]) -> Path:
    """Writes the page and returns its path."""
    hardware, versions = (results["environment"][name] for name in ("hardware", "versions"))
    counts = {f"{model['parameters'] / 1e6:.2f}M" for model in results["models"].values()}
    step = results["step"]
    page = f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Multi-head and multi-query attention</title><style>{STYLE}</style>
<h1>Multi-head and multi-query attention</h1>
<p>Two English–German Transformers of {" and ".join(sorted(counts))} parameters, trained on the same
{results["pairs"]:,} sentence pairs. In <b>multi-query</b> attention, all eight heads share their
keys and values, and wider feed-forward layers keep the size of the model.</p>
{_plots(results)}
<h2>Results</h2>
{_table(result_rows(results))}
<p class="note">ln PPL, BLEU and µs/token: {results["test_pairs"]} held-out sentences. ms/step: one
decoder step for {step["batch"]} sentences with {step["source"]} source tokens, at target position
{step["positions"][-1]}. KV B/token: bytes that a target token adds to the KV cache. The floor is
the minimum time of a step by memory bandwidth and matrix throughput. Models this small spend most
of a step outside attention; <code>writehead explain wmt14/multi-query</code> shows the paper's
size.</p>
<h2>Held-out sentences, beam 4</h2>
{_table(example_rows(results))}
<footer><p>{html.escape(hardware["device"])}, {hardware["cores"]} cores (threads:
{hardware["threads"]}); writehead {versions["writehead"]}, PyTorch {versions["torch"]};
{results["environment"]["date"]}</p></footer>
</html>
"""
    write_file(path, page)
    return path


def _table(rows: list[list[str]]) -> str:
    lines = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    lines[0] = lines[0].replace("td>", "th>")
    return f"<table><tr>{'</tr><tr>'.join(lines)}</tr></table>"


def _plots(results: dict[str, Any]) -> str:
    """Returns training curves, BLEU, and decoding time against length as inline SVG."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    loss, bleu, time = figure.subplots(1, 3)
    positions = [position + 1 for position in results["step"]["positions"]]
    for i, (kind, model) in enumerate(results["models"].items()):
        color = COLORS[kind]
        for name, style in (("ln_ppl", "-"), ("dev_ln_ppl", "o")):
            points = [(entry["step"], entry[name]) for entry in model["log"] if name in entry]
            label = kind if name == "ln_ppl" else None
            loss.plot(*zip(*points, strict=True), style, color=color, label=label, markersize=4)
        bars = [x + 0.4 * i - 0.2 for x in (0, 1)]
        drawn = bleu.bar(bars, model["bleu"].values(), 0.38, color=color, label=kind)
        bleu.bar_label(drawn, fmt="%.1f", padding=2)
        time.plot(positions, model["step_ms"], "o-", color=color, label=kind, markersize=4)
        time.plot(positions, model["floor_ms"], "--", color=color, linewidth=1)
    loss.set(title="Training (dots: held-out)", xlabel="step", ylabel="ln PPL", yscale="log")
    bleu.set(title="Quality", ylabel="BLEU", ylim=(0, 110), xticks=[0, 1])
    bleu.set_xticklabels(["greedy", "beam 4"])
    time.set(title="Decoder step (dashed: floor)", xlabel="position", ylabel="milliseconds")
    time.set_ylim(bottom=0)
    for axes in (loss, bleu, time):
        axes.spines[["top", "right"]].set_visible(False)
    loss.legend(frameon=False)
    text = io.StringIO()
    figure.savefig(text, format="svg")
    return text.getvalue().partition("?>")[2].partition(">")[2]
