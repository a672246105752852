"""§2.3, §3 in plain PyTorch: two batched products and a softmax, the backend that can do all."""

import torch
from torch import Tensor

from writehead.kernels.visibility import Visibility


def supports(Q: Tensor, K: Tensor, V: Tensor, visibility: Visibility) -> str | None:
    """None: this backend refuses nothing."""
    return None


def attend(Q: Tensor, K: Tensor, V: Tensor, visibility: Visibility, scale: float) -> Tensor:
    """[b,h,n,k] [b,g,m,k] [b,g,m,v] -> [b,h,n,v], softmax in float32 or the inputs' float64.

    The h/g read-heads that share a write-head are rows of one product, so K and V are not
    repeated.
    """
    b, h, n, k = Q.shape
    g, m, v = K.shape[1], K.shape[2], V.shape[3]
    Q = Q.reshape(b, g, h // g * n, k)
    logits = torch.matmul(Q, K.transpose(-1, -2))  # [b, g, h/g n, m]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
    mask, blind = visibility.mask(n, m, Q.device), visibility.blind(n, m, Q.device)
    if mask is None or blind is None:
        weights = torch.softmax(logits, dim=-1)
    else:
        logits = logits.view(b, h, n, m).masked_fill(~mask, float("-inf"))
        weights = torch.softmax(logits, dim=-1)
        # the softmax of a row that sees nothing is 0/0; here it is zero
        weights = weights.masked_fill(blind, 0.0)
        weights = weights.view(b, g, h // g * n, m)
    return torch.matmul(weights.to(V.dtype), V).view(b, h, n, v)
