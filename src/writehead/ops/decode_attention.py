"""§2.4, §3: attention of one or a few new positions per row to a KV cache or encoder memory.

A slot holds one sequence in `beam` adjacent rows of the cache: beam j of slot s is cache row
s beam + j. A step computes the slots listed in `slots`, in any order. Row r of its activations is
beam r % beam of the (r // beam)-th listed slot. Slots that are not live are neither read nor
written, and their results are undefined.

Position p of a row is stored at cache position p % size. Beams share earlier positions without
copies: `ancestors` gives the beam whose row holds each cache position.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from writehead.errors import ShapeError
from writehead.ops.available import choose_implementation, runs_triton
from writehead.ops.heads import Heads
from writehead.ops.rotary import Rotary, rotate

MAX_TILE_ROWS = 128  # queries that one program of the kernel computes
KERNEL_DEPTHS = (16, 32, 64, 128, 256)  # of keys and values
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, eq=False)
class CacheLayer:
    """One layer of a KV cache, and the slots that a step computes."""

    K: Tensor  # [S beam, g, size, k]
    V: Tensor  # [S beam, g, size, v]
    lengths: Tensor  # [S beam] int64, positions before this step
    live: Tensor  # [S beam] int64, 0 for rows to ignore; the same for all beams of a slot
    ancestors: Tensor | None = None  # [S beam, size] int32, beams of the same slot
    beam: int = 1
    slots: Tensor | None = None  # [R] int32; None: the first slots, in order
    window: int | None = None  # at least `size`; positions that a query sees, including its own
    padded: bool = False  # read all cache positions, whatever the lengths
    bound: int | None = None  # upper bound of lengths, known to the host; for the reference
    counts: Tensor | None = None  # [R], how many of the n new positions to write; None: all


@dataclass(frozen=True, eq=False)
class MemoryLayer:
    """The encoder's K and V for one decoder layer, shared by the beams of a slot."""

    K: Tensor  # [S, g, m, k]; only the last dimension must be contiguous
    V: Tensor  # [S, g, m, v]
    lengths: Tensor  # [S] int64
    live: Tensor  # [S beam] int64
    beam: int = 1
    slots: Tensor | None = None
    padded: bool = False
    bound: int | None = None


@dataclass(frozen=True, eq=False)
class DeferredRms:
    """The RMS norm of X [rows, 1, d], which a projection of X has left to attention.

    The gain is already in the projection. What is left is one factor per row, which attention can
    apply for less than a separate kernel would cost.
    """

    X: Tensor
    epsilon: float

    def apply(self, Q: Tensor) -> Tensor:
        """Multiplies each row of the projection Q [rows, 1, columns] by 1 / RMS."""
        X = self.X.to(torch.promote_types(self.X.dtype, torch.float32))
        factors = (X.square().mean(dim=2, keepdim=True) + self.epsilon).rsqrt()
        return (Q * factors).to(Q.dtype)


def decode_attention(
    QKV: Tensor,
    cache: CacheLayer,
    heads: Heads,
    *,
    scale: float,
    rotary: Rotary | None = None,
    deferred: DeferredRms | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Appends n positions per row to the cache and returns their attention, [R beam, n, h v].

    QKV: [R beam, n, hk + gk + gv]. A position sees itself and the earlier positions of its row, as
    far as the window allows. Lengths and ancestors do not change. n > 1 requires beam = 1.
    """
    _check(QKV, sum(heads.widths), cache, heads)
    n = QKV.shape[1]
    if cache.beam > 1 and (cache.ancestors is None or n > 1):
        raise ShapeError(
            f"beam={cache.beam} with n={n} new positions: beams need ancestors and n = 1"
        )
    chosen = _choose(implementation, QKV, heads, n * (heads.h // heads.g))
    if chosen == "triton":
        from writehead.ops.decode_attention_kernels import attend

        return attend(QKV, cache, heads, scale, rotary, deferred=deferred, counts=cache.counts)
    QKV = QKV if deferred is None else deferred.apply(QKV)
    return _attend_cache(QKV, cache, heads, scale, rotary)


def memory_attention(
    Q: Tensor,
    memory: MemoryLayer,
    heads: Heads,
    *,
    scale: float,
    deferred: DeferredRms | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Returns the attention of Q [R beam, n, hk] to the memory of each slot, [R beam, n, h v].

    All queries of a slot see its first `lengths` positions. The result is 0 if there are none.
    """
    _check(Q, heads.widths[0], memory, heads)
    rows = memory.beam * Q.shape[1] * (heads.h // heads.g)
    if _choose(implementation, Q, heads, rows) == "triton":
        from writehead.ops.decode_attention_kernels import attend

        return attend(Q, memory, heads, scale, deferred=deferred)
    Q = Q if deferred is None else deferred.apply(Q)
    return _attend_memory(Q, memory, heads, scale)


def why_not_triton(Q: Tensor, heads: Heads, rows: int) -> str | None:
    """Returns why the kernel cannot compute tiles of `rows` queries, or None."""
    if not runs_triton(Q):
        return f"Triton kernels do not run on {Q.device}"
    if torch.is_grad_enabled() and Q.requires_grad:
        return "the kernel has no gradients"
    if Q.dtype not in KERNEL_DTYPES:
        return f"the kernel does not support {Q.dtype}"
    if heads.k not in KERNEL_DEPTHS or heads.v not in KERNEL_DEPTHS:
        return f"k={heads.k} and v={heads.v} must be powers of two from 16 to 256"
    if rows > MAX_TILE_ROWS:
        return f"{rows} queries share a write-head; the kernel supports {MAX_TILE_ROWS}"
    return None


def _choose(name: str, Q: Tensor, heads: Heads, rows: int) -> str:
    """Returns the implementation to use for tiles of `rows` queries."""
    reasons = {"triton": why_not_triton(Q, heads, rows), "reference": None}
    return choose_implementation("attention of a decoding step", name, reasons)


def _check(Q: Tensor, columns: int, layer: CacheLayer | MemoryLayer, heads: Heads) -> None:
    """Raises ShapeError unless the tensors fit together."""
    K, V, slots = layer.K, layer.V, layer.slots
    if Q.dim() != 3 or Q.shape[2] != columns or len(Q) % layer.beam or 0 in Q.shape:
        raise ShapeError(
            f"queries have shape {list(Q.shape)}; {heads} with beam={layer.beam} need "
            f"[slots * beam, n, {columns}]"
        )
    if (K.shape[1], K.shape[3], V.shape[3]) != (heads.g, heads.k, heads.v):
        raise ShapeError(f"K {list(K.shape)} and V {list(V.shape)} do not fit {heads}")
    if not Q.dtype == K.dtype == V.dtype:
        raise ShapeError(f"{Q.dtype} queries, {K.dtype} K and {V.dtype} V must have one dtype")
    if slots is None:
        fits = len(Q) <= len(layer.live)
    else:
        fits = len(Q) == len(slots) * layer.beam
    if not fits:
        listed = "" if slots is None else f", {len(slots)} of them listed"
        raise ShapeError(
            f"{len(Q)} rows of queries do not fit {len(layer.live) // layer.beam} slots{listed}, "
            f"with beam={layer.beam}"
        )


def _attend_cache(
    QKV: Tensor, cache: CacheLayer, heads: Heads, scale: float, rotary: Rotary | None
) -> Tensor:
    """Computes the reference of `decode_attention`; copies K and V if `slots` are listed."""
    n, size, device = QKV.shape[1], cache.K.shape[2], QKV.device
    Q, K, V = heads.split(QKV)
    rows = _cache_rows(cache, len(QKV))  # [R beam]
    lengths = _listed(cache.lengths, cache, rows)
    positions = lengths.unsqueeze(1) + torch.arange(n, device=device)  # [R beam, n]
    if rotary is not None:
        angles = positions.clamp(max=len(rotary.cos) - 1)  # lengths are arbitrary if not live
        Q, K = rotate(Q, angles, rotary), rotate(K, angles, rotary)
    if n > 1 and cache.window is not None:
        # in a ring, the last new positions replace positions that the first queries still see
        memory = [torch.cat([T[rows], new], dim=2) for T, new in ((cache.K, K), (cache.V, V))]
        _append(cache, rows, positions, K, V)
        held = torch.cat([_positions_held(lengths, size), positions], dim=1).unsqueeze(1)
        last = positions.unsqueeze(2)
        seen = (held >= 0) & (held <= last) & (held > last - cache.window)  # [R, n, size + n]
        return _attend(Q, memory[0], memory[1], seen, scale)
    _append(cache, rows, positions, K, V)
    readable = size if cache.padded or cache.bound is None else min(size, cache.bound + n)
    places = torch.arange(readable, device=device)
    seen = places <= positions.unsqueeze(2)  # [R beam, n, m]
    K, V = (_listed(T[:, :, :readable], cache, rows) for T in (cache.K, cache.V))
    if cache.ancestors is None or cache.beam == 1:
        return _attend(Q, K, V, seen, scale)
    own = torch.arange(len(rows), device=device).unsqueeze(1) % cache.beam
    holders = _listed(cache.ancestors[:, :readable], cache, rows)
    holders = torch.where(places == positions % size, own, holders)
    return _attend_beams(Q, K, V, seen.squeeze(1), holders, cache.beam, scale)


def _cache_rows(cache: CacheLayer, count: int) -> Tensor:
    """Returns the cache row of each of `count` activation rows."""
    rows = torch.arange(count, device=cache.K.device)
    if cache.slots is None:
        return rows
    return cache.slots[rows // cache.beam].long() * cache.beam + rows % cache.beam


def _listed(T: Tensor, cache: CacheLayer, rows: Tensor) -> Tensor:
    """Returns the `rows` of T: a view, or a copy if slots are listed."""
    return T[: len(rows)] if cache.slots is None else T.index_select(0, rows)


def _positions_held(lengths: Tensor, size: int) -> Tensor:
    """Returns the position that each cache position holds, [rows, size]; negative if none."""
    newest = lengths.unsqueeze(1) - 1
    return newest - (newest - torch.arange(size, device=lengths.device)) % size


def _append(cache: CacheLayer, rows: Tensor, positions: Tensor, K: Tensor, V: Tensor) -> None:
    """Writes K [rows, g, n, k] and V [rows, g, n, v] of live rows into the cache."""
    size, live = cache.K.shape[2], _listed(cache.live, cache, rows)
    if cache.counts is not None:
        index, counts = torch.arange(K.shape[2], device=K.device), (cache.counts * live)[:, None]
        row, i = ((index < counts) & (index >= counts - size)).nonzero(as_tuple=True)
        for stored, new in ((cache.K, K), (cache.V, V)):
            stored[rows[row], :, positions[row, i] % size] = new[row, :, i]
        return
    places = positions[:, -size:] % size
    at, live = (rows.unsqueeze(1), slice(None), places), live.bool()
    all_live = live.device.type == "cpu" and bool(live.all())  # a GPU would have to wait
    for stored, new in ((cache.K, K), (cache.V, V)):
        new = new[:, :, -size:].transpose(1, 2)  # [rows, n, g, k]
        stored[at] = new if all_live else torch.where(live[:, None, None, None], new, stored[at])


def _attend_memory(Q: Tensor, memory: MemoryLayer, heads: Heads, scale: float) -> Tensor:
    """Computes the reference of `memory_attention`."""
    rows, n, _ = Q.shape
    count, g, m = rows // memory.beam, heads.g, memory.K.shape[2]
    readable = m if memory.padded or memory.bound is None else min(m, max(memory.bound, 1))
    K, V, lengths = (
        T[:count] if memory.slots is None else T.index_select(0, memory.slots)
        for T in (memory.K[:, :, :readable], memory.V[:, :, :readable], memory.lengths)
    )
    seen = torch.arange(readable, device=Q.device) < lengths.unsqueeze(1)  # [R, m]
    # beams become additional read-heads of the same memory
    Q = Q.view(count, memory.beam, n, g, -1, heads.k).permute(0, 3, 1, 4, 2, 5)
    O = _attend(Q.reshape(count, -1, n, heads.k), K, V, seen.unsqueeze(1), scale)  # noqa: E741
    O = O.masked_fill((lengths == 0)[:, None, None], 0.0)  # noqa: E741
    O = O.view(count, n, g, memory.beam, -1).permute(0, 3, 1, 2, 4)  # noqa: E741
    return O.reshape(rows, n, heads.h * heads.v)


def _attend(Q: Tensor, K: Tensor, V: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Computes [b, h, n, k] [b, g, m, k] [b, g, m, v] -> [b, n, h v]; seen: [b, n or 1, m]."""
    b, h, n, k = Q.shape
    g, mask = K.shape[1], seen.unsqueeze(1)
    if n == 1:  # the read-heads of a write-head become queries of one head
        Q = Q.reshape(b, g, h // g, k)
        O = scaled_dot_product_attention(Q, K, V, attn_mask=mask, scale=scale)  # noqa: E741
        return O.reshape(b, 1, -1)
    # write-heads become part of the batch and are expanded to their read-heads by a stride of 0
    m, v = V.shape[2:]
    O = scaled_dot_product_attention(  # noqa: E741
        Q.reshape(b * g, h // g, n, k),
        K.reshape(b * g, 1, m, k).expand(-1, h // g, -1, -1),
        V.reshape(b * g, 1, m, v).expand(-1, h // g, -1, -1),
        attn_mask=mask.repeat_interleave(g, dim=0),
        scale=scale,
    )
    return O.view(b, h, n, v).transpose(1, 2).reshape(b, n, h * v)


def _attend_beams(
    Q: Tensor, K: Tensor, V: Tensor, seen: Tensor, holders: Tensor, beam: int, scale: float
) -> Tensor:
    """Computes [R beam, h, 1, k] [R beam, g, m, k] [R beam, g, m, v] -> [R beam, 1, h v].

    To avoid copying K and V, every query is multiplied by all rows of its slot. A mask then hides
    the positions that its ancestors do not hold. seen, holders: [R beam, m].
    """
    rows, h, _, k = Q.shape
    count, g, m, v = rows // beam, K.shape[1], K.shape[2], V.shape[3]
    holder = torch.arange(beam, device=Q.device).view(beam, 1, 1)
    seen, holders = seen.view(count, 1, beam, m), holders.view(count, 1, beam, m)
    mask = torch.where(seen & (holders == holder), 0.0, -torch.inf)  # [R, holder, beam, m]
    Q = Q.reshape(count, beam, g, -1, k).transpose(1, 2).reshape(count, 1, g, -1, k) * scale
    K, V = (T.view(count, beam, *T.shape[1:]) for T in (K, V))
    logits = Q @ K.mT  # [R, holder, g, beam h/g, m]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits.view(count, beam, g, beam, -1, m).add_(mask[:, :, None, :, None])
    logits = logits.permute(0, 2, 3, 4, 1, 5).flatten(4)  # [R, g, beam, h/g, holder m]
    weights = torch.softmax(logits, dim=4).to(V.dtype).view(count, g, -1, beam, m)
    O = (weights.permute(0, 3, 1, 2, 4) @ V).sum(1)  # [R, g, beam h/g, v]  # noqa: E741
    return O.view(count, g, beam, -1).transpose(1, 2).reshape(rows, 1, h * v)
