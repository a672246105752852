"""Attention by our own Triton kernels over packed rows: each tile visits its own segments' memory.

Training on a GPU is its place. A row holds some ten sentences, so that a query may see about a
ninth of it; from where each segment begins and ends, each tile knows the range it has to visit.
The plan, in `packed_kernels`: `forward` owns a tile of queries and keeps their logsumexp;
`backward_queries` owns the same tile; `backward_memory` owns a tile of one write-head's memory
and adds up over its readers. Nothing is added atomically, so results repeat bit for bit.
Q, K and V may be parts of one wide product; their gradients are then parts of its one gradient.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op, register_autograd

from writehead.kernels.available import has_triton, is_interpreted
from writehead.kernels.heads import Heads
from writehead.kernels.packed_ranges import FAR, ranges
from writehead.kernels.visibility import Visibility

FEW = 16  # queries under which a kernel made for whole sequences has nothing to do
LEAST, MOST = 16, 256  # of k and v; tensor cores take no fewer, and more would not fit a tile
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Tile:
    """How much one program takes at a time, in powers of two of at least 16, and how it runs.

    rows: pairs of a query and a read-head. memory: positions of K and V. shared: the most
    read-heads of one write-head that stand side by side in the rows. warps, stages: Triton's.
    """

    rows: int
    memory: int
    shared: int = 16
    warps: int = 4
    stages: int = 2


# By kernel, bytes of an element, and the most that k and v may be; "alone" is for a write-head of
# one reader. Those of two bytes up to 128 are the best of about ten on an H200, at 128 rows of 256
# positions in sentences of some 27 (docs/benchmarks.md); the others have to fit smaller chips too.
TILES: dict[tuple[str, int, int], Tile] = {
    ("forward", 2, 128): Tile(rows=64, memory=16, stages=3),
    ("forward", 2, 256): Tile(rows=32, memory=32),
    ("forward", 4, 64): Tile(rows=32, memory=32),
    ("forward", 4, 128): Tile(rows=16, memory=16),
    ("forward", 4, 256): Tile(rows=16, memory=16, stages=1),
    ("backward_queries", 2, 128): Tile(rows=64, memory=16, stages=3),
    ("backward_queries", 2, 256): Tile(rows=32, memory=32),
    ("backward_queries", 4, 64): Tile(rows=32, memory=32),
    ("backward_queries", 4, 128): Tile(rows=16, memory=16),
    ("backward_queries", 4, 256): Tile(rows=16, memory=16, stages=1),
    ("backward_memory", 2, 128): Tile(rows=32, memory=64, stages=3),
    ("backward_memory alone", 2, 128): Tile(rows=16, memory=32, warps=2),
    ("backward_memory", 2, 256): Tile(rows=32, memory=32),
    ("backward_memory", 4, 64): Tile(rows=32, memory=32),
    ("backward_memory", 4, 128): Tile(rows=16, memory=16),
    ("backward_memory", 4, 256): Tile(rows=16, memory=16, stages=1),
}


def supports(Q: Tensor, K: Tensor, V: Tensor, visibility: Visibility) -> str | None:
    """None, or the sentence that says why these kernels are not for this."""
    if Q.device.type != "cuda" and (torch.compiler.is_compiling() or not is_interpreted()):
        return "the packed kernels work on a GPU"
    if not torch.compiler.is_compiling() and not has_triton():
        return "the packed kernels need Triton, which is not installed"
    if Q.device.type != "cuda" and Q.dtype == torch.bfloat16:
        return "Triton's interpreter gets products of bfloat16 wrong"
    if visibility.query_segments is None or visibility.memory_segments is None:
        return "the packed kernels are for packed rows, and these have no segments"
    if visibility.query_positions is not None or visibility.memory_positions is not None:
        return "the packed kernels take positions in their order, and these are given"
    if visibility.lengths is not None:
        return "the packed kernels know padding by its segment, 0, and here lengths are given"
    if Q.shape[2] < FEW:
        return f"the packed kernels are for whole sequences; there are {Q.shape[2]} queries a row"
    if Q.dtype not in DTYPES:
        return f"the packed kernels work in bfloat16, float16 or float32; these are {Q.dtype}"
    for name, size in (("k", K.shape[3]), ("v", V.shape[3])):
        if not LEAST <= size <= MOST or size & (size - 1):
            return (
                f"the packed kernels need {name} to be a power of two from {LEAST} to {MOST}; "
                f"it is {size}"
            )
    return None


def attend(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    visibility: Visibility,
    scale: float,
    noise: Tensor | None = None,
) -> Tensor:
    """[b,h,n,k] [b,g,m,k] [b,g,m,v] -> [b,h,n,v], a view of [b,n,h,v].

    noise: [b, g, m], a factor for the weight of each memory position; it gets no gradient.
    Segments are any numbers that int32 holds, and need not be contiguous: those that are not, or
    that number above both n and m, are as right and make a tile visit more.
    """
    rest = _rest(visibility, Q.shape[2], K.shape[2], scale, noise)
    O: Tensor = _forward(Q, K, V, *rest)[0]  # noqa: E741
    return O


def attend_fused(
    QKV: Tensor, heads: Heads, visibility: Visibility, scale: float, noise: Tensor | None = None
) -> Tensor:
    """`attend` of the Q, K and V in one product QKV [b, n, hk + gk + gv]: [b,h,n,v] likewise."""
    rest = _rest(visibility, QKV.shape[1], QKV.shape[1], scale, noise)
    O: Tensor = _fused_forward(QKV, *rest, list(astuple(heads)))[0]  # noqa: E741
    return O


# noise, queries, memory, scale, causal, window: what the kernels are told besides Q, K and V
Rest = tuple[Tensor | None, Tensor, Tensor, float, bool, int]


def _rest(visibility: Visibility, n: int, m: int, scale: float, noise: Tensor | None) -> Rest:
    if noise is not None:
        noise = noise.to(torch.float32).contiguous()
    window = min(visibility.window or 0, FAR)
    return noise, *ranges(visibility, n, m), scale, visibility.causal, window


# Opaque to the compiler, which has nothing to fuse with them. `triton_op`, which shows it the
# kernels, would refuse the interpreter's.
@custom_op("writehead::packed_forward", mutates_args=())
def _forward(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    noise: Tensor | None,
    queries: Tensor,
    memory: Tensor,
    scale: float,
    causal: bool,
    window: int,
) -> tuple[Tensor, Tensor]:
    """O [b, h, n, v] and logsumexp [b, h, n], the latter in units of log 2."""
    return _run_forward(Q, K, V, (noise, queries, memory, scale, causal, window))


@_forward.register_fake
def _fake_forward(Q: Tensor, K: Tensor, V: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _empty_forward(Q, V)


@custom_op("writehead::packed_backward", mutates_args=())
def _backward(
    dO: Tensor,
    O: Tensor,  # noqa: E741
    logsumexp: Tensor,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    noise: Tensor | None,
    queries: Tensor,
    memory: Tensor,
    scale: float,
    causal: bool,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV, shaped as Q, K and V."""
    gradients = _empty(Q, Q.shape[3]), _empty(K, K.shape[3]), _empty(V, V.shape[3])
    rest = (noise, queries, memory, scale, causal, window)
    _run_backward(dO, O, logsumexp, (Q, K, V), gradients, rest)
    return gradients


@_backward.register_fake
def _fake_backward(
    dO: Tensor,
    O: Tensor,  # noqa: E741
    logsumexp: Tensor,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(Q, Q.shape[3]), _empty(K, K.shape[3]), _empty(V, V.shape[3])


@custom_op("writehead::packed_fused_forward", mutates_args=())
def _fused_forward(
    QKV: Tensor,
    noise: Tensor | None,
    queries: Tensor,
    memory: Tensor,
    scale: float,
    causal: bool,
    window: int,
    heads: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """As `_forward`, of Q, K and V as `heads` finds them in QKV."""
    Q, K, V = Heads(*heads).split(QKV)
    return _run_forward(Q, K, V, (noise, queries, memory, scale, causal, window))


@_fused_forward.register_fake
def _fake_fused_forward(QKV: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    Q, _, V = Heads(*rest[-1]).split(QKV)
    return _empty_forward(Q, V)


@custom_op("writehead::packed_fused_backward", mutates_args=())
def _fused_backward(
    dO: Tensor,
    O: Tensor,  # noqa: E741
    logsumexp: Tensor,
    QKV: Tensor,
    noise: Tensor | None,
    queries: Tensor,
    memory: Tensor,
    scale: float,
    causal: bool,
    window: int,
    heads: Sequence[int],
) -> Tensor:
    """dQKV, contiguous. The kernels write all of it, dQ, dK and dV each in its own columns."""
    split = Heads(*heads).split
    dQKV = QKV.new_empty(QKV.shape)
    rest = (noise, queries, memory, scale, causal, window)
    _run_backward(dO, O, logsumexp, split(QKV), split(dQKV), rest)
    return dQKV


@_fused_backward.register_fake
def _fake_fused_backward(
    dO: Tensor,
    O: Tensor,  # noqa: E741
    logsumexp: Tensor,
    QKV: Tensor,
    *rest: Any,
) -> Tensor:
    return QKV.new_empty(QKV.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keeps what both backward operations take after dO: tensors first, as their inputs are."""
    tensors = [given for given in inputs if given is None or isinstance(given, Tensor)]
    ctx.options = inputs[len(tensors) :]
    ctx.save_for_backward(*output, *tensors)
    ctx.set_materialize_grads(False)  # of logsumexp there is none, and zeros would be work


def _differentiate(ctx: Any, dO: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if dO is None:
        return (None,) * 9
    return *_backward(dO, *ctx.saved_tensors, *ctx.options), *(None,) * 6


def _fused_differentiate(
    ctx: Any, dO: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    if dO is None:
        return (None,) * 8
    return _fused_backward(dO, *ctx.saved_tensors, *ctx.options), *(None,) * 7


register_autograd(_forward, _differentiate, setup_context=_save)
register_autograd(_fused_forward, _fused_differentiate, setup_context=_save)


def _run_forward(Q: Tensor, K: Tensor, V: Tensor, rest: Rest) -> tuple[Tensor, Tensor]:
    """O and logsumexp."""
    O, logsumexp = _empty_forward(Q, V)  # noqa: E741
    QKV = _in_rows(Q), _in_rows(K), _in_rows(V)
    _launch("forward", QKV, (O, logsumexp), QKV, rest)
    return O, logsumexp


def _run_backward(
    dO: Tensor,
    O: Tensor,  # noqa: E741
    logsumexp: Tensor,
    QKV: tuple[Tensor, Tensor, Tensor],
    gradients: tuple[Tensor, Tensor, Tensor],
    rest: Rest,
) -> None:
    """Writes dQ, dK and dV into `gradients`."""
    dO, O = _in_rows(dO), _in_rows(O)  # noqa: E741
    QKV = _in_rows(QKV[0]), _in_rows(QKV[1]), _in_rows(QKV[2])
    dQ, dK, dV = gradients
    delta = torch.empty_like(logsumexp)
    strided = (*QKV, O, dO, dQ)
    _launch("backward_queries", QKV, (O, dO, logsumexp, delta, dQ), strided, rest)
    # after the first, which leaves it delta
    strided = (*QKV, dO, dK, dV)
    _launch("backward_memory", QKV, (dO, logsumexp, delta, dK, dV), strided, rest)


def _empty_forward(Q: Tensor, V: Tensor) -> tuple[Tensor, Tensor]:
    """O and logsumexp, to be written."""
    return _empty(Q, V.shape[3]), Q.new_empty(Q.shape[:3], dtype=torch.float32)


def _empty(T: Tensor, depth: int) -> Tensor:
    """[b, heads, n, depth] to be written; in memory [b, n, heads, depth], as projections are."""
    b, heads, n, _ = T.shape
    return T.new_empty(b, n, heads, depth).transpose(1, 2)


def _in_rows(T: Tensor) -> Tensor:
    """T with each row of its last dimension in one piece; it is T itself where that is so."""
    return T if T.stride(3) == 1 else T.contiguous()


def _tile(name: str, itemsize: int, depth: int, *, alone: bool) -> Tile:
    """The tile of a kernel for k and v of up to `depth` elements of `itemsize` bytes."""
    most = min(most for of, size, most in TILES if (of, size) == (name, itemsize) and most >= depth)
    tile = TILES[name, itemsize, most]
    return TILES.get((f"{name} alone", itemsize, most), tile) if alone else tile


def _launch(
    name: str,
    QKV: tuple[Tensor, Tensor, Tensor],
    others: tuple[Tensor, ...],
    strided: tuple[Tensor, ...],
    rest: Rest,
) -> None:
    """Runs a kernel on QKV and the others, in tiles that fit them.

    strided: those of which it takes the strides, all but the last.
    """
    from writehead.kernels import packed_kernels  # which needs Triton, and that is optional

    Q, _, V = QKV
    noise, queries, memory, scale, causal, window = rest
    (b, h, n, k), (_, g, m, v) = Q.shape, V.shape
    group = h // g
    tile = _tile(name, Q.itemsize, max(k, v), alone=group == 1)
    shared = min(tile.shared, tile.rows, group & -group)  # a power of two that divides the group
    if name == "backward_memory":
        programs = b * g * -(-m // tile.memory)
    else:
        programs = b * h // shared * -(-n * shared // tile.rows)
    with torch.cuda.device_of(Q):  # type: ignore[no-untyped-call]
        getattr(packed_kernels, name)[(programs,)](
            *(*QKV, *others, queries, memory),
            queries if noise is None else noise,
            *(stride for T in strided for stride in T.stride()[:3]),
            *(n, m, h, scale),
            GROUP=group,
            DEPTH_K=k,
            DEPTH_V=v,
            CAUSAL=causal,
            WINDOW=window,
            NOISE=noise is not None,
            ROWS=tile.rows,
            MEMORY=tile.memory,
            SHARED=shared,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
