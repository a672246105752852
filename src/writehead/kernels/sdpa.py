"""Attention by PyTorch's fused `scaled_dot_product_attention`, arranged to share write-heads."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from writehead.kernels.visibility import Visibility

FEW = 16  # queries a row, from which on folding read-heads into them only costs a copy of Q


def supports(Q: Tensor, K: Tensor, V: Tensor, visibility: Visibility) -> str | None:
    """None, or the sentence that says why the fused kernels cannot do this."""
    k, v = K.shape[3], V.shape[3]
    if k != v:
        return f"the fused kernels of PyTorch need k = v; they are {k} and {v}"
    return None


def attend(Q: Tensor, K: Tensor, V: Tensor, visibility: Visibility, scale: float) -> Tensor:
    """[b,h,n,k] [b,g,m,k] [b,g,m,v] -> [b,h,n,v].

    `enable_gqa` is left alone: under a mask it falls back to a path that repeats K and V.
    """
    b, h, n, k = Q.shape
    g, m, v = K.shape[1], K.shape[2], V.shape[3]
    mask, causal = _arguments(visibility, n, m, Q.device)
    if n < FEW and not causal and (mask is None or mask.shape[2] == 1):
        # all queries see the same, so those of all read-heads (and beams) that share a write-head
        # become queries of one head, and K and V are read once
        Q = Q.reshape(b, g, h // g * n, k)
    elif g < h:
        # write-heads join the batch, and their read-heads see them through a stride of zero
        Q = Q.reshape(b * g, h // g, n, k)
        K = K.reshape(b * g, 1, m, k).expand(-1, h // g, -1, -1)
        V = V.reshape(b * g, 1, m, v).expand(-1, h // g, -1, -1)
        if mask is not None and mask.shape[0] > 1:
            mask = mask.repeat_interleave(g, dim=0)
    O = scaled_dot_product_attention(  # noqa: E741
        Q, K, V, attn_mask=mask, is_causal=causal, scale=scale
    )
    O = O.reshape(b, h, n, v)  # noqa: E741
    blind = None if mask is None else visibility.blind(n, m, Q.device)
    # PyTorch leaves a row that sees nothing undefined; here it is zero
    return O if blind is None else O.masked_fill(blind, 0.0)


def _arguments(
    visibility: Visibility, n: int, m: int, device: torch.device
) -> tuple[Tensor | None, bool]:
    """The mask to pass, or none and whether PyTorch's own causal triangle says it all."""
    if visibility.causal and visibility.is_whole and n == m:
        return None, True
    return visibility.mask(n, m, device), False
