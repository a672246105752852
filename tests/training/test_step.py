"""One update: the parts of a batch, clipping, and what a step depends on."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from trainings import CONFIG, MODEL
from writehead.data.batches import Batch, PackedBatches
from writehead.data.dataset import Dataset
from writehead.training.distributed import World
from writehead.training.step import Stepper

ALONE = World(0, 1, torch.device("cpu"))
PLAIN = replace(MODEL, vocabulary=330, dropout=0.0)
SGD = replace(CONFIG, optimizer="adamw", label_smoothing=0.0, z_loss=0.0, clip=None)


@pytest.fixture
def batch(dataset) -> Batch:
    split = Dataset.open(dataset).split("train")
    return next(PackedBatches(split, "translation", 4, 48, 48, seed=3))


def gradients(stepper: Stepper, batch: Batch, step: int = 0) -> dict[str, torch.Tensor]:
    """What `update` hands to the optimizer."""
    found = {}
    stepper.optimizer.step = lambda: found.update(
        {name: P.grad.clone() for name, P in stepper.model.named_parameters()}
    )
    stepper.update(batch, step)
    return found


def test_the_gradient_is_that_of_the_mean_cross_entropy_of_the_labels(batch):
    stepper = Stepper(PLAIN, SGD, ALONE)
    stepper.model.zero_grad()
    logits = stepper.model(
        batch.source,
        batch.inputs,
        source_packing=batch.source_packing,
        target_packing=batch.packing,
    )
    counts = batch.packing.segments != 0
    assert int(counts.sum()) == batch.tokens < counts.numel()
    cross_entropy(logits[counts], batch.labels[counts]).backward()
    expected = {name: P.grad.clone() for name, P in stepper.model.named_parameters()}
    stepper.model.zero_grad()
    for name, G in gradients(stepper, batch).items():
        assert_close(G, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["adafactor", "adamw"])
def test_parts_of_a_batch_make_the_same_update(batch, optimizer):
    made = []
    for accumulate in (1, 2, 4):
        config = replace(CONFIG, optimizer=optimizer, accumulate=accumulate)
        stepper = Stepper(PLAIN, config, ALONE)
        values = stepper.update(batch, 3)
        made.append((values, stepper.model.state_dict()))
    for values, weights in made[1:]:
        assert_close(values, made[0][0], rtol=1e-5, atol=1e-5)
        for name, T in weights.items():
            # rounding may turn the sign of a gradient that is all but zero
            assert (T - made[0][1][name]).abs().mean() < 1e-5, name


def test_clipping_scales_the_gradient_to_the_limit_and_tells_its_own_norm(batch):
    free, held = (Stepper(PLAIN, replace(SGD, clip=clip), ALONE) for clip in (None, 0.01))
    whole, clipped = gradients(free, batch), gradients(held, batch)
    norm = torch.stack([G.norm() for G in whole.values()]).norm()
    assert norm > 0.01
    for name, G in clipped.items():
        assert_close(G, whole[name] * 0.01 / norm, rtol=1e-3, atol=1e-7)
    assert held.update(batch, 0)[2] == pytest.approx(float(norm), rel=1e-5)


def test_a_gradient_below_the_limit_is_left_alone(batch):
    whole, same = (
        gradients(Stepper(PLAIN, replace(SGD, clip=clip), ALONE), batch) for clip in (None, 1e6)
    )
    assert all(torch.equal(whole[name], same[name]) for name in whole)


def test_the_z_loss_is_in_the_objective_and_not_in_the_likelihood(batch):
    plain, with_z = (
        Stepper(PLAIN, replace(SGD, z_loss=z), ALONE).update(batch, 0) for z in (0.0, 0.1)
    )
    assert with_z[1] == plain[1] == plain[0]
    logits = Stepper(PLAIN, SGD, ALONE).model(
        batch.source,
        batch.inputs,
        source_packing=batch.source_packing,
        target_packing=batch.packing,
    )
    log_z = logits.logsumexp(-1)[batch.packing.segments != 0]
    assert_close(with_z[0] - plain[0], 0.1 * log_z.square().sum(), rtol=1e-4, atol=1e-3)


def test_dropout_follows_from_the_seed_the_step_and_the_process(batch):
    noisy = replace(PLAIN, dropout=0.3)

    def loss(step: int = 0, rank: int = 0, seed: int = 0, stray: int = 0) -> float:
        stepper = Stepper(noisy, replace(CONFIG, seed=seed), World(rank, 1, torch.device("cpu")))
        torch.manual_seed(0)
        with torch.no_grad():
            for P in stepper.model.parameters():
                P.copy_(torch.randn_like(P) * 0.1)
        torch.rand(stray)  # what was drawn before does not matter
        return float(stepper.update(batch, step)[0])

    assert loss() == loss(stray=5)
    assert len({loss(), loss(step=1), loss(rank=1), loss(seed=1)}) == 4


def test_half_precision_keeps_float32_weights_and_nearly_the_loss(batch):
    half, whole = (
        Stepper(PLAIN, replace(SGD, precision=precision), ALONE)
        for precision in ("bfloat16", "float32")
    )
    losses = [stepper.update(batch, 0) for stepper in (half, whole)]
    assert {P.dtype for P in half.model.parameters()} == {torch.float32}
    assert losses[0][0] != losses[1][0]
    assert_close(losses[0], losses[1], rtol=2e-2, atol=1e-2)
