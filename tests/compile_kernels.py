"""Compiles the kernels of decoding and training for an H200 and prints their names.

Kernels are compiled instead of launched, so their results are never written.
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
compiled: dict[tuple[str, str], str] = {}  # PTX by name and specialization


def compile_instead(kernel: JITFunction, grid: tuple[int, ...]) -> Callable[..., None]:
    """Replaces `kernel[grid]`."""

    def launch(*args: object, **named: object) -> None:
        options = {name: named.pop(name) for name in OPTIONS & named.keys()}
        values = dict(zip(kernel.arg_names, args, strict=False)) | named
        signature, constants = {}, {}
        for parameter in kernel.params:
            value = values[parameter.name]
            kind = "constexpr" if parameter.is_constexpr else type_of(value)
            # as in a real launch, the compiler specializes integers equal to 1
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


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


def compile_search(task: str, rows: int, beam: int, **changes: object) -> None:
    """One step of a search in bfloat16."""
    options = DecodeConfig(max_length=3, beam=beam)
    sizes = {"d": 64, "h": 8, "k": 32, "v": 64, "decoder_layers": 1, **changes}
    made = model(config(task, **sizes), dtype=torch.bfloat16)
    constraints = Constraints.make(options, 1, None, None, rows, made.device)
    search = GraphDecoder(made).start(tokens(rows, 5), [4] * rows, 9, options, constraints)
    search.step()
    if beam > 1:
        beams.trace_back(search.buffers.history, search.buffers.pool, options.n_best)


def compile_products() -> None:
    """Products of one row, whose weights leave the cache first, and of forty rows."""
    for depth in (1024, 5440):
        X, W = zeros(1, depth), zeros(1280, depth)
        linear.row_linear(X, W, residual=zeros(1, 1280), passing=True)
    X, W = zeros(40, 1024), zeros(1280, 1024)
    tiles.tiled_linear(X, W, tiles.choose_shape(X, W), residual=zeros(40, 1280))


def compile_attention() -> None:
    """Attention over long memories, split or by the largest tiles, and packed attention."""
    for rows, g, m, v, padded in ((1, 2, 4096, 64, True), (150, 1, 4160, 128, False)):
        ones = torch.ones(rows, dtype=torch.long)
        Q, K, V = zeros(rows, 8 * 128), zeros(rows, g, m, 128), zeros(rows, g, m, v)
        decode.attend_memory(Q, K, V, ones, ones, heads=8, scale=0.1, padded=padded)
    noise = torch.ones(2, 2, 40)
    for dtype, used in ((torch.bfloat16, None), (torch.bfloat16, noise), (torch.float32, None)):
        shapes = (4, 40, 32), (2, 40, 32), (2, 40, 16)
        QKV = (zeros(2, *shape, dtype=dtype).requires_grad_() for shape in shapes)
        packed.attend(*QKV, PACKED, 0.1, used).sum().backward()
    for heads in (Heads(8, 8, 128, 128), Heads(8, 1, 128, 128)):
        QKV = zeros(2, 40, sum(heads.widths)).requires_grad_()
        packed.attend_fused(QKV, heads, PACKED, 0.1, torch.ones(2, heads.g, 40)).sum().backward()


def main() -> None:
    JITFunction.__getitem__ = compile_instead
    for module in (beams, begin, choose, decode, linear, pointwise, tiles):
        module.chained = lambda T: {"launch_pdl": True}  # as on an H200
    compile_search("translation", 20, 1)
    compile_search("translation", 3, 4, g=8)
    compile_search("translation", 1, 1)
    compile_search("translation", 1, 1, norm="layer", bias=True)
    compile_search("language", 1, 1, g=2, window=1)
    compile_search("language", 1, 2, window=1)
    compile_search("language", 2, 5)
    compile_products()
    compile_attention()
    logits = zeros(2, 40_000).requires_grad_()
    label_loss.label_loss(logits, torch.tensor([3, -100]), 0.1, 1e-4)[0].sum().backward()
    print(*sorted({name for name, _ in compiled}))


if __name__ == "__main__":
    main()
