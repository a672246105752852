"""Describes which memory positions a query may read.

Kernels skip positions that lengths, windows and segments hide. Other implementations of attention
use the equivalent `mask`.
"""

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from writehead.errors import ConfigError, ShapeError

Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class Visibility:
    """Which of m memory positions the n queries of a row may read; by default, all.

    Masks and spans are computed once and shared by all layers, so the tensors must not change.
    """

    causal: bool = False  # a query sees no position after its own
    window: int | None = None  # a query sees its own position and the window - 1 before it
    lengths: Tensor | None = None  # [b], the memory positions that are not padding
    query_positions: Tensor | None = None  # [b, n], instead of 0, 1, …
    query_segments: Tensor | None = None  # [b, n], a query sees its own segment only
    memory_segments: Tensor | None = None  # [b, m]; 0 is padding: sees nothing, never seen

    # what `cached` has computed; an argument, because FSDP copies by the arguments
    _results: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ConfigError(f"window={self.window} must be at least 1, the query's own position")
        if (self.query_segments is None) != (self.memory_segments is None):
            raise ShapeError("give both query_segments and memory_segments, or neither")

    @property
    def is_only_causal(self) -> bool:
        """Whether `causal` and nothing else limits a query."""
        limits = (self.window, self.lengths, self.query_positions, self.query_segments)
        return self.causal and all(limit is None for limit in limits)

    def check(self, b: int, n: int, m: int, device: torch.device) -> None:
        """Raises unless the tensors fit b rows of n queries and m memory positions."""
        shapes = {"lengths": [b], "query_positions": [b, n]}
        shapes |= {"query_segments": [b, n], "memory_segments": [b, m]}
        for name, shape in shapes.items():
            T: Tensor | None = getattr(self, name)
            if T is None:
                continue
            if list(T.shape) != shape or T.is_floating_point():
                raise ShapeError(
                    f"{name} is {T.dtype} {list(T.shape)}; Q, K and V need integers {shape}"
                )
            if T.device != device:
                raise ShapeError(f"{name} is on {T.device} and Q on {device}; move them together")

    def mask(self, n: int, m: int, device: torch.device) -> Tensor | None:
        """Returns whether each pair is visible, broadcastable to [b, 1, n, m]; None if all are."""
        return self.cached(("mask", n, m, device), lambda: self._make_mask(n, m, device))

    def fully_masked(self, n: int, m: int, device: torch.device) -> Tensor | None:
        """Returns whether a query sees nothing, broadcastable to [b, 1, n, 1]; None as `mask`."""
        mask = self.mask(n, m, device)
        if mask is None:
            return None
        return self.cached(("fully_masked", n, m, device), lambda: ~mask.any(dim=-1, keepdim=True))

    def cached(self, key: Hashable, compute: Callable[[], Result]) -> Result:
        """Returns the result of `compute`, computed once for each key."""
        if key not in self._results:
            self._results[key] = compute()
        result: Result = self._results[key]
        return result

    def _make_mask(self, n: int, m: int, device: torch.device) -> Tensor | None:
        conditions: list[Tensor] = []  # each broadcastable to [b, n, m]
        i, j = (torch.arange(count, device=device) for count in (n, m))
        i = (i if self.query_positions is None else self.query_positions).unsqueeze(-1)
        if self.causal:
            conditions.append(j <= i)
        if self.window is not None:
            conditions.append(j > i - self.window)
        if self.lengths is not None:
            conditions.append(j < self.lengths.view(-1, 1, 1))
        if self.query_segments is not None and self.memory_segments is not None:
            segments = self.query_segments.unsqueeze(-1)
            conditions.append((segments == self.memory_segments.unsqueeze(-2)) & (segments != 0))
        if not conditions:
            return None
        visible = functools.reduce(torch.bitwise_and, conditions)
        return visible.view(-1, 1, *visible.shape[-2:])
