"""`bench attention`: one new position a row over its memory, ours beside SDPA and FlashInfer.

K and V are read from several sets in turn, together far larger than the device's cache, so that
every call reads them from memory. All ways read the same numbers, and what each answers is held
against products in float32 of its first rows.
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
from writehead.bench.peers import flashinfer_call, flashinfer_workspace, tried
from writehead.bench.timing import Call, count_sets, time_calls
from writehead.config import AttentionConfig
from writehead.errors import ConfigError
from writehead.kernels import attend

# eight times b and m, each with one write-head and with eight
SIZES = (
    (1024, 128),
    (1024, 256),
    (256, 1024),
    (128, 2048),
    (64, 8192),
    (16, 8192),
    (1, 32_768),
    (1, 131_072),
)
SMALL_SIZES = ((64, 128), (16, 512), (4, 2048), (1, 8192))  # where there is no GPU
GRAPH_SECONDS = 2e-3  # of calls in one graph, far more than its launch takes
CHECKED_ROWS = 4
NO_KERNEL = "our kernels need a GPU; on a CPU the model attends by SDPA, folded"

SDPA, PRODUCTS, FLASHINFER, OURS = "SDPA", "products", "FlashInfer", "ours"
GROUPS = (OURS, SDPA, PRODUCTS, FLASHINFER)  # a way is named by its group, a comma and the rest


@dataclass(frozen=True)
class Shape:
    """n = 1: b rows of h read-heads over m positions of g write-heads, k = v = depth."""

    b: int
    m: int
    g: int
    h: int = 8
    depth: int = 128

    def __post_init__(self) -> None:
        if self.b < 1 or self.m < 1:
            raise ConfigError(f"b={self.b} rows of m={self.m} positions: both must be at least 1")
        _ = self.attention

    @property
    def attention(self) -> AttentionConfig:
        """The layer's sizes, checked."""
        return AttentionConfig(self.h * self.depth, self.h, self.g, self.depth, self.depth)

    def kv_bytes(self, element: int) -> int:
        """Bytes of K and V, all of which are read once."""
        return self.b * self.m * self.attention.kv_size * element


@dataclass(frozen=True, eq=False)
class Inputs:
    """Q [b, h, 1, k], K [b, g, m, k] and V [b, g, m, k]."""

    Q: Tensor
    K: Tensor
    V: Tensor

    @property
    def scale(self) -> float:
        """As in the model."""
        return float(self.Q.shape[3] ** -0.5)


Way = Callable[[Inputs], Call]


def default_shapes(device: torch.device, h: int, depth: int) -> list[Shape]:
    """Those that are measured unless others are asked for: multi-query first, then multi-head."""
    sizes = SIZES if device.type == "cuda" else SMALL_SIZES
    return [Shape(b, m, g, h, depth) for b, m in sizes for g in sorted({1, h})]


def bench_attention(
    shapes: Iterable[Shape],
    chip: cost.Chip,
    device: torch.device,
    dtype: torch.dtype,
    *,
    repeats: int,
    tell: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """Shape by shape, microseconds of every way there is, beside bytes over bandwidth."""
    if repeats < 1:
        raise ConfigError(f"{repeats} repeats cannot be timed; ask for 1 or more")

    def measured(shape: Shape) -> dict[str, Any]:
        tell(f"attention b={shape.b:,} m={shape.m:,} {shape.attention.kind}")
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return _measure(shape, chip, device, dtype, repeats)

    return map(measured, shapes)


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
    ways: dict[str, Any] = {}
    for name, way in _ways(shape, device).items():
        timed = partial(_time, way, sets, rounds, expected, size, repeats)
        ways[name] = timed() if name == OURS else tried(timed)
    if device.type != "cuda":
        ways[OURS] = {"absent": NO_KERNEL}
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
        "ways": ways,
        "best": {group: best for group in GROUPS if (best := _best(ways, group))},
    }


def _time(
    way: Way, sets: list[Inputs], rounds: int, expected: Tensor, size: int, repeats: int
) -> dict[str, Any]:
    """One way's time over all sets in turn, and how far its first answer is from the reference."""
    calls = [way(inputs) for inputs in sets]
    with torch.no_grad():
        O = calls[0]()  # noqa: E741
    assert isinstance(O, Tensor)
    got = O.reshape(len(sets[0].Q), -1)[: len(expected)].float()
    error = float((got - expected).norm() / expected.norm())
    times = time_calls(calls * rounds, expected.device, repeats=repeats)
    return {
        "us": times.to_json(1e-6),
        "bytes_per_second": size / times.median,
        "relative_error": error,
    }


def _best(ways: dict[str, Any], group: str) -> dict[str, Any] | None:
    """The quickest way of a group; None where none could be measured."""
    timed = {
        name: way["us"]["median"]
        for name, way in ways.items()
        if name.partition(",")[0] == group and "us" in way
    }
    if not timed:
        return None
    name = min(timed, key=lambda one: timed[one])
    return {"way": name, "us": timed[name], "bytes_per_second": ways[name]["bytes_per_second"]}


def _random_inputs(shape: Shape, device: torch.device, dtype: torch.dtype) -> Inputs:
    b, m, g, h, k = shape.b, shape.m, shape.g, shape.h, shape.depth
    Q, K, V = (
        torch.randn(b, heads, positions, k, device=device, dtype=dtype)
        for heads, positions in ((h, 1), (g, m), (g, m))
    )
    return Inputs(Q, K, V)


def _reference(inputs: Inputs) -> Tensor:
    """[rows, h k] of the first rows, by products in float32."""
    Q, K, V = (T[:CHECKED_ROWS].float() for T in (inputs.Q, inputs.K, inputs.V))
    return attend(Q, K, V, scale=inputs.scale, backend="eager").flatten(1)


def _ways(shape: Shape, device: torch.device) -> dict[str, Way]:
    """Every way that might answer, by name; on a CPU there are fewer, and none of ours."""
    ways: dict[str, Way] = {
        "SDPA, folded": lambda one: lambda: _folded(one),
        "products": lambda one: (
            lambda: attend(one.Q, one.K, one.V, scale=one.scale, backend="eager")
        ),
    }
    if shape.g < shape.h:
        ways["SDPA, enable_gqa"] = lambda one: (
            lambda: scaled_dot_product_attention(
                one.Q, one.K, one.V, scale=one.scale, enable_gqa=True
            )
        )
    if device.type != "cuda":
        return ways
    ways = {OURS: _ours, **ways}
    for kernel in (
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
    ):
        name = f"SDPA, folded, {kernel.name.removesuffix('_ATTENTION').lower()}"
        ways[name] = _by_kernel(kernel)
    workspace = cache(flashinfer_workspace)  # one for all sets, made when first asked for
    for cores in (True, False):
        name = f"FlashInfer, {'tensor' if cores else 'plain'} cores"
        ways[name] = _flashinfer(cores, workspace)
    return ways


def _ours(one: Inputs) -> Call:
    from writehead.kernels.decode import attend_memory  # brings Triton, which not all have

    b, m = len(one.Q), one.K.shape[2]
    Q = one.Q.flatten(1)  # [b, h k]
    lengths = torch.full((b,), m, device=Q.device)
    growing = torch.ones(b, dtype=torch.long, device=Q.device)
    heads = one.Q.shape[1]
    return lambda: attend_memory(Q, one.K, one.V, lengths, growing, heads=heads, scale=one.scale)


def _folded(one: Inputs) -> Tensor:
    """The read-heads of a write-head as further queries: our `sdpa` backend."""
    return attend(one.Q, one.K, one.V, scale=one.scale, backend="sdpa")


def _by_kernel(kernel: SDPBackend) -> Way:
    def way(one: Inputs) -> Call:
        def call() -> Tensor:
            with sdpa_kernel(kernel), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a kernel that cannot raises too
                return _folded(one)

        return call

    return way


def _flashinfer(tensor_cores: bool, workspace: Callable[[torch.device], Tensor]) -> Way:
    return lambda one: flashinfer_call(
        one.Q, one.K, one.V, one.scale, workspace(one.Q.device), tensor_cores=tensor_cores
    )
