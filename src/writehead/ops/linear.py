"""Linear projections, fused with the norm of the input, bias, activation, gate and residual.

- "small_rows": one kernel for 1 to 1,024 rows. With few rows, most of the time goes into reading
  the weight. A program reads the weights of its columns once, and starts before the previous kernel
  has ended. It reads whole rows of X, so it also computes the statistics of the norm:

      rms:    norm(x) W^T = r x W^T,                             r = 1 / sqrt(mean(x²) + epsilon)
      layer:  norm(x) W^T = r (x W^T - mean(x) column_sums(W)),  r = 1 / sqrt(var(x) + epsilon)

- "split_depth": for 2 to 128 rows and a weight with more depth than columns. Several programs
  divide the depth of a tile among themselves, to fill the GPU; a second kernel sums their parts.
- "library": a norm kernel, then a cuBLAS product, fused with other operations where possible.
- "onednn" and "int8": for weights that `Weight.pack` has packed for a CPU; see `cpu_weights.py`.
- "reference": plain PyTorch, with gradients.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from writehead.errors import ShapeError
from writehead.ops.available import choose_implementation, why_not_kernel
from writehead.ops.cpu_weights import PackedWeight, pack_int8, pack_onednn, why_not_onednn
from writehead.ops.launch import NUM_SMS, launch_pdl, multiply, tl, triton, wait_for_previous
from writehead.ops.norm import DeferredRms, Norm, normalize
from writehead.util.devices import runs_triton, shared_memory

Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}
MAX_SMALL_ROWS, MAX_NORMED_ROWS = 1024, 256  # without and, by default, with a norm or gate
MANY_COLUMNS = 16_384  # of a weight, for 1 row
MAX_SMALL_COLUMNS = 2048  # of a weight, for more than 1 row
MAX_SMALL_DEPTH = 1024  # of a weight
MAX_SPLIT_ROWS = 128
CACHE_LINE = 128  # bytes
GATE_COLUMNS = 1024  # per program of `_gate_kernel`
TMA_ALIGNMENT = 16  # bytes; required of rows by tensor descriptors


@dataclass(frozen=True, eq=False)
class Weight:
    """A projection, and the norm of its input."""

    W: Tensor  # [columns, depth]; if packed, on the meta device, without data
    bias: Tensor | None = None  # [columns]
    norm: Norm | None = None
    column_sums: Tensor | None = None  # [columns] float32, for a folded layer norm
    streamed: bool = False  # W does not stay in the L2 cache until the next step
    packed: PackedWeight | None = None  # W in the layout of a CPU library

    @property
    def is_quantized(self) -> bool:
        """Whether W has been replaced by int8 weights."""
        return self.packed is not None and self.packed.kind == "int8"

    @property
    def is_usable(self) -> bool:
        """Whether this weight, prepared for inference, can be used in the current gradient mode."""
        if self.is_quantized:
            return True
        is_autocast = self.packed is not None and torch.is_autocast_enabled("cpu")
        return not (torch.is_grad_enabled() or is_autocast)

    @property
    def is_folded(self) -> bool:
        """Whether the norm needs only the statistics of X, besides W and `column_sums`."""
        norm = self.norm
        if norm is None:
            return True
        has_sums = norm.kind == "rms" or self.column_sums is not None
        return norm.gain is None and norm.bias is None and has_sums

    @torch.no_grad()
    def fold(self, *, scale: float = 1.0, zero_bias: bool = False) -> "Weight":
        """Returns this weight for inference, with `scale` and the norm's gain and bias folded."""
        W, bias, norm, sums = self.W, self.bias, self.norm, None
        wide = torch.promote_types(W.dtype, torch.float32)
        if norm is not None and norm.bias is not None:
            shift = scale * (W.to(wide) @ norm.bias.to(wide))
            bias = (shift if bias is None else bias + shift).to(W.dtype)
        if norm is not None and norm.gain is not None:
            W = (scale * W.to(wide) * norm.wide_gain(wide)).to(W.dtype)
        elif scale != 1.0:
            W = (scale * W.to(wide)).to(W.dtype)
        if norm is not None:
            norm = replace(norm, gain=None, bias=None, offset=0.0)
            sums = W.float().sum(1) if norm.kind == "layer" else None
        if bias is None and zero_bias:  # cuBLAS fuses activations only with a bias
            bias = W.new_zeros(len(W))
        return replace(self, W=W, bias=bias, norm=norm, column_sums=sums)

    def pack(self, *, streamed: bool = False, int8: bool = False) -> "Weight":
        """Returns this folded weight in the fastest layout for its device, or in int8."""
        if not int8 and (runs_triton(self.W) or why_not_onednn(self.W)):
            return replace(self, streamed=streamed)
        packed = pack_int8(self.W) if int8 else pack_onednn(self.W)
        return replace(self, W=self.W.detach().to("meta"), packed=packed)


class Epilogue(NamedTuple):
    """The operations after the product; see `linear`."""

    activation: Activation | None = None
    gated: bool = False
    residual: Tensor | None = None  # [rows, columns]
    scale: float = 1.0
    deferred: DeferredRms | None = None
    relu_input: bool = False


def linear(
    X: Tensor,
    weight: Weight,
    *,
    activation: Activation | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
    scale: float = 1.0,
    deferred: DeferredRms | None = None,
    relu_input: bool = False,
    implementation: str = "auto",
) -> Tensor:
    """Returns residual + activation(scale * norm(X) W^T + bias), for X [..., depth].

    gated: W has 2 f rows; the activation of the first f columns is multiplied by the last f.
    deferred: a norm whose factors multiply the rows of norm(X) W^T. relu_input: relu(X) replaces X.
    These two are for products that `can_split_depth`.
    Without gradients, the result may overwrite `residual`.
    """
    if X.shape[-1] != weight.W.shape[1]:
        raise ShapeError(f"X has depth {X.shape[-1]}, but W has depth {weight.W.shape[1]}")
    shape = (*X.shape[:-1], len(weight.W) // 2 if gated else len(weight.W))
    if residual is not None and residual.shape != shape:
        raise ShapeError(f"residual has shape {list(residual.shape)}; it must be {list(shape)}")
    epilogue = Epilogue(activation, gated, residual, scale, deferred, relu_input)
    chosen = _choose(implementation, X, weight, epilogue)
    if chosen == "reference":
        return _reference(X, weight, epilogue)
    if residual is not None:
        epilogue = epilogue._replace(residual=residual.reshape(-1, shape[-1]))
    return IMPLEMENTATIONS[chosen](X.reshape(-1, X.shape[-1]), weight, epilogue).view(shape)


def _choose(name: str, X: Tensor, weight: Weight, epilogue: Epilogue) -> str:
    """Returns the implementation to use; "auto" is the fastest, by measurements on an H200."""
    is_usual = epilogue.deferred is None and not epilogue.relu_input
    unusual = None if is_usual else "it supports neither a deferred norm nor a relu of its input"
    if weight.packed is not None:
        kind = weight.packed.kind
        if name == "auto" and is_usual:
            return kind
        others = dict.fromkeys(IMPLEMENTATIONS, f"the weight is packed for {kind}")
        name = kind if name == "auto" else name
        return choose_implementation("linear", name, {**others, kind: unusual})
    rows, reason = X.numel() // max(X.shape[-1], 1), _why_not_library(X, weight, epilogue.residual)
    reasons = {
        "small_rows": reason or unusual or _why_not_small_rows(rows, weight),
        "split_depth": reason or _why_not_split_depth(rows, weight, epilogue.gated),
        "library": reason or unusual,
        "reference": None,
        **dict.fromkeys(("onednn", "int8"), "the weight is not packed for it; call Weight.pack"),
    }
    if name == "auto" and not _is_small(rows, weight, epilogue.gated):
        del reasons["small_rows"]
    if name == "auto" and not _is_deep(weight):
        del reasons["split_depth"]
    return choose_implementation("linear", name, reasons)


def _is_small(rows: int, weight: Weight, gated: bool) -> bool:
    """Returns whether "small_rows" is the fastest implementation, if it can run."""
    columns, depth = weight.W.shape
    is_narrow = columns <= MAX_SMALL_COLUMNS and depth <= MAX_SMALL_DEPTH
    is_short = rows <= MAX_NORMED_ROWS or (weight.norm is None and not gated)
    return rows == 1 or (is_narrow and is_short and weight.W.dtype != torch.float32)


def _is_deep(weight: Weight) -> bool:
    """Returns whether "split_depth" is faster than the library, if it can run."""
    columns, depth = weight.W.shape
    is_deep = columns <= MAX_SMALL_COLUMNS and depth > max(columns, MAX_SMALL_DEPTH)
    return is_deep and weight.W.dtype != torch.float32


def _why_not_library(X: Tensor, weight: Weight, residual: Tensor | None) -> str | None:
    """Returns why the library product cannot run, or None."""
    norm, tensors = weight.norm, (weight.W, weight.bias, residual)
    parameters = (None, None) if norm is None else (norm.gain, norm.bias)
    if reason := why_not_kernel(X, *tensors, *parameters):
        return reason
    if torch.is_autocast_enabled(X.device.type):
        return "it does not support autocast"
    if any(T is not None and T.dtype != X.dtype for T in tensors):
        return f"it needs X, W, bias and residual of one dtype; X has {X.dtype}"
    return None


def _why_not_small_rows(rows: int, weight: Weight) -> str | None:
    """Returns why the kernel does not support this weight and number of rows, or None."""
    if not 1 <= rows <= MAX_SMALL_ROWS:
        return f"it takes 1 to {MAX_SMALL_ROWS} rows, not {rows}"
    if not weight.is_folded:
        return "it needs the norm folded into W; call Weight.fold"
    return None if weight.W.is_contiguous() else "it needs a contiguous W"


def _why_not_split_depth(rows: int, weight: Weight, gated: bool) -> str | None:
    """Returns why the depth cannot be split, or None."""
    W = weight.W
    if not 2 <= rows <= MAX_SPLIT_ROWS:
        return f"it takes 2 to {MAX_SPLIT_ROWS} rows, not {rows}"
    if weight.norm is not None or gated:
        return "it supports neither norms nor gates"
    alignments = W.data_ptr(), W.shape[1] * W.element_size()
    if not W.is_contiguous() or any(one % TMA_ALIGNMENT for one in alignments):
        return f"it needs a contiguous W whose rows are aligned to {TMA_ALIGNMENT} bytes"
    return None


def can_split_depth(X: Tensor, weight: Weight) -> bool:
    """Returns whether a product with as many rows as X applies a deferred norm at no cost."""
    rows = X.numel() // X.shape[-1]
    return _is_deep(weight) and _why_not_split_depth(rows, weight, gated=False) is None


def deferred_norm(X: Tensor, weight: Weight) -> DeferredRms | None:
    """Returns the norm of X that a projection may leave to a later op, or None.

    A projection of one row computes the norm for free. In float16, unnormalized rows may overflow.
    """
    norm, rows = weight.norm, X.numel() // X.shape[-1]
    if norm is None or norm.kind != "rms" or rows == 1 or X.dtype == torch.float16:
        return None
    can_run = weight.is_folded and why_not_kernel(X, weight.W) is None
    return DeferredRms(X, norm.epsilon) if can_run else None


def _reference(X: Tensor, weight: Weight, epilogue: Epilogue) -> Tensor:
    if epilogue.relu_input:
        X = torch.relu(X)
    X = normalize(X, weight.norm, scale=epilogue.scale, implementation="reference")
    if epilogue.deferred is None:
        return _finish(F.linear(X, weight.W, weight.bias), epilogue)
    Y = epilogue.deferred.apply(F.linear(X, weight.W))
    return _finish(Y if weight.bias is None else Y + weight.bias, epilogue)


# this and the other implementations take X [rows, depth] and return [rows, columns]
def _onednn(X: Tensor, weight: Weight, epilogue: Epilogue) -> Tensor:
    assert weight.packed is not None
    X = normalize(X, weight.norm, scale=epilogue.scale)
    if epilogue.gated:
        return _finish(weight.packed.multiply(X, weight.bias), epilogue)
    return weight.packed.multiply(X, weight.bias, epilogue.activation, epilogue.residual)


def _int8(X: Tensor, weight: Weight, epilogue: Epilogue) -> Tensor:
    assert weight.packed is not None
    # under autocast, X has another dtype
    Y = weight.packed.multiply_quantized(X.float(), weight.norm)
    Y = Y if epilogue.scale == 1.0 else Y.mul_(epilogue.scale)
    Y = Y if weight.bias is None else Y.add_(weight.bias)
    if epilogue.activation == "relu" and not epilogue.gated:
        Y, epilogue = Y.relu_(), epilogue._replace(activation=None)
    return _finish(Y.to(X.dtype), epilogue)


def _finish(Y: Tensor, epilogue: Epilogue) -> Tensor:
    Y, gate = Y.chunk(2, dim=-1) if epilogue.gated else (Y, None)
    Y = Y if epilogue.activation is None else ACTIVATIONS[epilogue.activation](Y)
    Y = Y if gate is None else Y * gate
    return Y if epilogue.residual is None else epilogue.residual + Y


def _library(X: Tensor, weight: Weight, epilogue: Epilogue) -> Tensor:
    W, bias, activation, residual = weight.W, weight.bias, epilogue.activation, epilogue.residual
    X = normalize(X, weight.norm, scale=epilogue.scale)
    if epilogue.gated and residual is None and len(X) > 0:
        Z, f = F.linear(X, W, bias).contiguous(), len(W) // 2
        Y = Z.new_empty(len(X), f)
        launch_pdl(_gate_kernel, (len(X), triton.cdiv(f, GATE_COLUMNS)), Z)(
            *(Z, Y, f), ACTIVATION=activation or "", COLUMNS=GATE_COLUMNS, num_warps=4
        )
        return Y
    fusable = activation in ("relu", "gelu_tanh") and not epilogue.gated
    if fusable and bias is not None and X.is_cuda:  # on a CPU this would be the exact gelu
        Y = torch._addmm_activation(bias, X, W.t(), use_gelu=activation == "gelu_tanh")
        return Y if residual is None else residual + Y
    if residual is None or activation or epilogue.gated or not residual.is_contiguous():
        return _finish(F.linear(X, W, bias), epilogue)
    if residual.data_ptr() == X.data_ptr():
        residual = residual.clone()
    residual.addmm_(X, W.t())
    return residual if bias is None else residual.add_(bias)


class Tile(NamedTuple):
    """The work of one program of a product.

    The method "vector" is for one row and does not use tensor cores. "split" divides the depth
    among the warps of a program. "tile" copies its operands with tensor descriptors.
    """

    method: Literal["vector", "split", "tile"]
    rows: int
    columns: int  # rows of W; a gated product has half as many columns
    depth: int  # elements per iteration; for "split", per warp
    warps: int
    stages: int
    ahead: bool = False  # load the first weights before the previous kernel has ended
    prefetch: int = 0  # elements of each row of W to fetch into L2 before that
    splits: int = 1  # parts of the depth, for different programs


def choose_tile(X: Tensor, W: Tensor) -> Tile:
    """Returns the tile for X [rows, depth] and W [columns, depth], by measurements on an H200."""
    rows, depth = X.shape
    columns = len(W)
    if rows == 1:
        if depth > MAX_SMALL_DEPTH:
            return Tile("vector", 1, 4, 4096, 8, 1, ahead=True)
        if columns <= 8 * NUM_SMS:  # one program per multiprocessor
            return Tile("vector", 1, 8, 1024, 8, 1, ahead=True)
        return Tile("vector", 1, 4, 1024, 4 if columns < MANY_COLUMNS else 2, 1, ahead=True)
    if X.dtype == torch.float32:  # exact, without tensor cores; not tuned for speed
        return Tile("split", 16, 16, 16, 4, 2)
    if rows <= 16:
        deep = Tile("split", 16, 8, 128, 4, 4)
        return deep if depth > MAX_SMALL_DEPTH else Tile("split", 16, 8, 256, 4, 1, ahead=True)
    alignments = X.data_ptr(), W.data_ptr(), depth * W.element_size()
    if any(one % TMA_ALIGNMENT for one in alignments):
        return Tile("split", 32, 8, 128, 4, 3)

    def programs(width: int) -> int:
        return triton.cdiv(rows, 64) * triton.cdiv(columns, width)  # type: ignore[no-any-return]

    # the widest tile that leaves one or, with smaller buffers, two programs per multiprocessor
    if programs(16) <= NUM_SMS:
        return Tile("tile", 64, 16, 256, 4, 3, prefetch=1024)
    if programs(32) <= NUM_SMS:
        return Tile("tile", 64, 32, 128, 4, 6, prefetch=512)
    if programs(64) <= 2 * NUM_SMS:
        return Tile("tile", 64, 64, 128, 4, 3)
    return Tile("tile", 128, 64, 64, 4, 4)


def small_rows(X: Tensor, weight: Weight, epilogue: Epilogue, tile: Tile | None = None) -> Tensor:
    """Computes `linear` with one kernel.

    If the tile splits the depth, returns float32 parts [splits, rows, columns], without epilogue.
    """
    W, norm, gated, residual = weight.W, weight.norm, epilogue.gated, epilogue.residual
    X, tile, columns = X.contiguous(), tile or choose_tile(X, W), len(W) // 2 if gated else len(W)
    rows, depth = X.shape
    parts = (tile.splits,) if tile.splits > 1 else ()
    Y = X.new_empty(*parts, rows, columns, dtype=torch.float32 if parts else X.dtype)
    own = tile.columns // 2 if gated else tile.columns  # columns of Y per program
    x_tiles, w_tiles, stages = None, None, tile.stages
    if tile.method == "tile":
        from triton.tools.tensor_descriptor import TensorDescriptor  # needs Triton

        x_tiles = TensorDescriptor.from_tensor(X, [tile.rows, tile.depth])
        w_tiles = TensorDescriptor.from_tensor(W, [own, tile.depth])
        each = (tile.rows + tile.columns) * tile.depth * X.element_size()  # bytes of a stage
        stages = max(1, int(min(stages, shared_memory(X.device) / each)))
    constants = tl.constexpr(epilogue.activation or ""), tl.constexpr(gated)
    relu: Any = tl.constexpr(epilogue.relu_input)
    residual = None if residual is None else residual.contiguous()
    lines = triton.cdiv(min(tile.prefetch, depth) * W.element_size(), CACHE_LINE)
    grid = triton.cdiv(rows, tile.rows), triton.cdiv(columns, own), tile.splits
    launch_pdl(linear_kernel, grid, X)(
        *(X, W, x_tiles, w_tiles, weight.bias, weight.column_sums, Y, rows, columns, depth),
        0.0 if norm is None else norm.epsilon,
        Epilogue(*constants, residual, float(epilogue.scale), None, relu),
        Tile(*map(tl.constexpr, tile)),
        NORM="" if norm is None else norm.kind,
        LINES=triton.next_power_of_2(lines) if tile.splits == 1 else 0,
        EVICTION="evict_first" if weight.streamed and rows == 1 else "",
        num_warps=tile.warps,
        num_stages=stages,
    )
    return Y


def split_depth(X: Tensor, weight: Weight, epilogue: Epilogue) -> Tensor:
    """Computes `linear` by programs that each read a part of the depth, and a sum."""
    columns = len(weight.W)
    rows, splits = (16, 8) if len(X) <= 16 else (64, 12)  # tuned on an H200
    tile = Tile("tile", rows, 64, 128, 4, 4, splits=splits)
    if len(X) > 64:
        tile = Tile("tile", 64, 64, 64, 4, 6, splits=8)
    parts = small_rows(X, Weight(weight.W), Epilogue(relu_input=epilogue.relu_input), tile)
    Y = X.new_empty(len(X), columns)
    norm = None if epilogue.deferred is None else epilogue.deferred.for_kernel()
    residual = None if epilogue.residual is None else epilogue.residual.contiguous()
    constants = tile.splits, triton.next_power_of_2(columns), epilogue.activation or ""
    launch_pdl(_sum_kernel, (len(X),), X)(
        *(parts, weight.bias, norm, residual, Y, columns, float(epilogue.scale)),
        *map(tl.constexpr, constants),
        num_warps=4,
    )
    return Y


IMPLEMENTATIONS = {
    "reference": _reference,
    "library": _library,
    "small_rows": small_rows,
    "split_depth": split_depth,
    "onednn": _onednn,
    "int8": _int8,
}


@triton.jit
def linear_kernel(
    X,  # [rows, depth]
    W,  # [columns, depth], or [2 columns, depth] if gated
    x_tiles,  # descriptors of X and W, for the tile method
    w_tiles,
    bias,
    column_sums,
    Y,  # [rows, columns], or parts [splits, rows, columns]
    rows,
    columns,
    depth,
    epsilon,
    epilogue,
    tile,
    NORM: tl.constexpr,
    LINES: tl.constexpr,
    EVICTION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes some rows of Y per program, in the columns that tile.columns rows of W produce."""
    OWN: tl.constexpr = tile.columns // 2 if epilogue.gated else tile.columns
    first_row, first_column = tl.program_id(0) * tile.rows, tl.program_id(1) * OWN
    row, column = first_row + tl.arange(0, tile.rows), first_column + tl.arange(0, OWN)
    c = tl.arange(0, tile.columns)
    if epilogue.gated:  # rows j and j + f of W are adjacent
        w_row, is_w_row = first_column + c // 2 + (c % 2) * columns, first_column + c // 2 < columns
    else:
        w_row, is_w_row = column, column < columns
    w_start = W + w_row.to(tl.int64) * depth
    part = tl.arange(0, tile.depth)
    if tile.method == "vector":
        at = part[None, :]
        x_at, w_at = X + at, w_start[:, None] + at
        is_w = is_w_row[:, None]
    elif tile.method == "split":
        at = tl.arange(0, tile.warps)[:, None, None] * tile.depth + part[None, None, :]
        x_at, w_at = X + row[None, :, None] * depth + at, w_start[None, :, None] + at
        is_x, is_w = (row < rows)[None, :, None], is_w_row[None, :, None]

    # loads that do not depend on the previous kernel
    w = 0
    if tile.ahead:
        w = tl.load(w_at, mask=is_w & (at < depth), other=0.0, eviction_policy=EVICTION)
    if PDL and LINES > 0:
        _prefetch(W, w_row, (2 if epilogue.gated else 1) * columns - 1, depth, LINES)
    if bias is not None:
        b = tl.load(bias + w_row, mask=is_w_row, other=0.0).to(tl.float32)
    if NORM == "layer":
        w_sum = tl.load(column_sums + w_row, mask=is_w_row, other=0.0)
    wait_for_previous(PDL)
    out = row[:, None].to(tl.int64) * columns + column[None, :]
    is_out = (row < rows)[:, None] & (column < columns)[None, :]
    if epilogue.residual is not None:
        r = tl.load(epilogue.residual + out, mask=is_out, other=0.0)

    if tile.method == "vector":
        y, total, squares = _vector(x_at, w_at, w, at, is_w, depth, tile, NORM, EVICTION)
    elif tile.method == "split":
        y, total, squares = _split(x_at, w_at, w, at, is_x, is_w, depth, tile, NORM)
    else:
        first = first_row, first_column
        y, total, squares = _tile(x_tiles, w_tiles, first, columns, depth, tile, epilogue, NORM)

    if tile.splits > 1:
        tl.store(Y + tl.program_id(2).to(tl.int64) * rows * columns + out, y, mask=is_out)
    else:
        if NORM == "layer":
            mean = total / depth
            y = y - mean[:, None] * w_sum[None, :]
            squares = tl.maximum(squares - total * mean, 0.0)
        if NORM != "":
            y = y * tl.rsqrt(squares / depth + epsilon)[:, None]
        y = y * epilogue.scale
        if bias is not None:
            y += b[None, :]
        if epilogue.gated:
            y, gate = tl.split(tl.reshape(y, [tile.rows, OWN, 2]))
            y = _activate_tile(y, epilogue.activation) * gate
        else:
            y = _activate_tile(y, epilogue.activation)
        if epilogue.residual is not None:
            y += r.to(tl.float32)
        tl.store(Y + out, y.to(Y.dtype.element_ty), mask=is_out)


@triton.jit
def _vector(x_at, w_at, w, at, is_w, depth, tile, NORM: tl.constexpr, EVICTION: tl.constexpr):
    """Returns x W^T [1, columns] of one row, and the row's sum and sum of squares [1]."""
    acc, total, squares = tl.zeros([tile.columns], tl.float32), 0.0, 0.0
    for first in range(0, depth, tile.depth):
        coming = first + tile.depth
        x = tl.load(x_at + first, mask=first + at < depth, other=0.0).to(tl.float32)
        w_next = tl.load(
            w_at + coming, mask=is_w & (coming + at < depth), other=0.0, eviction_policy=EVICTION
        )
        # scalars, because Triton 3.6 cannot compile sums of tensors with one element
        if NORM == "layer":
            total += tl.sum(x)
        if NORM != "":
            squares += tl.sum(multiply(x, x))
        acc += tl.sum(multiply(w.to(tl.float32), x), axis=1)
        w = w_next
    none = tl.zeros([1], tl.float32)
    return acc[None, :], none + total, none + squares


@triton.jit
def _split(x_at, w_at, w, at, is_x, is_w, depth, tile, NORM: tl.constexpr):
    """Returns X W^T [rows, columns] and statistics of X; each warp sums its part of the depth."""
    acc = tl.zeros([tile.warps, tile.rows, tile.columns], tl.float32)
    total = tl.zeros([tile.warps, tile.rows], tl.float32)
    squares = tl.zeros([tile.warps, tile.rows], tl.float32)
    STEP: tl.constexpr = tile.warps * tile.depth
    for first in range(0, depth, STEP):
        x = tl.load(x_at + first, mask=is_x & (first + at < depth), other=0.0)
        if tile.ahead:
            coming = first + STEP
            w_next = tl.load(w_at + coming, mask=is_w & (coming + at < depth), other=0.0)
            acc = tl.dot(x, tl.trans(w, 0, 2, 1), acc, input_precision="ieee")
            w = w_next
        else:
            w_now = tl.load(w_at + first, mask=is_w & (first + at < depth), other=0.0)
            acc = tl.dot(x, tl.trans(w_now, 0, 2, 1), acc, input_precision="ieee")
        if NORM == "layer":
            total += tl.sum(x.to(tl.float32), axis=2)
        if NORM != "":
            squares += tl.sum(multiply(x.to(tl.float32), x.to(tl.float32)), axis=2)
    return tl.sum(acc, axis=0), tl.sum(total, axis=0), tl.sum(squares, axis=0)


@triton.jit
def _tile(x_tiles, w_tiles, first, columns, depth, tile, epilogue, NORM: tl.constexpr):
    """Returns X W^T [rows, columns] and statistics of X; descriptors load zeros past the edges."""
    first_row, first_column = first
    ROWS: tl.constexpr = tile.rows
    OWN: tl.constexpr = tile.columns // 2 if epilogue.gated else tile.columns
    acc, gate = tl.zeros([ROWS, OWN], tl.float32), tl.zeros([ROWS, OWN], tl.float32)
    total, squares = tl.zeros([ROWS, 16], tl.float32), tl.zeros([ROWS, ROWS], tl.float32)
    begin, end = 0, depth
    if tile.splits > 1:
        size = tl.cdiv(tl.cdiv(depth, tile.splits), tile.depth) * tile.depth
        begin = tl.program_id(2) * size
        end = tl.minimum(begin + size, depth)
    for at in range(begin, end, tile.depth):
        x = x_tiles.load([first_row, at])
        if epilogue.relu_input:
            x = tl.where(x < 0.0, tl.zeros_like(x), x)  # keeps NaN
        w = w_tiles.load([first_column, at])
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
        if epilogue.gated:
            w = w_tiles.load([first_column + columns, at])
            gate = tl.dot(x, tl.trans(w), gate, input_precision="ieee")
        if NORM != "":
            squares = tl.dot(x, tl.trans(x), squares, input_precision="ieee")
        if NORM == "layer":
            ones = tl.full([tile.depth, 16], 1.0, x.dtype)
            total = tl.dot(x, ones, total, input_precision="ieee")
    if epilogue.gated:
        acc = tl.reshape(tl.join(acc, gate), [ROWS, tile.columns])
    # The sums of squares are the diagonal of X X^T. A product computes them because Triton 3.7
    # reuses the buffer of a tile too early if both registers and an asynchronous product read it.
    row = tl.arange(0, ROWS)
    squares = tl.sum(tl.where(row[:, None] == row[None, :], squares, 0.0), axis=1)
    return acc, tl.max(total, axis=1), squares


@triton.jit
def _prefetch(W, w_row, last_row, depth, LINES: tl.constexpr):
    """Fetches the first LINES cache lines of each row `w_row` of W into L2."""
    LINE: tl.constexpr = 1024 // W.dtype.element_ty.primitive_bitwidth  # elements of 128 bytes
    at = tl.minimum(tl.arange(0, LINES) * LINE, depth - 1)[None, :]
    start = W + tl.minimum(w_row, last_row).to(tl.int64) * depth
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [start[:, None] + at],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _sum_kernel(
    parts, bias, deferred, residual, Y, columns, scale, SPLITS, SIZE, ACTIVATION, PDL: tl.constexpr
):
    """Sums the parts of one row per program; deferred: X, d and epsilon of an RMS norm."""
    wait_for_previous(PDL)
    row, rows, at = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.arange(0, SIZE)
    mask = at < columns
    y = tl.zeros([SIZE], tl.float32)
    for part in tl.static_range(SPLITS):
        y += tl.load(parts + (part * rows + row) * columns + at, mask=mask, other=0.0)
    y = y * scale
    if deferred is not None:
        X, d, epsilon, i = deferred[0], deferred[1], deferred[2], tl.arange(0, deferred[3])
        x = tl.load(X + row * d + i, mask=i < d, other=0.0).to(tl.float32)
        y = y * tl.rsqrt(tl.sum(multiply(x, x), axis=0) / d + epsilon)
    if bias is not None:
        y += tl.load(bias + at, mask=mask, other=0.0).to(tl.float32)
    y = _activate_tile(y, ACTIVATION)
    if residual is not None:
        y += tl.load(residual + row * columns + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(Y + row * columns + at, y.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def _gate_kernel(Z, Y, f, ACTIVATION: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr):
    """Computes COLUMNS columns of one row per program."""
    wait_for_previous(PDL)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    z = tl.load(Z + row * 2 * f + column, mask=column < f, other=0.0).to(tl.float32)
    factor = tl.load(Z + row * 2 * f + f + column, mask=column < f, other=0.0).to(tl.float32)
    y = _activate_tile(z, ACTIVATION) * factor
    tl.store(Y + row * f + column, y.to(Y.dtype.element_ty), mask=column < f)


@triton.jit
def _activate_tile(y, ACTIVATION: tl.constexpr):
    """Returns the activation of y."""
    if ACTIVATION == "relu":
        y = tl.where(y < 0.0, 0.0, y)  # keeps NaN
    elif ACTIVATION == "gelu":
        y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # tanh(u) = 2 sigmoid(2 u) - 1
        y = y * tl.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))
    elif ACTIVATION == "silu":
        y = y * tl.sigmoid(y)
    return y
