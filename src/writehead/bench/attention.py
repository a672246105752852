"""`bench attention`: the attention of one decoding step, ours beside PyTorch's.

K and V are read from several sets in turn, which together exceed the cache of the device, so that
every call reads them from memory. The output of each method is compared with float32 products.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from writehead.bench.decode import Place
from writehead.bench.peers import attempt
from writehead.bench.timing import Call, time_calls
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
CPU_CACHE_BYTES = 16 << 20
CACHE_FACTOR = 4  # how many times the size of the cache is read before anything is read again
MAX_SETS = 256
CHECKED_ROWS = 4
OURS = "ours"
SDPA_KERNELS = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")


@dataclass(frozen=True)
class Shape:
    """One query for each of b rows and h read-heads, over m positions of g write-heads."""

    b: int
    m: int
    g: int
    h: int = 8
    k: int = 128

    def __post_init__(self) -> None:
        if self.b < 1 or self.m < 1:
            raise ConfigError(f"b={self.b} and m={self.m} must be at least 1")
        _ = self.attention

    @property
    def attention(self) -> AttentionConfig:
        """The sizes of the layer, checked."""
        return AttentionConfig(self.h * self.k, self.h, self.g, self.k, self.k)


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


def default_shapes(device: torch.device, h: int, k: int) -> list[Shape]:
    """The shapes that are measured by default, multi-query and multi-head."""
    sizes = GPU_SIZES if device.type == "cuda" else CPU_SIZES
    return [Shape(b, m, g, h, k) for b, m in sizes for g in sorted({1, h})]


def bench_attention(shapes: Iterable[Shape], place: Place) -> Iterator[dict[str, Any]]:
    """Yields a row per shape: microseconds of every method, beside bytes over bandwidth."""
    for shape in shapes:
        place.report(f"attention b={shape.b:,} m={shape.m:,} {shape.attention.kind}")
        place.free()
        yield _measure(shape, place)


def _measure(shape: Shape, place: Place) -> dict[str, Any]:
    size = shape.b * shape.m * shape.attention.kv_size * place.dtype.itemsize
    floor, count, rounds = size / place.chip.bandwidth, _count_sets(size, place.device), 1
    if place.is_gpu:
        rounds = max(1, math.ceil(GRAPH_SECONDS / (count * (floor + 5e-6))))
    sets = [_random_inputs(shape, place) for _ in range(count)]
    measured: dict[str, Any] = {}
    for name, method in _methods(shape, place.device).items():
        work = partial(_time, method, sets, rounds, place)
        measured[name] = work() if name == OURS and place.is_gpu else attempt(work)
    return asdict(shape) | {
        "kind": shape.attention.kind,
        "kv_bytes": size,
        "floor_us": floor * 1e6,
        "sets": count,
        "measured": measured,
    }


def _count_sets(size: int, device: torch.device) -> int:
    """How many sets of `size` bytes to read so that none is in the cache when it is read again."""
    cache_bytes = CPU_CACHE_BYTES
    if device.type == "cuda":
        cache_bytes = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20)
    return min(MAX_SETS, max(2, math.ceil(CACHE_FACTOR * cache_bytes / size)))


@torch.no_grad()
def _time(method: Method, sets: list[Inputs], rounds: int, place: Place) -> dict[str, Any]:
    """The time of a method over all sets in turn, and the error of its first output."""
    calls, first = [method(inputs) for inputs in sets], sets[0]
    Q, K, V = (T[:CHECKED_ROWS].float() for T in (first.Q, first.K, first.V))
    expected = attend(Q, K, V, scale=first.scale, backend="eager").flatten(1)  # [rows, h k]
    output = calls[0]()
    assert isinstance(output, Tensor)
    found = output.reshape(len(first.Q), -1)[:CHECKED_ROWS].float()
    times = time_calls(calls * rounds, place.device, repeats=place.repeats)
    return {
        "us": times.to_json(1e-6),
        "bytes_per_second": (first.K.nbytes + first.V.nbytes) / times.median,
        "relative_error": float((found - expected).norm() / expected.norm()),
    }


def _random_inputs(shape: Shape, place: Place) -> Inputs:
    b, m, g, h, k = shape.b, shape.m, shape.g, shape.h, shape.k
    sizes = ((b, h, 1, k), (b, g, m, k), (b, g, m, k))
    return Inputs(*(torch.randn(s, device=place.device, dtype=place.dtype) for s in sizes))


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
    if device.type == "cuda":
        for name in SDPA_KERNELS:
            methods[f"SDPA, folded, {name}"] = partial(_by_kernel, getattr(SDPBackend, name))
    return methods


def _ours(one: Inputs) -> Call:
    if one.Q.device.type != "cuda":
        raise BackendError("our kernels need a GPU; on a CPU the model uses SDPA, folded")
    from writehead.kernels.decode import attend_memory  # imports Triton

    (b, heads), m = one.Q.shape[:2], one.K.shape[2]
    Q = one.Q.flatten(1)  # [b, h k]
    lengths, growing = (torch.full((b,), number, device=Q.device) for number in (m, 1))
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
