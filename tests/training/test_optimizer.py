from dataclasses import replace
from math import cos, pi

import pytest
import torch
from torch import nn

from writehead.config import TrainConfig
from writehead.training.optimizer import learning_rate, make_optimizer, set_learning_rate

CONFIG = TrainConfig(steps=1000, warmup=100, learning_rate=0.5, decay=0.1)


@pytest.mark.parametrize(
    ("changes", "step", "expected"),
    [
        ({}, 0, 0.005),
        ({}, 99, 0.5),
        ({}, 399, 0.25),
        ({}, 899, 0.5 * (100 / 900) ** 0.5),
        ({}, 949, 0.5 * (100 / 950) ** 0.5 * 0.51),
        ({"schedule": "cosine", "decay": 0.0}, 549, 0.25 * (1 + cos(pi * 450 / 900))),
        ({"schedule": "cosine", "decay": 0.0}, 999, 0.0),
        ({"schedule": "constant", "decay": 0.0}, 999, 0.5),
    ],
)
def test_the_learning_rate_follows_its_schedule(changes, step, expected):
    found = learning_rate(replace(CONFIG, **changes), step)
    assert found == pytest.approx(expected, rel=1e-2, abs=1e-9)


@pytest.mark.parametrize("name", ["adafactor", "adamw"])
def test_optimizers_make_the_updates_of_pytorchs_and_decay_matrices_only(name):
    ours, theirs = (nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    config = replace(CONFIG, optimizer=name, weight_decay=0.03)
    optimizer = make_optimizer(ours, config)
    groups = [{"params": [P], "weight_decay": 0.03 * (P.dim() > 1)} for P in theirs.parameters()]
    if name == "adafactor":
        reference = torch.optim.Adafactor(groups)
    else:
        betas = (config.beta1, config.beta2)
        reference = torch.optim.AdamW(groups, betas=betas, eps=1e-9)
    for step in range(31):
        X = torch.randn(11, 7) * 10.0 ** (step % 5 - 2)
        before = [P.detach().clone() for P in ours.parameters()]
        for model, used in ((ours, optimizer), (theirs, reference)):
            set_learning_rate(used, 0.03 / (step + 1) * (step < 30))
            used.zero_grad()
            (model(X) - 1.0).square().mean().backward()
            used.step()
    for P, expected, last in zip(ours.parameters(), theirs.parameters(), before, strict=True):
        torch.testing.assert_close(P, expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(P, last)  # the last step had a rate of zero
        for key, value in reference.state[expected].items():
            torch.testing.assert_close(optimizer.state[P][key], value, rtol=1e-4, atol=1e-6)
