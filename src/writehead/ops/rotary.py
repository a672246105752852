"""Rotary positions (RoFormer): queries and keys are rotated by angles that grow with position."""

from dataclasses import dataclass

import torch
from torch import Tensor

from writehead.errors import ConfigError


@dataclass(frozen=True, eq=False)
class Rotary:
    """Cosines and sines of the angles of each position; elements i and i + k/2 form a pair."""

    cos: Tensor  # [positions, k/2] float32
    sin: Tensor  # [positions, k/2] float32

    @classmethod
    def make(
        cls, positions: int, k: int, base: float = 1e4, *, device: torch.device | str | None = None
    ) -> "Rotary":
        """Computes the angles p · base^(-2i/k) of positions p and pairs i."""
        if positions < 1 or k < 2 or k % 2 or not base > 0.0:
            raise ConfigError(
                f"positions={positions}, k={k}, base={base}: rotary positions need at least one "
                f"position, an even k and a base above 0"
            )
        frequencies = base ** -(torch.arange(0, k, 2, dtype=torch.float64) / k)
        angles = torch.arange(positions, dtype=torch.float64).unsqueeze(1) * frequencies
        return cls(angles.cos().float().to(device), angles.sin().float().to(device))


class LazyRotary:
    """A `Rotary` for the layers of a stack, computed for each device when first needed."""

    def __init__(self, positions: int, k: int, base: float) -> None:
        self._sizes = positions, k, base
        self._made: dict[torch.device, Rotary] = {}

    def on(self, device: torch.device) -> Rotary:
        """Returns the `Rotary` on a device."""
        if device not in self._made:
            self._made[device] = Rotary.make(*self._sizes, device=device)
        return self._made[device]


def rotate(X: Tensor, positions: Tensor, rotary: Rotary) -> Tensor:
    """Rotates X [..., heads, n, k] by `positions` [..., n]; computes in float32 or better."""
    cos, sin = (T[positions].unsqueeze(-3) for T in (rotary.cos, rotary.sin))  # [..., 1, n, k/2]
    first, second = X.to(torch.promote_types(X.dtype, torch.float32)).chunk(2, dim=-1)
    rotated = first * cos - second * sin, second * cos + first * sin
    return torch.cat(rotated, dim=-1).to(X.dtype)
