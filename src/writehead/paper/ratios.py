"""§2.3.1, §2.4.1, §3.1: the ratio of memory access to operations, as printed and as counted."""

from dataclasses import dataclass, replace

from writehead.config import AttentionConfig
from writehead.cost import visible_pairs


@dataclass(frozen=True)
class Ratio:
    """Memory access over operations of one attention layer, in one section of the paper.

    `theta` is the sum of the section's terms; `counted` divides the elements of all tensors
    accessed by the multiply-adds.
    """

    section: str
    form: str
    terms: str
    theta: float
    counted: float


def ratios(attention: AttentionConfig, b: int, n: int) -> tuple[Ratio, ...]:
    """Returns the three ratios for self-attention over n positions.

    The paper's terms assume k = v = d/h and n ≤ d; the counts do not.
    """
    d, h, k = attention.d, attention.h, attention.k
    plain = replace(attention, bias=False)
    counted = [_batched_ratio(plain, b, n)]
    counted += [_incremental_ratio(replace(plain, g=g), b, n) for g in (h, 1)]
    theta = (1 / k + 1 / (b * n), n / d + 1 / b, 1 / d + n / (d * h) + 1 / b)
    return (
        Ratio("§2.3.1", f"batched {attention.kind}", "1/k + 1/(bn)", theta[0], counted[0]),
        Ratio("§2.4.1", "incremental multi-head", "n/d + 1/b", theta[1], counted[1]),
        Ratio("§3.1", "incremental multi-query", "1/d + n/(dh) + 1/b", theta[2], counted[2]),
    )


def _batched_ratio(attention: AttentionConfig, b: int, n: int) -> float:
    """Divides the elements of X, M, Q, K, V, O, Y, logits, weights and P by the multiply-adds."""
    d, h, k, v = attention.d, attention.h, attention.k, attention.v
    elements = b * n * (3 * d + h * (k + v) + attention.kv_size) + 2 * b * h * n**2
    operations = b * n * attention.parameters + b * h * n**2 * (k + v)
    return (elements + attention.parameters) / operations


def _incremental_ratio(attention: AttentionConfig, b: int, n: int) -> float:
    """Returns the same ratio for n calls, each of which reads K, V and the projections again."""
    d, h, k, v = attention.d, attention.h, attention.k, attention.v
    pairs = visible_pairs(n)
    elements = b * n * (2 * d + h * (k + v)) + b * pairs * attention.kv_size
    operations = b * n * attention.parameters + b * h * pairs * (k + v)
    return (elements + n * attention.parameters) / operations
