"""The Triton kernel of `embedding.py`."""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from writehead.ops.launch import launch_dependents, wait_for_previous


@triton.jit
def embed_kernel(
    tokens,
    positions,
    slots,
    E,
    P,
    X,
    e_stride,
    p_stride,
    last_position,
    beam,
    d,
    scale,
    SIZE: tl.constexpr,
    POSITIONS: tl.constexpr,
    SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes one row of X per program."""
    wait_for_previous(PDL)
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    source = row
    if SLOTS:
        source = tl.load(slots + row // beam).to(tl.int64) * beam + row % beam
    j = tl.arange(0, SIZE)
    token = tl.load(tokens + source).to(tl.int64)
    x = tl.load(E + token * e_stride + j, mask=j < d, other=0.0).to(tl.float32) * scale
    if POSITIONS:
        position = tl.minimum(tl.load(positions + source).to(tl.int64), last_position)
        x += tl.load(P + position * p_stride + j, mask=j < d, other=0.0).to(tl.float32)
    tl.store(X + row * d + j, x.to(X.dtype.element_ty), mask=j < d)
