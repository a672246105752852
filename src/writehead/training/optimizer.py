"""The optimizer and its learning rate at each step."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from writehead.config import TrainConfig

SHAPES = 64  # of parameters, that the compiler makes kernels for before it gives up
LANES = 8  # parameters that a captured step updates side by side


class Adafactor(torch.optim.Adafactor):
    """PyTorch's Adafactor, with the same state and the same updates, which waits for no device.

    PyTorch asks the device for two norms of every parameter at every step, and waits for each.
    Here the number of steps lies on the device too, so that a step can be captured and replayed;
    `compiled` makes a few fused passes of each update. They are short, and those of one parameter
    do not wait for another's: a captured step runs several side by side.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, *, compiled: bool = False) -> None:
        super().__init__(groups, lr=lr)
        self._update: Callable[..., None] = _compiled_update() if compiled else _update

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Updates all parameters that have a gradient."""
        for group in self.param_groups:
            params: list[Tensor] = []
            grads: list[Tensor] = []
            moments: list[list[Any]] = [[], [], [], []]
            self._init_group(group, params, grads, *moments)
            if not params:
                continue
            *factors, steps = moments
            for i, P in enumerate(params):
                if steps[i].device != P.device:  # PyTorch begins with it on the host
                    steps[i] = self.state[P]["step"] = steps[i].to(P.device)
            torch._foreach_add_(steps, 1.0)
            t, rate = steps[0], torch.as_tensor(group["lr"], device=steps[0].device)
            keep = t ** group["beta2_decay"]
            shrink = 1.0 - rate * group["weight_decay"] if group["weight_decay"] else None
            rate = torch.minimum(rate, t**-0.5)
            constants = keep, rate, shrink, group["eps"][1], group["d"]
            with _Lanes(params[0].device) as lanes:
                for i, (P, G, *own) in enumerate(zip(params, grads, *factors, strict=True)):
                    with lanes.take(i):
                        self._update(P, G, *own, *constants)


class _Lanes:
    """Streams that branch off a capture and join it again; otherwise everything is in its order."""

    def __init__(self, device: torch.device) -> None:
        captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        count = LANES if captured else 0
        self._streams = [torch.cuda.Stream(device) for _ in range(count)]  # type: ignore[no-untyped-call]

    def __enter__(self) -> "_Lanes":
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream())
        return self

    def take(self, i: int) -> AbstractContextManager[object]:
        """Has the i-th piece of work done in its lane."""
        if not self._streams:
            return nullcontext()
        return torch.cuda.stream(self._streams[i % len(self._streams)])

    def __exit__(self, *_: object) -> None:
        for stream in self._streams:
            torch.cuda.current_stream().wait_stream(stream)


def _update(
    P: Tensor,
    G: Tensor,
    row: Tensor | None,
    column: Tensor | None,
    variance: Tensor | None,
    keep: Tensor,
    rate: Tensor,
    shrink: Tensor | None,
    least_size: float,
    clip: float,
) -> None:
    """Changes one parameter and its moments: row and column of a matrix, or a whole variance."""
    least = torch.finfo(P.dtype).eps
    if row is not None and column is not None:
        row.lerp_(_rms(G, -1).square(), keep)
        column.lerp_(_rms(G, -2).square(), keep)
        estimate = row * column / row.mean(-2, keepdim=True).clamp(min=least)
    else:
        assert variance is not None
        estimate = variance.lerp_(G.square(), keep)
    change = G * estimate.clamp(min=least**2).rsqrt()
    size = _rms(P).clamp(min=least_size) * rate
    if shrink is not None:
        P.mul_(shrink)
    P.sub_(change * (size / (_rms(change) / clip).clamp(min=1.0)))


def _compiled_update() -> Callable[..., None]:
    """`_update` as a few kernels for each shape: those made for one shape are the quicker ones."""
    compiled = torch.compile(_update, dynamic=False)

    def update(*arguments: Any) -> None:
        with torch._dynamo.config.patch(recompile_limit=SHAPES):
            compiled(*arguments)

    return update


def _rms(T: Tensor, dim: int | None = None) -> Tensor:
    return T.square().mean(dim=dim, keepdim=dim is not None).sqrt()


def make_optimizer(model: nn.Module, config: TrainConfig, *, compiled: bool = False) -> Optimizer:
    """Adafactor or AdamW over all parameters; weight decay spares norms and biases."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    spared = [p for p in model.parameters() if p.dim() <= 1]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": spared, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.optimizer == "adafactor":
        return Adafactor(groups, lr=config.learning_rate, compiled=compiled)
    cuda = next(model.parameters()).device.type == "cuda"
    return AdamW(
        groups,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=1e-9,
        fused=cuda,
        capturable=cuda,
    )


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate of the step-th update, from 0."""
    t = step + 1
    rate = config.learning_rate * min(1.0, t / config.warmup)
    if t > config.warmup:
        if config.schedule == "inverse-sqrt":
            rate *= math.sqrt(config.warmup / t)
        elif config.schedule == "cosine":
            done = (t - config.warmup) / max(1, config.steps - config.warmup)
            rate *= 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
    last = config.decay * config.steps
    if last > 0:
        rate *= min(1.0, (config.steps - step) / last)
    return rate


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Makes the next update use `rate`, which on a GPU a captured step reads from its place."""
    for group in optimizer.param_groups:
        device = group["params"][0].device
        held = group["lr"]
        if device.type != "cuda":
            group["lr"] = rate
        elif isinstance(held, Tensor) and held.device == device:
            held.fill_(rate)
        else:
            group["lr"] = torch.tensor(rate, device=device)
