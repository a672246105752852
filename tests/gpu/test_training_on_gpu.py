"""Training steps captured as one CUDA graph against the same steps kernel by kernel."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from trainings import CONFIG, MODEL, pair_dataset
from writehead.config import ModelConfig, TrainConfig
from writehead.data.batches import Batch, PackedBatches
from writehead.data.dataset import Dataset
from writehead.training.distributed import World
from writehead.training.loss import sequence_loss
from writehead.training.step import WARMUP_STEPS, Stepper

pytestmark = pytest.mark.gpu

STEPS = 12
SIZES = {"d": 64, "f": 96, "h": 4, "k": 16, "v": 32}
PLAIN = replace(MODEL, **SIZES, vocab_size=330, dropout=0.0)
# a rate that rises and falls on the way, and batches of different tokens and numbers of them
TRAIN = replace(CONFIG, steps=STEPS, accumulate=2, compile="yes")
STILL = replace(TRAIN, optimizer="adamw", learning_rate=1e-30)  # so that weights stay


@pytest.fixture(scope="module")
def batches(tmp_path_factory) -> list[Batch]:
    split = Dataset.open(pair_dataset(tmp_path_factory.mktemp("pairs"))).split("train")
    made = PackedBatches(split, CONFIG.rows, 48, 48, seed=3)
    return [next(made) for _ in range(STEPS)]


def make(model: ModelConfig, config: TrainConfig) -> Stepper:
    torch.compiler.reset()
    return Stepper(model, config, World(0, 1, torch.device("cuda")))


def weights(stepper: Stepper) -> Tensor:
    return torch.cat([P.detach().flatten() for P in stepper.model.parameters()])


def train(config: TrainConfig, batches: list[Batch]) -> tuple[Tensor, Tensor]:
    """Loss and likelihood per token of each step, and how far all steps moved the weights."""
    stepper = make(PLAIN, config)
    before = weights(stepper)
    sums = [stepper.update(batch, i)[:2] / batch.tokens for i, batch in enumerate(batches)]
    return torch.stack(sums), weights(stepper) - before


@pytest.mark.parametrize(("optimizer", "rate"), [("adafactor", 0.01), ("adamw", 0.003)])
def test_captured_steps_train_as_those_that_are_not(optimizer, rate, batches):
    config = replace(TRAIN, optimizer=optimizer, learning_rate=rate)
    graph = torch.cuda.CUDAGraph
    with mock.patch.object(graph, "replay", autospec=True, side_effect=graph.replay) as replay:
        losses, moved = train(config, batches)
    assert replay.called

    right, expected = train(replace(config, compile="no"), batches)

    assert len({batch.tokens for batch in batches}) > 3
    assert right[-1, 1] < 0.8 * right[0, 1]  # it learns, so that a stale step would show
    assert_close(losses, right, rtol=3e-3, atol=0.0)
    assert (moved - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_captured_steps_drop_out_differently_and_by_their_number(dropout, batches):
    stepper = make(replace(PLAIN, dropout=dropout), STILL)

    def losses() -> list[float]:
        return [float(stepper.update(batches[0], step)[0]) for step in range(WARMUP_STEPS + 5)][
            WARMUP_STEPS:
        ]

    first = losses()
    spread = max(first) - min(first)
    assert spread > 1e-3 * max(first) if dropout else spread <= 1e-6 * max(first)
    assert losses() == pytest.approx(first, rel=1e-6)


def test_the_loss_of_a_large_vocabulary_errs_no_more_than_plain_pytorch():
    counts = torch.rand(4, 9, device="cuda") < 0.8
    labels = torch.randint(0, 32_000, (4, 9), device="cuda")
    logits = (4 * torch.randn(4, 9, 32_000, device="cuda")).bfloat16().requires_grad_()
    found = sequence_loss(logits, labels, counts, label_smoothing=0.1, z_loss=1e-4)
    exact = logits.detach().cpu().double().requires_grad_()
    right = sequence_loss(exact, labels.cpu(), counts.cpu(), label_smoothing=0.1, z_loss=1e-4)
    assert_close(found.objective.cpu(), right.objective)
    assert_close(found.nll.cpu(), right.nll)
    [ours] = torch.autograd.grad(found.objective, logits)
    [true] = torch.autograd.grad(right.objective, exact)
    assert_close(ours.cpu().double(), true, rtol=2**-8, atol=1e-7)
