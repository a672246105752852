"""Linear projections: those that share an input are computed as one, and packed for inference."""

import torch
from torch import nn

from writehead.ops.linear import Weight
from writehead.ops.norm import Norm


def make_projection(inputs: int, outputs: int, *, bias: bool = False) -> nn.Linear:
    """Returns a projection that keeps the variance of its input."""
    P = nn.Linear(inputs, outputs, bias=bias)
    nn.init.normal_(P.weight, std=inputs**-0.5)
    if bias:
        nn.init.zeros_(P.bias)
    return P


class Projections(nn.Module):
    """A module that joins projections of the same input, by names such as "P_q P_k P_v"."""

    def __init__(self) -> None:
        super().__init__()
        self.packed: dict[str, Weight] = {}

    @property
    def is_int8(self) -> bool:
        """Whether int8 weights have replaced the parameters."""
        return any(weight.is_quantized for weight in self.packed.values())

    def weight(self, names: str, norm: Norm | None = None) -> Weight:
        """Returns the named projections, with the norm of their input, as one weight."""
        packed = self.packed.get(names)
        if packed is not None and packed.is_usable:
            return packed
        first, *others = (getattr(self, name) for name in names.split())
        W, bias = first.weight, first.bias
        if others:
            W = torch.cat([W, *(P.weight for P in others)])
            bias = None if bias is None else torch.cat([bias, *(P.bias for P in others)])
        return Weight(W, bias, norm)

    def pack(
        self, norm: Norm | None, *names: str, zero_bias: bool = False, **options: bool
    ) -> None:
        """Prepares joined weights with `Weight.pack`; `norm` and `zero_bias` are for the first."""
        self.packed = {}
        for one in names:
            self.packed[one] = self.weight(one, norm).fold(zero_bias=zero_bias).pack(**options)
            norm, zero_bias = None, False
        if self.is_int8:
            self.to("meta")  # frees the parameters
