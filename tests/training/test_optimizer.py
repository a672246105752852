import dataclasses

import pytest
import torch
from torch import nn

from writehead.config import TrainConfig
from writehead.training.optimizer import learning_rate, make_optimizer, set_learning_rate

CONFIG = TrainConfig(steps=1000, warmup=100, learning_rate=0.5, decay=0.1)


def test_the_rate_rises_linearly_then_falls_with_the_square_root_and_ends_at_zero():
    rates = [learning_rate(CONFIG, step) for step in range(1000)]
    assert rates[0] == pytest.approx(0.005)
    assert rates[49] == pytest.approx(0.25)
    assert max(rates) == rates[99] == pytest.approx(0.5)
    assert rates[399] == pytest.approx(0.25)
    assert rates[899] == pytest.approx(0.5 * (100 / 900) ** 0.5)
    assert rates[949] == pytest.approx(0.5 * (100 / 950) ** 0.5 * 0.51)
    assert 0 < rates[999] < 0.01


def test_the_cosine_ends_at_zero_and_the_constant_stays():
    cosine = dataclasses.replace(CONFIG, schedule="cosine", decay=0.0)
    assert learning_rate(cosine, 549) == pytest.approx(0.25, rel=1e-2)
    assert learning_rate(cosine, 999) == pytest.approx(0.0, abs=1e-9)
    constant = dataclasses.replace(CONFIG, schedule="constant", decay=0.0)
    assert learning_rate(constant, 999) == 0.5


@pytest.mark.parametrize("name", ["adafactor", "adamw"])
def test_both_optimizers_descend_and_take_the_rate_they_are_given(name):
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    config = dataclasses.replace(CONFIG, optimizer=name)
    optimizer = make_optimizer(model, config)
    X, Y = torch.randn(64, 5), torch.randn(64, 3)
    losses = []
    for _ in range(50):
        set_learning_rate(optimizer, 0.05)
        loss = (model(X) - Y).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.9 * losses[0]
    before = model.weight.detach().clone()
    set_learning_rate(optimizer, 0.0)
    (model(X) - Y).square().mean().backward()
    optimizer.step()
    assert torch.equal(model.weight, before)


def test_weight_decay_spares_vectors():
    model = nn.Linear(5, 3)
    optimizer = make_optimizer(model, dataclasses.replace(CONFIG, weight_decay=0.1))
    decays = {
        id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]
    }
    assert decays == {id(model.weight): 0.1, id(model.bias): 0.0}


def test_adafactor_makes_pytorchs_updates_and_has_its_state():
    torch.manual_seed(0)
    ours, theirs = (nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    config = dataclasses.replace(CONFIG, weight_decay=0.03)
    optimizer = make_optimizer(ours, config)
    reference = torch.optim.Adafactor(
        [{"params": [p], "weight_decay": 0.03 * (p.dim() > 1)} for p in theirs.parameters()]
    )
    for step in range(30):
        X = torch.randn(11, 7) * 10.0 ** (step % 5 - 2)
        set_learning_rate(optimizer, 0.3 / (step + 1))
        set_learning_rate(reference, 0.3 / (step + 1))
        for model, used in ((ours, optimizer), (theirs, reference)):
            used.zero_grad()
            (model(X) - 1.0).square().mean().backward()
            used.step()
    for P, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(P, expected, rtol=1e-4, atol=1e-5)
        for name, value in reference.state[expected].items():
            torch.testing.assert_close(optimizer.state[P][name], value, rtol=1e-4, atol=1e-6)
