"""Compiles the kernels of decoding and training for an H200, and prints their names.

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
TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int64: "i64", torch.int32: "i32"}
SEGMENTS = torch.ones(2, 40, dtype=torch.long)
PACKED = Visibility(causal=True, query_segments=SEGMENTS, memory_segments=SEGMENTS)
compiled: dict[tuple[str, str], str] = {}  # PTX by name and specialisation


def compile_instead(kernel: JITFunction, grid: tuple[int, ...]) -> Callable[..., None]:
    """Stands for `kernel[grid]`."""

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
    """Triton's name for the type of an argument."""
    if isinstance(value, Tensor):
        return f"*{TYPES[value.dtype]}"
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}>"
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


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


def multiply() -> None:
    """Products of one row, with weights that leave the cache first, and of forty."""
    for depth in (1024, 5440):
        given = zeros(1, depth), zeros(1280, depth)
        linear.row_linear(*given, residual=zeros(1, 1280), passing=True)
    X, W = zeros(40, 1024), zeros(1280, 1024)
    tiles.tiled_linear(X, W, tiles.choose_shape(X, W), residual=zeros(40, 1280))


def attend_far(rows: int, g: int, m: int, v: int, *, padded: bool) -> None:
    """Attention to long memories."""
    ones = torch.ones(rows, dtype=torch.long)
    given = zeros(rows, 8 * 128), zeros(rows, g, m, 128), zeros(rows, g, m, v)
    decode.attend_memory(*given, ones, ones, heads=8, scale=0.1, padded=padded)


def attend_packed(dtype: torch.dtype, *, noisy: bool) -> None:
    """Packed attention and its gradients."""
    shapes = (4, 40, 32), (2, 40, 32), (2, 40, 16)
    Q, K, V = (zeros(2, *shape, dtype=dtype).requires_grad_() for shape in shapes)
    noise = torch.ones(2, 2, 40) if noisy else None
    packed.attend(Q, K, V, PACKED, 0.1, noise).sum().backward()


def attend_fused(heads: Heads) -> None:
    """The same of a fused projection, with noise."""
    QKV = zeros(2, 40, sum(heads.widths)).requires_grad_()
    noise = torch.ones(2, heads.g, 40)
    packed.attend_fused(QKV, heads, PACKED, 0.1, noise).sum().backward()


def main() -> None:
    JITFunction.__getitem__ = compile_instead
    for wrappers in (beams, begin, choose, decode, linear, pointwise, tiles):
        wrappers.chained = lambda T: {"launch_pdl": True}  # as on an H200
    greedy, *searches = (DecodeConfig(max_length=3, beam=beam) for beam in (1, 4, 2, 5))
    take_a_step("translation", 20, greedy)
    take_a_step("translation", 3, searches[0], g=8)
    take_a_step("translation", 1, greedy)
    take_a_step("translation", 1, greedy, norm="layer", bias=True)
    take_a_step("language", 1, greedy, g=2, window=1)
    take_a_step("language", 1, searches[1], window=1)
    take_a_step("language", 2, searches[2])
    multiply()
    attend_far(1, 2, 4096, 64, padded=True)  # which is read in parts
    attend_far(150, 1, 4160, 128, padded=False)  # by the largest tiles
    for noisy in (False, True):
        attend_packed(torch.bfloat16, noisy=noisy)
    attend_packed(torch.float32, noisy=False)  # which takes the most time to compile
    for g in (8, 1):
        attend_fused(Heads(8, g, 128, 128))
    logits = zeros(2, 40_000).requires_grad_()
    label_loss.label_loss(logits, torch.tensor([3, -100]), 0.1, 1e-4)[0].sum().backward()
    print(*sorted({name for name, _ in compiled}))


if __name__ == "__main__":
    main()
