"""What `bench decode` does, in order, and what the paper says of the same rows; `tokens`' plan."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from writehead.bench.context import Context, context_sweep, language_row
from writehead.bench.decode import Place, batch_sweep, fitted, translation_row
from writehead.bench.tokens import Plan
from writehead.config import DecodeConfig, ModelConfig
from writehead.cost import Setting
from writehead.decoding.textio import read_lines
from writehead.errors import ConfigError
from writehead.model.runs import read_config
from writehead.paper.presets import FAMILIES, rows
from writehead.paper.tables import TABLE_2

T = TypeVar("T")

# (of a GPU, of a CPU): what the plots sweep over
SWEEP_FAMILIES = {"context": ("lm1b", "tiny-lm"), "batch": ("wmt14", "tiny")}
SWEEP_ROWS = ("multi-head", "multi-query")
CONTEXTS = ([2**i for i in range(7, 16)], [2**i for i in range(6, 11)])
BATCHES = ([2**i for i in range(11)], [2**i for i in range(6)])
LEAST = 4  # ids: one besides those of padding, of the end and of what is unknown
PAPERS_SETTING = ("wmt14", 1024, 128, 128)  # family, batch, source and target of Table 2
SWEEP_ROWS_TOGETHER = 16  # in the sweep over contexts


@dataclass(frozen=True)
class DecodePlan:
    """What to decode: translation models in settings, language models in contexts."""

    models: dict[str, ModelConfig]
    batches: list[int]
    source: int
    target: int
    beams: list[int]
    vocab_size: int | None
    contexts: list[int]
    language_batches: list[int]
    lengths: tuple[str, ...]
    sweeps: bool = False
    gpu: bool = False  # which of the two the sweeps are over

    def __post_init__(self) -> None:
        for name, numbers in (
            ("--batch", self.batches),
            ("--beam", self.beams),
            ("--source", [self.source]),
            ("--target", [self.target]),
            ("--context", self.contexts),
        ):
            if min(numbers) < 1:
                raise ConfigError(f"{name} {min(numbers)} is too little; give 1 or more")
        if self.vocab_size is not None and self.vocab_size < LEAST:
            raise ConfigError(f"--vocab-size {self.vocab_size} is too little; give {LEAST} or more")
        for batch in self.language_batches:
            for context in self.contexts:
                Context(batch, context, _steps(context))
        for task in ("translation", "language"):
            self.of_task(task)
        for name, config in self.of_task("translation").items():
            check_beams(self.beams, config.vocab_size, name)
        self._check_lengths()

    def _check_lengths(self) -> None:
        """Raises where a sentence has more tokens than a model has learned positions for."""
        models = self.of_task("translation")
        if self.sweeps:
            family = self.of_device(SWEEP_FAMILIES["batch"])
            models |= {family: FAMILIES[family]}
        for name, config in models.items():
            for option, length, positions in (
                ("--source", self.source, config.source_positions),
                ("--target", self.target, config.target_positions),
            ):
                if length > positions:
                    raise ConfigError(
                        f"{option} {length} is past the {positions} learned positions of {name}; "
                        f"give {positions} or less"
                    )

    def of_device(self, choices: tuple[T, T]) -> T:
        """The first of two on a GPU, the second on a CPU."""
        return choices[0 if self.gpu else 1]

    def of_task(self, task: str) -> dict[str, ModelConfig]:
        """The models of a task; a language model has positions for every context."""
        context = max(self.contexts) if task == "language" else 0
        return {
            name: fitted(config, self.vocab_size, context)
            for name, config in self.models.items()
            if config.task == task
        }


def run_decode(
    plan: DecodePlan,
    result: dict[str, Any],
    place: Place,
    save: Callable[[], None],
) -> None:
    """Fills `result` row by row, and saves it after each."""
    result["setting"] = {
        name: value
        for name, value in asdict(plan).items()
        if name not in ("models", "sweeps", "gpu")
    } | {"repeats": place.repeats, "presets": list(plan.models)}
    result["rows"], result["contexts"], result["sweeps"] = [], [], {}
    for batch in plan.batches:
        for name, config in plan.of_task("translation").items():
            for beam in plan.beams:
                setting = Setting(batch, plan.source, plan.target, beam, place.dtype.itemsize)
                row = translation_row(name, config, setting, place, lengths=plan.lengths)
                result["rows"].append(row | {"paper": paper_row(name, setting)})
                save()
    for batch in plan.language_batches:
        for length in plan.contexts:
            for name, config in plan.of_task("language").items():
                context = Context(batch, length, _steps(length))
                result["contexts"].append(language_row(name, config, context, place))
                save()
    if plan.sweeps:
        _sweep(plan, result, place, save)


def _sweep(
    plan: DecodePlan, result: dict[str, Any], place: Place, save: Callable[[], None]
) -> None:
    """Multi-head and multi-query over contexts and over batches, for the plots."""
    lengths, batches = plan.of_device(CONTEXTS), plan.of_device(BATCHES)
    language, translation = (
        {
            f"{family}/{row}": fitted(
                rows(family)[row],
                plan.vocab_size,
                max(lengths) if FAMILIES[family].task == "language" else 0,
            )
            for row in SWEEP_ROWS
        }
        for family in map(plan.of_device, SWEEP_FAMILIES.values())
    )
    result["sweeps"]["context"] = context_sweep(language, SWEEP_ROWS_TOGETHER, lengths, place)
    save()
    result["sweeps"]["batch"] = batch_sweep(translation, batches, plan.source, plan.target, place)
    save()


def paper_row(name: str, setting: Setting) -> dict[str, Any] | None:
    """The row of the paper's Table 2 that a preset in its own setting stands for; else None."""
    family, _, row_name = name.partition("/")
    if (family, setting.batch, setting.source, setting.target) != PAPERS_SETTING:
        return None
    found = [row for row in TABLE_2 if row.row == row_name]
    return asdict(found[0]) if found else None


def _steps(context: int) -> int:
    """How many steps of a context are timed."""
    return min(32, context // 2)


def check_beams(beams: Iterable[int], vocab_size: int, name: str | Path) -> None:
    """Raises ConfigError unless the model of a name can be searched with each of them."""
    for beam in beams:
        DecodeConfig(beam=beam)
        if beam > vocab_size:
            raise ConfigError(
                f"--beam {beam} is past the {vocab_size} tokens of {name}, of which a beam has one "
                f"each at first; give fewer"
            )


def tokens_plan(
    run: Path,
    path: str,
    lines: int,
    beams: tuple[int, ...],
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    tell: Callable[[str], None],
) -> Plan:
    """What `bench tokens` decodes: the first lines of a file that have text in them."""
    check_beams(beams, read_config(run).vocab_size, run)
    some: list[tuple[int, str]] = []
    empty: list[int] = []
    read = enumerate(read_lines(path), start=1)
    while len(some) < lines and (one := next(read, None)) is not None:
        if one[1].strip():
            some.append(one)
        else:
            empty.append(one[0])
    return Plan(run, some, device, dtypes, tuple(dict.fromkeys(beams)), tell, empty)
