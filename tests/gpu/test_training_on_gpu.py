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
from writehead.model import make_model
from writehead.runs import save_run
from writehead.training.distributed import World
from writehead.training.origin import Origin
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


def make(model: ModelConfig, config: TrainConfig, origin: Origin | None = None) -> Stepper:
    torch.compiler.reset()
    return Stepper(model, config, World(0, 1, torch.device("cuda")), origin)


def weights(stepper: Stepper) -> Tensor:
    return torch.cat([P.detach().flatten() for P in stepper.model.parameters()])


def train(
    config: TrainConfig, batches: list[Batch], origin: Origin | None = None
) -> tuple[Tensor, Tensor]:
    """Loss and likelihood per token of each step, and the change of the weights."""
    stepper = make(PLAIN, config, origin)
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


def test_captured_steps_learn_from_a_teacher_like_uncaptured_steps(batches, tmp_path):
    torch.manual_seed(7)
    save_run(tmp_path / "teacher", make_model(replace(PLAIN, g=4, d=48)))
    config = replace(TRAIN, optimizer="adamw", learning_rate=0.003, distill=0.7)
    origin = Origin(teacher=tmp_path / "teacher")
    losses, moved = train(config, batches, origin)
    plain, expected_move = train(replace(config, compile="no"), batches, origin)
    alone, _ = train(replace(config, compile="no"), batches)
    assert (plain[:, 0] - alone[:, 0]).abs().max() > 0.1  # the teacher matters
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
