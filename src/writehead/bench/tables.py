"""The records of all benchmarks as tables for a terminal."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from writehead.bench.attention import OURS as OURS_ATTENTION
from writehead.bench.context import OURS as OURS_AT_CONTEXT
from writehead.bench.decode import OURS, PYTORCH, quickest, search_name

TEXT_COLUMNS = ("model", "search", "system", "method")  # aligned to the left

Cells = Iterable[Sequence[object]]  # rows of cells


def show(result: dict[str, Any], page: Console) -> None:
    """Prints the table of a record and its notes."""
    if chip := result.get("chip"):
        page.print(f"{chip['name']}: {chip['source']}\n", highlight=False, soft_wrap=True)
    title, head, cells = MAKERS[result["bench"]](result)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in head:
        left = column in TEXT_COLUMNS
        table.add_column(column, justify="left" if left else "right", no_wrap=left, overflow="fold")
    for row in cells:
        table.add_row(*map(_shown, row))
    page.print(title, style="bold", markup=False, highlight=False)
    page.print(table)
    systems = [row.get("measured", {}) for row in result.get("rows", ())]
    absences = [
        f"{label}: {measured['absent']}"
        for system in [*systems, result.get("engines", {})]
        for label, measured in system.items()
        if "absent" in measured
    ]
    for note in [*result.get("notes", ()), *dict.fromkeys(absences)]:
        page.print(note, style="dim", markup=False, highlight=False, soft_wrap=True)


def _shown(value: object) -> str:
    """Three digits of a float, without an exponent."""
    if value is None:
        return "–"
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _attention(result: dict[str, Any]) -> tuple[str, list[str], Cells]:
    rows = result["rows"]

    def cells() -> Iterator[list[object]]:
        for row in rows:
            times = {
                name: one["us"]["median"] for name, one in row["measured"].items() if "us" in one
            }
            ours = times.pop(OURS_ATTENTION, None)
            peer = min(times, key=lambda name: times[name], default=None)
            rate = row["kv_bytes"] / min(filter(None, [ours, *times.values()]), default=1e9) / 1e3
            best = peer and times[peer]
            yield [row["b"], row["m"], row["g"], ours, best, peer, row["floor_us"], rate]

    title = f"Attention of one query per row, h={rows[0]['h']}, k=v={rows[0]['k']}: microseconds"
    return title, ["b", "m", "g", "ours", "best peer", "method", "floor", "GB/s"], cells()


def _decode(result: dict[str, Any]) -> tuple[str, list[str], Cells]:
    rows, config = result["rows"], result["config"]
    lengths = config["lengths"][-1]
    labels = [
        label
        for label in dict.fromkeys(label for row in rows for label in row["measured"])
        if any("step_ms" in row["measured"].get(label, {}) for row in rows)
    ]

    def cells() -> Iterator[list[object]]:
        for row in rows:
            setting, ours = row["setting"], quickest(row, OURS[lengths])
            token = ours and ours["us_per_token"]
            yield [
                *(row["preset"], setting["batch"], search_name(setting["beam"])),
                *(_step_ms(row, label) for label in labels),
                row["floor"]["step_ms"][lengths],
                ours and f"{ours['share_of_floor']:.0%}",
                token and f"{_shown(token['encoder'])} + {_shown(token['decoder'])}",
            ]

    tokens = f"{config['source']} + {config['target']} tokens"
    title = f"Milliseconds per decoding step, {tokens}, {result['dtype']}"
    head = ["model", "batch", "search", *labels, "floor", "floor/ours", "ours, µs per token"]
    return title, head, cells()


def _context(result: dict[str, Any]) -> tuple[str, list[str], Cells]:
    cells = [
        [
            *(row["preset"], row["batch"], row["context"], _step_ms(row, OURS_AT_CONTEXT)),
            *(_step_ms(row, PYTORCH), row["floor"]["step_ms"]),
        ]
        for row in result["rows"]
    ]
    head = ["model", "batch", "context", "ours", PYTORCH, "floor"]
    return f"Milliseconds per decoding step after a context, {result['dtype']}", head, cells


def _translate(result: dict[str, Any]) -> tuple[str, list[str], Cells]:
    cells = [
        [
            *(name, search, engine["load_s"], engine["first_sentence_s"]),
            *(found["sentences_per_second"], found["tokens_per_second"]),
            result["equal_lines"].get(name, {}).get(search),
        ]
        for name, engine in result["engines"].items()
        for search, found in engine.get("searches", {}).items()
    ]
    head = ["system", "search", "load, s", "first sentence, s", "sentences/s", "tokens/s"]
    title = f"{result['sentences']:,} lines of {result['input']}, {result['dtype']}"
    return title, [*head, "lines equal to ours"], cells


def _train(result: dict[str, Any]) -> tuple[str, list[str], Cells]:
    cells = [
        [
            *(row["name"], row["step_ms"], row["us_per_token"], row["floor_us_per_token"]),
            *(f"{row['utilisation']:.1%}", f"{row['fill']:.1%}"),
        ]
        for row in result["rows"]
    ]
    head = ["model", "ms per step", "µs per token", "floor, µs", "utilisation", "rows filled"]
    return "Training steps", head, cells


def _step_ms(row: dict[str, Any], label: str) -> float | None:
    measured = row["measured"].get(label, {})
    return float(measured["step_ms"]["median"]) if "step_ms" in measured else None


MAKERS = {
    "attention": _attention,
    "context": _context,
    "decode": _decode,
    "train": _train,
    "translate": _translate,
}
