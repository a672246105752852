"""What a config costs and why, as one JSON object and as a page for the terminal."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from writehead import cost
from writehead.config import ModelConfig
from writehead.cost import Chip, Setting, Work
from writehead.errors import ConfigError
from writehead.paper.ratios import ratios

LARGEST = (
    "largest batch: the most sentences of these lengths whose K and V, with the weights and what a "
    "step works on, fit the chip's memory."
)


@dataclass(frozen=True)
class Question:
    """A config in a setting on a chip, and the position of the step to explain.

    For an imported model, `approximations` lists the differences of the config, and `longest` is
    the maximum number of tokens in a sentence. Other models are limited by their learned positions.
    """

    name: str
    config: ModelConfig
    setting: Setting
    chip: Chip
    position: int | None = None
    approximations: tuple[str, ...] = ()
    longest: int | None = None


def explain(question: Question) -> dict[str, Any]:
    """Everything that `writehead explain` knows, as JSON values: counts exact, times in µs."""
    config, setting, chip = question.config, question.setting, question.chip
    _check_lengths(question)
    position = setting.target - 1 if question.position is None else question.position
    memory, largest = cost.memory_bytes(config, setting), cost.largest_batch(config, setting, chip)
    tokens = setting.batch * setting.target
    step = cost.decoder_step(config, setting, position)
    parts = cost.parameters(config)
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
        "decoder_sequence_padded": _work(
            cost.decoder_sequence(config, setting, padded=True), chip, tokens
        ),
        "ratios": [
            asdict(ratio)
            for ratio in ratios(config.encoder_attention, setting.rows, setting.target)
        ],
        "comparison": _comparison(question, position),
        "memory_bytes": memory,
        "fits": memory <= chip.memory,
        "largest_batch": largest,
    }


def _check_lengths(question: Question) -> None:
    """Raises ConfigError if a sentence has more tokens than the model has positions."""
    config, setting = question.config, question.setting
    for side in ("source", "target"):
        length, positions = getattr(setting, side), getattr(config, f"{side}_positions")
        if question.longest is not None:
            if length > question.longest:
                raise ConfigError(
                    f"{side}={length} tokens are more than the model's {question.longest} "
                    f"positions; ask for {question.longest} or fewer"
                )
            continue
        if length > positions:
            raise ConfigError(
                f"{side}={length} tokens are more than the {positions} learned positions; ask for "
                f"{positions} or fewer, or set model.{side}_positions={length}"
            )


def _work(work: Work, chip: Chip, tokens: int) -> dict[str, Any]:
    floor = work.floor(chip) * 1e6
    return {
        "operations": work.operations,
        "bytes": work.bytes,
        "floor_us": floor,
        "floor_us_per_token": floor / tokens if tokens else 0.0,
        "parts": [
            {**asdict(part), "bytes": part.bytes, "floor_us": part.floor(chip) * 1e6}
            for part in work.parts
        ],
    }


def _comparison(question: Question, position: int) -> dict[str, Any] | None:
    """This config as multi-head and as multi-query, with the same number of parameters.

    Grouped-query stands between them if it is that. None where feed-forward layers are too narrow
    to make up for the difference.
    """
    config, setting, chip = question.config, question.setting, question.chip
    answer: dict[str, Any] = {}
    kinds = {"multi-head": config.h, config.kind: config.g, "multi-query": 1}
    for kind, g in kinds.items():
        try:
            variant = config if config.g == g else config.with_write_heads(g)
        except ConfigError:
            return None
        answer[kind] = {
            "f": variant.f,
            "kv_bytes": cost.kv_bytes(variant, setting)["total"],
            "step_floor_us": cost.decoder_step(variant, setting, position).floor(chip) * 1e6,
            "largest_batch": cost.largest_batch(variant, setting, chip),
        }
    slow, fast = answer["multi-head"], answer["multi-query"]
    answer["gain"] = slow["step_floor_us"] / fast["step_floor_us"]
    return answer


def render(answer: dict[str, Any], console: Console) -> None:
    """Prints the answer as a page."""
    tables = [_parameters, _totals, _step, _ratios]
    if answer["comparison"] is not None:
        tables.append(_gain)
    console.print(_headline(answer))
    for table in tables:
        console.print(table(answer))
        console.print()
    if answer["comparison"] is not None:
        console.print(LARGEST, style="dim")


def _headline(answer: dict[str, Any]) -> RenderableType:
    config, setting, chip = answer["config"], answer["setting"], answer["chip"]
    layers = f"{config['encoder_layers']}+" if config["encoder_layers"] else ""
    kv = answer["kv_bytes"]
    local = f", window {config['window']}" if config["window"] else ""
    source = f"{setting['source']} source and " if config["encoder_layers"] else ""
    beam = f", beam {setting['beam']}" if setting["beam"] > 1 else ""
    lines = Text()
    lines.append(f"\n{answer['name']}", style="bold")
    lines.append(
        f"  {answer['kind']} {config['task']} model, {quantity(answer['parameters']['total'])} "
        f"parameters\n"
        f"  {layers}{config['decoder_layers']} layers, d={config['d']}, d_ff={config['f']}, "
        f"h={config['h']} read-heads, g={config['g']} write-heads, k={config['k']}, "
        f"v={config['v']}{local}\n"
    )
    for note in answer["approximations"]:
        lines.append("approximated", style="bold")
        lines.append(f"  {note}\n")
    lines.append("setting", style="bold")
    lines.append(
        f"  {setting['batch']:,} sentences of {source}{setting['target']} target tokens{beam}, "
        f"{setting['element']}-byte\n"
    )
    lines.append(chip["name"], style="bold")
    lines.append(
        f"  {quantity(chip['bandwidth'])}B/s, {quantity(chip['flops'])}FLOP/s, "
        f"{quantity(chip['memory'])}B ({chip['source']})\n"
    )
    lines.append("K and V", style="bold")
    each = f"{quantity(kv['target_token'])}B a target token"
    if kv["source_token"]:
        each += f", {quantity(kv['source_token'])}B a source token"
    lines.append(f"  {each}; {quantity(kv['total'])}B in all\n")
    lines.append("memory", style="bold")
    lines.append(f"  {_room(answer)}\n", style="" if answer["fits"] else "red")
    return lines


def _room(answer: dict[str, Any]) -> str:
    """Whether the batch fits into the chip's memory, and else which one does."""
    needed, batch = quantity(answer["memory_bytes"]), answer["setting"]["batch"]
    there = quantity(answer["chip"]["memory"])
    if answer["fits"]:
        return f"{needed}B of {there}B: weights, K and V, and room to work"
    if not answer["largest_batch"]:
        return f"{needed}B are needed and there are {there}B: not even one sentence fits"
    return (
        f"{needed}B are needed and there are {there}B: {batch:,} sentences do not fit; the largest "
        f"batch that does is {answer['largest_batch']:,}"
    )


def _parameters(answer: dict[str, Any]) -> RenderableType:
    total = answer["parameters"]["total"]
    table = _table("Parameters", "part", "count", "share")
    for name, count in answer["parameters"]["parts"].items():
        table.add_row(name, f"{count:,}", f"{count / total:.1%}")
    table.add_section()
    table.add_row("all", f"{total:,}", quantity(total))
    return table


def _totals(answer: dict[str, Any]) -> RenderableType:
    table = _table("Work and its floor", "", "ops", "bytes", "floor", "µs a token")
    step = f"decoder step at position {answer['decoder_step']['position']}"
    for label, key in (
        ("training step", "training_step"),
        ("encoder", "encoder"),
        (step, "decoder_step"),
        ("decoder, all steps by true length", "decoder_sequence"),
        ("decoder, all steps padded (as §4.3)", "decoder_sequence_padded"),
    ):
        work = answer[key]
        if work["parts"]:
            table.add_row(
                label,
                quantity(work["operations"]),
                quantity(work["bytes"]) + "B",
                duration(work["floor_us"]),
                f"{work['floor_us_per_token']:.3g}",
            )
    return table


def _step(answer: dict[str, Any]) -> RenderableType:
    step = answer["decoder_step"]
    title = f"Decoder step at position {step['position']}, by part"
    table = _table(title, "part", "ops", "weights", "K and V", "activations", "floor", "by")
    chip = answer["chip"]
    for part in step["parts"]:
        by_operations = part["operations"] / chip["flops"] >= (
            (part["weights"] + part["kv"]) / chip["bandwidth"]
        )
        table.add_row(
            part["name"],
            quantity(part["operations"]),
            *(quantity(part[kind]) + "B" for kind in ("weights", "kv", "activations")),
            duration(part["floor_us"]),
            "ops" if by_operations else "bytes",
        )
    return table


def _ratios(answer: dict[str, Any]) -> RenderableType:
    table = _table(
        "Memory access over operations, one attention layer", "paper", "form", "Θ", "=", "counted"
    )
    for ratio in answer["ratios"]:
        table.add_row(
            ratio["section"],
            ratio["form"],
            ratio["terms"],
            f"{ratio['theta']:.4f}",
            f"{ratio['counted']:.4f}",
        )
    return table


def _gain(answer: dict[str, Any]) -> RenderableType:
    comparison = answer["comparison"]
    table = _table(
        "Multi-head and multi-query, parameters equal",
        "attention",
        "d_ff",
        "K and V",
        "step floor",
        "largest batch",
    )
    for kind in ("multi-head", "grouped-query", "multi-query"):
        if kind not in comparison:
            continue
        side = comparison[kind]
        table.add_row(
            kind,
            str(side["f"]),
            quantity(side["kv_bytes"]) + "B",
            duration(side["step_floor_us"]),
            f"{side['largest_batch']:,}",
        )
    table.add_section()
    less = comparison["multi-head"]["kv_bytes"] / comparison["multi-query"]["kv_bytes"]
    table.add_row("gain", "", f"{less:.1f}×", f"{comparison['gain']:.1f}×", "")
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for i, column in enumerate(columns):
        left = i == 0 or column in ("form", "Θ", "by")
        justify: Literal["left", "right"] = "left" if left else "right"
        table.add_column(column, justify=justify, style="" if i else "cyan", no_wrap=i == 0)
    return table


def quantity(value: float) -> str:
    """A number with three digits and a decimal prefix: 211M, 4.3T, 3.07k."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 0.9995 * size:
            return f"{value / size:.3g}{prefix}"
    return f"{value:.3g}"


def duration(microseconds: float) -> str:
    """A time with three digits, in µs, ms or s."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= 0.9995 * size:
            return f"{microseconds / size:.3g} {unit}"
    return f"{microseconds:.3g} µs"
