"""Explains the cost of a model, as one JSON object or as tables for the terminal."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from writehead import cost
from writehead.config import ModelConfig
from writehead.cost import Chip, Setting, Work
from writehead.errors import ConfigError
from writehead.paper.ratios import ratios


def quantity(value: float) -> str:
    """Formats a number with three digits and a decimal prefix: 211M, 4.3T, 3.07k."""
    return _scaled(value, {"P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1})


def size(value: float) -> str:
    """Formats a number of bytes."""
    return quantity(value) + "B"


def duration(microseconds: float) -> str:
    """Formats a time with three digits, in µs, ms or s."""
    return _scaled(microseconds, {" s": 1e6, " ms": 1e3, " µs": 1})


def _scaled(value: float, units: dict[str, float]) -> str:
    fitting = (unit for unit, scale in units.items() if value >= 0.9995 * scale)
    unit = next(fitting, list(units)[-1])
    return f"{value / units[unit]:.3g}{unit}"


LAYERS = ("encoder_layers", "decoder_layers")
SIZES = (*LAYERS, "d", "f", "h", "g", "encoder_g", "cross_g", "k", "v", "window")
MIXED = "mixed"  # encoder, decoder and cross-attention differ in their number of write-heads
WORK = ("training_step", "encoder", "decoder_step", "decoder_sequence")
COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {  # the key of the values and their format
    "count": ("count", "{:,}".format),
    "share": ("share", "{:.1%}".format),
    "ops": ("operations", quantity),
    "bytes": ("bytes", size),
    "weights": ("weights", size),
    "KV": ("kv", size),
    "floor": ("floor_us", duration),
    "µs/token": ("floor_us_per_token", "{:.3g}".format),
    "bound": ("bound", str),
    "form": ("form", str),
    "Θ": ("terms", str),
    "=": ("theta", "{:.4f}".format),
    "counted": ("counted", "{:.4f}".format),
    "d_ff": ("f", "{}".format),
    "K and V": ("kv_bytes", size),
    "step floor": ("step_floor_us", duration),
    "largest batch": ("largest_batch", "{:,}".format),
}


@dataclass(frozen=True)
class Question:
    """A config, a workload, a chip, and the position of the decoder step to explain."""

    name: str
    config: ModelConfig
    setting: Setting
    chip: Chip
    position: int | None = None
    approximations: tuple[str, ...] = ()  # of an imported model


def explain(question: Question) -> dict[str, Any]:
    """Computes all costs as JSON values; times are in microseconds."""
    config, setting, chip = question.config, question.setting, question.chip
    _check_lengths(question)
    position = setting.target - 1 if question.position is None else question.position
    attention, parts = config.decoder_attention, cost.parameters(config)
    tokens = setting.batch * setting.target
    step = cost.decoder_step(config, setting, position)
    largest = cost.largest_batch(config, setting, chip)
    return {
        "name": question.name,
        "config": config.to_json(),
        "kind": config.kind,
        "approximations": list(question.approximations),
        "setting": asdict(setting),
        "chip": asdict(chip),
        "parameters": {"total": sum(parts.values()), "parts": parts},
        "kv_bytes": cost.kv_bytes(config, setting),
        "training_step": _work(cost.training_step(config, setting), chip, tokens),
        "encoder": _work(cost.encoder(config, setting), chip, setting.batch * setting.source),
        "decoder_step": {"position": position, **_work(step, chip, setting.batch)},
        "decoder_sequence": _work(cost.decoder_sequence(config, setting), chip, tokens),
        "ratios": [asdict(ratio) for ratio in ratios(attention, setting.rows, setting.target)],
        "comparison": _comparison(question, position),
        "fits": setting.batch <= largest,
        "largest_batch": largest,
    }


def _check_lengths(question: Question) -> None:
    """Raises ConfigError if a sentence has more tokens than the model has positions."""
    for side in ("source", "target"):
        length = getattr(question.setting, side)
        most = getattr(question.config, f"{side}_positions")
        if length > most:
            raise ConfigError(
                f"{side}={length} exceeds the model's {most} positions; choose {most} or fewer"
            )


def _work(work: Work, chip: Chip, tokens: int) -> dict[str, Any]:
    floor = work.floor(chip) * 1e6
    return {
        "operations": work.operations,
        "bytes": work.bytes,
        "floor_us": floor,
        "floor_us_per_token": floor / tokens if tokens else 0.0,
        "parts": [
            {
                **asdict(part),
                "bytes": part.bytes,
                "floor_us": part.floor(chip) * 1e6,
                "bound": "bytes" if part.operations / chip.flops < part.floor(chip) else "ops",
            }
            for part in work.parts
        ],
    }


def _comparison(question: Question, position: int) -> dict[str, Any] | None:
    """Compares variants with equal parameters; returns None if d_ff is too small to match them."""
    config, setting, chip = question.config, question.setting, question.chip
    uniform = config.encoder_attention.g == config.cross_attention.g == config.g
    variants: dict[str, ModelConfig] = {config.kind if uniform else MIXED: config}
    try:
        for kind, g in {"multi-head": config.h, "multi-query": 1}.items():
            variants.setdefault(kind, config.with_write_heads(g))
    except ConfigError:
        return None
    answer: dict[str, Any] = {
        kind: {
            "f": variant.f,
            "kv_bytes": cost.kv_bytes(variant, setting)["total"],
            "step_floor_us": cost.decoder_step(variant, setting, position).floor(chip) * 1e6,
            "largest_batch": cost.largest_batch(variant, setting, chip),
        }
        for kind, variant in variants.items()
    }
    slow, fast = answer["multi-head"], answer["multi-query"]
    return {**answer, "gain": slow["step_floor_us"] / fast["step_floor_us"]}


def render(answer: dict[str, Any], console: Console) -> None:
    """Prints the answer of `explain` as tables."""
    page = Text("\n")
    for label, text in _headline(answer):
        page.append(label, style="bold")
        page.append(f"  {text}\n")
    console.print(page)
    for table in _tables(answer):
        console.print(table)
        console.print()


def _headline(answer: dict[str, Any]) -> Iterator[tuple[str, str]]:
    config, chip, kv = answer["config"], answer["chip"], answer["kv_bytes"]
    total, most = quantity(answer["parameters"]["total"]), answer["largest_batch"]
    yield answer["name"], f"{answer['kind']} {config['task']} model, {total} parameters"
    yield "sizes", ", ".join(f"{name}={config[name]}" for name in SIZES if config[name])
    yield from (("approximated", note) for note in answer["approximations"])
    yield "workload", ", ".join(f"{name}={value:,}" for name, value in answer["setting"].items())
    speed = f"{size(chip['bandwidth'])}/s, {quantity(chip['flops'])}FLOP/s, {size(chip['memory'])}"
    yield chip["name"], f"{speed} ({chip['source']})"
    sides = ("target", "source") if kv["source_token"] else ("target",)
    rates = " and ".join(f"{size(kv[f'{side}_token'])} per {side} token" for side in sides)
    yield "KV cache", f"{rates}, {size(kv['total'])} in total"
    fits = "fits" if answer["fits"] else "does not fit"
    yield "memory", f"the batch {fits}; the largest batch is {most:,}"


def _tables(answer: dict[str, Any]) -> Iterator[Table]:
    total, counts = answer["parameters"]["total"], answer["parameters"]["parts"]
    parts = {name: {"count": n, "share": n / total} for name, n in counts.items()}
    yield _table("Parameters", parts, "part", "count", "share")
    work = {key.replace("_", " "): answer[key] for key in WORK if answer[key]["parts"]}
    yield _table("Work and its floor", work, "work", "ops", "bytes", "floor", "µs/token")
    step = answer["decoder_step"]
    parts = {part["name"]: part for part in step["parts"]}
    title = f"Decoder step at position {step['position']}, by part"
    yield _table(title, parts, "part", "ops", "weights", "KV", "floor", "bound")
    sections = {ratio["section"]: ratio for ratio in answer["ratios"]}
    title = "Memory access over operations, one attention layer"
    yield _table(title, sections, "section", "form", "Θ", "=", "counted")
    comparison = answer["comparison"]
    if comparison is None:
        return
    kinds = ("multi-head", "grouped-query", MIXED, "multi-query")
    rows = {kind: comparison[kind] for kind in kinds if kind in comparison}
    title, columns = "Multi-head and multi-query, parameters equal", ("K and V", "step floor")
    table = _table(title, rows, "attention", "d_ff", *columns, "largest batch")
    ratio = rows["multi-head"]["kv_bytes"] / rows["multi-query"]["kv_bytes"]
    table.add_row("gain", "", f"{ratio:.1f}×", f"{comparison['gain']:.1f}×")
    yield table


def _table(title: str, rows: dict[str, dict[str, Any]], first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column(first, no_wrap=True)
    forms = [COLUMNS[column] for column in columns]
    for column, (_, form) in zip(columns, forms, strict=True):
        table.add_column(column, justify="left" if form is str else "right")
    for name, row in rows.items():
        table.add_row(name, *(form(row[key]) for key, form in forms))
    return table
