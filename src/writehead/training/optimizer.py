"""Adafactor and AdamW, and the learning-rate schedule."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from writehead.config import TrainConfig

MAX_COMPILED_SHAPES = 64  # the optimizer is compiled for each shape of a parameter
NUM_STREAMS = 8  # parameters updated concurrently in a CUDA graph; one alone does not fill a GPU


class Adafactor(torch.optim.Adafactor):
    """PyTorch's Adafactor without calls of `.item()`, which CUDA graphs cannot capture."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, *, compiled: bool = False) -> None:
        super().__init__(groups, lr=lr)
        self._update: Callable[..., None] = _compiled_update() if compiled else _update

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Updates all parameters that have a gradient."""
        updates = [update for group in self.param_groups for update in self._updates(group)]
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        streams = [torch.cuda.Stream() for _ in range(NUM_STREAMS * capturing)]  # type: ignore[no-untyped-call]
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        for i, arguments in enumerate(updates):
            with torch.cuda.stream(streams[i % NUM_STREAMS] if streams else None):
                self._update(*arguments)
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)

    def _updates(self, group: dict[str, Any]) -> list[tuple[Any, ...]]:
        """Returns the arguments of `_update` for each parameter of a group."""
        params: list[Tensor] = []
        grads: list[Tensor] = []
        rows, columns, variances, steps = moments = [list[Any]() for _ in range(4)]
        self._init_group(group, params, grads, *moments)
        if not params:
            return []
        for i, P in enumerate(params):
            if steps[i].device != P.device:  # PyTorch creates it on the CPU
                steps[i] = self.state[P]["step"] = steps[i].to(P.device)
        torch._foreach_add_(steps, 1.0)
        t, lr = steps[0], torch.as_tensor(group["lr"], device=steps[0].device)
        decay = 1.0 - lr * group["weight_decay"] if group["weight_decay"] else None
        shared = t ** group["beta2_decay"], torch.minimum(lr, t**-0.5), decay
        own = zip(params, grads, rows, columns, variances, strict=True)
        return [(*tensors, *shared, group["eps"][1], group["d"]) for tensors in own]


def _update(
    P: Tensor,
    G: Tensor,
    row: Tensor | None,
    column: Tensor | None,
    variance: Tensor | None,
    one_minus_beta2: Tensor,
    lr: Tensor,
    decay: Tensor | None,
    min_rms: float,
    clip: float,
) -> None:
    """Updates one parameter and its moments: row and column of a matrix, or a whole variance."""
    eps = torch.finfo(P.dtype).eps
    if row is not None and column is not None:
        row.lerp_(_rms(G, -1).square(), one_minus_beta2)
        column.lerp_(_rms(G, -2).square(), one_minus_beta2)
        estimate = row * column / row.mean(-2, keepdim=True).clamp(min=eps)
    else:
        assert variance is not None
        estimate = variance.lerp_(G.square(), one_minus_beta2)
    change = G * estimate.clamp(min=eps**2).rsqrt()
    step_size = _rms(P).clamp(min=min_rms) * lr
    if decay is not None:
        P.mul_(decay)
    P.sub_(change * (step_size / (_rms(change) / clip).clamp(min=1.0)))


def _compiled_update() -> Callable[..., None]:
    compiled = torch.compile(_update, dynamic=False)  # kernels for a fixed shape are faster

    def update(*arguments: Any) -> None:
        with torch._dynamo.config.patch(recompile_limit=MAX_COMPILED_SHAPES):
            compiled(*arguments)

    return update


def _rms(T: Tensor, dim: int | None = None) -> Tensor:
    return T.square().mean(dim=dim, keepdim=dim is not None).sqrt()


def make_optimizer(model: nn.Module, config: TrainConfig, *, compiled: bool = False) -> Optimizer:
    """Returns Adafactor or AdamW; weight decay is for matrices only, not for norms and biases."""
    matrices = [P for P in model.parameters() if P.dim() > 1]
    vectors = [P for P in model.parameters() if P.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    rate, cuda = config.learning_rate, matrices[0].device.type == "cuda"
    if config.optimizer == "adafactor":
        return Adafactor(groups, rate, compiled=compiled)
    betas = (config.beta1, config.beta2)
    return AdamW(groups, rate, betas, eps=1e-9, fused=cuda, capturable=cuda)


def learning_rate(config: TrainConfig, step: int) -> float:
    """Returns the learning rate of a step; steps count from 0."""
    t = step + 1
    rate = config.learning_rate * min(1.0, t / config.warmup)
    if t > config.warmup:
        if config.schedule == "inverse-sqrt":
            rate *= math.sqrt(config.warmup / t)
        elif config.schedule == "cosine":
            progress = (t - config.warmup) / max(1, config.steps - config.warmup)
            rate *= 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    cooldown = config.decay * config.steps
    return rate * min(1.0, (config.steps - step) / cooldown) if cooldown else rate


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Sets the learning rate; on a GPU, in the tensor that a CUDA graph reads."""
    for group in optimizer.param_groups:
        device = group["params"][0].device
        if device.type != "cuda":
            group["lr"] = rate
        elif isinstance(group["lr"], Tensor) and group["lr"].device == device:
            group["lr"].fill_(rate)
        else:
            group["lr"] = torch.tensor(rate, device=device)
