"""Loss, update and optimizers against plain PyTorch, and what the noise of an update depends on."""

from dataclasses import replace
from math import cos, pi

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, log_softmax, one_hot
from torch.testing import assert_close

from trainings import CONFIG, MODEL
from writehead.config import TrainConfig
from writehead.data.batches import Batch, PackedBatches
from writehead.data.dataset import Dataset
from writehead.training.distributed import World
from writehead.training.loss import sequence_loss
from writehead.training.optimizer import learning_rate, make_optimizer, set_learning_rate
from writehead.training.step import Stepper

ALONE = World(0, 1, torch.device("cpu"))
PLAIN = replace(MODEL, vocab_size=330, dropout=0.0)
BARE = replace(CONFIG, optimizer="adamw", label_smoothing=0.0, z_loss=0.0, clip=None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("smoothing", "z"), [(0.0, 0.0), (0.3, 1e-2)])
def test_the_loss_is_cross_entropy_with_soft_labels_and_log_z_squared(dtype, smoothing, z):
    logits, labels = (3 * torch.randn(2, 5, 7)).to(dtype), torch.randint(0, 7, (2, 5))
    counts = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]], dtype=torch.bool)
    logits.requires_grad_()
    loss = sequence_loss(logits, labels, counts, label_smoothing=smoothing, z_loss=z)
    exact, soft = logits.float(), (1 - smoothing) * one_hot(labels, 7) + smoothing / 7
    each = -(soft * log_softmax(exact, dim=-1)).sum(-1) + z * exact.logsumexp(-1) ** 2
    assert_close(loss.objective, each[counts].sum())
    assert_close(loss.nll, cross_entropy(exact[counts], labels[counts], reduction="sum"))
    loss.objective.backward()
    assert not logits.grad[~counts].any()
    assert logits.grad[counts].any(dim=-1).all()


@pytest.fixture
def batch(dataset) -> Batch:
    split = Dataset.open(dataset).split("train")
    return next(PackedBatches(split, 4, 48, 48, seed=3))


def gradients(batch: Batch, **changes: object) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The gradients that `update` hands to the optimizer, and the values it returns."""
    found, stepper = {}, Stepper(PLAIN, replace(BARE, **changes), ALONE)
    stepper.optimizer.step = lambda: found.update(
        {name: P.grad.clone() for name, P in stepper.model.named_parameters()}
    )
    return found, stepper.update(batch, 0)


def test_the_gradient_is_that_of_the_mean_cross_entropy_and_clipped_to_its_limit(batch):
    whole, values = gradients(batch)
    model, counts = Stepper(PLAIN, BARE, ALONE).model, batch.packing.segments != 0
    assert int(counts.sum()) == batch.tokens < counts.numel()
    packings = {"source_packing": batch.source_packing, "target_packing": batch.packing}
    logits = model(batch.source, batch.inputs, **packings)[counts]
    mean = cross_entropy(logits, batch.labels[counts])
    mean.backward()
    norm = torch.stack([G.norm() for G in whole.values()]).norm()
    assert_close(values, torch.stack([mean * batch.tokens, mean * batch.tokens, norm]))
    _, with_z = gradients(batch, z_loss=0.1)
    expected = values[0] + 0.1 * logits.logsumexp(-1).square().sum()
    assert_close(with_z[:2], torch.stack([expected, values[1]]), rtol=1e-5, atol=0.0)
    clipped, held = gradients(batch, clip=0.01)
    unclipped, _ = gradients(batch, clip=1e6)
    assert norm > 0.01
    assert_close(held[2], norm)  # as it was before clipping
    for name, P in model.named_parameters():
        assert_close(whole[name], P.grad, rtol=1e-4, atol=1e-6)
        assert_close(unclipped[name], whole[name])
        assert_close(clipped[name], whole[name] * 0.01 / norm, rtol=1e-3, atol=1e-7)


def test_dropout_depends_on_the_seed_the_step_and_the_process_alone(batch):
    def loss(step: int = 0, rank: int = 0, seed: int = 0, stray: int = 0) -> float:
        world = World(rank, 1, torch.device("cpu"))
        stepper = Stepper(replace(PLAIN, dropout=0.3), replace(CONFIG, seed=seed), world)
        torch.manual_seed(0)
        with torch.no_grad():
            for P in stepper.model.parameters():
                P.copy_(torch.randn_like(P) * 0.1)
        torch.rand(stray)  # earlier random numbers do not matter
        return float(stepper.update(batch, step)[0])

    assert loss() == loss(stray=5)
    assert len({loss(), loss(step=1), loss(rank=1), loss(seed=1)}) == 4


def test_bfloat16_keeps_float32_weights_and_nearly_the_loss(batch):
    half = Stepper(PLAIN, replace(BARE, precision="bfloat16"), ALONE)
    found, expected = half.update(batch, 0), gradients(batch)[1]
    assert {P.dtype for P in half.model.parameters()} == {torch.float32}
    assert found[0] != expected[0]
    assert_close(found, expected, rtol=2e-2, atol=1e-2)


RATES = TrainConfig(steps=1000, warmup=100, learning_rate=0.5, decay=0.1)


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
    found = learning_rate(replace(RATES, **changes), step)
    assert found == pytest.approx(expected, rel=1e-2, abs=1e-9)


@pytest.mark.parametrize("name", ["adafactor", "adamw"])
def test_optimizers_make_the_updates_of_pytorchs_and_decay_matrices_only(name):
    ours, theirs = (nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    config = replace(RATES, optimizer=name, weight_decay=0.03)
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
