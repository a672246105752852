"""Results of `bench` as tables: what is said here is read from the result, as its JSON has it."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from writehead.bench.attention import GROUPS
from writehead.bench.decode import (
    BEAM_GRAPH,
    COMPILED,
    FREE_GRAPH,
    GRAPH,
    LENGTHS,
    MARIAN,
    OURS,
    quickest,
)
from writehead.explain import quantity

ON_A_CPU = (
    "On a CPU ours is the plain path, model.start and model.step, which is what the engine does "
    "there; look at ratios, since times on a shared machine are worth little."
)
PAPER = (
    "TPUv2: the paper's Table 2, 211M parameters on eight cores, batch 1,024, 128 + 128 tokens, "
    "padded; another chip, so compare ratios."
)
NONE = "–"


def show_attention(result: dict[str, Any], page: Console) -> None:
    """Microseconds of each shape by each way, beside bytes over bandwidth."""
    shapes = result["shapes"]
    title = (
        f"Attention of one position, h={shapes[0]['h']}, k=v={shapes[0]['k']}, "
        f"{result['dtype']}: µs"
    )
    table = _table(title, "b", "m", "g", *GROUPS, "bytes", "GB/s", "peer", "gain")
    one_head = {(one["b"], one["m"]): _leading(one) for one in shapes if one["g"] == 1}
    for shape in shapes:
        best = [shape["best"].get(group) for group in GROUPS]
        ours, peers = best[0], [other["us"] for other in best[1:] if other]
        leading = _leading(shape)
        table.add_row(
            f"{shape['b']:,}",
            f"{shape['m']:,}",
            str(shape["g"]),
            *(_number(one and one["us"]) for one in best),
            _number(shape["floor_us"]),
            _number(leading and shape["kv_bytes"] / leading / 1e3),
            _gain(min(peers, default=None), ours and ours["us"]),
            _gain(leading, one_head.get((shape["b"], shape["m"]))) if shape["g"] > 1 else "",
        )
    _print(page, result, [table], _attention_notes(result))


def _leading(shape: dict[str, Any]) -> float | None:
    """Microseconds of ours, or of the quickest where there is none of ours."""
    best = {group: found["us"] for group, found in shape["best"].items()}
    return best.get(GROUPS[0]) or min(best.values(), default=None)


def _attention_notes(result: dict[str, Any]) -> list[str]:
    notes = [
        "SDPA, FlashInfer: the quickest of their arrangements; the JSON has all. bytes: K and V "
        "read once at the bandwidth. GB/s: what ours reaches, or the quickest where there is none. "
        "peer: the best peer's time over ours. gain: this over one write-head's time."
    ]
    for group in GROUPS:
        ways = [
            way
            for shape in result["shapes"]
            for name, way in shape["ways"].items()
            if name.partition(",")[0] == group
        ]
        if not any("us" in way for way in ways):
            notes += [f"{group}: {way['absent']}" for way in ways] or [f"{group}: needs a GPU"]
    return list(dict.fromkeys(notes))


def show_decode(result: dict[str, Any], page: Console) -> None:
    """Table 2 for each batch, the steps in milliseconds, and language models by context."""
    tables, rows = [], result["rows"]
    for batch in dict.fromkeys(row["setting"]["batch"] for row in rows):
        some = [row for row in rows if row["setting"]["batch"] == batch]
        tables += [
            _table_2(some, lengths, result["dtype"])
            for lengths in LENGTHS
            if any(OURS[lengths] in row["measured"] for row in some)
        ]
    if rows:
        tables.append(_steps(rows))
    if any(set(row["measured"]) - set(OURS.values()) for row in rows):
        tables.append(_peers(rows))
    if result["contexts"]:
        tables.append(_contexts(result["contexts"]))
    notes = _absences(rows + result["contexts"])
    if any(row["paper"] for row in rows):
        notes.insert(0, PAPER)
    if result["device"] == "cpu":
        notes.insert(0, ON_A_CPU)
    _print(page, result, tables, notes)


def _table_2(rows: list[dict[str, Any]], lengths: str, dtype: str) -> Table:
    """Microseconds a token as the paper's table has them: encoder + decoder, by kind and search."""
    setting = rows[0]["setting"]
    how = "padded, as the paper's" if lengths == "padded" else "by true lengths"
    title = (
        f"Table 2, {how}: µs a token, encoder + decoder\n"
        f"batch {setting['batch']:,}, {setting['source']} + {setting['target']} tokens, {dtype}"
    )
    beams = list(dict.fromkeys(row["setting"]["beam"] for row in rows))
    beside = ("TPUv2",) if any(row["paper"] for row in rows) else ()
    columns = [said for beam in beams for said in (_search(beam), *beside)]
    table = _table(title, "attention", *columns)
    by_place = {(row["preset"], row["setting"]["beam"]): row for row in rows}
    presets = dict.fromkeys(row["preset"] for row in rows)
    for name in presets:
        cells = []
        for beam in beams:
            row = by_place[name, beam]
            cells.append(_pair(quickest(row, OURS[lengths])))
            cells += [_paper(row, beam) for _ in beside]
        table.add_row(name, *cells)
    table.add_section()
    for slow, fast in _couples(presets):
        cells = []
        for beam in beams:
            pair = by_place[slow, beam], by_place[fast, beam]
            cells.append(_gain(*(_decoder(row, OURS[lengths]) for row in pair)))
            cells += [_gain(*(_paper_decoder(row, beam) for row in pair)) for _ in beside]
        table.add_row(f"  gain of {fast.partition('/')[2]}", *cells)
    return table


def _couples(presets: Iterable[str]) -> list[tuple[str, str]]:
    """Multi-head rows with the multi-query rows that differ in nothing else."""
    names = list(presets)
    couples = [(name, name.replace("/multi-head", "/multi-query")) for name in names]
    return [(slow, fast) for slow, fast in couples if slow != fast and fast in names]


def _steps(rows: list[dict[str, Any]]) -> Table:
    """Milliseconds of a mean decoder step beside its floor, read either way."""
    columns = [said for kind in LENGTHS for said in (kind, "floor", "share")]
    table = _table("A decoder step of ours: ms", "attention", "batch", "search", *columns)
    for row in rows:
        cells = []
        for kind in LENGTHS:
            ours = quickest(row, OURS[kind])
            cells += [
                _number(_step(ours)),
                _number(row["floor"]["step_ms"][kind]),
                f"{ours['share_of_floor']:.0%}" if ours else NONE,
            ]
        table.add_row(*_where(row), *cells)
    return table


def _peers(rows: list[dict[str, Any]]) -> Table:
    """Milliseconds of a mean decoder step of the peers: PyTorch padded, Hugging Face not."""
    compiles = any(COMPILED in name for row in rows for name in row["measured"])
    labels = ["padded", "PyTorch", "no reordering", "true", "Hugging Face"]
    if compiles:
        labels.insert(2, "compiled")
    title = "A decoder step, ours padded and by true lengths beside the peers': ms"
    table = _table(title, "attention", "batch", "search", *labels)
    for row in rows:
        plain = GRAPH if row["setting"]["beam"] == 1 else BEAM_GRAPH
        names = [OURS["padded"], plain, FREE_GRAPH, OURS["true"], MARIAN]
        if compiles:
            names.insert(2, plain + COMPILED)
        table.add_row(*_where(row), *(_number(_step(quickest(row, name))) for name in names))
    return table


def _where(row: dict[str, Any]) -> tuple[str, str, str]:
    setting = row["setting"]
    return row["preset"], f"{setting['batch']:,}", _search(setting["beam"])


def _contexts(rows: list[dict[str, Any]]) -> Table:
    """A language model's step and one layer's attention, and what multi-query gains in both."""
    table = _table(
        "A language model's step behind a context: ms; attention of one layer: µs",
        *("model", "batch", "context", "step", "floor", "share", "PyTorch"),
        *("layer", "floor", "GB/s"),
    )
    for batch, length in dict.fromkeys((row["batch"], row["context"]) for row in rows):
        here = {
            row["preset"]: row for row in rows if (row["batch"], row["context"]) == (batch, length)
        }
        for name, row in here.items():
            ours, attention = quickest(row, "ours"), row["attention"]
            rate = attention.get("bytes_per_second")
            table.add_row(
                name,
                f"{batch:,}",
                f"{length:,}",
                _number(_step(ours)),
                _number(row["floor"]["step_ms"]),
                f"{ours['share_of_floor']:.0%}" if ours else NONE,
                _number(_step(quickest(row, GRAPH))),
                _number(_attention(row)),
                _number(row["floor"]["attention_us"]),
                _number(rate and rate / 1e9),
            )
        for slow, fast in _couples(here):
            pair = here[slow], here[fast]
            table.add_row(
                f"  gain of {fast.partition('/')[2]}",
                "",
                "",
                _gain(*(_step(quickest(row, "ours")) for row in pair)),
                _gain(*(row["floor"]["step_ms"] for row in pair)),
                "",
                _gain(*(_step(quickest(row, GRAPH)) for row in pair)),
                _gain(*(_attention(row) for row in pair)),
                _gain(*(row["floor"]["attention_us"] for row in pair)),
                "",
            )
        table.add_section()
    return table


def show_translate(result: dict[str, Any], page: Console) -> None:
    """Seconds to start, and speed after that, by engine and search."""
    table = _table(
        f"{result['sentences']:,} lines of {result['input']}",
        *("engine", "load, s", "first sentence, s", "search", "first pass, s"),
        *("sentences/s", "tokens/s"),
    )
    for name, engine in result["engines"].items():
        for i, (search, found) in enumerate(engine["searches"].items()):
            table.add_row(
                name if i == 0 else "",
                f"{engine['load_s']:.2f}" if i == 0 else "",
                f"{engine['first_sentence_s']:.2f}" if i == 0 else "",
                search,
                f"{found['first_pass_s']:.2f}",
                f"{found['sentences_per_second']:,.1f}",
                f"{found['tokens_per_second']:,.0f}",
            )
    kernels = "an empty" if result["cold"] else "whatever was in the"
    notes = [
        f"The first sentence counts from the beginning of loading, with {kernels} cache of "
        f"compiled kernels; the first pass over the file may compile and capture more."
    ]
    for search, same in result.get("same_text", {}).items():
        notes.append(f"{search}: {same:,} of {result['sentences']:,} lines are the same text.")
    if len(result["engines"]) == 1:
        notes.append("On a CPU the engine is plain PyTorch, so it stands alone.")
    _show(page, table)
    page.print()
    _say(page, notes)


def show_tokens(result: dict[str, Any], page: Console) -> None:
    """How many sentences got the reference's tokens, and how many change with the batch."""
    names = list(result["rows"][0]["batches"])
    table = _table(
        f"{result['sentences']:,} lines of {result['input']}: tokens held against the reference's",
        *("dtype", "search", "same", "near-ties", "unproved", "others", *names),
    )
    notes = [
        f"Reference: {result['reference']}. A near-tie differs by no more than the dtype's "
        f"rounding can; the JSON names each, with its difference. Unproved: beams that came as "
        f"close at an earlier step, and may have parted there. The last columns count what "
        f"changes when the same lines come in other batches, (others) in brackets.",
    ]
    for row in result["rows"]:
        batches = row["batches"].values()
        table.add_row(
            row["dtype"],
            _search(row["beam"]),
            f"{row['same']:,}",
            f"{len(row['near_ties']):,}",
            f"{len(row['unproved']):,}",
            f"{len(row['others']):,}",
            *(f"{found['changed']:,} ({len(found['others']):,})" for found in batches),
        )
        where = f"{row['dtype']}, {_search(row['beam'])}"
        if row["others"]:
            lines = ", ".join(str(one["line"]) for one in row["others"][:8])
            notes.append(f"{where}: no near-tie explains line {lines}; the JSON has all.")
    if result["left_out"]:
        notes.append(f"Lines longer than the model reads, left out: {len(result['left_out']):,}.")
    if result["empty"]:
        notes.append(f"Empty lines, passed over: {len(result['empty']):,}.")
    _show(page, table)
    page.print()
    _say(page, notes)


def _absences(rows: list[dict[str, Any]]) -> list[str]:
    """Why there is no figure, each reason once with all the rows it holds for."""
    said: dict[str, list[str]] = {}
    for row in rows:
        found = {**row["measured"], "attention": row.get("attention", {})}
        for label, one in found.items():
            if reason := one.get("absent") or one.get("left_out"):
                said.setdefault(f"{label}: {reason}", []).append(row["preset"])
    return [f"{sentence} ({', '.join(dict.fromkeys(who))})" for sentence, who in said.items()]


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for i, column in enumerate(columns):
        left = column in ("attention", "model", "engine", "dtype", "search") and i < 4
        table.add_column(
            column,
            justify="left" if left else "right",
            style="" if i else "cyan",
            no_wrap=left,
            overflow="fold",
        )
    return table


def _print(page: Console, result: dict[str, Any], tables: list[Table], notes: list[str]) -> None:
    chip = result["chip"]
    page.print(
        f"{chip['name']}: {quantity(chip['bandwidth'])}B/s, {quantity(chip['flops'])}FLOP/s "
        f"({chip['source']})\n",
        highlight=False,
        soft_wrap=True,
    )
    for table in tables:
        _show(page, table)
        page.print()
    _say(page, notes)


def _show(page: Console, table: Table) -> None:
    """A table under its title, which may be the wider of the two."""
    page.print(table.title, style="bold", markup=False, highlight=False)
    table.title = None
    page.print(table)


def _say(page: Console, notes: list[str]) -> None:
    for note in notes:
        page.print(note, style="dim", markup=False, highlight=False, soft_wrap=True)


def _search(beam: int) -> str:
    return "greedy" if beam == 1 else f"beam {beam}"


def _step(found: dict[str, Any] | None) -> float | None:
    return None if found is None else float(found["step_ms"]["median"])


def _attention(row: dict[str, Any]) -> float | None:
    times = row["attention"].get("us")
    return None if times is None else float(times["median"])


def _decoder(row: dict[str, Any], label: str) -> float | None:
    found = quickest(row, label)
    return None if found is None else float(found["us_per_token"]["decoder"])


def _pair(found: dict[str, Any] | None) -> str:
    if found is None:
        return NONE
    us = found["us_per_token"]
    return f"{_number(us['encoder'])} + {_number(us['decoder'])}"


def _paper(row: dict[str, Any], beam: int) -> str:
    paper = row["paper"]
    if paper is None or beam not in (1, 4):
        return NONE
    before = "" if beam == 1 else "beam4_"
    return f"{paper[f'{before}encoder']:g} + {paper[f'{before}decoder']:g}"


def _paper_decoder(row: dict[str, Any], beam: int) -> float | None:
    paper = row["paper"]
    if paper is None or beam not in (1, 4):
        return None
    return float(paper["decoder" if beam == 1 else "beam4_decoder"])


def _gain(slow: float | None, fast: float | None) -> str:
    return f"{slow / fast:.1f}×" if slow and fast else NONE


def _number(value: Any) -> str:
    """Three digits, without an exponent."""
    if not value:
        return NONE
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
