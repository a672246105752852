"""Describes a family of Hugging Face models: how to read its config, and its tensor names.

A family reads `config.json` field by field through `Fields`, which notes what a ModelConfig cannot
express. Importing refuses such a model; explaining its cost lists the notes as approximations.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from writehead.config import ModelConfig, Task
from writehead.errors import ConfigError, shown

MAX_SIZE = 1 << 24
OUTPUT = "lm_head.weight"  # the output matrix, in all families
ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}
OUR_ACTIVATIONS = {"gelu_tanh": "gelu_pytorch_tanh"}  # others have the same name


class Fields:
    """The values of a `config.json`, and `notes` on what a ModelConfig cannot express."""

    def __init__(self, file: Path, data: Mapping[str, Any]) -> None:
        self.file, self.data = file, data
        self.notes: list[str] = []

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a value of any type; null counts as absent."""
        value = self.data.get(name)
        return default if value is None else value

    def size(self, name: str, default: int | None = None) -> int:
        """Returns a positive integer; without a default, it is required."""
        value = self.get(name, default)
        if value is None:
            raise ConfigError(f"{self.file} lacks {name}; use a complete config.json")
        is_size = type(value) is int and 0 < value <= MAX_SIZE
        return int(self._checked(is_size, name, value, f"an integer from 1 to {MAX_SIZE:,}"))

    def token(self, name: str, value: object, vocab_size: int) -> int:
        """Returns a token id, which may come from another file, if the model has it."""
        is_token = type(value) is int and 0 <= value < vocab_size
        words = f"a token of the model, which has {vocab_size:,}"
        token: int = self._checked(is_token, name, value, words)
        return token

    def flag(self, name: str, default: bool = False) -> bool:
        """Returns true or false."""
        value = self.get(name, default)
        return bool(self._checked(isinstance(value, bool), name, value, "true or false"))

    def number(self, name: str, default: float, *, above: float = 0.0) -> float:
        """Returns a number above a limit."""
        value = self.get(name, default)
        is_number = type(value) in (int, float) and value > above
        number: float = self._checked(is_number, name, value, f"a number above {above:g}")
        return number

    def fraction(self, name: str, default: float) -> float:
        """Returns a number from 0 to 1, such as a dropout rate."""
        value = self.get(name, default)
        is_fraction = type(value) in (int, float) and 0 <= value < 1
        number: float = self._checked(is_fraction, name, value, "a number from 0 to below 1")
        return number

    def inner(self, name: str) -> "Fields | None":
        """Returns the values of an inner object, if it is present."""
        if (value := self.get(name)) is None:
            return None
        return Fields(self.file, self._checked(isinstance(value, dict), name, value, "an object"))

    def _checked(self, fits: bool, name: str, value: Any, words: str) -> Any:
        if not fits:
            raise ConfigError(f"{self.file} has {name}={shown(value)}, not {words}")
        return value

    def depth(self, d: int, h: int) -> int:
        """Returns the size of each of h heads that divide the width."""
        if d % h:
            raise ConfigError(f"{self.file}: {h} heads must divide a width of {d}")
        return d // h

    def activation(self, name: str, default: str) -> str:
        """Returns our name for an activation."""
        return self.known_activation(self.get(name, default))

    def known_activation(self, value: object) -> str:
        """Returns our name for an activation that another value contains."""
        if not isinstance(value, str) or value not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ConfigError(f"{self.file} has the activation {shown(value)}; supported: {known}")
        return ACTIVATIONS[value]

    def note(self, note: str, applies: object) -> None:
        """Notes something that a ModelConfig cannot express, if it applies to the model."""
        if applies:
            self.notes.append(note)


@dataclass(frozen=True)
class Entry:
    """A module or tensor of a Hugging Face model, and those of ours that it holds.

    Several of ours are joined along the rows: one after another or, with `heads`, head by head.
    """

    theirs: str
    ours: tuple[str, ...]
    heads: int | None = None
    transposed: bool = False  # the Hugging Face weight is [inputs, outputs]
    leading: bool = False  # the Hugging Face tensor has a leading dimension of 1
    optional: bool = False  # zero if the file lacks it
    aliases: tuple[str, ...] = ()  # other names under which a file may repeat the tensor


Entries = Iterator[Entry]


@dataclass(frozen=True)
class Family:
    """Models with one `model_type`.

    `read` returns fields of ModelConfig, `write` those of the Hugging Face config, and `entries`
    the names of all tensors. A family without `entries` is only approximated, to explain its cost.
    """

    name: str
    read: Callable[[Fields], dict[str, Any]]
    entries: Callable[[ModelConfig], Entries] | None = None
    architecture: str = ""
    write: Callable[[ModelConfig], dict[str, Any]] | None = None
    task: Task = "language"
    biased: bool = False  # all its projections have biases
    prefix: str = "model."  # some files leave it out
    computed: str = "$^"  # matches names of tensors that the model computes
    sinusoids: str = "$^"  # matches tables of sinusoidal positions, which must equal ours
    tokens: Mapping[str, int] = field(default_factory=dict)  # eos, pad and bos of files without

    def is_computed(self, name: str) -> bool:
        """Returns whether a tensor follows from the config."""
        return re.fullmatch(f"{self.computed}|{self.sinusoids}", name) is not None

    def full_name(self, name: str) -> str:
        """Returns the name of a tensor with the prefix."""
        is_full = "." not in name or name.startswith((self.prefix, OUTPUT.partition(".")[0]))
        return name if is_full else self.prefix + name


def renamed(theirs: str, ours: str, names: Mapping[str, str], **layout: Any) -> Entries:
    """Yields entries of a layer's modules: `names` maps theirs to ours, separated by spaces."""
    for their_name, our_names in names.items():
        yield Entry(
            f"{theirs}.{their_name}", tuple(f"{ours}.{one}" for one in our_names.split()), **layout
        )
