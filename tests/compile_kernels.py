"""Compiles the kernels of decoding and training for an H200 and prints their names.

Kernels are compiled instead of launched, so their results are never written.
"""

import re
import sys
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from helpers import config, model, tokens
from writehead.config import DecodeConfig
from writehead.engine.runner import Lane, Shape
from writehead.engine.search import Options, Targets
from writehead.ops import decode_attention as decode_ops
from writehead.ops import packed_attention
from writehead.ops.decode_attention import CacheLayer, MemoryLayer, decode_attention
from writehead.ops.heads import Heads
from writehead.ops.linear import Weight, linear
from writehead.ops.loss import label_loss
from writehead.ops.norm import DeferredRms
from writehead.ops.visibility import Visibility

H200 = GPUTarget("cuda", 90, 32)
OPTIONS = {"num_warps", "num_stages", "launch_pdl"}
TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int64: "i64", torch.int32: "i32"}
TYPES |= {torch.float16: "fp16", torch.uint8: "u8"}
SEGMENTS = torch.ones(2, 40, dtype=torch.long)
PACKED = Visibility(causal=True, query_segments=SEGMENTS, memory_segments=SEGMENTS)
SIZES = {"d": 64, "f": 96, "h": 8, "k": 32, "v": 64, "decoder_layers": 1, "target_positions": 64}
LAYER_NORM = {"norm": "layer", "bias": True, "activation": "gelu"}
GATED = {"gated": True, "activation": "silu", "positions": "rotary"}
SHARED_MEMORY = 227 << 10  # bytes per program on an H200
MOVES, FUSED = {"mov.b32", "mov.f32"}, {"fma.rn.f32", "fma.rn.ftz.f32"}  # in PTX
compiled: set[tuple[str, str]] = set()  # names and specializations


def compile_instead(kernel: JITFunction, grid: tuple[int, ...]) -> Callable[..., None]:
    """Replaces `kernel[grid]`."""

    def compile_kernel(*args: object, **named: object) -> None:
        options = {name: named.pop(name) for name in OPTIONS & named.keys()}
        values = dict(zip(kernel.arg_names, args, strict=False)) | named
        signature, constants = {}, {}
        for parameter in kernel.params:
            value = values[parameter.name]
            if parameter.is_constexpr:
                signature[parameter.name], constants[(parameter.num,)] = "constexpr", value
            else:
                signature[parameter.name] = type_of(value, (parameter.num,), constants)
        key = kernel.__name__, str((signature, constants, sorted(options.items())))
        if key not in compiled:
            source = ASTSource(kernel, signature, constants)
            made = triton.compile(source, target=H200, options=options)
            assert made.metadata.shared <= SHARED_MEMORY, (key, made.metadata.shared)
            assert not sums_differ(made.asm["ptx"]), f"a sum across threads uses FMA in {key}"
            compiled.add(key)

    return compile_kernel


def sums_differ(ptx: str) -> bool:
    """Returns whether a sum across threads uses FMA, so that the threads get different sums."""
    received = set()  # registers with values from another thread
    for line in ptx.splitlines():
        line = re.sub(r"@!?%p\d+", "", line)
        name, *registers = re.findall(r"[%\w.]+", line) or [""]
        if name == "shfl.sync.bfly.b32" or (name in MOVES and registers[1] in received):
            received.add(registers[0])
        elif name in FUSED and registers[3] in received:
            return True
    return False


def type_of(value: object, place: tuple[int, ...], constants: dict) -> object:
    """Returns Triton's name for the type of an argument; records integers that are constants."""
    if isinstance(value, tuple):
        types = [type_of(one, (*place, i), constants) for i, one in enumerate(value)]
        return type(value)(*types) if hasattr(value, "_fields") else tuple(types)
    if isinstance(value, Tensor):
        return f"*{TYPES[value.dtype]}"
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}>"
    if isinstance(value, float):
        return "fp32"
    # as in a real launch, the compiler specializes integers equal to 1
    if isinstance(value, tl.constexpr) or value is None or value == 1:
        constants[place] = getattr(value, "value", value)
        return "constexpr"
    return "i32" if -(2**31) <= int(value) < 2**31 else "i64"


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


@torch.no_grad()
def compile_lane(task: str, slots: int, beam: int, **changes: object) -> None:
    """Encodes or prefills, then runs one step of a lane's slots, as in a graph."""
    dtype = changes.pop("dtype", torch.bfloat16)
    made = model(config(task, **(SIZES | changes)), dtype=dtype).pack()
    lane = Lane(made, Shape(slots, beam, 8 * (task == "translation"), 32), Targets(37, 1))
    if task == "translation":
        lane.encode(range(slots), tokens(slots, 5).tolist())
    else:
        state = made.new_state(slots, 8)
        made.feed(tokens(slots, 7), state, torch.full((slots,), 5))
    options = [Options(DecodeConfig(), 3)] * slots
    lane.admit(range(slots), options, 0)
    for samples in (False, True)[: 3 - min(beam, 2)]:
        lane._run(torch.arange(slots, dtype=torch.int32), slots, samples)
    lane.collect(range(slots), options)


@torch.no_grad()
def compile_products() -> None:
    """Runs products of one row with streamed weights, and of many rows and columns."""
    for rows, columns, depth in ((1, 1280, 1024), (1, 1280, 5440), (16, 32768, 1024)):
        weight = Weight(zeros(columns, depth), streamed=True)
        for dtype in (torch.bfloat16, torch.float16)[: 1 + (rows == 1)]:
            one = Weight(weight.W.to(dtype), streamed=True)
            linear(zeros(rows, depth, dtype=dtype), one, implementation="small_rows")
    for rows, activation, gated in ((16, "silu", True), (40, "relu", False), (200, "silu", True)):
        weight, X = Weight(zeros(1280, 1024)), zeros(rows, 1024)
        shape = {"gated": gated, "residual": zeros(rows, 1280 // (1 + gated))}
        linear(X, weight, activation=activation, implementation="small_rows", **shape)
    linear(zeros(300, 1024), Weight(zeros(1280, 1024)), activation="silu", gated=True)
    X = zeros(16, 1024)
    given = {"residual": X, "deferred": DeferredRms(X, 1e-6), "relu_input": True}
    linear(zeros(16, 5440), Weight(zeros(1024, 5440)), **given)


def compile_decode_attention() -> None:
    """Runs attention over long memories, split or in large tiles, and of several positions."""
    for rows, g, m, v, padded in ((1, 2, 4096, 64, True), (150, 1, 4160, 128, False)):
        ones, heads = torch.ones(rows, dtype=torch.long), Heads(8, g, 128, v)
        K, V = (zeros(rows, g, m, depth) for depth in (128, v))
        memory = MemoryLayer(K, V, ones, ones, beam=1, slots=None, padded=padded)
        decode_attention(zeros(rows, 1, 8 * 128), memory, heads, scale=0.1)
        for n, window in ((1, None), (3, None), (2, m)):
            cache = CacheLayer(K, V, ones, ones, beam=1, window=window, padded=padded)
            QKV = zeros(rows, n, sum(heads.widths))
            decode_attention(QKV, cache, heads, scale=0.1)


def compile_training() -> None:
    """Runs attention over packed sequences, and the loss."""
    noise = torch.ones(2, 2, 40)
    for dtype, used in ((torch.bfloat16, None), (torch.bfloat16, noise), (torch.float32, None)):
        shapes = (4, 40, 32), (2, 40, 32), (2, 40, 16)
        QKV = (zeros(2, *shape, dtype=dtype).requires_grad_() for shape in shapes)
        packed_attention.attend(*QKV, PACKED, 0.1, used).sum().backward()
    for heads in (Heads(8, 8, 128, 128), Heads(8, 1, 128, 128)):
        QKV = zeros(2, 40, sum(heads.widths)).requires_grad_()
        noise = torch.ones(2, heads.g, 40)
        packed_attention.attend(*heads.split(QKV), PACKED, 0.1, noise, QKV).sum().backward()
    logits, options = zeros(2, 40_000).requires_grad_(), {"label_smoothing": 0.1, "z_loss": 1e-4}
    losses = label_loss(logits, torch.tensor([3, -100]), implementation="triton", **options)
    losses[0].sum().backward()


def main() -> None:
    JITFunction.__getitem__ = compile_instead
    decode_ops.shared_memory = lambda device: SHARED_MEMORY
    as_on_an_h200 = {"runs_triton": lambda T: True, "supports_pdl": lambda device: True}
    for module in [one for name, one in sys.modules.items() if name.startswith("writehead.")]:
        for name in as_on_an_h200.keys() & vars(module).keys():
            setattr(module, name, as_on_an_h200[name])
    for slots in (1, 16, 32, 128):
        compile_lane("translation", slots, 1)
        compile_lane("translation", slots, 4, g=8)
    compile_lane("translation", 1, 1, g=8, **LAYER_NORM)
    compile_lane("translation", 16, 2, dtype=torch.float32, **LAYER_NORM)
    compile_lane("translation", 32, 1, norm_place="post", **LAYER_NORM)
    compile_lane("language", 1, 1, g=2, window=1)
    compile_lane("language", 16, 5, window=7, **GATED)
    compile_lane("language", 128, 1, **GATED)
    compile_lane("translation", 16, 2, positions="relative", attention_scale=1.0)
    compile_lane("language", 16, 1, window=7, positions="relative", relative_distance=20)
    compile_products()
    compile_decode_attention()
    compile_training()
    print(*sorted({name for name, _ in compiled}))


if __name__ == "__main__":
    main()
