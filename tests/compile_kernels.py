"""Compiles for an H200 whatever kernels decoding and packed attention launch; prints their names.

Nothing is run: a launch compiles, and leaves its results as they were.
"""

from collections.abc import Callable

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from helpers import config, model, tokens
from writehead.config import DecodeConfig
from writehead.decoding.graphs import GraphDecoder
from writehead.decoding.search import Constraints
from writehead.kernels import (
    Visibility,
    beams,
    begin,
    choose,
    decode,
    label_loss,
    linear,
    packed,
    pointwise,
    tiles,
)
from writehead.kernels.heads import Heads

H200 = GPUTarget("cuda", 90, 32)
OPTIONS = {"num_warps", "num_stages", "launch_pdl"}
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.int32: "*i32",
}
compiled: dict[tuple[str, str], str] = {}  # by what makes one kernel differ from another


def compile_instead(kernel: JITFunction, grid: tuple[int, ...]) -> Callable[..., None]:
    """What `kernel[grid]` is here."""

    def launch(*args: object, **named: object) -> None:
        options = {name: named.pop(name) for name in OPTIONS & named.keys()}
        values = dict(zip(kernel.arg_names, args, strict=False)) | named
        signature, constants = {}, {}
        for parameter in kernel.params:
            value = values[parameter.name]
            kind = "constexpr" if parameter.is_constexpr else type_of(value)
            # as at a real launch, an integer of 1 is known to the compiler
            if kind == "constexpr" or (kind == "i32" and value == 1):
                kind, constants[(parameter.num,)] = "constexpr", value
            signature[parameter.name] = kind
        key = kernel.__name__, str((signature, constants, sorted(options.items())))
        if key not in compiled:
            source = ASTSource(kernel, signature, constants)
            compiled[key] = triton.compile(source, target=H200, options=options).asm["ptx"]

    return launch


def type_of(value: object) -> str:
    """What a launch calls the type of an argument."""
    if isinstance(value, Tensor):
        return TYPES[value.dtype]
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype][1:]}{list(value.block_shape)}>"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= int(value) < 2**31 else "i64"


def take_a_step(task: str, rows: int, options: DecodeConfig, **changes: object) -> None:
    """One step of a search in bfloat16, by kernels that may start early."""
    sizes = {"d": 64, "h": 8, "k": 32, "v": 64, "decoder_layers": 1, **changes}
    made = model(config(task, **sizes), dtype=torch.bfloat16)
    constraints = Constraints.make(options, 1, None, None, rows, made.device)
    taken = GraphDecoder(made).start(tokens(rows, 5), [4] * rows, 9, options, constraints)
    taken.step()
    if options.width > 1:
        beams.trace_back(taken.buffers.history, taken.buffers.pool, options.n_best)


def multiply_one_row(dtype: torch.dtype) -> None:
    """A product of one row with weights that leave the cache first."""
    for depth in (1024, 5440):
        X, W = (torch.zeros(size, depth, dtype=dtype) for size in (1, 1280))
        linear.row_linear(X, W, residual=torch.zeros(1, 1280, dtype=dtype), passing=True)


def attend_far_with_many(dtype: torch.dtype) -> None:
    """Attention of many rows to long memories, whose tiles are the largest."""
    K, V = (torch.zeros(150, 1, 4160, 128, dtype=dtype) for _ in range(2))
    ones = torch.ones(150, dtype=torch.long)
    Q = torch.zeros(150, 8 * 128, dtype=dtype)
    decode.attend_memory(Q, K, V, ones, ones, heads=8, scale=0.1)


def attend_far(dtype: torch.dtype) -> None:
    """Attention to a memory so long that it is read in parts."""
    K, V = (torch.zeros(1, 2, 4096, width, dtype=dtype) for width in (128, 64))
    one = torch.ones(1, dtype=torch.long)
    Q = torch.zeros(1, 8 * 128, dtype=dtype)
    decode.attend_memory(Q, K, V, one, one, heads=8, scale=0.1, padded=True)


def multiply_some_rows(dtype: torch.dtype) -> None:
    """A product of more rows than are few."""
    X, W = (torch.zeros(size, 1024, dtype=dtype) for size in (40, 1280))
    shape = tiles.choose_shape(X, W)
    assert shape is not None
    tiles.tiled_linear(X, W, shape, residual=torch.zeros(40, 1280, dtype=dtype))


def attend_packed(dtype: torch.dtype, *, noisy: bool) -> None:
    """Packed attention and its gradients."""
    shapes = (4, 40, 32), (2, 40, 32), (2, 40, 16)
    Q, K, V = (torch.zeros(2, *shape, dtype=dtype, requires_grad=True) for shape in shapes)
    segments = torch.ones(2, 40, dtype=torch.long)
    visibility = Visibility(causal=True, query_segments=segments, memory_segments=segments)
    noise = torch.ones(2, 2, 40) if noisy else None
    packed.attend(Q, K, V, visibility, 0.1, noise).sum().backward()


def attend_packed_and_fused(dtype: torch.dtype, heads: Heads) -> None:
    """The same of one wide product, with noise."""
    QKV = torch.zeros(2, 40, sum(heads.widths), dtype=dtype, requires_grad=True)
    segments = torch.ones(2, 40, dtype=torch.long)
    visibility = Visibility(causal=True, query_segments=segments, memory_segments=segments)
    noise = torch.ones(2, heads.g, 40)
    packed.attend_fused(QKV, heads, visibility, 0.1, noise).sum().backward()


def label(dtype: torch.dtype) -> None:
    """The loss of labels and its gradient."""
    logits = torch.zeros(2, 40_000, dtype=dtype, requires_grad=True)
    label_loss.label_loss(logits, torch.tensor([3, -100]), 0.1, 1e-4)[0].sum().backward()


def main() -> None:
    JITFunction.__getitem__ = compile_instead
    for wrappers in (beams, begin, choose, decode, linear, pointwise, tiles):
        wrappers.chained = lambda T: {"launch_pdl": True}  # as on an H200
    greedy, beam = DecodeConfig(max_length=3), DecodeConfig(max_length=3, beam=4)
    take_a_step("translation", 20, greedy)
    multiply_some_rows(torch.bfloat16)
    take_a_step("translation", 3, beam, g=8)
    take_a_step("translation", 1, greedy)
    take_a_step("translation", 1, greedy, norm="layer", bias=True)
    take_a_step("language", 1, greedy, g=2, window=1)
    take_a_step("language", 1, DecodeConfig(max_length=3, beam=2), window=1)
    take_a_step("language", 2, DecodeConfig(max_length=3, beam=5))
    multiply_one_row(torch.bfloat16)
    attend_far(torch.bfloat16)
    attend_far_with_many(torch.bfloat16)
    for noisy in (False, True):
        attend_packed(torch.bfloat16, noisy=noisy)
    attend_packed(torch.float32, noisy=False)  # which takes the most time to compile
    for g in (8, 1):
        attend_packed_and_fused(torch.bfloat16, Heads(8, g, 128, 128))
    label(torch.bfloat16)
    print(*sorted({name for name, _ in compiled}))


if __name__ == "__main__":
    main()
