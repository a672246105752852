"""`bench attention`: times the attention of one decoding step, ours and PyTorch's.

K and V are read from several sets in turn, which together exceed the cache of the device, so every
call reads them from memory. The output of each method is compared with float32 products.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from writehead.bench.decode import Place
from writehead.bench.peers import attempt
from writehead.bench.timing import time_calls
from writehead.config import AttentionConfig
from writehead.errors import BackendError, ConfigError
from writehead.ops.attention import attend
from writehead.ops.decode_attention import MemoryLayer, decode_attention
from writehead.ops.heads import Heads

H, DEPTH = 8, 128  # read-heads, and k = v: those of the paper
# (b, m), each measured with one write-head and with one per read-head
GPU_SIZES = (
    *((1024, 128), (1024, 256), (256, 1024), (128, 2048)),
    *((64, 8192), (16, 8192), (1, 32_768), (1, 131_072)),
)
CPU_SIZES = ((64, 128), (16, 512), (4, 2048), (1, 8192))
GRAPH_SECONDS = 2e-3  # of calls in one graph, far longer than its launch
CPU_CACHE_BYTES = 16 << 20
CACHE_FACTOR = 4  # the sets together are this many times as large as the cache
MAX_SETS = 256
CHECKED_ROWS = 4
OURS = "ours"

Shape = tuple[int, int, int]  # b rows with one query each, over m positions of g write-heads
Inputs = tuple[Tensor, Tensor, Tensor]  # Q [b, h, 1, k], K [b, g, m, k] and V [b, g, m, k]
Method = Callable[[Tensor, Tensor, Tensor], Tensor]


def default_shapes(device: torch.device) -> list[Shape]:
    """Returns the default shapes, multi-query and multi-head."""
    sizes = GPU_SIZES if device.type == "cuda" else CPU_SIZES
    return [(b, m, g) for b, m in sizes for g in (1, H)]


def check_shape(b: int, m: int, g: int) -> None:
    """Raises ConfigError unless b and m are positive and g divides h."""
    if b < 1 or m < 1:
        raise ConfigError(f"b={b} and m={m} must be at least 1")
    AttentionConfig(H * DEPTH, H, g, DEPTH, DEPTH)


def bench_attention(shapes: Iterable[Shape], place: Place) -> Iterator[dict[str, Any]]:
    """Yields a row per shape: microseconds of every method, and the floor."""
    random = partial(torch.randn, device=place.device, dtype=place.dtype)
    chip = torch.cuda.get_device_properties(place.device) if place.is_gpu else None
    cache_bytes = getattr(chip, "L2_cache_size", CPU_CACHE_BYTES)
    for b, m, g in shapes:
        place.report(f"attention b={b:,} m={m:,} g={g}")
        place.free()
        size = 2 * b * m * g * DEPTH * place.dtype.itemsize
        count = min(MAX_SETS, max(2, math.ceil(CACHE_FACTOR * cache_bytes / size)))
        kv = (b, g, m, DEPTH)
        sets = [(random(b, H, 1, DEPTH), random(kv), random(kv)) for _ in range(count)]
        floor = size / place.chip.bandwidth
        rounds = math.ceil(GRAPH_SECONDS / (count * (floor + 5e-6))) if place.is_gpu else 1
        measured: dict[str, Any] = {}
        for name, method in METHODS.items():
            work = partial(_time, method, sets, rounds, place)
            measured[name] = work() if name == OURS and place.is_gpu else attempt(work)
        row = {"b": b, "m": m, "g": g, "h": H, "k": DEPTH, "kv_bytes": size}
        yield row | {"floor": {"us": floor * 1e6}, "measured": measured}


@torch.no_grad()
def _time(method: Method, sets: list[Inputs], rounds: int, place: Place) -> dict[str, Any]:
    """Returns the time of a method over all sets in turn, and the error of its first output."""
    calls = [partial(method, *inputs) for inputs in sets]
    Q, K, V = (T[:CHECKED_ROWS].float() for T in sets[0])
    expected = _products(Q, K, V).flatten(1)  # [rows, h k]
    actual = calls[0]().reshape(len(sets[0][0]), -1)[:CHECKED_ROWS].float()
    times = time_calls(calls * rounds, place.device, repeats=place.repeats)
    error = float((actual - expected).norm() / expected.norm())
    return {"us": times.to_json(1e-6), "relative_error": error}


def _ours(Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    if Q.device.type != "cuda":
        raise BackendError("our kernels need a GPU; on a CPU the model uses SDPA")
    lengths, live = (_full(len(Q), n, Q.device) for n in (K.shape[2], 1))
    memory, heads = MemoryLayer(K, V, lengths, live), Heads(H, K.shape[1], DEPTH, DEPTH)
    Q = Q.flatten(1).unsqueeze(1)  # [b, 1, h k]
    return decode_attention(Q, memory, heads, scale=DEPTH**-0.5, implementation="triton")


@lru_cache(maxsize=2)
def _full(b: int, value: int, device: torch.device) -> Tensor:
    """Returns a tensor [b], cached so that timed calls do not create it."""
    return torch.full((b,), value, device=device)


def _products(Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    return attend(Q, K, V, scale=DEPTH**-0.5, implementation="eager")


def _folded(Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    """Runs our `sdpa` implementation, which folds read-heads of a write-head into queries."""
    return attend(Q, K, V, scale=DEPTH**-0.5, implementation="sdpa")


METHODS: dict[str, Method] = {
    OURS: _ours,
    "SDPA": _folded,
    "SDPA, enable_gqa": partial(scaled_dot_product_attention, enable_gqa=True),
    "products": _products,
}
