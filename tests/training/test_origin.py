"""Training from the weights of a run, and distillation from a teacher."""

import json
import signal
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from trainings import CONFIG, LANGUAGE, MODEL, assert_same_training, last_checkpoint, pair_dataset
from trainings import go as train_alone
from writehead.config import ModelConfig
from writehead.data.batches import Batch, PackedBatches
from writehead.data.dataset import Dataset
from writehead.errors import ConfigError, RunError
from writehead.interop.convert import convert
from writehead.model import make_model
from writehead.runs import load_run, save_run
from writehead.training.distributed import World
from writehead.training.loop import train
from writehead.training.loss import distillation_loss
from writehead.training.origin import Origin
from writehead.training.step import Stepper

ALONE = World(0, 1, torch.device("cpu"))
MULTI_HEAD, STUDENT = replace(MODEL, g=2), replace(MODEL, encoder_g=2)


def save(folder, config: ModelConfig, dataset, **changes):
    torch.manual_seed(5)
    made = make_model(replace(config, vocab_size=330, **changes))
    save_run(folder, made, tokenizer=dataset / "tokenizer.model")
    return folder


@pytest.fixture(scope="module")
def teacher(dataset, tmp_path_factory):
    return save(tmp_path_factory.mktemp("teacher") / "run", MULTI_HEAD, dataset)


@pytest.fixture(scope="module")
def converted(teacher):
    convert(teacher, teacher.with_name("converted"), write_heads=1)
    return teacher.with_name("converted")


@pytest.fixture
def batch(dataset) -> Batch:
    return next(PackedBatches(Dataset.open(dataset).split("train"), 4, 48, 48, seed=3))


def go(dataset, run, config=CONFIG, model=STUDENT, **origin):
    return train(dataset, run, model, config, origin=Origin(**origin), device="cpu")


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_the_loss_to_a_teacher_is_its_cross_entropy_at_a_temperature(temperature):
    logits, teacher = (3 * torch.randn(2, 3, 7, dtype=torch.float32) for _ in range(2))
    teacher[0, 1, 4] = -torch.inf  # this token is impossible for both
    logits[0, 1, 4] = -torch.inf
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]], dtype=torch.bool)
    found = distillation_loss(logits.requires_grad_(), teacher, mask, temperature)
    expected = 0.0
    for b, n in mask.nonzero().tolist():
        kept = [j for j in range(7) if teacher[b, n, j] > -torch.inf]
        p = (teacher[b, n, kept].double() / temperature).exp()
        q = (logits[b, n, kept].double() / temperature).exp()
        expected -= temperature**2 * (p / p.sum() * (q / q.sum()).log()).sum()
    assert_close(found.double(), expected)
    found.backward()
    assert logits.grad.isfinite().all()
    assert not logits.grad[~mask].any()
    difference = torch.softmax(logits / temperature, -1) - torch.softmax(teacher / temperature, -1)
    assert_close(logits.grad[mask], (difference * temperature)[mask])  # the gradient keeps its size


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_objective_mixes_the_labels_and_the_teacher(batch, teacher, converted, accumulate):
    model = replace(STUDENT, vocab_size=330, dropout=0.0)

    def objective(**changes) -> torch.Tensor:
        config = replace(CONFIG, accumulate=accumulate, **changes)
        return Stepper(model, config, ALONE, Origin(converted, teacher)).update(batch, 0)[0]

    packings = {"source_packing": batch.source_packing, "target_packing": batch.packing}
    logits, taught = (
        load_run(run).model(batch.source, batch.inputs, **packings) for run in (converted, teacher)
    )
    soft = distillation_loss(logits, taught, batch.packing.segments != 0, 2.0)
    alone = Stepper(model, CONFIG, ALONE, Origin(converted)).update(batch, 0)[0]
    assert_close(objective(distill=1.0, distill_temperature=2.0), soft.detach())
    assert_close(objective(distill=0.0), alone)
    mixed = objective(distill=0.3, distill_temperature=2.0)
    assert_close(mixed, 0.7 * alone + 0.3 * soft.detach())


def test_a_teacher_has_no_dropout_and_does_not_learn(batch, dataset, tmp_path):
    teacher = save(tmp_path / "teacher", MULTI_HEAD, dataset, dropout=0.5)
    config = replace(CONFIG, distill=1.0)
    stepper = Stepper(replace(STUDENT, vocab_size=330), config, ALONE, Origin(teacher=teacher))
    before = {name: W.clone() for name, W in stepper.teacher.state_dict().items()}
    for step in range(2):
        stepper.update(batch, step)
    assert not stepper.teacher.training
    for name, W in stepper.teacher.state_dict().items():
        assert torch.equal(W, before[name])
        assert W.grad is None


def test_training_starts_from_the_weights_of_a_run(dataset, converted, tmp_path):
    still = replace(CONFIG, steps=1, optimizer="adamw", learning_rate=1e-30)
    go(dataset, tmp_path / "run", still, init=converted)
    for (name, W), start in zip(
        load_run(tmp_path / "run").model.state_dict().items(),
        load_run(converted).model.state_dict().values(),
        strict=True,
    ):
        assert torch.equal(W, start), name


def test_uptraining_with_a_teacher_resumes_exactly(
    dataset, teacher, converted, tmp_path, signal_at
):
    origin = {"init": converted, "teacher": teacher}
    go(dataset, tmp_path / "whole", **origin)
    signal_at(signal.SIGTERM, 1, 6)
    for step in (2, 7, CONFIG.steps):
        assert go(dataset, tmp_path / "run", **origin).step == step
    assert_same_training(tmp_path / "run", tmp_path / "whole")
    train_alone(dataset, tmp_path / "alone", model=STUDENT)
    weights = [
        (last_checkpoint(tmp_path / one) / "model.safetensors").read_bytes()
        for one in ("run", "alone")
    ]
    assert weights[0] != weights[1]


def test_a_run_resumes_only_with_the_runs_it_was_started_from(
    dataset, teacher, converted, tmp_path
):
    run, longer = tmp_path / "run", replace(CONFIG, steps=3)
    go(dataset, run, replace(CONFIG, steps=2), init=converted, teacher=teacher)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    for origin, words in (
        ({"init": converted}, "teacher"),
        ({"teacher": teacher}, "initial weights"),
        ({"init": converted, "teacher": converted}, "teacher"),
        ({}, "initial weights.*teacher"),
    ):
        with pytest.raises(ConfigError, match=f"other settings: the {words} had fingerprint"):
            go(dataset, run, longer, **origin)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    go(dataset, run, longer, init=converted, teacher=teacher)
    plan = json.loads((run / "train.json").read_text())
    assert plan["init"] != plan["teacher"]
    del plan["init"], plan["teacher"]  # as an earlier version wrote it
    (run / "train.json").write_text(json.dumps(plan))
    go(dataset, run, replace(CONFIG, steps=4))


def test_runs_that_do_not_fit_are_refused(dataset, teacher, converted, tmp_path):
    other = pair_dataset(tmp_path / "other", count=100)
    language = save(tmp_path / "language", LANGUAGE, dataset)
    moved = save(tmp_path / "moved", MODEL, dataset, bos=2)
    bare = tmp_path / "bare"
    save_run(bare, make_model(replace(MODEL, vocab_size=331)))
    for data, origin, error, words in (
        (dataset, {"init": teacher}, ConfigError, "model.g is 1, but .* has 2"),
        (dataset, {"init": bare}, ConfigError, "model.vocab_size is 330, but .* has 331"),
        (dataset, {"teacher": bare}, ConfigError, "has vocab_size=331"),
        (dataset, {"teacher": language}, ConfigError, "has task='language'"),
        (dataset, {"teacher": moved}, ConfigError, "has bos=2"),
        (other, {"init": converted}, ConfigError, "another tokenizer.*prepare the text"),
        (other, {"teacher": teacher}, ConfigError, "another tokenizer.*prepare the text"),
        (dataset, {"teacher": tmp_path / "none"}, RunError, "there is no run"),
    ):
        with pytest.raises(error, match=words):
            go(data, tmp_path / "new", **origin)
    assert not (tmp_path / "new").exists()


def test_the_command_takes_the_model_from_the_initial_run(
    dataset, teacher, converted, tmp_path, writehead, refused
):
    settings = [f"--set=train.{name}={value}" for name, value in CONFIG.to_json().items()]
    origin = ("--init", converted, "--teacher", teacher)
    options = (*settings, "--set=train.steps=2", "--device=cpu")
    code, _, err = writehead(
        "train", dataset, *origin, "--run", tmp_path / "run", *options, "--set=model.dropout=0"
    )
    assert code == 0, err
    found = load_run(tmp_path / "run").model.config
    assert found == replace(load_run(converted).model.config, dropout=0.0)
    assert "both --init and --run" in refused("train", dataset, *origin, *options)
    assert "both --init and --run" in refused("train", dataset, "--run", tmp_path / "new")
