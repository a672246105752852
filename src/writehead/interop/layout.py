"""Converts tensors between the Hugging Face layout and ours, following a family's entries."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from writehead.errors import RunError, one_line
from writehead.interop.families import Entry, Family

Weights = dict[str, Tensor]
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
MAX_NAMED = 3  # tensors that a message names


@dataclass(frozen=True)
class Layout:
    """Hugging Face tensors by name, as entries of single tensors, for our weights of `shapes`."""

    family: Family
    shapes: Mapping[str, torch.Size]
    entries: Mapping[str, Entry]

    @classmethod
    def of(
        cls, family: Family, entries: Iterable[Entry], weights: Mapping[str, Tensor]
    ) -> "Layout":
        """Expands the modules of a family to the weights and biases that a model of ours has."""
        shapes = {name: W.shape for name, W in weights.items()}
        expanded: dict[str, Entry] = {}
        for entry in entries:
            if entry.ours[0] in shapes:
                expanded[entry.theirs] = entry
                continue
            for kind in ("weight", "bias"):
                if (names := tuple(f"{one}.{kind}" for one in entry.ours))[0] in shapes:
                    theirs, is_matrix = f"{entry.theirs}.{kind}", len(shapes[names[0]]) == 2
                    transposed = entry.transposed and is_matrix
                    expanded[theirs] = replace(
                        entry, theirs=theirs, ours=names, transposed=transposed
                    )
        return cls(family, shapes, expanded)

    def to_ours(self, theirs: Mapping[str, Tensor], origin: object) -> Weights:
        """Returns our weights; raises RunError if tensors are missing, unexpected or misshapen."""
        given = {self.family.full_name(name): T for name, T in theirs.items()}
        aliases = self._aliases()
        known = self.entries.keys() | aliases.keys()
        extra = [one for one in given if one not in known and not self.family.is_computed(one)]
        for alias, name in aliases.items():
            if alias not in given:
                continue
            if not _equal(given.setdefault(name, given[alias]), given[alias]):
                raise RunError(f"{origin}: {alias} differs from {name}, but they must be equal")
        missing = [name for name, e in self.entries.items() if not (e.optional or name in given)]
        for words, faulty in (("lacks", missing), ("has unexpected", extra)):
            if faulty:
                raise RunError(
                    f"{origin} {words} {_named(faulty)}; its weights and its config.json must "
                    f"belong together: download or copy the folder again"
                )
        weights: Weights = {}
        for name, entry in self.entries.items():
            shapes = [self.shapes[one] for one in entry.ours]
            empty = join(entry, [torch.empty(shape, device="meta") for shape in shapes])
            T = given.get(name)
            T = next(iter(given.values())).new_zeros(empty.shape) if T is None else T
            if T.dtype not in FLOATS:
                floats = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
                raise RunError(
                    f"{origin}: {name} has {T.dtype} values; use a model with weights in {floats}"
                )
            if T.shape != empty.shape:
                raise RunError(
                    f"{origin}: {name} has shape {list(T.shape)}, but its config.json needs "
                    f"{list(empty.shape)}; use the config.json that belongs to these weights"
                )
            # kernels need contiguous weights
            parts = [part.contiguous() for part in split(entry, T, shapes)]
            weights |= zip(entry.ours, parts, strict=True)
        return {name: weights[name] for name in self.shapes}

    def to_theirs(self, weights: Mapping[str, Tensor]) -> Weights:
        """Returns their tensors, under one name each."""
        return {
            name: join(entry, [weights[one] for one in entry.ours])
            for name, entry in self.entries.items()
        }

    def restore(
        self,
        weights: Mapping[str, Tensor],
        names: Sequence[str],
        computed: Mapping[str, Tensor],
        origin: object,
    ) -> Weights:
        """Returns their tensors under the names that a file had, and those that a model computes.

        Raises RunError unless these are all tensors of the model.
        """
        made = self.to_theirs(weights)
        aliases = self._aliases()
        full = {name: self.family.full_name(name) for name in names}
        covered = {aliases.get(name, name) for name in full.values()}
        left_out = self.entries.keys() - covered
        missing = [one for one in left_out if not self.entries[one].optional or made[one].any()]
        theirs = {name: made.get(aliases.get(one, one)) for name, one in full.items()}
        extra = [name for name, T in theirs.items() if T is None]
        wrong = [name for name in extra if not self.family.is_computed(full[name])]
        if missing or wrong or sorted(extra) != sorted(computed) or len(full) < len(names):
            differing = sorted({*missing, *wrong, *(computed.keys() ^ set(extra))})
            raise RunError(
                f"{origin} does not name each tensor of the model once: {_named(differing)}; "
                f"import the model again"
            )
        return {name: computed[name] if T is None else T for name, T in theirs.items()}

    def _aliases(self) -> dict[str, str]:
        return {alias: e.theirs for e in self.entries.values() for alias in e.aliases}


def split(entry: Entry, T: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Returns our tensors, of these shapes, that a Hugging Face tensor holds."""
    if entry.leading:
        T = T[0]
    if entry.transposed:
        T = T.t()
    if entry.heads is None:
        return list(torch.split(T, [shape[0] for shape in shapes]))
    heads = T.view(entry.heads, len(shapes), -1, *T.shape[1:])
    return [heads[:, i].flatten(0, 1) for i in range(len(shapes))]


def join(entry: Entry, tensors: Sequence[Tensor]) -> Tensor:
    """Reverses `split`."""
    T = tensors[0]
    if entry.heads is None:
        T = torch.cat([*tensors]) if len(tensors) > 1 else T
    else:
        parts = [one.reshape(entry.heads, -1, *one.shape[1:]) for one in tensors]
        T = torch.stack(parts, dim=1).flatten(0, 2)
    if entry.transposed:
        T = T.t()
    return T.unsqueeze(0) if entry.leading else T


def _equal(first: Tensor, second: Tensor) -> bool:
    return first.dtype == second.dtype and torch.equal(first, second)


def _named(names: Sequence[str]) -> str:
    """Lists the first few tensors, and counts the rest."""
    rest = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return one_line(", ".join(names[:MAX_NAMED]), 300) + rest
