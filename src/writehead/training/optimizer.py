"""The optimizer and its learning rate at each step."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from writehead.config import TrainConfig


class Adafactor(torch.optim.Adafactor):
    """PyTorch's Adafactor, with the same state and the same updates, which waits for no device.

    PyTorch asks the device for two norms of every parameter at every step, and waits for each.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Updates all parameters that have a gradient."""
        for group in self.param_groups:
            params: list[Tensor] = []
            grads: list[Tensor] = []
            moments: list[list[Any]] = [[], [], [], []]
            self._init_group(group, params, grads, *moments)
            for P, G, row, column, variance, step in zip(params, grads, *moments, strict=True):
                step += 1
                t = float(step)  # it is on the host
                keep = t ** group["beta2_decay"]
                if variance is None:
                    row.lerp_(_rms(G, -1).square(), keep)
                    column.lerp_(_rms(G, -2).square(), keep)
                    scale = row.mean(-2, keepdim=True).clamp(min=self._least(P))
                    estimate = row @ column / scale
                else:
                    variance.lerp_(G.square(), keep)
                    estimate = variance
                update = G * estimate.clamp(min=self._least(P) ** 2).rsqrt()
                size = _rms(P).clamp(min=group["eps"][1]) * min(group["lr"], t**-0.5)
                if group["weight_decay"]:
                    P.mul_(1.0 - group["lr"] * group["weight_decay"])
                P.sub_(update * (size / (_rms(update) / group["d"]).clamp(min=1.0)))

    @staticmethod
    def _least(P: Tensor) -> float:
        return torch.finfo(P.dtype).eps


def _rms(T: Tensor, dim: int | None = None) -> Tensor:
    count = T.numel() if dim is None else T.shape[dim]
    norm: Tensor = torch.linalg.vector_norm(T, dim=dim, keepdim=dim is not None)
    return norm / math.sqrt(count)


def make_optimizer(model: nn.Module, config: TrainConfig) -> Optimizer:
    """Adafactor or AdamW over all parameters; weight decay spares norms and biases."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    spared = [p for p in model.parameters() if p.dim() <= 1]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": spared, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.optimizer == "adafactor":
        return Adafactor(groups, lr=config.learning_rate)
    fused = next(model.parameters()).device.type == "cuda"
    return AdamW(
        groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), eps=1e-9, fused=fused
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
    """Makes the next update use `rate`."""
    for group in optimizer.param_groups:
        group["lr"] = rate
