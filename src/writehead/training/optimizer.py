"""The optimizer and its learning rate at each step."""

import math

from torch import nn
from torch.optim import Adafactor, AdamW, Optimizer

from writehead.config import TrainConfig


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
