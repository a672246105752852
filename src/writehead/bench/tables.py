"""Prints the records of all benchmarks as tables."""

from typing import Any

from rich.console import Console
from rich.table import Table

TEXT_COLUMNS = ("preset", "name", "system", "search", "batching")  # left-aligned
# the columns that distinguish rows, and the unit of the times
MEASURED = {
    "attention": (("b", "m", "g"), "us"),
    "decode": (("preset", "target", "batch", "beam"), "step_ms"),
}
TRAINED = ("name", "step_ms", "us_per_token", "floor_us_per_token", "utilisation", "fill")
TRANSLATED = (
    *("sentences_per_second", "occupancy", "step_share", "device_idle"),
    *("equal_lines", "bleu"),
)

Rows = list[list[Any]]


def show(result: dict[str, Any], page: Console) -> None:
    """Prints the table of a record and its notes."""
    if chip := result.get("chip"):
        page.print(f"{chip['name']}: {chip['source']}\n", highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    head, rows = _table(result)
    for column in head:
        left = column in TEXT_COLUMNS
        table.add_column(column, justify="left" if left else "right", no_wrap=left, overflow="fold")
    for row in rows:
        table.add_row(*map(_shown, row))
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


def median(row: dict[str, Any], label: str, unit: str = "step_ms") -> float | None:
    """Returns the median time of a system in a row; None if it was not measured."""
    measured = row["measured"].get(label, {})
    return float(measured[unit]["median"]) if unit in measured else None


def _table(result: dict[str, Any]) -> tuple[list[str], Rows]:
    if result["bench"] == "train":
        return list(TRAINED), [[row[name] for name in TRAINED] for row in result["rows"]]
    if result["bench"] == "serve":
        return _served(result)
    if result["bench"] == "translate":
        rows = [
            [name, search, engine.get("load_s"), *map(figures.get, TRANSLATED)]
            for name, engine in result["engines"].items()
            for search, figures in engine.get("searches", {}).items()
        ]
        return ["system", "search", "load_s", *TRANSLATED], rows
    sizes, unit = MEASURED[result["bench"]]
    labels = list(dict.fromkeys(label for row in result["rows"] for label in row["measured"]))
    labels = [name for name in labels if any(median(row, name, unit) for row in result["rows"])]
    rows = []
    for row in result["rows"]:
        facts, floor = row | row.get("setting", {}), row["floor"][unit]
        times = [median(row, label, unit) for label in labels]
        floor = floor["true"] if isinstance(floor, dict) else floor
        rows.append([*(facts[size] for size in sizes), *times, floor])
    return [*sizes, *labels, "floor, µs" if unit == "us" else "floor, ms"], rows


def _served(result: dict[str, Any]) -> tuple[list[str], Rows]:
    """Leaves out what no row has, so that the table fits a terminal."""
    head = ["batching", "rate", "clients", "sent", "errors", "req/s", "tok/s", "good/s"]
    head += ["p50 ms", "p95 ms", "equal", "offline"]
    rows = []
    for row in result["rows"]:
        load, latency, offline = row["load"], row["e2el_ms"] or {}, row.get("offline") or {}
        figures = [row["requests"], sum(row["errors"].values()), row["requests_per_second"]]
        figures += [row["tokens_per_second"], row["goodput"]]
        figures += [latency.get(name) for name in ("p50", "p95")]
        figures += [offline.get("equal"), offline.get("throughput_ratio")]
        rows.append([row["batching"], load["rate"], load["concurrency"], *figures])
    kept = [i for i in range(len(head)) if any(row[i] is not None for row in rows)]
    return [head[i] for i in kept], [[row[i] for i in kept] for row in rows]


def _shown(value: object) -> str:
    """Formats a value; a float has three digits and no exponent."""
    if value is None:
        return "–"
    if isinstance(value, dict):  # sacrebleu's scores by tokenization
        value = value["intl"]
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
