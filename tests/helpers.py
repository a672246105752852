"""References and small models that several rooms' tests compare with."""

import math
from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from writehead.config import ModelConfig
from writehead.kernels import Visibility
from writehead.model import DecoderState, LanguageModel, TranslationModel

# all that decoding and training launch
KERNELS = {
    "attend_kernel",
    "combine_kernel",
    "_linear_kernel",
    "_rows_kernel",
    "_tiles_kernel",
    "_embed_kernel",
    "_normalize_kernel",
    "_begin_kernel",
    "_survey_kernel",
    "pick_kernel",
    "_greedy_kernel",
    "beam_kernel",
    "trace_kernel",
    "forward",
    "backward_queries",
    "backward_memory",
    "_sum_kernel",
    "_differentiate_kernel",
}

Sees = Callable[[int, int, int], bool]


def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def sees(visibility: Visibility) -> Sees:
    """Whether query i of a row may read memory position j, said of one pair at a time."""

    def look_up(table: Tensor | None, row: int, index: int) -> int:
        return index if table is None else int(table[row, index])

    def answer(row: int, i: int, j: int) -> bool:
        query = look_up(visibility.query_positions, row, i)
        memory = look_up(visibility.memory_positions, row, j)
        if memory < 0 or (visibility.lengths is not None and j >= visibility.lengths[row]):
            return False
        if visibility.causal and memory > query:
            return False
        if visibility.window is not None and query - memory >= visibility.window:
            return False
        if visibility.query_segments is None:
            return True
        own = int(visibility.query_segments[row, i])
        return own != 0 and own == int(visibility.memory_segments[row, j])

    return answer


def slow_attend(Q: Tensor, K: Tensor, V: Tensor, may_see: Sees, scale: float) -> Tensor:
    """Attention one scalar at a time, [b,h,n,k] [b,g,m,k] [b,g,m,v] -> [b,h,n,v]."""
    b, h, n, _ = Q.shape
    g, m, v = V.shape[1:]
    O = torch.zeros(b, h, n, v, dtype=Q.dtype)  # noqa: E741
    for row, head, i in product(range(b), range(h), range(n)):
        write_head = head // (h // g)
        seen = [j for j in range(m) if may_see(row, i, j)]
        exps = [math.exp(scale * float(Q[row, head, i] @ K[row, write_head, j])) for j in seen]
        for weight, j in zip(exps, seen, strict=True):
            O[row, head, i] += weight / sum(exps) * V[row, write_head, j]
    return O


def additive(visible: Tensor) -> Tensor:
    """The listings' mask: 0 where booleans are true and -inf elsewhere."""
    return torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, -math.inf)


def causal_mask(b: int, h: int, n: int, window: int | None = None) -> Tensor:
    """The listings' mask [b, h, n, n] of a decoder, with or without a window."""
    visible = torch.ones(n, n, dtype=torch.bool).tril()
    if window is not None:
        visible &= ~torch.ones(n, n, dtype=torch.bool).tril(-window)
    return additive(visible).expand(b, h, n, n)


def config(task: str = "language", **changes: object) -> ModelConfig:
    """A small model in which no two sizes are equal."""
    sizes: dict[str, object] = {
        "task": task,
        "vocabulary": 37,
        "d": 14,
        "f": 17,
        "h": 6,
        "g": 1,
        "k": 5,
        "v": 7,
        "decoder_layers": 3,
        "target_positions": 23,
        "dropout": 0.0,
    }
    if task == "translation":
        sizes |= {"encoder_layers": 2, "source_positions": 19}
    return ModelConfig(**(sizes | changes))


def model(
    cfg: ModelConfig, *, dtype: torch.dtype = torch.float64, backend: str = "auto"
) -> TranslationModel | LanguageModel:
    """A model in evaluation mode, all of whose parameters, gains and biases too, are random."""
    made = (TranslationModel if cfg.task == "translation" else LanguageModel)(cfg, backend)
    with torch.no_grad():
        for P in made.parameters():
            P += torch.randn_like(P) * 0.3
    return made.to(dtype).eval()


def tokens(*shape: int, vocabulary: int = 37) -> Tensor:
    return torch.randint(vocabulary, shape)


def step_through(
    made: TranslationModel | LanguageModel, fed: Tensor, state: DecoderState
) -> Tensor:
    """Logits [rows, n, vocabulary] of fed [rows, n], one token at a time."""
    return torch.stack([made.step(column, state) for column in fed.unbind(1)], dim=1)
