"""§2.4, §3: attention of one or a few new positions per row to a KV cache or encoder memory.

A slot holds one sequence in `beam` adjacent rows of the cache: beam j of slot s is cache row
s beam + j. A step computes the slots listed in `slots`, in any order. Row r of its activations is
beam r % beam of the (r // beam)-th listed slot. Slots that are not live are neither read nor
written, and their results are undefined.

Position p of a row is stored at cache position p % size. Beams share earlier positions without
copies: `ancestors` gives the beam whose row holds each cache position.

A program of the Triton kernel owns one write-head of one row of K and V, and a tile with all
queries that read them, so K and V are read once. It ends at the row's length, so padding costs
nothing. If there are too few programs to fill the GPU, the positions are split into parts, and a
second kernel combines the results. The program of the first part also adds the new positions, which
arrive with the queries, to its softmax, and writes them to the cache.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from writehead.errors import ShapeError
from writehead.ops.attention import INVARIANT_MULTIPLE, attend_sdpa
from writehead.ops.available import KERNEL_DEPTHS, choose_implementation, why_not_kernel
from writehead.ops.heads import Heads
from writehead.ops.launch import NUM_SMS, launch_pdl, multiply, tl, triton, wait_for_previous
from writehead.ops.norm import DeferredRms
from writehead.ops.packed_attention import LOG2E, attend_tile
from writehead.ops.relative import bias_at
from writehead.ops.rotary import Rotary, rotate
from writehead.util.devices import shared_memory

# If the positions are a multiple of this, PyTorch's float32 products, softmax and sums on a CPU
# round the results of a row alike in any batch.
INVARIANT_POSITIONS = 2 * INVARIANT_MULTIPLE
GATHERED_BYTES = 1 << 21  # bytes of K that the reference gathers at a time for beams
MAX_TILE_ROWS = 128  # queries that one program of the kernel computes
# The tiles and these limits were chosen by measurements on an H200.
PROGRAMS_OF_FOUR_STAGES = 1024  # with more programs, fewer stages are faster
PROGRAMS_TO_HIDE_LATENCY = 8192  # with at least this many, programs hide each other's loads
MAX_SPLITS = 128  # with more, the second kernel would take longer than the first
SHORT_MEMORY, LONG_MEMORY, VERY_LONG_MEMORY = 64, 512, 4096  # positions
WIDE_HEAD = 256  # bytes; a tile of 32 KB then has at most 128 positions, the limit


@dataclass(frozen=True, eq=False)
class MemoryLayer:
    """The encoder's K and V for one decoder layer, and the slots that a step computes."""

    K: Tensor  # [S, g, m, k]; only the last dimension must be contiguous
    V: Tensor  # [S, g, m, v]
    lengths: Tensor  # [S] int64
    live: Tensor  # [S beam] int64, 0 for rows to ignore; the same for all beams of a slot
    beam: int = 1
    slots: Tensor | None = None  # [R] int32; None: the first slots, in order
    padded: bool = False  # read all positions, whatever the lengths
    bound: int | None = None  # upper bound of lengths, known to the host; for the reference
    shared: dict[str, Any] | None = None  # results that all layers of a step share
    batch_invariant: bool = False  # a row has the same result in any batch; for the reference

    def readable(self, bound: int) -> int:
        """Returns how many positions to read if all lengths are up to `bound`."""
        size, is_ring = self.K.shape[2], self.K.shape[2] % INVARIANT_POSITIONS != 0
        if self.padded or self.bound is None or (self.batch_invariant and is_ring):
            return size
        return min(size, round_up(bound, INVARIANT_POSITIONS) if self.batch_invariant else bound)


@dataclass(frozen=True, eq=False)
class CacheLayer(MemoryLayer):
    """One layer of a KV cache. K, V and lengths have S beam rows; lengths exclude this step."""

    ancestors: Tensor | None = None  # [S beam, m] int32, beams of the same slot
    window: int | None = None  # at least m; positions that a query sees, including its own
    counts: Tensor | None = None  # [R], how many of the n new positions to write; None: all
    bias: Tensor | None = None  # [h, …] float32, a table of relative positions


def decode_attention(
    Q: Tensor,
    layer: MemoryLayer,
    heads: Heads,
    *,
    scale: float,
    rotary: Rotary | None = None,
    deferred: DeferredRms | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Returns the attention of n positions per row to a layer, [R beam, n, h v].

    For a MemoryLayer, Q is [R beam, n, hk]. All queries of a slot see its first `lengths`
    positions; the result is 0 if there are none. For a CacheLayer, Q is [R beam, n, hk + gk + gv],
    and its K and V are appended to the cache. A position sees itself and the earlier positions of
    its row within the window. Lengths and ancestors do not change. n > 1 requires beam = 1.
    """
    _check(Q, layer, heads)
    rows = Q.shape[1] * (heads.h // heads.g)
    if not isinstance(layer, CacheLayer):
        rows *= layer.beam
    reasons = {"triton": why_not_triton(Q, heads, rows), "reference": None}
    if choose_implementation("a decoding step's attention", implementation, reasons) == "triton":
        return attend_triton(Q, layer, heads, scale, rotary, deferred)
    Q = Q if deferred is None else deferred.apply(Q)
    if isinstance(layer, CacheLayer):
        return _attend_cache(Q, layer, heads, scale, rotary)
    return _attend_memory(Q, layer, heads, scale)


def round_up(positions: int, multiple: int) -> int:
    """Rounds up to a positive multiple."""
    return max(1, -(-positions // multiple)) * multiple


def why_not_triton(Q: Tensor, heads: Heads, rows: int) -> str | None:
    """Returns why the kernel cannot compute tiles of `rows` queries, or None."""
    if reason := why_not_kernel(Q):
        return reason
    if not {heads.k, heads.v} <= KERNEL_DEPTHS:
        return f"k={heads.k} and v={heads.v} must be powers of two from 16 to 256"
    if rows > MAX_TILE_ROWS:
        return f"{rows} queries share a write-head; the kernel supports {MAX_TILE_ROWS}"
    return None


def _check(Q: Tensor, layer: MemoryLayer, heads: Heads) -> None:
    """Raises ShapeError unless the tensors fit together."""
    K, V, beam = layer.K, layer.V, layer.beam
    columns = sum(heads.widths) if isinstance(layer, CacheLayer) else heads.widths[0]
    if Q.dim() != 3 or Q.shape[2] != columns or len(Q) % beam or 0 in Q.shape:
        raise ShapeError(
            f"queries have shape {list(Q.shape)}; {heads} with beam={beam} need "
            f"[slots * beam, n, {columns}]"
        )
    if (K.shape[1], K.shape[3], V.shape[3]) != (heads.g, heads.k, heads.v):
        raise ShapeError(f"K {list(K.shape)} and V {list(V.shape)} do not fit {heads}")
    if not Q.dtype == K.dtype == V.dtype:
        raise ShapeError(f"{Q.dtype} queries, {K.dtype} K and {V.dtype} V must have one dtype")
    n, given = Q.shape[1], len(Q) // beam
    slots = len(layer.live) // beam if layer.slots is None else len(layer.slots)
    if given > slots or (given < slots and layer.slots is not None):
        raise ShapeError(f"{len(Q)} rows of queries do not fit {slots} slots with beam={beam}")
    if isinstance(layer, CacheLayer) and beam > 1 and (layer.ancestors is None or n > 1):
        raise ShapeError(f"beam={beam} and n={n}: beams need ancestors and n = 1")


class _Step(NamedTuple):
    """What all layers have in common in one step of the reference: positions and masks."""

    rows: Tensor  # [R beam], of the cache
    positions: Tensor  # [R beam, n], of the new positions
    at: tuple[Tensor, slice, Tensor]  # where to store them, unless there are counts
    live: Tensor | None  # [R beam, 1, 1, 1]; None: all rows are live
    appends_last: bool  # because the new positions replace some that the first queries still see
    readable: int  # m, positions of the cache to read
    mask: Tensor  # [R beam, 1 or h, n, m or m + n], added to the logits
    places: Tensor | None  # [R beam, g, m], of the K and V of beams; None: in the rows themselves


def _make_step(cache: CacheLayer, heads: Heads, count: int, n: int) -> _Step:
    """Returns the step for `count` rows with n new positions each."""
    size, device = cache.K.shape[2], cache.K.device
    rows = torch.arange(count, device=device)
    if cache.slots is not None:
        rows = cache.slots[rows // cache.beam].long() * cache.beam + rows % cache.beam
    lengths, live = (_listed(T, cache, rows) for T in (cache.lengths, cache.live))
    positions = lengths.unsqueeze(1) + torch.arange(n, device=device)
    at = rows.unsqueeze(1), slice(None), positions[:, -size:] % size
    all_live = device.type == "cpu" and bool(live.all())  # on a GPU, this would synchronize
    stopped = None if all_live else live.bool()[:, None, None, None]
    appends_last = n > 1 and cache.window is not None
    readable = cache.readable((cache.bound or 0) + n)
    held = torch.arange(readable, device=device).unsqueeze(0)  # positions in the cache
    if cache.window is not None:
        newest = positions[:, :1] - int(appends_last)
        held = newest - (newest - held) % size  # negative if none
    held = torch.cat([held, positions], dim=1) if appends_last else held
    distances = positions.unsqueeze(2) - held.unsqueeze(1)
    seen = distances >= 0
    if cache.window is not None:
        seen &= (held >= 0).unsqueeze(1) & (distances < cache.window)
    dtype, places = torch.promote_types(cache.K.dtype, torch.float32), None
    mask = torch.where(seen, 0.0, -torch.inf).to(dtype).unsqueeze(1)
    mask = mask if cache.bias is None else mask + bias_at(cache.bias, distances)
    if cache.ancestors is not None and cache.beam > 1:
        places = _held_places(cache, heads.g, rows, distances.squeeze(1) == 0)
    return _Step(rows, positions, at, stopped, appends_last, readable, mask, places)


def _held_places(cache: CacheLayer, g: int, rows: Tensor, is_new: Tensor) -> Tensor:
    """Returns where K.flatten(0, 2) has the vectors of each row, [R beam, g, m].

    They are in the rows of the row's ancestors, but the new position is in the row itself. is_new:
    [R beam, m].
    """
    assert cache.ancestors is not None
    m, size = is_new.shape[1], cache.K.shape[2]
    own = (rows % cache.beam).unsqueeze(1)
    holders = torch.where(is_new, own, _listed(cache.ancestors[:, :m], cache, rows).long())
    holders += rows.unsqueeze(1) - own
    vectors = holders.unsqueeze(1) * g + torch.arange(g, device=rows.device).unsqueeze(1)
    return vectors * size + torch.arange(m, device=rows.device)


def _cached(layer: MemoryLayer, name: str, make: Callable[[], Any]) -> Any:
    """Returns the result of `make`, computed once for all layers of a step."""
    if layer.shared is None:
        return make()
    if name not in layer.shared:
        layer.shared[name] = make()
    return layer.shared[name]


def _attend_cache(
    QKV: Tensor, cache: CacheLayer, heads: Heads, scale: float, rotary: Rotary | None
) -> Tensor:
    """Computes the reference for a CacheLayer; copies K and V if `slots` are listed."""
    step = _cached(cache, "step", lambda: _make_step(cache, heads, *QKV.shape[:2]))
    Q, K_new, V_new = heads.split(QKV)
    if rotary is not None:
        angles = step.positions.clamp(max=len(rotary.cos) - 1)  # arbitrary if not live
        Q, K_new = rotate(Q, angles, rotary), rotate(K_new, angles, rotary)
    if not step.appends_last:
        _append(cache, step, K_new, V_new)
    if step.places is not None:
        return _attend_beams(Q, cache, step.places, step.mask, scale)
    K, V = (_listed(T[:, :, : step.readable], cache, step.rows) for T in (cache.K, cache.V))
    if step.appends_last:
        K, V = torch.cat([K, K_new], dim=2), torch.cat([V, V_new], dim=2)
        _append(cache, step, K_new, V_new)
    if Q.shape[2] > 1 or cache.counts is not None:
        # n and m depend on the batch; in float64, that does not matter
        dtype = torch.float64 if cache.batch_invariant else Q.dtype
        q, k, v, mask = (T.to(dtype) for T in (Q, K, V, step.mask))
        O = attend_sdpa(q, k, v, mask, scale)  # noqa: E741
        return O.transpose(1, 2).flatten(2).to(Q.dtype)
    return _attend_next(Q, K, V, step.mask, cache, scale)


def _listed(T: Tensor, cache: CacheLayer, rows: Tensor) -> Tensor:
    """Returns the `rows` of T: a view, or a copy if slots are listed."""
    return T[: len(rows)] if cache.slots is None else T.index_select(0, rows)


def _append(cache: CacheLayer, step: _Step, K: Tensor, V: Tensor) -> None:
    """Writes K [rows, g, n, k] and V [rows, g, n, v] of live rows into the cache."""
    size, rows = cache.K.shape[2], step.rows
    if cache.counts is not None:
        counts = (cache.counts * _listed(cache.live, cache, rows))[:, None]
        index = torch.arange(K.shape[2], device=K.device)
        row, i = ((index < counts) & (index >= counts - size)).nonzero(as_tuple=True)
        for stored, new in ((cache.K, K), (cache.V, V)):
            stored[rows[row], :, step.positions[row, i] % size] = new[row, :, i]
        return
    for stored, new in ((cache.K, K), (cache.V, V)):
        new = new[:, :, -size:].transpose(1, 2)  # [rows, n, g, k]
        stored[step.at] = new if step.live is None else torch.where(step.live, new, stored[step.at])


def _attend_memory(Q: Tensor, memory: MemoryLayer, heads: Heads, scale: float) -> Tensor:
    """Computes the reference for a MemoryLayer."""
    rows, n, _ = Q.shape
    count, g, readable = rows // memory.beam, heads.g, memory.readable(max(memory.bound or 0, 1))
    K, V, lengths = (
        T[:count] if memory.slots is None else T.index_select(0, memory.slots)
        for T in (memory.K[:, :, :readable], memory.V[:, :, :readable], memory.lengths)
    )

    def make_mask() -> tuple[Tensor, Tensor | None]:
        seen = torch.arange(readable, device=Q.device) < lengths.unsqueeze(1)
        mask = torch.where(seen, 0.0, -torch.inf)[:, None, None].expand(-1, g, -1, -1)
        mask, empty = mask.contiguous(), lengths == 0
        none_empty = Q.device.type == "cpu" and not empty.any()
        return mask, None if none_empty else empty[:, None, None, None]

    mask, empty = _cached(memory, "mask", make_mask)
    # beams and new positions become additional read-heads of the same memory
    Q = Q.view(count, memory.beam, n, g, -1, heads.k).permute(0, 3, 1, 2, 4, 5)
    O = _attend_few(Q.flatten(2, 4), K, V, mask, memory, scale)  # noqa: E741
    O = O if empty is None else O.masked_fill(empty, 0.0)  # noqa: E741
    O = O.view(count, g, memory.beam, n, -1, heads.v).permute(0, 2, 3, 1, 4, 5)  # noqa: E741
    return O.reshape(rows, n, heads.h * heads.v)


def _attend_few(
    Q: Tensor, K: Tensor, V: Tensor, mask: Tensor, layer: MemoryLayer, scale: float
) -> Tensor:
    """Computes Q [b, g, q, k], K [b, g, m, k], V [b, g, m, v] -> [b, g, q, v], for few queries.

    `mask` [b, 1 or g, 1 or q, m] is added to the logits.
    """
    b, g, q = Q.shape[:3]
    can_flatten = g == 1 or all(T.stride(0) == g * T.stride(1) for T in (K, V))
    if Q.dtype != torch.float32 or not can_flatten:
        return scaled_dot_product_attention(Q, K, V, attn_mask=mask.to(Q.dtype), scale=scale)
    # on a CPU, two products are faster than SDPA
    Q, K, V, mask = (T.flatten(0, 1) for T in (Q, K, V, mask.expand(-1, g, -1, -1)))
    if layer.batch_invariant and len(Q) == 1:  # threads would divide a single product
        Q, K, V, mask = (T.expand(2, -1, -1) for T in (Q, K, V, mask))
    weights = torch.softmax(torch.baddbmm(mask, Q, K.mT, alpha=scale), dim=2)
    return torch.bmm(weights, V)[: b * g].view(b, g, q, V.shape[2])


def _attend_next(
    Q: Tensor, K: Tensor, V: Tensor, mask: Tensor, cache: CacheLayer, scale: float
) -> Tensor:
    """Computes one new position per row, Q [b, h, 1, k] -> [b, 1, h v]; mask [b, 1 or h, 1, m]."""
    b, g, m = K.shape[:3]
    Q, mask = Q.reshape(b, g, -1, Q.shape[3]), mask.reshape(b, min(g, mask.shape[1]), -1, m)
    return _attend_few(Q, K, V, mask, cache, scale).flatten(1).unsqueeze(1)


def _attend_beams(
    Q: Tensor, cache: CacheLayer, places: Tensor, mask: Tensor, scale: float
) -> Tensor:
    """Computes the same as `_attend_next`, with the K and V of ancestors.

    It copies the K and V of a few rows at a time, so that the copies stay in a CPU's caches.
    Multiplying every query by the K and V of all beams would need no copies, but takes longer.
    """
    _, g, m = places.shape
    count = max(1, GATHERED_BYTES // (g * m * Q.shape[3] * Q.element_size()))
    K, V = (T.flatten(0, 2) for T in (cache.K, cache.V))
    O = []  # noqa: E741
    for q, at, part in zip(*(torch.split(T, count) for T in (Q, places, mask)), strict=True):
        k, v = (T.index_select(0, at.flatten()).view(len(q), g, m, -1) for T in (K, V))
        O.append(_attend_next(q, k, v, part, cache, scale))
    return torch.cat(O)


@dataclass(frozen=True)
class Tile:
    """Positions that a program reads at a time, and its launch options."""

    positions: int
    warps: int
    stages: int
    prefetch: bool = False  # load the first tile before the queries are complete


@dataclass(frozen=True)
class Shape:
    """The sizes that a tile is chosen for."""

    depth: int  # max(k, v)
    itemsize: int
    programs: int  # without splits
    positions: int
    queries: int = 1  # rows of the tile
    appends: bool = False
    beams: bool = False


def choose_tile(shape: Shape, shared_memory: float = math.inf) -> Tile:
    """Returns the fastest tile that fits `shared_memory` bytes per program.

    Many small programs hide each other's latency. With few programs, each must load more at once.
    """
    programs, positions = shape.programs, shape.positions
    # size: bytes of K in a tile
    if positions > LONG_MEMORY and _prefers_large_tiles(shape):
        size, warps, stages, prefetch = 32768, 4, 3, False
    elif positions > LONG_MEMORY:
        size, warps, prefetch = 16384, 4, False
        stages = 4 if programs <= PROGRAMS_OF_FOUR_STAGES else 3
    elif programs <= NUM_SMS:
        size, warps, stages, prefetch = 16384 if shape.appends else 32768, 4, 2, True
    elif programs >= PROGRAMS_TO_HIDE_LATENCY and not shape.appends and not shape.beams:
        size, warps, stages, prefetch = 16384, 2, 2, False
    elif programs >= PROGRAMS_TO_HIDE_LATENCY or shape.beams:
        size, warps, stages, prefetch = 4096, 1, 3 if shape.appends else 2, False
    else:
        size, warps, stages, prefetch = 8192 if positions > SHORT_MEMORY else 4096, 1, 2, True
    if shape.queries > 32:  # the results need the registers of several warps
        warps = 8 if shape.queries * shape.depth >= 16384 else 4
        size, stages, prefetch = 16384, 2, False
    each = shape.depth * shape.itemsize  # bytes of one position
    count = _tile_positions(size, each)
    needed = max(64, shape.queries) * each  # for queries and results
    while (stages - 1) * 2 * count * each + needed > shared_memory and (stages > 2 or count > 16):
        stages, count = (stages - 1, count) if stages > 2 else (stages, count // 2)
    return Tile(count, warps, stages, prefetch)


def _prefers_large_tiles(shape: Shape) -> bool:
    """Returns whether tiles of 32 KB are fastest; a multiprocessor then holds one program."""
    if shape.programs > NUM_SMS:
        return shape.positions > VERY_LONG_MEMORY
    # one program per multiprocessor: with smaller tiles, some would hold two programs, some none
    each, splits = shape.depth * shape.itemsize, min(NUM_SMS // shape.programs, MAX_SPLITS)
    return each >= WIDE_HEAD and shape.positions // (2 * _tile_positions(32768, each)) >= splits


def _tile_positions(size: int, each: int) -> int:
    """Returns how many positions of `each` bytes fit in about `size` bytes."""
    return max(16, min(128, int(triton.next_power_of_2(size // each))))


def choose_splits(shape: Shape, tile: Tile) -> int:
    """Returns the number of parts to split the positions into; each has at least two tiles."""
    most = min(NUM_SMS // shape.programs, MAX_SPLITS)
    return max(1, min(most, shape.positions // (2 * tile.positions)))


class Inputs(NamedTuple):
    """A layer as the kernel reads it; what is in capitals is a compile-time constant."""

    K: Tensor
    V: Tensor
    k_strides: tuple[int, ...]  # of rows, heads and positions
    v_strides: tuple[int, ...]
    lengths: Tensor
    live: Tensor
    slots: Tensor | None
    ancestors: Tensor | None
    counts: Tensor | None
    bias: tuple[Tensor, int] | None  # a table of relative positions, and its limit
    size: int
    window: int | None
    G: int
    GROUP: int  # read-heads of a write-head
    BEAM: int
    TOKENS: int  # new positions of a program: of a cache row, or of all beams of a slot
    SIZE_Q: int  # a power of two, as are the next three
    SIZE_K: int
    SIZE_V: int
    POSITIONS: int
    SPLITS: int
    APPENDS: bool
    PADDED: bool
    PREFETCH: bool


def attend_triton(
    Q: Tensor,
    layer: MemoryLayer,
    heads: Heads,
    scale: float,
    rotary: Rotary | None = None,
    deferred: DeferredRms | None = None,
    *,
    tile: Tile | None = None,
    splits: int | None = None,
) -> Tensor:
    """Computes `decode_attention` with the kernel."""
    rows, n, _ = Q.shape
    K, V, beam, size, group = layer.K, layer.V, layer.beam, layer.K.shape[2], heads.h // heads.g
    appends, ancestors, counts, window, bias = False, None, None, None, None
    if isinstance(layer, CacheLayer):
        appends, counts, window = True, layer.counts, layer.window
        ancestors = layer.ancestors if beam > 1 else None
        bias = None if layer.bias is None else (layer.bias, layer.bias.shape[1] // 2)
    tokens = n if appends else n * beam  # of a program
    programs, depth = rows * n // tokens * heads.g, max(heads.k, heads.v)
    shape = Shape(depth, K.element_size(), programs, size, tokens * group, appends, beam > 1)
    if n > 1 and window is not None:
        splits = 1  # one part would overwrite positions that another reads
    tile = tile or choose_tile(shape, shared_memory(K.device))
    splits = splits or choose_splits(shape, tile)
    Q, count = Q.reshape(rows * n, -1), rows * n * heads.h
    O = Q.new_empty(rows, n, heads.h * heads.v)  # noqa: E741
    parts = None
    if splits > 1:  # normalized results; the largest logit and the sum
        parts = tuple(O.new_empty(splits, count, x, dtype=torch.float32) for x in (heads.v, 2))
    size_q = max(16, triton.next_power_of_2(tokens * group))
    sizes = heads.g, group, beam, tokens, size_q, heads.k, heads.v, tile.positions, splits
    inputs = Inputs(
        *(K, V, K.stride()[:3], V.stride()[:3], layer.lengths, layer.live, layer.slots),
        *(ancestors, counts, bias, size, window),
        *map(tl.constexpr, (*sizes, appends, layer.padded, tile.prefetch)),
    )
    angles = None if rotary is None else (rotary.cos, rotary.sin, len(rotary.cos))
    norm = None if deferred is None else deferred.for_kernel()
    launch_pdl(attend_kernel, (programs, splits), Q)(
        *(Q, Q.stride(0), inputs, angles, norm, O, parts, scale * math.log2(math.e)),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if parts is not None:
        constants = map(tl.constexpr, (splits, triton.next_power_of_2(splits), heads.v))
        launch_pdl(combine_kernel, (count,), Q)(parts, O, count, *constants, num_warps=4)
    return O


@triton.jit
def attend_kernel(Q, q_stride, inputs, rotary, norm, O, parts, scale, PDL: tl.constexpr):  # noqa: E741
    """Computes attention of one tile: reads K and V in steps, with a running softmax in base 2.

    rotary: cosines, sines, and their positions. norm: X, d, epsilon, and the power of two above d.
    """
    G: tl.constexpr = inputs.G
    GROUP: tl.constexpr = inputs.GROUP
    TOKENS: tl.constexpr = inputs.TOKENS
    POSITIONS: tl.constexpr = inputs.POSITIONS
    head, index = tl.program_id(0) % G, (tl.program_id(0) // G).to(tl.int64)
    part = tl.program_id(1) if inputs.SPLITS > 1 else 0
    queries = tl.arange(0, inputs.SIZE_Q)
    token = queries // GROUP
    row = index * TOKENS + token  # of Q and O
    heads = head * GROUP + queries % GROUP
    ks, vs = tl.arange(0, inputs.SIZE_K), tl.arange(0, inputs.SIZE_V)

    slot = index // inputs.BEAM if inputs.APPENDS else index
    if inputs.slots is not None:
        slot = tl.load(inputs.slots + slot).to(tl.int64)
    first_row = slot * inputs.BEAM
    own = first_row + index % inputs.BEAM if inputs.APPENDS else slot  # row of K and V
    alive = tl.load(inputs.live + first_row) != 0
    length, size = tl.load(inputs.lengths + own).to(tl.int32), inputs.size
    held = tl.minimum(length, size)
    end = tl.where(alive, size if inputs.PADDED else held, 0)
    width = tl.cdiv(tl.cdiv(end, inputs.SPLITS), POSITIONS) * POSITIONS
    begin = part * width
    end = tl.minimum(end, begin + width)
    k_row, k_head, k_position = inputs.k_strides
    v_row, v_head, v_position = inputs.v_strides
    K, V = inputs.K + head * k_head, inputs.V + head * v_head

    # the previous kernel writes the queries; lengths and cache are older and can be read already
    if inputs.PREFETCH:
        k, v = _load_tile(K, V, inputs, own, first_row, begin, end)
    wait_for_previous(PDL)
    is_query = queries < TOKENS * GROUP
    start, mask = (row * q_stride + heads * inputs.SIZE_K)[:, None], (is_query & alive)[:, None]
    q = _load_rotated(Q, start, ks[None, :], mask, (length + token)[:, None], rotary, inputs)
    if norm is not None:
        factors = _rms_factors(norm, index * TOKENS, token, inputs)
        q = (q.to(tl.float32) * factors[:, None]).to(q.dtype)
    largest = tl.full([inputs.SIZE_Q], float("-inf"), tl.float32)
    total = tl.zeros([inputs.SIZE_Q], tl.float32)
    acc = tl.zeros([inputs.SIZE_Q, inputs.SIZE_V], tl.float32)
    K_new = Q + index * TOKENS * q_stride + (G * GROUP + head) * inputs.SIZE_K
    V_new = Q + index * TOKENS * q_stride + G * (GROUP + 1) * inputs.SIZE_K + head * inputs.SIZE_V
    count = TOKENS  # new positions to write
    if inputs.counts is not None:
        count = tl.load(inputs.counts + index).to(tl.int32)
    if inputs.APPENDS and TOKENS == 1:
        if part == 0:
            k_new = _load_rotated(K_new, 0, ks, alive, length, rotary, inputs)
            v_new = tl.load(V_new + vs, mask=alive, other=0.0)
            if norm is not None:
                factor = tl.max(factors, axis=0)  # all are equal, because there is one row
                k_new = (k_new.to(tl.float32) * factor).to(k_new.dtype)
                v_new = (v_new.to(tl.float32) * factor).to(v_new.dtype)
            place = length % size
            is_stored = alive & (count > 0)
            tl.store(K + own * k_row + place * k_position + ks, k_new, mask=is_stored)
            tl.store(V + own * v_row + place * v_position + vs, v_new, mask=is_stored)
            logits = multiply(q.to(tl.float32), k_new.to(tl.float32)[None, :])
            largest = tl.sum(logits, axis=1) * scale
            if inputs.bias is not None:
                largest += _load_bias(inputs, heads, token * 0)
            total += 1.0
            acc += v_new.to(tl.float32)[None, :]
    if inputs.PREFETCH:
        seen, distance, v = _seen(v, inputs, begin, end, held, length, token)
        logits = _logits(q, k, seen, inputs, heads, distance, scale)
        largest, total, acc = attend_tile(logits, v, largest, total, acc)
        begin += POSITIONS
    for first in range(begin, end, POSITIONS):
        k, v = _load_tile(K, V, inputs, own, first_row, first, end)
        seen, distance, v = _seen(v, inputs, first, end, held, length, token)
        logits = _logits(q, k, seen, inputs, heads, distance, scale)
        largest, total, acc = attend_tile(logits, v, largest, total, acc)
    if inputs.APPENDS and TOKENS > 1:
        end_new = TOKENS if inputs.SPLITS == 1 else tl.where(part == 0, TOKENS, 0)
        for first in tl.range(0, end_new, POSITIONS, num_stages=1):
            new = first + tl.arange(0, POSITIONS)
            is_new = (new < TOKENS) & alive
            k_new, v_new = _load_new(K_new, V_new, q_stride, new, is_new, length, rotary, inputs)
            seen_new = is_new[None, :] & (new[None, :] <= token[:, None])
            if inputs.window is not None:
                seen_new = seen_new & (token[:, None] - new[None, :] < inputs.window)
            distance = token[:, None] - new[None, :]
            logits = _logits(q, k_new, seen_new, inputs, heads, distance, scale)
            largest, total, acc = attend_tile(logits, v_new, largest, total, acc)
        tl.debug_barrier()  # all warps have read the positions that are replaced in a ring
        for first in tl.range(0, end_new, POSITIONS, num_stages=1):
            new = first + tl.arange(0, POSITIONS)
            is_new = (new < count) & (new >= count - size) & alive
            k_new, v_new = _load_new(K_new, V_new, q_stride, new, is_new, length, rotary, inputs)
            places = ((length + new) % size)[:, None]
            k_at, v_at = own * k_row + places * k_position, own * v_row + places * v_position
            tl.store(K + k_at + ks[None, :], k_new, mask=is_new[:, None])
            tl.store(V + v_at + vs[None, :], v_new, mask=is_new[:, None])
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    result = row * (G * GROUP) + heads
    if parts is None:
        to = O + result[:, None] * inputs.SIZE_V + vs[None, :]
        tl.store(to, acc.to(O.dtype.element_ty), mask=is_query[:, None])
    else:
        part_O, part_statistics = parts
        result += part * (tl.num_programs(0).to(tl.int64) * TOKENS * GROUP)
        tl.store(
            part_O + result[:, None] * inputs.SIZE_V + vs[None, :], acc, mask=is_query[:, None]
        )
        tl.store(part_statistics + result * 2, largest, mask=is_query)
        tl.store(part_statistics + result * 2 + 1, total, mask=is_query)


@triton.jit
def _rms_factors(norm, first, token, inputs):
    """Returns 1 / RMS of the row of X of each query's token, [SIZE_Q]; `first` is token 0's row."""
    X, d, epsilon = norm[0], norm[1], norm[2]
    at, factors = tl.arange(0, norm[3]), tl.zeros([inputs.SIZE_Q], tl.float32)
    for i in tl.static_range(inputs.TOKENS):
        x = tl.load(X + (first + i) * d + at, mask=at < d, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(multiply(x, x), axis=0) / d + epsilon)
        factors = tl.where(token == i, factor, factors) if inputs.TOKENS > 1 else factors + factor
    return factors


@triton.jit
def _load_tile(K, V, inputs, own, first_row, first, end):
    """Loads K and V [POSITIONS, SIZE] of the positions from `first` on; 0 from `end` on."""
    at, holder = first + tl.arange(0, inputs.POSITIONS), own
    if inputs.ancestors is not None:
        holders = tl.load(inputs.ancestors + own * inputs.size + at, mask=at < end, other=0)
        holder = first_row + holders[:, None]
    k_at = holder * inputs.k_strides[0] + at[:, None] * inputs.k_strides[2]
    v_at = holder * inputs.v_strides[0] + at[:, None] * inputs.v_strides[2]
    ks, vs = tl.arange(0, inputs.SIZE_K)[None, :], tl.arange(0, inputs.SIZE_V)[None, :]
    mask = (at < end)[:, None]
    k = tl.load(K + k_at + ks, mask=mask, other=0.0)
    return k, tl.load(V + v_at + vs, mask=mask, other=0.0)


@triton.jit
def _load_rotated(T, start, ks, mask, position, rotary, inputs):
    """Loads T[start + ks], rotated by `position` with rotary positions; 0 where `mask` is false."""
    x = tl.load(T + start + ks, mask=mask, other=0.0)
    if rotary is not None:
        cos, sin, limit = rotary
        HALF: tl.constexpr = inputs.SIZE_K // 2
        pair = tl.load(T + start + (ks + HALF) % inputs.SIZE_K, mask=mask, other=0.0).to(tl.float32)
        # positions that will not be written may exceed the capacity
        at = tl.minimum(position, limit - 1) * HALF + ks % HALF
        c, s = tl.load(cos + at, mask=mask, other=0.0), tl.load(sin + at, mask=mask, other=0.0)
        x = (x.to(tl.float32) * c + tl.where(ks < HALF, -pair, pair) * s).to(x.dtype)
    return x


@triton.jit
def _load_new(K_new, V_new, stride, new, is_new, length, rotary, inputs):
    """Loads K and V of the new positions `new` [POSITIONS] from the columns after the queries."""
    at, mask, position = (new * stride)[:, None], is_new[:, None], (length + new)[:, None]
    ks, vs = tl.arange(0, inputs.SIZE_K)[None, :], tl.arange(0, inputs.SIZE_V)[None, :]
    k = _load_rotated(K_new, at, ks, mask, position, rotary, inputs)
    return k, tl.load(V_new + at + vs, mask=mask, other=0.0)


@triton.jit
def _seen(v, inputs, first, end, held, length, token):
    """Returns which positions from `first` on queries see, how far back these are, and v."""
    at, size = (first + tl.arange(0, inputs.POSITIONS))[None, :], inputs.size
    seen = at < tl.minimum(held, end)
    if inputs.APPENDS:
        if inputs.TOKENS == 1:
            seen = seen & (at != length % size)  # the new position replaces it in a full ring
        elif inputs.window is not None:
            position = length - 1 - (length - 1 - at) % size
            seen = seen & (position > (length + token)[:, None] - inputs.window)
    if inputs.PADDED:  # unused values may be NaN, and 0 × NaN is NaN
        used = first + tl.arange(0, inputs.POSITIONS) < held
        v = tl.where(used[:, None], v, tl.zeros_like(v))
    distance = token[:, None] + 1 + (length - 1 - at) % size  # from the position that is held
    return seen, distance, v


@triton.jit
def _load_bias(inputs, heads, distances):
    """Loads the bias of read-heads at distances, in base 2; the arguments broadcast."""
    table, limit = inputs.bias
    column = limit + tl.minimum(tl.maximum(distances, -limit), limit)
    return tl.load(table + heads * (2 * limit + 1) + column) * LOG2E


@triton.jit
def _logits(q, k, seen, inputs, heads, distance, scale):
    """Returns the logits of a tile in base 2, with the bias of each distance, if there is one."""
    logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if inputs.bias is not None:
        logits += _load_bias(inputs, heads[:, None], distance)
    return tl.where(seen, logits, float("-inf"))


@triton.jit
def combine_kernel(parts, O, count, SPLITS, SIZE_S, SIZE_V, PDL: tl.constexpr):  # noqa: E741
    """Combines the parts of one row and read-head: their mean, weighted by their sums."""
    wait_for_previous(PDL)
    index = tl.program_id(0).to(tl.int64)
    part_O, part_statistics = parts
    part, vs = tl.arange(0, SIZE_S), tl.arange(0, SIZE_V)
    is_part = part < SPLITS
    at = part.to(tl.int64) * count + index
    largest = tl.load(part_statistics + at * 2, mask=is_part, other=float("-inf"))
    total = tl.load(part_statistics + at * 2 + 1, mask=is_part, other=0.0)
    values = tl.load(part_O + at[:, None] * SIZE_V + vs[None, :], mask=is_part[:, None], other=0.0)
    peak = tl.max(largest, axis=0)
    weight = multiply(total, tl.exp2(largest - tl.where(peak == float("-inf"), 0.0, peak)))
    whole = tl.sum(weight, axis=0)
    result = tl.sum(multiply(values, weight[:, None]), axis=0) / tl.where(whole == 0.0, 1.0, whole)
    tl.store(O + index * SIZE_V + vs, result.to(O.dtype.element_ty))
