"""What describes a family of Hugging Face models: how its config is read, and its tensors' names.

A family reads `config.json` field by field through `Fields`, which notes what a ModelConfig cannot
express. Importing refuses such a model; explaining its cost lists the notes as approximations.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from writehead.config import ModelConfig, Task
from writehead.errors import ConfigError, shown

MAX_SIZE = 1 << 24
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
        """Returns a positive integer; without a default, it must be there."""
        value = self.get(name, default)
        if value is None:
            raise ConfigError(f"{self.file} lacks {name}; use a complete config.json")
        if type(value) is not int or not 0 < value <= MAX_SIZE:
            raise ConfigError(
                f"{self.file} has {name}={shown(value)}, not an integer from 1 to {MAX_SIZE:,}"
            )
        return value

    def depth(self, d: int, h: int) -> int:
        """Returns the size of each of h heads that divide the width."""
        if d % h:
            raise ConfigError(f"{self.file}: {h} heads must divide a width of {d}")
        return d // h

    def activation(self, name: str, default: str) -> str:
        """Returns our name of an activation."""
        value = self.get(name, default)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ConfigError(f"{self.file} has the activation {shown(value)}; supported: {known}")
        return ACTIVATIONS[value]

    def note(self, note: str, applies: object) -> None:
        """Notes a difference, if it applies, between the model and what a ModelConfig expresses."""
        if applies:
            self.notes.append(note)


@dataclass(frozen=True)
class Entry:
    """One of their modules or tensors, and those of ours that it holds.

    Several of ours are joined along the rows: one after another, or, with `heads`, head by head.
    """

    theirs: str
    ours: tuple[str, ...]
    heads: int | None = None
    transposed: bool = False  # their weight is [inputs, outputs]
    leading: bool = False  # their tensor has a leading dimension of 1
    optional: bool = False  # zero if the file lacks it
    aliases: tuple[str, ...] = ()  # other names under which a file may repeat the tensor


Entries = Iterator[Entry]


@dataclass(frozen=True)
class Family:
    """Models with one `model_type`.

    `read` returns fields of ModelConfig, `write` fields of their config, and `entries` the names of
    all tensors. A family without `entries` is only approximated, to explain its cost.
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

    def is_computed(self, name: str) -> bool:
        """Returns whether a tensor is a table that follows from the config."""
        return re.fullmatch(self.computed, name) is not None


def renamed(theirs: str, ours: str, names: Mapping[str, str], **layout: Any) -> Entries:
    """Yields entries of a layer's modules: `names` maps theirs to ours, separated by spaces."""
    for their_name, our_names in names.items():
        yield Entry(
            f"{theirs}.{their_name}", tuple(f"{ours}.{one}" for one in our_names.split()), **layout
        )
