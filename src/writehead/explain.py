"""The cost of a model, as one JSON object or as tables for the terminal."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from writehead import cost
from writehead.config import ModelConfig
from writehead.cost import Chip, Setting, Work
from writehead.errors import ConfigError
from writehead.paper.ratios import ratios


@dataclass(frozen=True)
class Question:
    """A config, a workload and a chip, and the position of the decoder step to explain.

    For an imported model, `approximations` lists where the config differs from it, and `longest` is
    its maximum number of tokens. Other models are limited by their learned positions.
    """

    name: str
    config: ModelConfig
    setting: Setting
    chip: Chip
    position: int | None = None
    approximations: tuple[str, ...] = ()
    longest: int | None = None


def explain(question: Question) -> dict[str, Any]:
    """Computes all costs as JSON values; times are in microseconds."""
    config, setting, chip = question.config, question.setting, question.chip
    _check_lengths(question)
    position = setting.target - 1 if question.position is None else question.position
    memory, largest = cost.memory_bytes(config, setting), cost.largest_batch(config, setting, chip)
    tokens = setting.batch * setting.target
    step = cost.decoder_step(config, setting, position)
    padded = cost.decoder_sequence(config, setting, padded=True)
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
        "decoder_sequence_padded": _work(padded, chip, tokens),
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
    for side in ("source", "target"):
        length = getattr(question.setting, side)
        most = question.longest or getattr(question.config, f"{side}_positions")
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
            {**asdict(part), "bytes": part.bytes, "floor_us": part.floor(chip) * 1e6}
            for part in work.parts
        ],
    }


def _comparison(question: Question, position: int) -> dict[str, Any] | None:
    """Compares the config with its multi-head and multi-query variants of equal parameters.

    Returns None if the feed-forward layers are too narrow to compensate for the difference.
    """
    config, setting, chip = question.config, question.setting, question.chip
    answer: dict[str, Any] = {}
    for kind, g in {"multi-head": config.h, config.kind: config.g, "multi-query": 1}.items():
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
    return {**answer, "gain": slow["step_floor_us"] / fast["step_floor_us"]}


def render(answer: dict[str, Any], console: Console) -> None:
    """Prints the answer of `explain` as tables."""
    console.print(_headline(answer))
    for table in (_parameters, _totals, _step, _ratios):
        console.print(table(answer))
        console.print()
    if answer["comparison"] is not None:
        console.print(_gain(answer["comparison"]))


def _headline(answer: dict[str, Any]) -> RenderableType:
    config, setting, chip = answer["config"], answer["setting"], answer["chip"]
    layers = f"{config['encoder_layers']}+" if config["encoder_layers"] else ""
    kv, total = answer["kv_bytes"], quantity(answer["parameters"]["total"])
    window = f", window {config['window']}" if config["window"] else ""
    source = f"{setting['source']} source and " if config["encoder_layers"] else ""
    beam = f", beam {setting['beam']}" if setting["beam"] > 1 else ""
    per_source = f", {quantity(kv['source_token'])}B per source token" if source else ""
    lines = [
        (f"\n{answer['name']}", f"{answer['kind']} {config['task']} model, {total} parameters"),
        (
            "",
            f"{layers}{config['decoder_layers']} layers, d={config['d']}, d_ff={config['f']}, "
            f"h={config['h']} read-heads, g={config['g']} write-heads, k={config['k']}, "
            f"v={config['v']}{window}",
        ),
        *(("approximated", note) for note in answer["approximations"]),
        (
            "workload",
            f"{setting['batch']:,} sentences of {source}{setting['target']} target tokens{beam}, "
            f"{setting['element']} bytes per element",
        ),
        (
            chip["name"],
            f"{quantity(chip['bandwidth'])}B/s, {quantity(chip['flops'])}FLOP/s, "
            f"{quantity(chip['memory'])}B ({chip['source']})",
        ),
        (
            "KV cache",
            f"{quantity(kv['target_token'])}B per target token{per_source}; "
            f"{quantity(kv['total'])}B in total",
        ),
        ("memory", _memory(answer)),
    ]
    page = Text()
    for label, text in lines:
        page.append(label, style="bold")
        page.append(f"  {text}\n")
    return page


def _memory(answer: dict[str, Any]) -> str:
    """Describes whether the batch fits in the chip's memory, and the largest that does."""
    words = f"{quantity(answer['memory_bytes'])}B of {quantity(answer['chip']['memory'])}B"
    if answer["fits"]:
        return words
    if not answer["largest_batch"]:
        return f"{words} needed; not even one sentence fits"
    return (
        f"{words} needed; {answer['setting']['batch']:,} sentences do not fit, but "
        f"{answer['largest_batch']:,} do"
    )


def _parameters(answer: dict[str, Any]) -> Table:
    total = answer["parameters"]["total"]
    parts = answer["parameters"]["parts"].items()
    rows = [(name, f"{count:,}", f"{count / total:.1%}") for name, count in parts]
    rows.append(("total", f"{total:,}", quantity(total)))
    return _table("Parameters", ("part", "count", "share"), rows)


def _totals(answer: dict[str, Any]) -> Table:
    labels = {
        "training_step": "training step",
        "encoder": "encoder",
        "decoder_step": f"decoder step at position {answer['decoder_step']['position']}",
        "decoder_sequence": "decoder, all steps",
        "decoder_sequence_padded": "decoder, all steps padded (§4.3)",
    }
    rows = [
        (
            label,
            quantity(answer[key]["operations"]),
            quantity(answer[key]["bytes"]) + "B",
            duration(answer[key]["floor_us"]),
            f"{answer[key]['floor_us_per_token']:.3g}",
        )
        for key, label in labels.items()
        if answer[key]["parts"]
    ]
    return _table("Work and its floor", ("work", "ops", "bytes", "floor", "µs/token"), rows)


def _step(answer: dict[str, Any]) -> Table:
    step, chip = answer["decoder_step"], answer["chip"]
    rows = []
    for part in step["parts"]:
        compute = part["operations"] / chip["flops"]
        rows.append(
            (
                part["name"],
                quantity(part["operations"]),
                *(quantity(part[kind]) + "B" for kind in ("weights", "kv", "activations")),
                duration(part["floor_us"]),
                "ops" if compute >= (part["weights"] + part["kv"]) / chip["bandwidth"] else "bytes",
            )
        )
    title = f"Decoder step at position {step['position']}, by part"
    return _table(title, ("part", "ops", "weights", "KV", "activations", "floor", "bound"), rows)


def _ratios(answer: dict[str, Any]) -> Table:
    rows = [
        (one["section"], one["form"], one["terms"], f"{one['theta']:.4f}", f"{one['counted']:.4f}")
        for one in answer["ratios"]
    ]
    title = "Memory access over operations, one attention layer"
    return _table(title, ("section", "form", "Θ", "=", "counted"), rows)


def _gain(comparison: dict[str, Any]) -> Table:
    kinds = [kind for kind in ("multi-head", "grouped-query", "multi-query") if kind in comparison]
    rows: list[tuple[str, ...]] = [
        (
            kind,
            str(comparison[kind]["f"]),
            quantity(comparison[kind]["kv_bytes"]) + "B",
            duration(comparison[kind]["step_floor_us"]),
            f"{comparison[kind]['largest_batch']:,}",
        )
        for kind in kinds
    ]
    less = comparison["multi-head"]["kv_bytes"] / comparison["multi-query"]["kv_bytes"]
    rows.append(("gain", "", f"{less:.1f}×", f"{comparison['gain']:.1f}×", ""))
    title = "Multi-head and multi-query, parameters equal"
    return _table(title, ("attention", "d_ff", "K and V", "step floor", "largest batch"), rows)


def _table(title: str, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for i, column in enumerate(columns):
        left = i == 0 or column in ("form", "Θ", "bound")
        table.add_column(
            column,
            justify="left" if left else "right",
            style="" if i else "cyan",
            no_wrap=i == 0,
        )
    for row in rows:
        table.add_row(*row)
    return table


def quantity(value: float) -> str:
    """Formats a number with three digits and a decimal prefix: 211M, 4.3T, 3.07k."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 0.9995 * size:
            return f"{value / size:.3g}{prefix}"
    return f"{value:.3g}"


def duration(microseconds: float) -> str:
    """Formats a time with three digits, in µs, ms or s."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= 0.9995 * size:
            return f"{microseconds / size:.3g} {unit}"
    return f"{microseconds:.3g} µs"
