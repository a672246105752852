"""Rotary positions (RoFormer): queries and keys are rotated by angles that grow with position."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scaling:
    """Lower frequencies for more positions than a model was first trained with, as in Llama 3.1.

    Frequencies with fewer than `low` turns in `original` positions (or all, if it is None) are
    divided by `factor`. Those with more than `high` turns are kept; the rest are interpolated.
    """

    factor: float = 1.0
    original: int | None = None
    low: float = 1.0
    high: float = 4.0

    def apply(self, frequencies: Tensor) -> Tensor:
        """Returns the scaled frequencies."""
        if self.original is None:
            return frequencies / self.factor
        turns = self.original * frequencies / (2 * math.pi)
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
        return frequencies * (kept + (1.0 - kept) / self.factor)


@dataclass(frozen=True, eq=False)
class Rotary:
    """Cosines and sines of the angles of each position; elements i and i + k/2 form a pair."""

    cos: Tensor  # [positions, k/2] float32
    sin: Tensor  # [positions, k/2] float32
    _copies: dict[torch.device, "Rotary"] = field(default_factory=dict, repr=False)

    @classmethod
    def make(cls, positions: int, k: int, base: float, scaling: Scaling) -> "Rotary":
        """Computes the angles p · base^(-2i/k) of positions p and pairs i, which may be scaled."""
        # on the CPU even where tensors are made on the meta device, which computes nothing
        exponents = torch.arange(0, k, 2, dtype=torch.float64, device="cpu") / k
        numbers = torch.arange(positions, dtype=torch.float64, device="cpu")
        angles = numbers.unsqueeze(1) * scaling.apply(base**-exponents)
        return cls(angles.cos().float(), angles.sin().float())

    def on(self, device: torch.device) -> "Rotary":
        """Returns a copy on a device, which is made once."""
        if device not in self._copies:
            self._copies[device] = Rotary(self.cos.to(device), self.sin.to(device))
        return self._copies[device]


def rotate(X: Tensor, positions: Tensor, rotary: Rotary) -> Tensor:
    """Rotates X [..., heads, n, k] by `positions` [..., n]; computes in float32 or better."""
    cos, sin = (T[positions].unsqueeze(-3) for T in (rotary.cos, rotary.sin))  # [..., 1, n, k/2]
    first, second = X.to(torch.promote_types(X.dtype, torch.float32)).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(X.dtype)
