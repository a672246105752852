"""The one entry to attention: checks, beams, ancestors, and the choice of a backend.

Backends say why not: `supports` returns None or a sentence. "auto" takes the first that can; one
asked for by name that cannot raises with its sentence.
"""

from typing import Protocol

import torch
from torch import Tensor

from writehead.errors import BackendError, ConfigError, ShapeError, nearest
from writehead.kernels import eager, packed, sdpa
from writehead.kernels.heads import Heads
from writehead.kernels.visibility import Visibility


class Backend(Protocol):
    """What a backend's module offers."""

    def supports(self, Q: Tensor, K: Tensor, V: Tensor, visibility: Visibility) -> str | None:
        """None, or the sentence that says why not."""

    def attend(
        self, Q: Tensor, K: Tensor, V: Tensor, visibility: Visibility, scale: float
    ) -> Tensor:
        """As the public `attend`, of checked tensors with a row of K and V for each row of Q."""


# in the order that "auto" asks them
BACKENDS: dict[str, Backend] = {"packed": packed, "sdpa": sdpa, "eager": eager}


def attend(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    visibility: Visibility | None = None,
    *,
    scale: float,
    noise: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """softmax(scale Q K^T) V over the visible memory: [b,h,n,k] [b,g,m,k] [b,g,m,v] -> [b,h,n,v].

    Read-head i reads write-head i // (h/g). The softmax is taken in float32 or better; a query
    that sees nothing gets zeros. K and V may have fewer rows than Q: each then serves b / rows
    consecutive rows of Q, as the encoder's do for the beams of a sentence, and `visibility` speaks
    of those fewer rows. noise: [b, g, m], factors for the softmax's weights, one for all queries
    of a memory position; they are constants, without a gradient.
    """
    visibility = visibility or Visibility()
    _check(Q, K, V, visibility, scale, noise)
    b, h, n, k = Q.shape
    beams = b // K.shape[0]
    if beams > 1:
        # the beams of a sentence become further queries over its one memory
        Q = Q.view(-1, beams, h, n, k).transpose(1, 2).reshape(-1, h, beams * n, k)
    if visibility.ancestors is not None:
        K, V = _gather(K, visibility.ancestors), _gather(V, visibility.ancestors)
        noise = noise if noise is None else _gather(noise, visibility.ancestors)
    chosen = _choose(backend, Q, K, V, visibility)
    if chosen == "packed":
        O = packed.attend(Q, K, V, visibility, scale, noise)  # noqa: E741
    else:
        # a factor of a position's values is a factor of its weight for every query
        V = V if noise is None else (V * noise.unsqueeze(3)).to(V.dtype)
        O = BACKENDS[chosen].attend(Q, K, V, visibility, scale)  # noqa: E741
    if beams > 1:
        O = O.view(-1, h, beams, n, V.shape[3]).transpose(1, 2).reshape(b, h, n, -1)  # noqa: E741
    return O


def attend_fused(
    QKV: Tensor,
    heads: Heads,
    visibility: Visibility | None = None,
    *,
    scale: float,
    noise: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """`attend` of the Q, K and V in one wide product [b, n, hk + gk + gv]: [b,h,n,v].

    The packed kernels write the gradient of QKV as one tensor; for other backends it is put
    together from three.
    """
    visibility = visibility or Visibility()
    Q, K, V = heads.split(QKV)
    _check(Q, K, V, visibility, scale, noise)
    if visibility.ancestors is None and _choose(backend, Q, K, V, visibility) == "packed":
        return packed.attend_fused(QKV, heads, visibility, scale, noise)
    return attend(Q, K, V, visibility, scale=scale, noise=noise, backend=backend)


def check_backend(name: str) -> None:
    """Raises unless `name` is "auto" or a backend's."""
    if name != "auto" and name not in BACKENDS:
        raise ConfigError(f"unknown backend {name!r}; {nearest(name, ['auto', *BACKENDS])}")


def _choose(name: str, Q: Tensor, K: Tensor, V: Tensor, visibility: Visibility) -> str:
    """The name of the backend to use."""
    check_backend(name)
    if name != "auto":
        why_not = BACKENDS[name].supports(Q, K, V, visibility)
        if why_not:
            raise BackendError(f"backend {name!r} cannot: {why_not}; use backend='auto'")
        return name
    able = (one for one in BACKENDS if BACKENDS[one].supports(Q, K, V, visibility) is None)
    return next(able)


def _gather(T: Tensor, ancestors: Tensor) -> Tensor:
    """T [rows, g, m, …] as each row of `ancestors` [b, m] sees it: [b, g, m, …]."""
    slots = torch.arange(T.shape[2], device=T.device)
    return T[ancestors, :, slots].transpose(1, 2)  # [b, m, g, …] -> [b, g, m, …]


def _check(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    visibility: Visibility,
    scale: float,
    noise: Tensor | None,
) -> None:
    for name, T in (("Q", Q), ("K", K), ("V", V)):
        if T.dim() != 4 or 0 in T.shape:
            raise ShapeError(
                f"{name} has shape {list(T.shape)}; attend takes Q [b, h, n, k], K [b, g, m, k] "
                f"and V [b, g, m, v], none of them empty"
            )
        if not T.is_floating_point() or T.dtype != Q.dtype:
            raise ShapeError(f"{name} is {T.dtype}; Q, K and V must be one floating-point type")
        if T.device != Q.device:
            raise ShapeError(f"{name} is on {T.device} and Q on {Q.device}; move them together")
    if K.shape[:3] != V.shape[:3] or Q.shape[3] != K.shape[3]:
        raise ShapeError(
            f"Q {list(Q.shape)}, K {list(K.shape)} and V {list(V.shape)} do not fit; K and V must "
            f"agree in [b, g, m] and Q and K in k"
        )
    if Q.shape[1] % K.shape[1]:
        raise ShapeError(
            f"{K.shape[1]} write-heads cannot serve {Q.shape[1]} read-heads; g must divide h"
        )
    if Q.shape[0] % K.shape[0]:
        raise ShapeError(
            f"{K.shape[0]} rows of K and V cannot serve {Q.shape[0]} rows of Q; the first must "
            f"divide the second"
        )
    if noise is not None and (noise.shape != K.shape[:3] or not noise.is_floating_point()):
        raise ShapeError(
            f"noise is {noise.dtype} {list(noise.shape)}; K needs floating-point factors "
            f"{list(K.shape[:3])}, a write-head's for each memory position"
        )
    if noise is not None and noise.device != Q.device:
        raise ShapeError(f"noise is on {noise.device} and Q on {Q.device}; move them together")
    if not scale > 0.0:
        raise ConfigError(f"scale={scale} must be above 0; the usual one is k**-0.5")
    if Q.shape[0] != K.shape[0]:
        own = (visibility.window, visibility.query_positions, visibility.query_segments)
        if visibility.causal or any(limit is not None for limit in (*own, visibility.ancestors)):
            raise ShapeError(
                "rows of Q that share K and V all see the same memory; causal, window, query "
                "positions, segments and ancestors need a row of K and V for each row of Q"
            )
    visibility.check(K.shape[0], Q.shape[2], K.shape[2], Q.device)
