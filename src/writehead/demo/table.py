"""The demo's results on the terminal, in the form of the paper's Tables 1 and 2."""

from typing import Any

from rich.console import Console
from rich.table import Table

from writehead.paper.tables import TABLE_2

PAPER = {row.row: row for row in TABLE_2}


def show_examples(results: dict[str, Any], console: Console) -> None:
    """Held-out sentences: the reference, and what either model made of them."""
    console.print("\n[bold]Held-out sentences, beam 4[/]")
    for example in results["examples"]:
        for name, text in example.items():
            style = "cyan" if name == "source" else ""
            mark = "" if name == "source" or text == example["reference"] else " ←"
            console.print(f"  {name:12} {text}{mark}", style=style, markup=False)
        console.print()


def show_results(results: dict[str, Any], console: Console) -> None:
    """One table: quality as in Table 1, time as in Table 2, and the ratios beside the paper's."""
    rows = table_rows(results)
    table = Table(title="Multi-head and multi-query", title_style="bold", title_justify="left")
    table.box, table.pad_edge, table.padding = None, False, (0, 1, 0, 0)  # 80 columns are enough
    for i, column in enumerate(rows[0]):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    for row in rows[1:3]:
        table.add_row(*row)
    table.add_section()
    for row in rows[3:]:
        table.add_row(*row)
    console.print(table)
    steps, test = results["steps"], results["test"]
    console.print(
        f"ln(PPL) and BLEU (beam 1 / 4): {test['sentences']} held-out sentences of up to "
        f"{test['max_words']} words. Times, by one thread: µs a token of those, greedy and beam "
        f"4; long: a step of {steps['batch']} sentences with {steps['source']} source and "
        f"{steps['positions'][-1]} target tokens behind it; floor: the least that step can take "
        f"here, by bytes and operations. K/V: bytes a token. The paper: 211M parameters, 1,024 "
        f"sentences of 128 tokens, TPUv2. With models this small a step is mostly overhead: "
        f"`writehead explain wmt14/multi-query` shows the paper's size.",
        style="dim",
    )


def table_rows(results: dict[str, Any]) -> list[list[str]]:
    """The table as text: a heading, a row a model, our ratio and the paper's."""
    heading = ["attention", "h", "k,v", "d_ff", "ln PPL", "BLEU 1/4", "greedy", "beam 4"]
    rows = [[*heading, "long", "floor", "K/V"]]
    ratios: dict[str, list[float]] = {}
    for kind, model in results["models"].items():
        config, step = model["config"], results["steps"]["kinds"][kind]
        per_token = 1e3 / results["steps"]["batch"]
        times = [
            results["decoding"]["greedy"][kind],
            results["decoding"]["beam-4"][kind],
            step["milliseconds"][-1] * per_token,
            step["floor_milliseconds"][-1] * per_token,
            step["kv_bytes_per_token"],
        ]
        ratios[kind] = times
        bleu = [model["bleu"][search]["intl"] for search in ("greedy", "beam-4")]
        rows.append(
            [
                kind,
                str(config["h"]),
                str(config["k"]),
                str(config["f"]),
                f"{model['ln_ppl']:.3f}",
                f"{bleu[0]:.1f}/{bleu[1]:.1f}",
                *(f"{value:.3g}" for value in times[:-1]),
                f"{times[-1]:.0f} B",
            ]
        )
    slow, fast = ratios["multi-head"], ratios["multi-query"]
    ours = [f"{a / b:.1f}×" for a, b in zip(slow, fast, strict=True)]
    rows.append(["ratio here", *[""] * 5, *ours])
    head, query = PAPER["multi-head"], PAPER["multi-query"]
    # with the encoder's part, which is in the times here too
    paper = [
        (head.encoder + head.decoder) / (query.encoder + query.decoder),
        (head.beam4_encoder + head.beam4_decoder) / (query.beam4_encoder + query.beam4_decoder),
    ]
    rows.append(["the paper's", *[""] * 5, *(f"{r:.1f}×" for r in paper), "", "", "8.0×"])
    return rows
