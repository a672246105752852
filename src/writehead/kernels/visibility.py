"""Which memory positions a query may read, told by structure rather than by a mask.

A kernel that knows lengths, windows and segments can skip what is not visible; `mask` turns the
same facts into booleans for a backend that cannot.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from writehead.errors import ConfigError, ShapeError


@dataclass(frozen=True, eq=False)
class Visibility:
    """What n queries a row may see of m memory positions; by default, everything.

    causal: a query sees no position after its own.
    window: a query sees its own position and the window-1 before it, no earlier one.
    lengths: [b], the memory positions that exist; the rest is padding.
    query_positions: [b, n], where each query stands; by default 0, 1, … n-1.
    memory_positions: [b, m], where each memory slot stands, negative for an empty one; by default
      0, 1, … m-1.
    query_segments, memory_segments: [b, n] and [b, m]: a query sees its own segment only, and
      segment 0 is padding, which neither sees nor is seen.
    ancestors: [b, m], the row of K and V that holds each row's memory; by default its own. It
      says where to read, not what is visible, so `mask` takes no note of it.

    All layers of a step see alike, so masks are made once and kept: the tensors must not change.
    """

    causal: bool = False
    window: int | None = None
    lengths: Tensor | None = None
    query_positions: Tensor | None = None
    memory_positions: Tensor | None = None
    query_segments: Tensor | None = None
    memory_segments: Tensor | None = None
    ancestors: Tensor | None = None

    # of an instance; called the class's so that it is no field: a copy makes its own masks
    _kept: ClassVar[dict[tuple[str, int, int, torch.device], Tensor | None]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_kept", {})
        if self.window is not None and self.window < 1:
            raise ConfigError(f"window={self.window} must be at least 1, the query's own position")
        if (self.query_segments is None) != (self.memory_segments is None):
            raise ShapeError("give both query_segments and memory_segments, or neither")

    @property
    def is_whole(self) -> bool:
        """Whether nothing but `causal` limits a query."""
        limits = (self.window, self.lengths, self.query_positions, self.memory_positions)
        return all(limit is None for limit in (*limits, self.query_segments, self.memory_segments))

    def check(self, b: int, n: int, m: int, device: torch.device) -> None:
        """Raises unless all that is given fits b rows of n queries and m memory positions."""
        for name, shape in (
            ("lengths", [b]),
            ("query_positions", [b, n]),
            ("memory_positions", [b, m]),
            ("query_segments", [b, n]),
            ("memory_segments", [b, m]),
            ("ancestors", [b, m]),
        ):
            T: Tensor | None = getattr(self, name)
            if T is None:
                continue
            if list(T.shape) != shape or T.is_floating_point():
                raise ShapeError(
                    f"{name} is {T.dtype} {list(T.shape)}; Q, K and V need integers {shape}"
                )
            if T.device != device:
                raise ShapeError(f"{name} is on {T.device} and Q on {device}; move them together")
        # on another device, looking would wait for it
        rows = self.ancestors if device.type == "cpu" else None
        if rows is not None and bool(((rows < 0) | (rows >= b)).any()):
            raise ShapeError(f"ancestors must be rows of K and V, from 0 to {b - 1}")

    def mask(self, n: int, m: int, device: torch.device) -> Tensor | None:
        """The visible pairs as booleans that broadcast to [b, 1, n, m]; None where all are."""
        key = ("mask", n, m, device)
        if key not in self._kept:
            self._kept[key] = self._make_mask(n, m, device)
        return self._kept[key]

    def blind(self, n: int, m: int, device: torch.device) -> Tensor | None:
        """The queries that see nothing, booleans that broadcast to [b, 1, n, 1]; as in `mask`."""
        key = ("blind", n, m, device)
        if key not in self._kept:
            mask = self.mask(n, m, device)
            self._kept[key] = None if mask is None else ~mask.any(dim=-1, keepdim=True)
        return self._kept[key]

    def _make_mask(self, n: int, m: int, device: torch.device) -> Tensor | None:
        visible: Tensor | None = None

        def also(condition: Tensor) -> None:
            nonlocal visible
            visible = condition if visible is None else visible & condition

        # [b or 1, n, 1] against [b or 1, 1, m]
        i = _positions(self.query_positions, n, device).unsqueeze(-1)
        j = _positions(self.memory_positions, m, device).unsqueeze(-2)
        if self.causal:
            also(j <= i)
        if self.window is not None:
            also(j > i - self.window)
        if self.memory_positions is not None:
            also(j >= 0)
        if self.lengths is not None:
            slots = torch.arange(m, device=device)
            also((slots < self.lengths.unsqueeze(-1)).unsqueeze(-2))
        if self.query_segments is not None and self.memory_segments is not None:
            reader = self.query_segments.unsqueeze(-1)
            also((reader == self.memory_segments.unsqueeze(-2)) & (reader != 0))
        return None if visible is None else visible.unsqueeze(1)


def _positions(given: Tensor | None, count: int, device: torch.device) -> Tensor:
    return given if given is not None else torch.arange(count, device=device).unsqueeze(0)
