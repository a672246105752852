"""`bench attention`: the attention of one decoding step, ours beside SDPA and FlashInfer.

K and V are read from several sets in turn, which together exceed the cache of the device, so that
every call reads them from memory. The output of each method is compared with float32 products.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from writehead import cost
from writehead.bench.peers import attempt, flashinfer_call, flashinfer_workspace
from writehead.bench.timing import Call, count_sets, time_calls
from writehead.config import AttentionConfig
from writehead.errors import BackendError, ConfigError
from writehead.kernels import attend

# (b, m), each measured with one write-head and with one per read-head
GPU_SIZES = (
    *((1024, 128), (1024, 256), (256, 1024), (128, 2048)),
    *((64, 8192), (16, 8192), (1, 32_768), (1, 131_072)),
)
CPU_SIZES = ((64, 128), (16, 512), (4, 2048), (1, 8192))
GRAPH_SECONDS = 2e-3  # of calls in one graph, far longer than its launch
CHECKED_ROWS = 4
OURS, SDPA, PRODUCTS, FLASHINFER = "ours", "SDPA", "products", "FlashInfer"
GROUPS = (OURS, SDPA, PRODUCTS, FLASHINFER)  # a method is called by its group, or "group, variant"


@dataclass(frozen=True)
class Shape:
    """One query for each of b rows and h read-heads, over m positions of g write-heads."""

    b: int
    m: int
    g: int
    h: int = 8
    depth: int = 128

    def __post_init__(self) -> None:
        if self.b < 1 or self.m < 1:
            raise ConfigError(f"b={self.b} and m={self.m} must be at least 1")
        _ = self.attention

    @property
    def attention(self) -> AttentionConfig:
        """The sizes of the layer, checked."""
        return AttentionConfig(self.h * self.depth, self.h, self.g, self.depth, self.depth)

    def kv_bytes(self, element: int) -> int:
        """Bytes of K and V."""
        return self.b * self.m * self.attention.kv_size * element


@dataclass(frozen=True, eq=False)
class Inputs:
    """Q [b, h, 1, k], K [b, g, m, k] and V [b, g, m, k]."""

    Q: Tensor
    K: Tensor
    V: Tensor

    @property
    def scale(self) -> float:
        """k^-0.5, as in the model."""
        return float(self.Q.shape[3] ** -0.5)


Method = Callable[[Inputs], Call]


def default_shapes(device: torch.device, h: int, depth: int) -> list[Shape]:
    """The shapes that are measured by default, multi-query and multi-head."""
    sizes = GPU_SIZES if device.type == "cuda" else CPU_SIZES
    return [Shape(b, m, g, h, depth) for b, m in sizes for g in sorted({1, h})]


def bench_attention(
    shapes: Iterable[Shape],
    chip: cost.Chip,
    device: torch.device,
    dtype: torch.dtype,
    *,
    repeats: int,
    report: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """Yields a row per shape: microseconds of every method, beside bytes over bandwidth."""
    if repeats < 1:
        raise ConfigError(f"repeats={repeats} must be at least 1")
    for shape in shapes:
        report(f"attention b={shape.b:,} m={shape.m:,} {shape.attention.kind}")
        if device.type == "cuda":
            torch.cuda.empty_cache()
        yield _measure(shape, chip, device, dtype, repeats)


def _measure(
    shape: Shape, chip: cost.Chip, device: torch.device, dtype: torch.dtype, repeats: int
) -> dict[str, Any]:
    size = shape.kv_bytes(dtype.itemsize)
    floor = size / chip.bandwidth
    count = count_sets(size, device)
    sets = [_random_inputs(shape, device, dtype) for _ in range(count)]
    rounds = 1
    if device.type == "cuda":
        rounds = max(1, math.ceil(GRAPH_SECONDS / (count * (floor + 5e-6))))
    expected = _reference(sets[0])
    measured: dict[str, Any] = {}
    for name, method in _methods(shape, device).items():
        work = partial(_time, method, sets, rounds, expected, size, repeats)
        must_work = name == OURS and device.type == "cuda"
        measured[name] = work() if must_work else attempt(work)
    return {
        "b": shape.b,
        "m": shape.m,
        "g": shape.g,
        "h": shape.h,
        "k": shape.depth,
        "kind": shape.attention.kind,
        "kv_bytes": size,
        "floor_us": floor * 1e6,
        "sets": count,
        "bytes_in_turn": size * count,
        "calls": count * rounds,
        "measured": measured,
        "best": {group: best for group in GROUPS if (best := _best(measured, group))},
    }


def _time(
    method: Method, sets: list[Inputs], rounds: int, expected: Tensor, size: int, repeats: int
) -> dict[str, Any]:
    """The time of a method over all sets in turn, and the error of its first output."""
    calls = [method(inputs) for inputs in sets]
    output = calls[0]()
    assert isinstance(output, Tensor)
    found = output.reshape(output.shape[0], -1)[:CHECKED_ROWS].float()
    error = float((found - expected).norm() / expected.norm())
    times = time_calls(calls * rounds, expected.device, repeats=repeats)
    return {
        "us": times.to_json(1e-6),
        "bytes_per_second": size / times.median,
        "relative_error": error,
    }


def _best(measured: dict[str, Any], group: str) -> dict[str, Any] | None:
    """The fastest method of a group, or None."""
    timed = {
        name: method["us"]["median"]
        for name, method in measured.items()
        if name.partition(",")[0] == group and "us" in method
    }
    if not timed:
        return None
    name = min(timed, key=lambda one: timed[one])
    return {
        "method": name,
        "us": timed[name],
        "bytes_per_second": measured[name]["bytes_per_second"],
    }


def _random_inputs(shape: Shape, device: torch.device, dtype: torch.dtype) -> Inputs:
    b, m, g, h, k = shape.b, shape.m, shape.g, shape.h, shape.depth
    Q, K, V = (
        torch.randn(b, heads, positions, k, device=device, dtype=dtype)
        for heads, positions in ((h, 1), (g, m), (g, m))
    )
    return Inputs(Q, K, V)


def _reference(inputs: Inputs) -> Tensor:
    """[rows, h k] of the first rows, by float32 products."""
    Q, K, V = (T[:CHECKED_ROWS].float() for T in (inputs.Q, inputs.K, inputs.V))
    return attend(Q, K, V, scale=inputs.scale, backend="eager").flatten(1)


def _methods(shape: Shape, device: torch.device) -> dict[str, Method]:
    """All methods by name."""
    methods: dict[str, Method] = {
        OURS: _ours,
        "SDPA, folded": lambda one: partial(_folded, one),
        "products": lambda one: partial(
            attend, one.Q, one.K, one.V, scale=one.scale, backend="eager"
        ),
    }
    if shape.g < shape.h:
        methods["SDPA, enable_gqa"] = lambda one: partial(
            scaled_dot_product_attention, one.Q, one.K, one.V, scale=one.scale, enable_gqa=True
        )
    if device.type != "cuda":
        return methods
    for kernel in (
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
    ):
        name = f"SDPA, folded, {kernel.name.removesuffix('_ATTENTION').lower()}"
        methods[name] = partial(_by_kernel, kernel)
    workspace = cache(flashinfer_workspace)
    for tensor_cores in (True, False):
        name = f"FlashInfer, {'tensor' if tensor_cores else 'CUDA'} cores"
        methods[name] = partial(_flashinfer, tensor_cores, workspace)
    return methods


def _ours(one: Inputs) -> Call:
    if one.Q.device.type != "cuda":
        raise BackendError("our kernels need a GPU; on a CPU the model uses SDPA, folded")
    from writehead.kernels.decode import attend_memory  # imports Triton

    b, m = len(one.Q), one.K.shape[2]
    Q = one.Q.flatten(1)  # [b, h k]
    lengths = torch.full((b,), m, device=Q.device)
    growing = torch.ones(b, dtype=torch.long, device=Q.device)
    heads = one.Q.shape[1]
    return lambda: attend_memory(Q, one.K, one.V, lengths, growing, heads=heads, scale=one.scale)


def _folded(one: Inputs) -> Tensor:
    """Our `sdpa` backend: the read-heads of a write-head as further queries."""
    return attend(one.Q, one.K, one.V, scale=one.scale, backend="sdpa")


def _by_kernel(kernel: SDPBackend, one: Inputs) -> Call:
    def call() -> Tensor:
        with sdpa_kernel(kernel), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a kernel that does not apply raises too
            return _folded(one)

    return call


def _flashinfer(
    tensor_cores: bool, workspace: Callable[[torch.device], Tensor], one: Inputs
) -> Call:
    return flashinfer_call(
        one.Q, one.K, one.V, one.scale, workspace(one.Q.device), tensor_cores=tensor_cores
    )
