"""Training steps captured as a CUDA graph against the same steps without one."""

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
from writehead.training.step import WARMUP_STEPS, Stepper

pytestmark = pytest.mark.gpu

STEPS = 12
SIZES = {"d": 64, "f": 96, "h": 4, "k": 16, "v": 32}
PLAIN = replace(MODEL, **SIZES, vocab_size=330, dropout=0.0)
# the learning rate rises and falls, and batches have different numbers of tokens
TRAIN = replace(CONFIG, steps=STEPS, accumulate=2, compile="yes")
STILL = replace(TRAIN, optimizer="adamw", learning_rate=1e-30)  # the weights do not change


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
    """Loss and likelihood per token of each step, and the change of the weights."""
    stepper = make(PLAIN, config)
    before = weights(stepper)
    sums = [stepper.update(batch, i)[:2] / batch.tokens for i, batch in enumerate(batches)]
    return torch.stack(sums), weights(stepper) - before


@pytest.mark.parametrize(("optimizer", "rate"), [("adafactor", 0.01), ("adamw", 0.003)])
def test_captured_steps_train_like_uncaptured_steps(optimizer, rate, batches):
    config = replace(TRAIN, optimizer=optimizer, learning_rate=rate)
    graph = torch.cuda.CUDAGraph
    with mock.patch.object(graph, "replay", autospec=True, side_effect=graph.replay) as replay:
        losses, moved = train(config, batches)
    assert replay.called
    plain, expected_move = train(replace(config, compile="no"), batches)
    assert len({batch.tokens for batch in batches}) > 3
    assert plain[-1, 1] < 0.8 * plain[0, 1]  # it learns, so a stale step would show
    assert_close(losses, plain, rtol=3e-3, atol=0.0)
    assert (moved - expected_move).norm() < 0.05 * expected_move.norm()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_dropout_of_captured_steps_depends_on_the_step_number(dropout, batches):
    stepper = make(replace(PLAIN, dropout=dropout), STILL)

    def losses() -> list[float]:
        steps = range(WARMUP_STEPS + 5)
        return [float(stepper.update(batches[0], step)[0]) for step in steps][WARMUP_STEPS:]

    first = losses()
    spread = max(first) - min(first)
    assert spread > 1e-3 * max(first) if dropout else spread <= 1e-6 * max(first)
    assert losses() == pytest.approx(first, rel=1e-6)
