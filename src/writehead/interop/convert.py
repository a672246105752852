"""Converts multi-head attention to grouped-query or multi-query attention.

Each group of write-heads becomes one write-head. The method `aligned` first chooses which
heads to group, and rotates their keys and values onto each other. P_q and P_o absorb the rotations,
so the model computes the same function until the heads of a group are averaged. `low-rank` forms
the same groups, and finds the keys and values that best approximate all products P_q^T P_k and
P_o P_v of a group.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from writehead.config import AttentionConfig, ModelConfig, matched_d_ff
from writehead.errors import ConfigError, RunError, nearest
from writehead.interop.pretrained import read_source
from writehead.runs.folder import check_different, check_place, run_directory, write_model

Method = Literal["aligned", "low-rank", "mean", "first"]
METHODS: tuple[Method, ...] = get_args(Method)
HEADLESS_POSITIONS = ("learned", "sinusoidal", "rotary")  # do not distinguish read-heads
MAX_ITERATIONS = 100  # of rotating heads to the mean of their group
TINY = 1e-100  # keeps heads of zeros from dividing by 0
TOLERANCE = 1e-9  # stop when the error falls by a smaller fraction

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Converted:
    """The configs before and after a conversion."""

    before: ModelConfig
    after: ModelConfig


def convert(
    run: Path | str,
    output: Path | str,
    *,
    write_heads: int,
    method: Method = "aligned",
    widen: bool = False,
    encoder: bool = False,
    overwrite: bool = False,
) -> Converted:
    """Writes a copy of `run` whose decoder has fewer write-heads (KV heads) to `output`.

    Converts self-attention and cross-attention of the decoder and, with `encoder`, the encoder's
    self-attention. With `widen`, d_ff grows so that the number of parameters stays the same.
    """
    output = Path(output)
    check_place(output, overwrite)
    source = read_source(run)
    if source.quantization is not None:
        raise RunError(f"{run} is quantized; convert the original, then quantize the result")
    check_different(output, source.folder)
    before = source.config
    after, weights = convert_weights(
        before, source.weights, write_heads, method, widen=widen, encoder=encoder
    )
    if after == before:
        count = "1 write-head, the minimum" if before.g == 1 else f"{before.g} write-heads"
        advice = "nothing to convert" if before.g == 1 else "choose fewer"
        raise ConfigError(f"{run} already has {count}; {advice}")
    with run_directory(output, overwrite=overwrite) as fresh:
        write_model(fresh, after, weights, source.files)
    return Converted(before, after)


def convert_weights(
    config: ModelConfig,
    weights: Weights,
    write_heads: int,
    method: Method = "aligned",
    *,
    widen: bool = False,
    encoder: bool = False,
) -> tuple[ModelConfig, Weights]:
    """Returns the config and weights of a model converted to `write_heads`; see `convert`."""
    if method not in METHODS:
        raise ConfigError(f"unknown method {method!r}; {nearest(str(method), METHODS)}")
    after = converted_config(config, write_heads, encoder=encoder)
    if method in ("aligned", "low-rank"):
        weights = align_weights(config, weights, write_heads, encoder=encoder)
    result = dict(weights)
    for name, attention in _attentions(config, write_heads, encoder=encoder):
        heads = Heads.read(weights, name, attention)
        if method == "low-rank":
            pooled = heads.factor(write_heads, is_rotary=_is_rotary(config, name))
        else:
            pooled = heads.pool(write_heads, first=method == "first")
        result |= pooled.write(weights, name)
    if widen:
        after = replace(after, f=matched_d_ff(after, config))
        result = _widen(after, result)
    return after, result


def align_weights(
    config: ModelConfig, weights: Weights, write_heads: int, *, encoder: bool = False
) -> Weights:
    """Permutes and rotates heads so that the heads of each future group become similar.

    The model computes the same function with the returned weights.
    """
    converted_config(config, write_heads, encoder=encoder)  # checks the sizes
    result = dict(weights)
    for name, attention in _attentions(config, write_heads, encoder=encoder):
        heads = Heads.read(weights, name, attention)
        # other positions may belong to read-heads, in the same order for all layers
        can_sort = name.endswith("cross") or config.positions in HEADLESS_POSITIONS
        aligned = heads.align(write_heads, is_rotary=_is_rotary(config, name), can_sort=can_sort)
        result |= aligned.write(weights, name)
    return result


def _is_rotary(config: ModelConfig, name: str) -> bool:
    """Returns whether an attention layer rotates Q and K by their positions."""
    return config.positions == "rotary" and not name.endswith("cross")


def converted_config(
    config: ModelConfig, write_heads: int, *, encoder: bool = False
) -> ModelConfig:
    """Returns the config with at most `write_heads` in the attention layers to convert."""
    if encoder and not config.encoder_layers:
        raise ConfigError("a language model has no encoder to convert")
    if type(write_heads) is not int or write_heads < 1:
        raise ConfigError(f"write_heads={write_heads!r} must be a positive integer")
    counts = {}
    for name, attention, wanted in (
        ("decoder's self-attention", config.decoder_attention, True),
        ("cross-attention", config.cross_attention, bool(config.encoder_layers)),
        ("encoder's self-attention", config.encoder_attention, encoder),
    ):
        counts[name] = min(attention.g, write_heads) if wanted else attention.g
        if attention.g % counts[name]:
            raise ConfigError(
                f"write_heads={write_heads} must divide the {attention.g} write-heads of the {name}"
            )
    own, cross, encoders = counts.values()
    if not config.encoder_layers:
        return replace(config, g=own)
    return replace(
        config,
        g=own,
        cross_g=None if cross == own else cross,
        encoder_g=None if encoders == own else encoders,
    )


def _attentions(
    config: ModelConfig, write_heads: int, *, encoder: bool
) -> Iterator[tuple[str, AttentionConfig]]:
    """Yields the names and configs of the attention layers to convert."""
    kinds = [("decoder", "attention", config.decoder_layers, config.decoder_attention)]
    kinds.append(("decoder", "cross", config.cross_layers, config.cross_attention))
    kinds.append(
        ("encoder", "attention", config.encoder_layers * encoder, config.encoder_attention)
    )
    for stack, kind, layers, attention in kinds:
        if attention.g > write_heads:
            yield from ((f"{stack}.layers.{i}.{kind}", attention) for i in range(layers))


def _widen(config: ModelConfig, weights: Weights) -> Weights:
    """Adds hidden units that do not change the function: their columns of `narrow` are zero."""
    generator, result = torch.Generator().manual_seed(0), dict(weights)
    for name, W in weights.items():
        missing = config.f - (
            W.shape[1] if "feed_forward.narrow" in name and W.dim() > 1 else len(W)
        )
        if ".feed_forward." not in name or missing == 0 or name.endswith("narrow.bias"):
            continue
        if name.endswith("narrow.weight"):
            result[name] = torch.cat([W, W.new_zeros(len(W), missing)], dim=1)
        elif W.dim() == 1:
            result[name] = torch.cat([W, W.new_zeros(missing)])
        else:
            rows = torch.randn(missing, config.d, generator=generator) * config.d**-0.5
            result[name] = torch.cat([W, rows.to(W)])
    return result


@dataclass(frozen=True)
class Heads:
    """The projections of one layer by head, in float64: g write-heads, of r = h / g read-heads.

    A bias is a column of Q, K and V, so that it is rotated like the weights.
    """

    Q: Tensor  # [g, r, k, d or d + 1]
    K: Tensor  # [g, k, d or d + 1]
    V: Tensor  # [g, v, d or d + 1]
    O: Tensor  # [g, r, v, d]  # noqa: E741

    @classmethod
    def read(cls, weights: Weights, name: str, attention: AttentionConfig) -> "Heads":
        """Reads the projections of an attention layer."""
        d, h, g, k, v = (getattr(attention, size) for size in "dhgkv")
        Q, K, V = (_with_bias(weights, f"{name}.P_{one}") for one in "qkv")
        O = weights[f"{name}.P_o.weight"].double()  # noqa: E741
        return cls(
            Q.view(g, h // g, k, -1),
            K.view(g, k, -1),
            V.view(g, v, -1),
            O.T.reshape(g, h // g, v, d),
        )

    def write(self, weights: Weights, name: str) -> Weights:
        """Returns the changed weights of the layer, in their own dtype."""
        result = {}
        for one, W in zip("qkv", (self.Q, self.K, self.V), strict=True):
            old, rows = weights[f"{name}.P_{one}.weight"], W.flatten(0, -2)
            result[f"{name}.P_{one}.weight"] = rows[:, : old.shape[1]].to(old)
            if f"{name}.P_{one}.bias" in weights:
                result[f"{name}.P_{one}.bias"] = rows[:, -1].to(old)
        P_o = f"{name}.P_o.weight"
        result[P_o] = self.O.flatten(0, 2).T.to(weights[P_o])
        return {name: W.contiguous() for name, W in result.items()}

    def pool(self, groups: int, *, first: bool) -> "Heads":
        """Replaces the keys and values of neighbouring heads with their mean or with the first."""
        K, V = (_grouped(W, groups) for W in (self.K, self.V))  # [G, s, k, d]
        K, V = (W[:, 0] if first else W.mean(dim=1) for W in (K, V))
        Q, O = (_grouped(W, groups).flatten(1, 2) for W in (self.Q, self.O))  # noqa: E741
        return Heads(Q, K, V, O)

    def factor(self, groups: int, *, is_rotary: bool) -> "Heads":
        """Replaces keys and values with those that best approximate all products of a group.

        Keys that are rotated by their positions are averaged instead.
        """
        O, V = _shared_factor(self.O, self.V, groups)  # noqa: E741
        if is_rotary:
            averaged = self.pool(groups, first=False)
            return Heads(averaged.Q, averaged.K, V, O)
        return Heads(*_shared_factor(self.Q, self.K, groups), V, O)

    def align(self, groups: int, *, is_rotary: bool, can_sort: bool = True) -> "Heads":
        """Sorts similar heads into groups, and rotates the heads of each onto their mean."""
        order = torch.arange(len(self.K))
        if can_sort:
            distances = _distances(self.K, is_rotary) + _distances(self.V, False)
            order = torch.tensor(balanced_groups(distances.tolist(), groups)).flatten()
        Q, K, V, O = (W[order] for W in (self.Q, self.K, self.V, self.O))  # noqa: E741
        A = _group_rotations(K, groups, is_rotary)  # [g, k, k]
        B = _group_rotations(V, groups, False)  # [g, v, v]
        return Heads(A.unsqueeze(1) @ Q, A @ K, B @ V, B.unsqueeze(1) @ O)


def _grouped(W: Tensor, groups: int) -> Tensor:
    """Returns heads W [g, …] as [groups, g / groups, …]."""
    return W.reshape(groups, -1, *W.shape[1:])


def _with_bias(weights: Weights, name: str) -> Tensor:
    """Returns a projection in float64, with its bias as the last column."""
    W, bias = weights[f"{name}.weight"].double(), weights.get(f"{name}.bias")
    return W if bias is None else torch.cat([W, bias.double().unsqueeze(1)], dim=1)


def rotation_onto(X: Tensor, Y: Tensor, *, is_rotary: bool = False) -> Tensor:
    """Returns the rotation R that minimizes |R X - Y| for X, Y [..., k, d] (Procrustes).

    With rotary positions, R must commute with the rotation of each position. It turns each pair of
    elements by an angle: it multiplies i and i + k/2 by a complex number of size 1.
    """
    if not is_rotary:
        U, _, V = torch.linalg.svd(Y @ X.mT)
        R: Tensor = U @ V
        return R
    X, Y = (torch.complex(*W.chunk(2, dim=-2)) for W in (X, Y))
    angles = (Y * X.conj()).sum(dim=-1).angle()  # [..., k/2]
    cos, sin = torch.diag_embed(angles.cos()), torch.diag_embed(angles.sin())
    return torch.cat([torch.cat([cos, -sin], dim=-1), torch.cat([sin, cos], dim=-1)], dim=-2)


def _shared_factor(A: Tensor, B: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Returns A' [groups, s r, k, …] and one B' [groups, k, …] per group with A'^T B' ≈ A^T B.

    A: [g, r, k, …], B: [g, k, …]. B' spans the main directions of all products of the group, so the
    sum of squared errors is minimal. The mean size of B is kept.
    """
    products = _grouped(A.mT @ B.unsqueeze(1), groups).flatten(1, 2)  # [groups, s r, d, d]
    _, S, directions = torch.linalg.svd(products.flatten(1, 2), full_matrices=False)
    k = min(B.shape[1], S.shape[1])
    directions, roots = directions[:, :k], S[:, :k].clamp(min=1e-12 * float(S.max()) + TINY).sqrt()
    sizes = torch.linalg.matrix_norm(_grouped(B, groups)).mean(dim=1, keepdim=True)  # [groups, 1]
    roots = (roots * (sizes + TINY) / torch.linalg.vector_norm(roots, dim=1, keepdim=True))[
        ..., None
    ]
    A_new = (products @ (directions / roots).mT.unsqueeze(1)).mT
    rest = (0, 0, 0, B.shape[1] - k)
    return pad(A_new, rest), pad(roots * directions, rest)


def _distances(W: Tensor, is_rotary: bool) -> Tensor:
    """Returns the squared distances [g, g] of heads W [g, k, d] after rotation, relative to W."""
    X, Y = W.unsqueeze(1), W.unsqueeze(0)
    R = rotation_onto(X, Y, is_rotary=is_rotary)  # [g, g, k, k]
    return (R @ X - Y).square().sum(dim=(-2, -1)) / W.square().sum().clamp(min=TINY)


def balanced_groups(distances: list[list[float]], groups: int) -> list[list[int]]:
    """Partitions heads into groups of equal size with small distances inside each group.

    Starts from neighbours, and exchanges two heads of different groups while that reduces the sum.
    """
    size = len(distances) // groups
    found = [list(range(first, first + size)) for first in range(0, len(distances), size)]

    def cost(*chosen: list[int]) -> float:
        return sum(distances[i][j] for group in chosen for i, j in combinations(group, 2))

    improved = True
    while improved:
        improved = False
        for A, B in combinations(found, 2):
            for i, j in product(range(size), repeat=2):
                before = cost(A, B)
                A[i], B[j] = B[j], A[i]
                if cost(A, B) < before * (1.0 - TOLERANCE):
                    improved = True
                else:
                    A[i], B[j] = B[j], A[i]
    return sorted(sorted(group) for group in found)


def _group_rotations(W: Tensor, groups: int, is_rotary: bool) -> Tensor:
    """Returns rotations R [g, k, k] of heads W [g, k, d] onto the mean of their group.

    This is generalized Procrustes analysis: rotate onto the mean, update the mean, and repeat.
    """
    W = _grouped(W, groups)  # [G, s, k, d]
    target, error = W[:, :1], float("inf")
    for _ in range(MAX_ITERATIONS):
        R = rotation_onto(W, target.expand_as(W), is_rotary=is_rotary)
        rotated = R @ W
        target = rotated.mean(dim=1, keepdim=True)
        before, error = error, float((rotated - target).square().sum())
        if error >= before * (1.0 - TOLERANCE):
            break
    return R.flatten(0, 1)
