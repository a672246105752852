"""Embeds tokens and their positions, and computes the table of sinusoidal positions."""

import torch
from torch import Tensor
from torch.nn import functional

from writehead.errors import ShapeError
from writehead.ops.available import choose_implementation, runs_triton


def embed(
    tokens: Tensor,
    E: Tensor,
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
    chosen = choose_implementation("embedding", implementation, reasons)
    compute = _triton if chosen == "triton" else _reference
    return compute(tokens, E, positions, P, scale, slots, beam)


def sinusoidal(positions: int, d: int, *, device: torch.device | None = None) -> Tensor:
    """Returns the table [positions, d] of sines, then cosines, of position · 10000^(-2i/d).

    Vaswani et al. interleave sines and cosines; like Marian, we do not.
    """
    i = torch.arange((d + 1) // 2, dtype=torch.float64, device=device)
    position = torch.arange(positions, dtype=torch.float64, device=device)
    angles = position.unsqueeze(1) * 10000.0 ** (-2.0 * i / d)  # [positions, d/2]
    return torch.cat([angles.sin(), angles[:, : d // 2].cos()], dim=1).float()


def _why_not_triton(E: Tensor, P: Tensor | None) -> str | None:
    """Returns why the kernel does not support the arguments, or None."""
    tables = [T for T in (E, P) if T is not None]
    if not runs_triton(E):
        return f"Triton does not run on {E.device}"
    if torch.is_grad_enabled() and any(T.requires_grad for T in tables):
        return "the kernel has no gradient"
    if any(T.stride(1) != 1 for T in tables):
        return "the columns of E and P must be contiguous"
    return None


def _reference(
    tokens: Tensor,
    E: Tensor,
    positions: Tensor | None,
    P: Tensor | None,
    scale: float,
    slots: Tensor | None,
    beam: int,
) -> Tensor:
    if slots is not None:
        rows = (slots.long().unsqueeze(1) * beam + torch.arange(beam, device=E.device)).flatten()
        tokens, positions = tokens[rows], None if positions is None else positions[rows]
    X = functional.embedding(tokens, E)
    X = X if scale == 1.0 else X * scale
    if positions is None or P is None:
        return X
    return X + functional.embedding(positions.clamp(max=len(P) - 1), P).to(X.dtype)


def _triton(
    tokens: Tensor,
    E: Tensor,
    positions: Tensor | None,
    P: Tensor | None,
    scale: float,
    slots: Tensor | None,
    beam: int,
) -> Tensor:
    from writehead.ops.embedding_kernels import embed_kernel  # needs Triton
    from writehead.ops.launch import launch, pdl

    d = E.shape[1]
    shape = tokens.shape if slots is None else (len(slots) * beam,)
    X = torch.empty(*shape, d, dtype=E.dtype, device=E.device)
    P = E if P is None else P
    options = pdl(E)
    launch(embed_kernel, (X.numel() // d,))(
        tokens.reshape(-1),
        tokens if positions is None else positions.reshape(-1),
        tokens if slots is None else slots,
        *(E, P, X, E.stride(0), P.stride(0), len(P) - 1, beam, d, float(scale)),
        SIZE=1 << (d - 1).bit_length(),
        POSITIONS=positions is not None,
        SLOTS=slots is not None,
        PDL=bool(options),
        num_warps=4,
        **options,
    )
    return X
