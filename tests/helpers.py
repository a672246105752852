"""References, tolerances and small models shared by the tests."""

import json
import math
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close

from writehead.config import ModelConfig
from writehead.model import Attention, LanguageModel, Packing, TranslationModel
from writehead.ops.visibility import Visibility
from writehead.runs.folder import CHECKSUMS, CONFIG, WEIGHTS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter computes bfloat16 products incorrectly
DTYPES = [torch.bfloat16, torch.float16, torch.float32][DEVICE == "cpu" :]

# every kernel that decoding and training launch
KERNELS = {
    *("embed_kernel", "linear_kernel", "_gate_kernel", "_sum_kernel", "_normalize_kernel"),
    *(
        "attend_kernel",
        "combine_kernel",
        "scan_kernel",
        "sample_kernel",
        "top_kernel",
        "beam_kernel",
    ),
    *("trace_kernel", "loss_kernel", "loss_gradient_kernel", "packed_forward_kernel"),
    *("packed_dq_kernel", "packed_dkv_kernel"),
}

Sees = Callable[[int, int, int], bool]


def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal random numbers on the device of the kernel tests."""
    return torch.randn(*shape, device=DEVICE).to(dtype)


def integers(*values: int, dtype: torch.dtype = torch.long) -> Tensor:
    return torch.tensor(values, device=DEVICE, dtype=dtype)


def assert_close_in(dtype: torch.dtype, ours: Tensor, expected: Tensor, *, ulps: int = 16) -> None:
    """Two ways of computing differ only by rounding in `dtype`.

    Rounding errors of sums scale with their largest terms, which may cancel, so the tolerance is
    relative to the largest result.
    """
    ours, expected = ours.detach(), expected.detach()
    finite = expected[expected.isfinite()]
    largest = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
    atol = ulps * torch.finfo(dtype).eps * largest
    assert_close(ours.double(), expected.double().to(ours.device), atol=atol, rtol=0.0)


def assert_at_most_twice(ours: Tensor, plain: Tensor, exact: Tensor) -> None:
    """The error of `ours` is at most twice that of plain PyTorch in the same dtype."""
    assert ours.dtype == plain.dtype
    error, allowed = (ours - exact).abs(), (plain - exact).abs()
    # allow a few float32 ulps in case plain PyTorch happens to be exact
    largest = max(1.0, float(exact.abs().max()))
    assert error.max() <= 2 * allowed.max() + 2e-6 * largest
    assert error.mean() <= 2 * allowed.mean() + 2e-7 * largest


def sees(visibility: Visibility) -> Sees:
    """A function that tells whether query i of a row may read memory position j."""

    def answer(row: int, i: int, j: int) -> bool:
        positions = visibility.query_positions
        query = i if positions is None else int(positions[row, i])
        if visibility.lengths is not None and j >= visibility.lengths[row]:
            return False
        if visibility.causal and j > query:
            return False
        if visibility.window is not None and query - j >= visibility.window:
            return False
        if visibility.query_segments is None:
            return True
        own = int(visibility.query_segments[row, i])
        return own != 0 and own == int(visibility.memory_segments[row, j])

    return answer


def slow_attend(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    may_see: Sees,
    scale: float,
    bias: Callable[[int, int, int, int], float] = lambda row, head, i, j: 0.0,
) -> Tensor:
    """Attention one scalar at a time, [b,h,n,k] [b,g,m,k] [b,g,m,v] -> [b,h,n,v]."""
    b, h, n, _ = Q.shape
    g, m, v = V.shape[1:]
    O = torch.zeros(b, h, n, v, dtype=Q.dtype)  # noqa: E741
    for row, head, i in product(range(b), range(h), range(n)):
        write_head = head // (h // g)
        seen = [j for j in range(m) if may_see(row, i, j)]
        logits = [scale * float(Q[row, head, i] @ K[row, write_head, j]) for j in seen]
        biases = [bias(row, head, i, j) for j in seen]
        exps = [math.exp(sum(both)) for both in zip(logits, biases, strict=True)]
        for weight, j in zip(exps, seen, strict=True):
            O[row, head, i] += weight / sum(exps) * V[row, write_head, j]
    return O


def additive(visible: Tensor) -> Tensor:
    """The mask of the listings: 0 where `visible` and -inf elsewhere."""
    return torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, -math.inf)


def causal_mask(b: int, h: int, n: int, window: int | None = None) -> Tensor:
    """The mask [b, h, n, n] of a decoder in the listings, with or without a window."""
    visible = torch.ones(n, n, dtype=torch.bool).tril()
    if window is not None:
        visible &= ~torch.ones(n, n, dtype=torch.bool).tril(-window)
    return additive(visible).expand(b, h, n, n)


def config(task: str = "language", **changes: object) -> ModelConfig:
    """A small model in which no two sizes are equal."""
    sizes: dict[str, object] = {"task": task, "d": 14, "f": 17, "h": 6, "g": 1, "k": 5, "v": 7}
    sizes |= {"vocab_size": 37, "decoder_layers": 3, "target_positions": 23, "dropout": 0.0}
    if task == "translation":
        sizes |= {"encoder_layers": 2, "source_positions": 19}
    return ModelConfig(**(sizes | changes))


def model(
    cfg: ModelConfig, *, dtype: torch.dtype = torch.float64, backend: str = "auto"
) -> TranslationModel | LanguageModel:
    """A model in evaluation mode with random parameters, including gains and biases."""
    made = (TranslationModel if cfg.task == "translation" else LanguageModel)(cfg, backend)
    with torch.no_grad():
        for P in made.parameters():
            P += torch.randn_like(P) * 0.3
    return made.to(dtype).eval()


def tokens(*shape: int, vocab_size: int = 37) -> Tensor:
    return torch.randint(vocab_size, shape)


def packing(segments: Tensor) -> Packing:
    """Several sequences per row, whose positions count from 0 in each; 0 is padding."""
    rows = [[row[:i].count(one) for i, one in enumerate(row)] for row in segments.tolist()]
    return Packing(segments, torch.tensor(rows))


def projections(module: Attention, *, shared: bool = False) -> tuple[Tensor, ...]:
    """P_q (scaled), P_k, P_v and P_o of the paper's listings, with h heads or one `shared` head."""
    d, h, g, k, v = (getattr(module.config, name) for name in "dhgkv")
    P_q = module.P_q.weight.view(h, k, d).transpose(1, 2) * k**-0.5
    P_k = module.P_k.weight.view(g, k, d).transpose(1, 2).repeat_interleave(h // g, dim=0)
    P_v = module.P_v.weight.view(g, v, d).transpose(1, 2).repeat_interleave(h // g, dim=0)
    P_o = module.P_o.weight.view(d, h, v).transpose(0, 1)
    return (P_q, P_k[0], P_v[0], P_o) if shared else (P_q, P_k, P_v, P_o)


def edit_weights(run: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Changes the weights of a run, and removes its checksums."""
    weights = load_file(run / WEIGHTS)
    change(weights)
    save_file(weights, run / WEIGHTS)
    (run / CHECKSUMS).unlink(missing_ok=True)


def edit_config(run: Path, change: Callable[[dict[str, object]], object]) -> None:
    """Changes the config of a run, and removes its checksums."""
    data = json.loads((run / CONFIG).read_text())
    change(data)
    (run / CONFIG).write_text(json.dumps(data))
    (run / CHECKSUMS).unlink(missing_ok=True)
