"""The Triton kernels of `decode_attention`.

A program owns one write-head of one row of K and V, and one part of its positions. The rows of its
tile are the queries of all read-heads, beams and new positions that read them, so K and V are read
once. The loop ends at the row's length, which is read on the device, so padding costs nothing. If
there are too few programs to fill the GPU, the positions are split into parts, and a second kernel
combines the results.

New positions arrive with the queries. The program of the first part adds them to its softmax and
writes them to the cache.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from writehead.ops.decode_attention import CacheLayer, DeferredRms, MemoryLayer
from writehead.ops.heads import Heads
from writehead.ops.launch import launch, launch_dependents, pdl, wait_for_previous
from writehead.ops.rotary import Rotary

# The tiles and these limits were chosen by measurements on an H200.
NUM_SMS = 132
PROGRAMS_OF_FOUR_STAGES = 1024  # with more programs, fewer stages are faster
PROGRAMS_TO_HIDE_LATENCY = 8192  # with at least this many, programs hide each other's loads
MAX_SPLITS = 128  # with more, the second kernel would take longer than the first
SHORT_MEMORY, LONG_MEMORY, VERY_LONG_MEMORY = 64, 512, 4096  # positions
WIDE_HEAD = 256  # bytes; a tile of 32 KB then has at most 128 positions, the limit
LOG2E = 1.4426950408889634


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

    @property
    def bytes_per_position(self) -> int:
        """Bytes of one position of K or V."""
        return self.depth * self.itemsize


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
    each = shape.bytes_per_position
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
    each, splits = shape.bytes_per_position, min(NUM_SMS // shape.programs, MAX_SPLITS)
    return each >= WIDE_HEAD and shape.positions // (2 * _tile_positions(32768, each)) >= splits


def _tile_positions(size: int, each: int) -> int:
    """Returns how many positions of `each` bytes fit in about `size` bytes."""
    return max(16, min(128, int(triton.next_power_of_2(size // each))))


def choose_splits(shape: Shape, tile: Tile) -> int:
    """Returns the number of parts to split the positions into; each has at least two tiles."""
    most = min(NUM_SMS // shape.programs, MAX_SPLITS)
    return max(1, min(most, shape.positions // (2 * tile.positions)))


@functools.cache
def _shared_memory(device: torch.device) -> float:
    """Returns the bytes of shared memory that a program may use."""
    if device.type != "cuda":
        return math.inf
    index = torch.cuda.current_device() if device.index is None else device.index
    return float(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


def attend(
    Q: Tensor,
    layer: CacheLayer | MemoryLayer,
    heads: Heads,
    scale: float,
    rotary: Rotary | None = None,
    *,
    deferred: DeferredRms | None = None,
    counts: Tensor | None = None,
    tile: Tile | None = None,
    splits: int | None = None,
) -> Tensor:
    """Computes `decode_attention` over a CacheLayer, or `memory_attention` over a MemoryLayer.

    counts: [R], how many of the n new positions of each row are written; None: all.
    """
    rows, n, _ = Q.shape
    K, V, beam, size, group = layer.K, layer.V, layer.beam, layer.K.shape[2], heads.h // heads.g
    appends, ancestors, window = False, None, None
    if isinstance(layer, CacheLayer):
        appends, ancestors, window = True, layer.ancestors, layer.window
    tokens = n if appends else n * beam  # of a program
    programs, depth = rows * n // tokens * heads.g, max(heads.k, heads.v)
    shape = Shape(depth, K.element_size(), programs, size, tokens * group, appends, beam > 1)
    if n > 1 and window is not None:
        splits = 1  # one part would overwrite positions that another reads
    tile = tile or choose_tile(shape, _shared_memory(K.device))
    splits = splits or choose_splits(shape, tile)
    Q = Q.reshape(rows * n, -1)
    O = Q.new_empty(rows, n, heads.h * heads.v)  # noqa: E741
    parts = [
        Q.new_empty(splits if splits > 1 else 0, rows * n * heads.h, width, dtype=torch.float32)
        for width in (heads.v, 2)  # normalized results; the largest logit and the sum
    ]
    X, d = (Q, 0) if deferred is None else (deferred.X, deferred.X.shape[-1])
    chain = pdl(Q)
    launch(attend_kernel, (programs, splits))(
        Q,
        Q.stride(0),
        K,
        V,
        *K.stride()[:3],
        *V.stride()[:3],
        layer.lengths,
        layer.live,
        layer.lengths if layer.slots is None else layer.slots,
        layer.lengths if ancestors is None else ancestors,
        layer.lengths if rotary is None else rotary.cos,
        layer.lengths if rotary is None else rotary.sin,
        0 if rotary is None else len(rotary.cos),
        layer.lengths if counts is None else counts,
        X,
        d,
        0.0 if deferred is None else deferred.epsilon,
        O,
        *parts,
        size,
        window or 0,
        scale * LOG2E,
        G=heads.g,
        GROUP=group,
        BEAM=beam,
        TOKENS=tokens,
        SIZE_Q=max(16, triton.next_power_of_2(tokens * group)),
        SIZE_K=heads.k,
        SIZE_V=heads.v,
        POSITIONS=tile.positions,
        SPLITS=splits,
        APPENDS=appends,
        SLOTS=layer.slots is not None,
        ANCESTORS=beam > 1 and ancestors is not None,
        WINDOW=window is not None,
        ROTARY=rotary is not None,
        COUNTS=counts is not None,
        SIZE_D=triton.next_power_of_2(d) if d else 0,
        PADDED=layer.padded,
        PREFETCH=tile.prefetch,
        PDL=bool(chain),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **chain,
    )
    if splits > 1:
        launch(combine_kernel, (rows * n * heads.h,))(
            *parts,
            O,
            rows * n * heads.h,
            SPLITS=splits,
            SIZE_S=triton.next_power_of_2(splits),
            SIZE_V=heads.v,
            PDL=bool(chain),
            num_warps=4,
            **chain,
        )
    return O


@triton.jit
def attend_kernel(
    Q,
    q_stride,
    K,
    V,
    k_row,
    k_head,
    k_position,
    v_row,
    v_head,
    v_position,
    lengths,
    live,
    slots,
    ancestors,
    cos,
    sin,
    limit,
    counts,
    X,
    d,
    epsilon,
    O,  # noqa: E741
    part_O,
    part_statistics,
    size,
    window,
    scale,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    BEAM: tl.constexpr,
    TOKENS: tl.constexpr,
    SIZE_Q: tl.constexpr,
    SIZE_K: tl.constexpr,
    SIZE_V: tl.constexpr,
    POSITIONS: tl.constexpr,
    SPLITS: tl.constexpr,
    APPENDS: tl.constexpr,
    SLOTS: tl.constexpr,
    ANCESTORS: tl.constexpr,
    WINDOW: tl.constexpr,
    ROTARY: tl.constexpr,
    COUNTS: tl.constexpr,
    SIZE_D: tl.constexpr,
    PADDED: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes attention of one tile: reads K and V in steps, with a running softmax in base 2.

    TOKENS: the new positions of a cache row with APPENDS, otherwise of all beams of a slot.
    """
    head, index = tl.program_id(0) % G, (tl.program_id(0) // G).to(tl.int64)
    part = tl.program_id(1) if SPLITS > 1 else 0
    queries = tl.arange(0, SIZE_Q)
    token = queries // GROUP
    row = index * TOKENS + token  # of Q and O
    heads = head * GROUP + queries % GROUP
    ks, vs = tl.arange(0, SIZE_K), tl.arange(0, SIZE_V)

    slot = index // BEAM if APPENDS else index
    if SLOTS:
        slot = tl.load(slots + slot).to(tl.int64)
    first_row = slot * BEAM
    own = first_row + index % BEAM if APPENDS else slot  # row of K and V
    alive = tl.load(live + first_row) != 0
    length = tl.load(lengths + own).to(tl.int32)
    held = tl.minimum(length, size)
    end = tl.where(alive, size if PADDED else held, 0)
    width = tl.cdiv(tl.cdiv(end, SPLITS), POSITIONS) * POSITIONS
    begin = part * width
    end = tl.minimum(end, begin + width)
    K += head * k_head
    V += head * v_head
    if ANCESTORS:
        ancestors += own * size

    # the previous kernel writes the queries; lengths and cache are older and can be read already
    if PREFETCH:
        holder = _holder(ancestors, own, first_row, begin, end, POSITIONS, ANCESTORS)
        k = _load_tile(K, holder * k_row, k_position, begin, end, SIZE_K, POSITIONS)
        v = _load_tile(V, holder * v_row, v_position, begin, end, SIZE_V, POSITIONS)
    wait_for_previous(PDL)
    launch_dependents(PDL)
    is_query = queries < TOKENS * GROUP
    start, mask = (row * q_stride + heads * SIZE_K)[:, None], (is_query & alive)[:, None]
    position = (length + token)[:, None]
    q = _load_rotated(Q, start, ks[None, :], mask, position, cos, sin, limit, SIZE_K, ROTARY)
    if SIZE_D > 0:
        factors = _rms_factors(X, index * TOKENS, token, d, epsilon, TOKENS, SIZE_Q, SIZE_D)
        q = (q.to(tl.float32) * factors[:, None]).to(q.dtype)
    largest = tl.full([SIZE_Q], float("-inf"), tl.float32)
    total = tl.zeros([SIZE_Q], tl.float32)
    acc = tl.zeros([SIZE_Q, SIZE_V], tl.float32)
    new_k = index * TOKENS * q_stride + (G * GROUP + head) * SIZE_K
    new_v = index * TOKENS * q_stride + G * (GROUP + 1) * SIZE_K + head * SIZE_V
    count = TOKENS  # new positions to write
    if COUNTS:
        count = tl.load(counts + index).to(tl.int32)
    if APPENDS and TOKENS == 1:
        if part == 0:
            k_new = _load_rotated(Q, new_k, ks, alive, length, cos, sin, limit, SIZE_K, ROTARY)
            v_new = tl.load(Q + new_v + vs, mask=alive, other=0.0)
            if SIZE_D > 0:
                factor = tl.max(factors, axis=0)  # all are equal, because there is one row
                k_new = (k_new.to(tl.float32) * factor).to(k_new.dtype)
                v_new = (v_new.to(tl.float32) * factor).to(v_new.dtype)
            place = length % size
            stored = alive & (count > 0)
            tl.store(K + own * k_row + place * k_position + ks, k_new, mask=stored)
            tl.store(V + own * v_row + place * v_position + vs, v_new, mask=stored)
            largest = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], axis=1) * scale
            total += 1.0
            acc += v_new.to(tl.float32)[None, :]
    if PREFETCH:
        seen = _seen(
            begin, end, held, length, size, window, token, POSITIONS, APPENDS, TOKENS, WINDOW
        )
        v = _clear(v, begin, held, POSITIONS, PADDED)
        largest, total, acc = _attend_tile(q, k, v, largest, total, acc, seen, scale)
        begin += POSITIONS
    for first in range(begin, end, POSITIONS):
        holder = _holder(ancestors, own, first_row, first, end, POSITIONS, ANCESTORS)
        k = _load_tile(K, holder * k_row, k_position, first, end, SIZE_K, POSITIONS)
        v = _load_tile(V, holder * v_row, v_position, first, end, SIZE_V, POSITIONS)
        seen = _seen(
            first, end, held, length, size, window, token, POSITIONS, APPENDS, TOKENS, WINDOW
        )
        v = _clear(v, first, held, POSITIONS, PADDED)
        largest, total, acc = _attend_tile(q, k, v, largest, total, acc, seen, scale)
    if APPENDS and TOKENS > 1:
        K_new, V_new = Q + new_k, Q + new_v
        end_new = TOKENS if SPLITS == 1 else tl.where(part == 0, TOKENS, 0)
        for first_new in tl.range(0, end_new, POSITIONS, num_stages=1):
            new = first_new + tl.arange(0, POSITIONS)
            is_new = (new < TOKENS) & alive
            k_new, v_new = _load_new(
                K_new, V_new, q_stride, new, is_new, length, cos, sin, limit, SIZE_K, SIZE_V, ROTARY
            )
            seen_new = is_new[None, :] & (new[None, :] <= token[:, None])
            if WINDOW:
                seen_new = seen_new & (token[:, None] - new[None, :] < window)
            largest, total, acc = _attend_tile(
                q, k_new, v_new, largest, total, acc, seen_new, scale
            )
        tl.debug_barrier()  # all warps have read the positions that are replaced in a ring
        for first_new in tl.range(0, end_new, POSITIONS, num_stages=1):
            new = first_new + tl.arange(0, POSITIONS)
            is_new = (new < count) & (new >= count - size) & alive
            k_new, v_new = _load_new(
                K_new, V_new, q_stride, new, is_new, length, cos, sin, limit, SIZE_K, SIZE_V, ROTARY
            )
            places = ((length + new) % size)[:, None]
            k_at, v_at = own * k_row + places * k_position, own * v_row + places * v_position
            tl.store(K + k_at + ks[None, :], k_new, mask=is_new[:, None])
            tl.store(V + v_at + vs[None, :], v_new, mask=is_new[:, None])
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    result = row * (G * GROUP) + heads
    if SPLITS == 1:
        to = O + result[:, None] * SIZE_V + vs[None, :]
        tl.store(to, acc.to(O.dtype.element_ty), mask=is_query[:, None])
    else:
        result += part * (tl.num_programs(0).to(tl.int64) * TOKENS * GROUP)
        tl.store(part_O + result[:, None] * SIZE_V + vs[None, :], acc, mask=is_query[:, None])
        tl.store(part_statistics + result * 2, largest, mask=is_query)
        tl.store(part_statistics + result * 2 + 1, total, mask=is_query)


@triton.jit
def _rms_factors(
    X,
    first,
    token,
    d,
    epsilon,
    TOKENS: tl.constexpr,
    SIZE_Q: tl.constexpr,
    SIZE_D: tl.constexpr,
):
    """Returns 1 / RMS of the row of X that each query was projected from, [SIZE_Q].

    first: the row of token 0.
    """
    at, factors = tl.arange(0, SIZE_D), tl.zeros([SIZE_Q], tl.float32)
    for i in tl.static_range(TOKENS):
        x = tl.load(X + (first + i) * d + at, mask=at < d, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(x * x, axis=0) / d + epsilon)
        factors = tl.where(token == i, factor, factors) if TOKENS > 1 else factors + factor
    return factors


@triton.jit
def _holder(
    ancestors, own, first_row, first, end, POSITIONS: tl.constexpr, ANCESTORS: tl.constexpr
):
    """Returns the cache rows of the positions from `first` on: [POSITIONS, 1], or one for all."""
    holder = own
    if ANCESTORS:
        at = first + tl.arange(0, POSITIONS)
        holder = first_row + tl.load(ancestors + at, mask=at < end, other=0)[:, None]
    return holder


@triton.jit
def _load_tile(T, start, stride, first, end, SIZE: tl.constexpr, POSITIONS: tl.constexpr):
    """Loads K or V [POSITIONS, SIZE] of the positions from `first` on; 0 from `end` on."""
    at = (first + tl.arange(0, POSITIONS))[:, None]
    return tl.load(T + start + at * stride + tl.arange(0, SIZE)[None, :], mask=at < end, other=0.0)


@triton.jit
def _load_rotated(
    T, start, ks, mask, position, cos, sin, limit, SIZE_K: tl.constexpr, ROTARY: tl.constexpr
):
    """Loads T[start + ks], rotated by `position` if ROTARY; 0 where `mask` is false."""
    x = tl.load(T + start + ks, mask=mask, other=0.0)
    if ROTARY:
        HALF: tl.constexpr = SIZE_K // 2
        pair = tl.load(T + start + (ks + HALF) % SIZE_K, mask=mask, other=0.0).to(tl.float32)
        # positions that will not be written may exceed the capacity
        at = tl.minimum(position, limit - 1) * HALF + ks % HALF
        c, s = tl.load(cos + at, mask=mask, other=0.0), tl.load(sin + at, mask=mask, other=0.0)
        x = (x.to(tl.float32) * c + tl.where(ks < HALF, -pair, pair) * s).to(x.dtype)
    return x


@triton.jit
def _load_new(
    K_new,
    V_new,
    stride,
    new,
    is_new,
    length,
    cos,
    sin,
    limit,
    SIZE_K: tl.constexpr,
    SIZE_V: tl.constexpr,
    ROTARY: tl.constexpr,
):
    """Loads K and V of the new positions `new` [POSITIONS] from the columns after the queries."""
    at, mask, position = (new * stride)[:, None], is_new[:, None], (length + new)[:, None]
    ks, vs = tl.arange(0, SIZE_K)[None, :], tl.arange(0, SIZE_V)[None, :]
    k = _load_rotated(K_new, at, ks, mask, position, cos, sin, limit, SIZE_K, ROTARY)
    return k, tl.load(V_new + at + vs, mask=mask, other=0.0)


@triton.jit
def _seen(
    first,
    end,
    held,
    length,
    size,
    window,
    token,
    POSITIONS: tl.constexpr,
    APPENDS: tl.constexpr,
    TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Returns whether queries see the cache positions from `first` on: [SIZE_Q or 1, POSITIONS]."""
    at = (first + tl.arange(0, POSITIONS))[None, :]
    seen = at < tl.minimum(held, end)
    if APPENDS:
        if TOKENS == 1:
            seen = seen & (at != length % size)  # the new position replaces it in a full ring
        elif WINDOW:
            position = length - 1 - (length - 1 - at) % size
            seen = seen & (position > (length + token)[:, None] - window)
    return seen


@triton.jit
def _clear(v, first, held, POSITIONS: tl.constexpr, PADDED: tl.constexpr):
    """Sets the values of unused cache positions to 0; they may be NaN, and 0 × NaN is NaN."""
    if PADDED:
        used = first + tl.arange(0, POSITIONS) < held
        v = tl.where(used[:, None], v, tl.zeros_like(v))
    return v


@triton.jit
def _attend_tile(q, k, v, largest, total, acc, seen, scale):
    """Returns the running softmax after one more tile: largest logit, sum, weighted values."""
    logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    logits = tl.where(seen, logits, float("-inf"))
    now = tl.maximum(largest, tl.max(logits, axis=1))
    base = tl.where(now == float("-inf"), 0.0, now)  # nothing seen yet
    p = tl.exp2(logits - base[:, None])
    kept = tl.exp2(largest - base)
    total = total * kept + tl.sum(p, axis=1)
    acc = tl.dot(p.to(v.dtype), v, acc * kept[:, None], input_precision="ieee")
    return now, total, acc


@triton.jit
def combine_kernel(
    part_O,
    part_statistics,
    O,  # noqa: E741
    count,
    SPLITS: tl.constexpr,
    SIZE_S: tl.constexpr,
    SIZE_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """Combines the parts of one row and read-head: their mean, weighted by their sums."""
    wait_for_previous(PDL)
    launch_dependents(PDL)
    index = tl.program_id(0).to(tl.int64)
    parts, vs = tl.arange(0, SIZE_S), tl.arange(0, SIZE_V)
    is_part = parts < SPLITS
    at = parts.to(tl.int64) * count + index
    largest = tl.load(part_statistics + at * 2, mask=is_part, other=float("-inf"))
    total = tl.load(part_statistics + at * 2 + 1, mask=is_part, other=0.0)
    values = tl.load(part_O + at[:, None] * SIZE_V + vs[None, :], mask=is_part[:, None], other=0.0)
    peak = tl.max(largest, axis=0)
    weight = total * tl.exp2(largest - tl.where(peak == float("-inf"), 0.0, peak))
    whole = tl.sum(weight, axis=0)
    result = tl.sum(values * weight[:, None], axis=0) / tl.where(whole == 0.0, 1.0, whole)
    tl.store(O + index * SIZE_V + vs, result.to(O.dtype.element_ty))
