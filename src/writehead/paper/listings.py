"""§2-3: the paper's six functions in PyTorch, einsum for einsum. The reference for the tests.

The library does not call these functions. Names are the paper's and, as in the paper, the logits
are not scaled (§2.2: the scale can be folded into P_q). Comments mark errors in the paper.
"""

from torch import Tensor, cat, einsum, softmax


def DotProductAttention(q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    """§2.1: attention of one query q [k] over K [m, k] and V [m, v]: y [v]."""
    logits = einsum("k,mk->m", q, K)
    weights = softmax(logits, dim=-1)
    return einsum("m,mv->v", weights, V)


def MultiheadAttention(
    x: Tensor, M: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor
) -> Tensor:
    """§2.2: multi-head attention of one vector x [d] over M [m, d]: y [d].

    P_q, P_k: [h, d, k]. P_v, P_o: [h, d, v].
    """
    q = einsum("d,hdk->hk", x, P_q)
    K = einsum("md,hdk->hmk", M, P_k)
    V = einsum("md,hdv->hmv", M, P_v)
    logits = einsum("hk,hmk->hm", q, K)
    weights = softmax(logits, dim=-1)
    o = einsum("hm,hmv->hv", weights, V)
    return einsum("hv,hdv->d", o, P_o)


def MultiheadAttentionBatched(
    X: Tensor, M: Tensor, mask: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor
) -> Tensor:
    """§2.3: multi-head attention of X [b, n, d] over M [b, m, d]: Y [b, n, d].

    mask: [b, h, n, m], -inf in the illegal positions. P_q, P_k: [h, d, k]. P_v, P_o: [h, d, v].
    """
    Q = einsum("bnd,hdk->bhnk", X, P_q)
    K = einsum("bmd,hdk->bhmk", M, P_k)
    V = einsum("bmd,hdv->bhmv", M, P_v)
    logits = einsum("bhnk,bhmk->bhnm", Q, K)
    weights = softmax(logits + mask, dim=-1)
    O = einsum("bhnm,bhmv->bhnv", weights, V)  # noqa: E741
    return einsum("bhnv,hdv->bnd", O, P_o)


def MultiheadSelfAttentionIncremental(
    x: Tensor, prev_K: Tensor, prev_V: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """§2.4: one step of multi-head self-attention, x [b, d]: y [b, d], new_K, new_V.

    prev_K: [b, h, m, k], prev_V: [b, h, m, v]; the new ones have m+1 positions.
    """
    q = einsum("bd,hdk->bhk", x, P_q)
    # printed "M" where the step's x is meant
    new_K = cat([prev_K, einsum("bd,hdk->bhk", x, P_k).unsqueeze(2)], dim=2)
    # printed "M" where the step's x is meant
    new_V = cat([prev_V, einsum("bd,hdv->bhv", x, P_v).unsqueeze(2)], dim=2)
    logits = einsum("bhk,bhmk->bhm", q, new_K)
    weights = softmax(logits, dim=-1)
    o = einsum("bhm,bhmv->bhv", weights, new_V)
    # printed "O" where the step's o is meant
    y = einsum("bhv,hdv->bd", o, P_o)
    return y, new_K, new_V


def MultiqueryAttentionBatched(
    X: Tensor, M: Tensor, mask: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor
) -> Tensor:
    """§3: multi-query attention of X [b, n, d] over M [b, m, d]: Y [b, n, d].

    mask: [b, h, n, m]. P_q: [h, d, k]. P_k: [d, k]. P_v: [d, v] (printed "d, v]"). P_o: [h, d, v].
    """
    Q = einsum("bnd,hdk->bhnk", X, P_q)
    K = einsum("bmd,dk->bmk", M, P_k)
    V = einsum("bmd,dv->bmv", M, P_v)
    logits = einsum("bhnk,bmk->bhnm", Q, K)
    weights = softmax(logits + mask, dim=-1)
    O = einsum("bhnm,bmv->bhnv", weights, V)  # noqa: E741
    return einsum("bhnv,hdv->bnd", O, P_o)


def MultiquerySelfAttentionIncremental(
    x: Tensor, prev_K: Tensor, prev_V: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """§3: one step of multi-query self-attention, x [b, d]: y [b, d], K, V.

    prev_K: [b, m, k], prev_V: [b, m, v]; the new ones (which the paper calls K and V here) have
    m+1 positions.
    """
    q = einsum("bd,hdk->bhk", x, P_q)
    # printed "M" for x, and axis=2, which is k: the memory is axis 1 of [b, m, k]
    K = cat([prev_K, einsum("bd,dk->bk", x, P_k).unsqueeze(1)], dim=1)
    # printed "M" for x, and axis=2, which is v: the memory is axis 1 of [b, m, v]
    V = cat([prev_V, einsum("bd,dv->bv", x, P_v).unsqueeze(1)], dim=1)
    logits = einsum("bhk,bmk->bhm", q, K)
    weights = softmax(logits, dim=-1)
    o = einsum("bhm,bmv->bhv", weights, V)
    # printed "O" where the step's o is meant
    y = einsum("bhv,hdv->bd", o, P_o)
    return y, K, V
