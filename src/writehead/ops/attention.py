"""Attention over a whole memory (§2.3, §3): `attend`, and the choice of its implementation.

- "packed": Triton kernels for several sequences per row (`packed_attention.py`).
- "grouped": copies such sequences to padded rows, grouped by similar length.
- "sdpa": PyTorch's `scaled_dot_product_attention`.
- "eager": the reference, two matrix products and a softmax.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from writehead.errors import ConfigError, ShapeError
from writehead.ops import packed_attention
from writehead.ops.available import choose_implementation, needs_gradient
from writehead.ops.relative import bias_at
from writehead.ops.visibility import Visibility
from writehead.util.segments import padded_groups

# If the queries and positions are multiples of this, PyTorch's float32 kernels on a CPU round the
# results of a row alike in any batch.
INVARIANT_MULTIPLE = 16
GROUP_TOKENS = 256  # minimum per group, because small matrix products are slow
IMPLEMENTATIONS = ("packed", "grouped", "sdpa", "eager")
WHY_NOT_GROUPED = "grouping works only in inference, with shared and contiguous segments"
Groups = list[tuple[Visibility, Tensor, Tensor]]
MAX_FOLDED_QUERIES = 15  # with more queries, folding read-heads into them costs a copy of Q


def attend(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    visibility: Visibility | None = None,
    *,
    scale: float,
    bias: Tensor | None = None,
    noise: Tensor | None = None,
    fused: Tensor | None = None,
    batch_invariant: bool = False,
    implementation: str = "auto",
) -> Tensor:
    """Returns softmax(scale Q K^T) V: [b, h, n, k] [b, g, m, k] [b, g, m, v] -> [b, h, n, v].

    Read-head i reads write-head i // (h/g). The softmax is computed in float32 or better. A query
    that sees no position returns zeros. bias [h, …] is a table of relative positions, which are
    added to the logits (`ops/relative.py`). noise [b, g, m] multiplies the weights of each memory
    position; it has no gradient. fused [b, n, hk + gk + gv], if given, is the projection of which
    Q, K and V are views; its gradient may then be computed as one tensor.

    batch_invariant: a row has the same result, bit for bit, in any batch; on a CPU, for m <= 192.
    """
    visibility = visibility or Visibility()
    _check(Q, K, V, noise, bias)
    if not scale > 0.0:
        raise ConfigError(f"scale={scale} must be above 0; the usual value is k**-0.5")
    n, m, k, v = Q.shape[2], K.shape[2], Q.shape[3], V.shape[3]
    visibility.check(len(Q), n, m, Q.device)
    reasons = {
        "packed": packed_attention.why_not(Q, K, V, visibility)
        or (None if bias is None else "the kernels do not support a bias of relative positions"),
        "grouped": None if _can_group(Q, K, V, visibility, noise) else WHY_NOT_GROUPED,
        "sdpa": None if k == v else f"PyTorch's fused attention needs k = v, not {k} and {v}",
        "eager": None,
    }
    chosen = choose_implementation("attention", implementation, reasons)
    if chosen == "packed":
        return packed_attention.attend(Q, K, V, visibility, scale, noise, fused)
    if chosen == "grouped":
        return _grouped(
            visibility, Q, K, V, scale=scale, bias=bias, batch_invariant=batch_invariant
        )
    if noise is not None:  # multiplying the values has the same effect
        V = (V * noise.unsqueeze(3)).to(V.dtype)
    if bias is not None:
        i, j = visibility.query_positions, torch.arange(m, device=Q.device)
        i = torch.arange(n, device=Q.device) if i is None else i
        bias = bias_at(bias, i.unsqueeze(-1) - j)  # [h, n, m] or [b, h, n, m]
    causal = chosen == "sdpa" and visibility.is_only_causal and n == m and bias is None
    mask = None if causal else visibility.mask(n, m, Q.device)
    empty = None if causal else visibility.fully_masked(n, m, Q.device)
    if batch_invariant:
        more_n, more_m = -n % INVARIANT_MULTIPLE, -m % INVARIANT_MULTIPLE
        Q, K, V = (pad(T, (0, 0, 0, more)) for T, more in ((Q, more_n), (K, more_m), (V, more_m)))
        bias = None if bias is None else pad(bias, (0, more_m, 0, more_n))
        if not causal:
            mask = torch.ones(1, 1, 1, m, device=Q.device).bool() if mask is None else mask
            mask = pad(mask, (0, more_m, 0, more_n if mask.shape[2] > 1 else 0))
    if chosen == "sdpa":
        if bias is not None:  # a row of minus infinity would have a gradient of NaN
            bias = bias.to(Q.dtype).view(-1, *bias.shape[-3:])
            mask = bias if mask is None else torch.where(mask, bias, torch.finfo(Q.dtype).min)
        O = attend_sdpa(Q, K, V, mask, scale, causal=causal)[:, :, :n]  # noqa: E741
    else:
        O = _attend_eager(Q, K, V, mask, scale, bias)[:, :, :n]  # noqa: E741
    return O if empty is None else O.masked_fill(empty, 0.0)  # otherwise undefined


def _can_group(
    Q: Tensor, K: Tensor, V: Tensor, visibility: Visibility, noise: Tensor | None
) -> bool:
    others, segments = (visibility.lengths, visibility.query_positions), visibility.query_segments
    if segments is None or segments is not visibility.memory_segments:
        return False
    if any(one is not None for one in (*others, noise)) or needs_gradient(Q, K, V) or Q.is_meta:
        return False
    if torch.compiler.is_compiling() or (Q.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    return visibility.cached("groups", lambda: _groups(visibility, segments)) is not None


def _groups(visibility: Visibility, segments: Tensor) -> Groups | None:
    groups, limits = padded_groups(segments, GROUP_TOKENS), (visibility.causal, visibility.window)
    if groups is None:
        return None
    return [(Visibility(*limits, rows.lengths), *rows[1:]) for rows in groups]


def _grouped(visibility: Visibility, *QKV: Tensor, **options: Any) -> Tensor:
    """Attends within each segment of a row; `_can_group` has cached the groups."""
    (b, h, n, _), v = QKV[0].shape, QKV[2].shape[3]
    O = QKV[0].new_zeros(b, n, h, v)  # noqa: E741
    flat = [T.transpose(1, 2).flatten(0, 1) for T in QKV]  # [b n, heads, depth]
    for limits, elements, own in visibility.cached("groups", Groups):
        Q, K, V = (T[elements].transpose(1, 2) for T in flat)  # [segments, heads, m, depth]
        found = attend(Q, K, V, limits, **options).transpose(1, 2).flatten(0, 1)
        O.flatten(0, 1).index_copy_(0, elements.flatten()[own], found[own])
    return O.transpose(1, 2)


def _attend_eager(
    Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None, scale: float, bias: Tensor | None
) -> Tensor:
    """Computes read-heads that share a write-head as one product, without repeating K and V."""
    (b, h, n, k), (_, g, m, v) = Q.shape, V.shape
    logits = torch.matmul(Q.reshape(b, g, h // g * n, k), K.mT)  # [b, g, h/g n, m]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
    logits = logits.view(b, h, n, m) if bias is None else logits.view(b, h, n, m) + bias
    if mask is not None:  # a row of minus infinity would be NaN
        logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
    weights = torch.softmax(logits, dim=-1).view(b, g, h // g * n, m)
    return torch.matmul(weights.to(V.dtype), V).view(b, h, n, v)


def attend_sdpa(
    Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None, scale: float, *, causal: bool = False
) -> Tensor:
    """Computes attention by SDPA, without `enable_gqa`, which would repeat K and V for a mask."""
    (b, h, n, k), (_, g, m, v) = Q.shape, V.shape
    if mask is not None and mask.shape[1] > 1:  # a bias per read-head
        Q, mask = Q.reshape(b, g, h // g * n, k), mask.reshape(len(mask), g, -1, m)
    elif n <= MAX_FOLDED_QUERIES and not causal and (mask is None or mask.shape[2] == 1):
        # all queries see the same positions, so the queries of read-heads that share a write-head
        # can be queries of one head, and K and V are read once
        Q = Q.reshape(b, g, h // g * n, k)
    elif g < h:
        # write-heads become part of the batch and are expanded to their read-heads by a stride of 0
        Q = Q.reshape(b * g, h // g, n, k)
        K = K.reshape(b * g, 1, m, k).expand(-1, h // g, -1, -1)
        V = V.reshape(b * g, 1, m, v).expand(-1, h // g, -1, -1)
        if mask is not None and mask.shape[0] > 1:
            mask = mask.repeat_interleave(g, dim=0)
    O = scaled_dot_product_attention(  # noqa: E741
        Q, K, V, attn_mask=mask, is_causal=causal, scale=scale
    )
    return O.reshape(b, h, n, v)


def _check(Q: Tensor, K: Tensor, V: Tensor, noise: Tensor | None, bias: Tensor | None) -> None:
    for name, T in (("Q", Q), ("K", K), ("V", V)):
        if T.dim() != 4 or 0 in T.shape:
            raise ShapeError(
                f"{name} has shape {list(T.shape)}; attend takes Q [b, h, n, k], K [b, g, m, k] "
                f"and V [b, g, m, v], none of them empty"
            )
        if not T.is_floating_point() or T.dtype != Q.dtype:
            raise ShapeError(f"{name} is {T.dtype}; Q, K and V must have one floating-point type")
    for name, other in (("K", K), ("V", V), ("noise", noise)):
        if other is not None and other.device != Q.device:
            raise ShapeError(f"{name} is on {other.device} and Q on {Q.device}; move them together")
    (b, h, _, k), (_, g, m, _) = Q.shape, K.shape
    if K.shape[:3] != V.shape[:3] or (b, k) != (K.shape[0], K.shape[3]) or h % g:
        raise ShapeError(
            f"Q {list(Q.shape)}, K {list(K.shape)} and V {list(V.shape)} do not fit; K and V need "
            f"the same [b, g, m], Q and K the same b and k, and g must divide h"
        )
    if noise is not None and (noise.shape != K.shape[:3] or not noise.is_floating_point()):
        raise ShapeError(
            f"noise is {noise.dtype} {list(noise.shape)}; it must be floating-point factors "
            f"[b, g, m] = {[b, g, m]}"
        )
    if bias is not None and (bias.dim() != 2 or len(bias) != h or bias.shape[1] % 2 == 0):
        raise ShapeError(f"bias is {list(bias.shape)}; it must be a table [h, 2 limit + 1]")
