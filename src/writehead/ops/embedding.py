"""Embeds tokens and their positions, and computes the table of sinusoidal positions."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from writehead.errors import ShapeError
from writehead.ops.available import choose_implementation, why_not_kernel
from writehead.ops.launch import launch_pdl, tl, triton, wait_for_previous


@dataclass(frozen=True, eq=False)
class QuantizedTable:
    """A table [rows, d] in int8, with a scale for each row; see `quantize_rows`."""

    codes: Tensor  # [rows, d] int8
    scales: Tensor  # [rows, 1]

    def __len__(self) -> int:
        return len(self.codes)

    def look_up(self, tokens: Tensor) -> Tensor:
        """Returns the rows [..., d] of tokens [...]."""
        return F.embedding(tokens, self.codes) * F.embedding(tokens, self.scales)


def embed(
    tokens: Tensor,
    E: Tensor | QuantizedTable,
    *,
    positions: Tensor | None = None,
    P: Tensor | None = None,
    scale: float = 1.0,
    slots: Tensor | None = None,
    beam: int = 1,
    implementation: str = "auto",
) -> Tensor:
    """Returns E[tokens] · scale + P[positions] in the dtype of E, [..., d].

    tokens: [...]. positions: broadcastable to tokens; positions past the end of P use its last row.
    With slots [R], tokens and positions are those of all cache rows, and the result is [R beam, d]:
    for each slot s, rows s · beam to s · beam + beam - 1.
    """
    if (positions is None) != (P is None):
        raise ShapeError("give both positions and P, or neither")
    if slots is not None and tokens.dim() != 1:
        raise ShapeError(f"with slots, tokens must be [rows], not {list(tokens.shape)}")
    if positions is not None:
        positions = positions.expand_as(tokens)
    reasons = {"triton": _why_not_triton(E, P), "reference": None}
    if choose_implementation("embedding", implementation, reasons) == "triton":
        assert isinstance(E, Tensor)
        shape, d = tokens.shape if slots is None else (len(slots) * beam,), E.shape[1]
        X = torch.empty(*shape, d, dtype=E.dtype, device=E.device)
        added = None
        if positions is not None and P is not None:
            added = positions.reshape(-1), P, P.stride(0), len(P) - 1
        launch_pdl(embed_kernel, (X.numel() // d,), E)(
            *(tokens.reshape(-1), slots, E, added, X, E.stride(0), beam, d, float(scale)),
            SIZE=triton.next_power_of_2(d),
            num_warps=4,
        )
        return X
    if slots is not None:
        beams = torch.arange(beam, device=tokens.device)
        rows = (slots.long().unsqueeze(1) * beam + beams).flatten()
        tokens, positions = tokens[rows], None if positions is None else positions[rows]
    X = E.look_up(tokens) if isinstance(E, QuantizedTable) else F.embedding(tokens, E)
    X = X if scale == 1.0 else X * scale
    if positions is None or P is None:
        return X
    return X + F.embedding(positions.clamp(max=len(P) - 1), P).to(X.dtype)


def _why_not_triton(E: Tensor | QuantizedTable, P: Tensor | None) -> str | None:
    """Returns why the kernel cannot run, or None."""
    if isinstance(E, QuantizedTable):
        return "the table is quantized"
    if reason := why_not_kernel(E, P):
        return reason
    if any(T is not None and T.stride(1) != 1 for T in (E, P)):
        return "the columns of E and P must be contiguous"
    return None


def sinusoidal(
    positions: int, d: int, denominator: str = "d", *, device: torch.device | None = None
) -> Tensor:
    """Returns the table [positions, d] of sines, then cosines, of position · 10000^(-2i/d).

    Vaswani et al. interleave sines and cosines; we do not. With denominator="d-2", the exponent is
    -2i/(d-2), so that the lowest frequency is 1/10000.
    """
    i = torch.arange((d + 1) // 2, dtype=torch.float64, device=device)
    position = torch.arange(positions, dtype=torch.float64, device=device)
    exponents = -2.0 * i / (max(d - 2, 1) if denominator == "d-2" else d)
    angles = position.unsqueeze(1) * 10000.0**exponents  # [positions, d/2]
    return torch.cat([angles.sin(), angles[:, : d // 2].cos()], dim=1).float()


@triton.jit
def embed_kernel(
    tokens, slots, E, added, X, stride, beam, d, scale, SIZE: tl.constexpr, PDL: tl.constexpr
):
    """Computes one row of X per program; added: positions, P, its stride and its last row."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    source = row
    if slots is not None:
        source = tl.load(slots + row // beam).to(tl.int64) * beam + row % beam
    j = tl.arange(0, SIZE)
    token = tl.load(tokens + source).to(tl.int64)
    x = tl.load(E + token * stride + j, mask=j < d, other=0.0).to(tl.float32) * scale
    if added is not None:
        positions, P, p_stride, last = added
        position = tl.minimum(tl.load(positions + source).to(tl.int64), last)
        x += tl.load(P + position * p_stride + j, mask=j < d, other=0.0).to(tl.float32)
    tl.store(X + row * d + j, x.to(X.dtype.element_ty), mask=j < d)
