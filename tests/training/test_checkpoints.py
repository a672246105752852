"""Checkpoints: which are kept, their average, and safety from crashes, damage and full disks."""

import shutil
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file
from torch.testing import assert_close

from texts import full_disk
from trainings import CONFIG, command, dev_curve, go, last_checkpoint, steps, weights
from writehead.engine import Engine
from writehead.errors import ConfigError, RunError, TrainingError
from writehead.model.runs import load_run
from writehead.training import loop
from writehead.training.checkpoint import average_run
from writehead.training.evaluate import Likelihood
from writehead.training.step import Stepper

EVERY_STEP = replace(CONFIG, steps=5, checkpoint_every=1, keep=5, average=3)


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def trained(dataset, tmp_path_factory):
    """A run with five checkpoints whose finished model is the mean of the last three."""
    run = tmp_path_factory.mktemp("runs") / "trained"
    go(dataset, run, EVERY_STEP)
    return run


@pytest.fixture
def run(dataset, tmp_path):
    """A finished run of 11 steps with checkpoints at 4, 8 and 11."""
    go(dataset, tmp_path / "run")
    return tmp_path / "run"


def test_checkpoints_are_runs_and_average_to_a_run(trained, tmp_path, writehead):
    mean = tmp_path / "mean"
    assert writehead("average", trained, mean, "--last=2")[0] == 0
    for folder, last in ((mean, 2), (trained, 3), (last_checkpoint(trained), 1)):
        assert list(Engine.load(folder, "cpu").translate(["Kalo."]))
        paths = [trained / "checkpoints" / f"step-0000000{i}" for i in range(6 - last, 6)]
        for name, T in weights(folder).items():
            assert_close(T, torch.stack([weights(path)[name] for path in paths]).mean(0))
            assert T.dtype == torch.float32
    assert {path.stat().st_mode & 0o777 for path in last_checkpoint(trained).iterdir()} == {0o644}
    before = contents(tmp_path)
    assert writehead("average", trained, mean, "--last=3")[0] == 2
    assert contents(tmp_path) == before
    assert writehead("average", trained, mean, "--last=3", "--force")[0] == 0
    assert (mean / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("source", "output", "last", "words"),
    [
        ("", "new", 6, "5 of the 6"),
        ("", "new", 0, "at least 1"),
        ("nowhere", "new", 1, "0 of the 1"),
        ("", "", 2, "contains more than a run"),
        ("", "checkpoints/step-00000005", 2, "contains more than a run"),
    ],
)
def test_an_impossible_average_changes_nothing(trained, source, output, last, words):
    before = contents(trained.parent)
    with pytest.raises((RunError, ConfigError), match=words):
        average_run(trained / source, trained / output, last, overwrite=True)
    assert contents(trained.parent) == before


@pytest.mark.parametrize(("every", "scores"), [(2, [1.5, 3, 2]), (1, [0.1, 1.5, 0.2, 3, 2.5])])
def test_the_last_checkpoint_and_the_best_are_kept(dataset, tmp_path, monkeypatch, every, scores):
    scores = iter(scores)
    monkeypatch.setattr(loop, "likelihood", lambda *_: Likelihood(next(scores), 1))
    intervals = {"evaluate_every": every, "checkpoint_every": 2}
    go(dataset, tmp_path, replace(EVERY_STEP, **intervals, keep=1, average=1))
    assert steps(tmp_path) == [2, 5]


def test_a_run_interrupted_before_its_model_is_written_does_not_keep_the_old_one(
    dataset, tmp_path, monkeypatch
):
    go(dataset, tmp_path, replace(CONFIG, steps=4))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop, "average_weights", Mock(side_effect=KeyboardInterrupt))
        go(dataset, tmp_path)
    assert steps(tmp_path) == [4, 8, 11]
    with pytest.raises(RunError, match="checkpoints/step-00000011"):
        load_run(tmp_path)
    go(dataset, tmp_path)
    last = weights(last_checkpoint(tmp_path))
    assert all(torch.equal(T, last[name]) for name, T in weights(tmp_path).items())


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):  # a bit of a mantissa
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("model.safetensors", cut),
        ("model.safetensors", flip),
        ("optimizer.safetensors", flip),
        ("optimizer.safetensors", lambda path: save_file({}, path)),
        ("training.json", cut),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_serves(dataset, run, name, damage):
    expected = dev_curve(run)
    damage(last_checkpoint(run) / name)
    with pytest.raises(RunError, match="step-00000011 is damaged"):
        go(dataset, run)
    if name == "model.safetensors":
        with pytest.raises(RunError, match="step-00000011 is damaged"):
            average_run(run, run.with_name("mean"), 2)
    shutil.rmtree(last_checkpoint(run))
    (last_checkpoint(run) / "checksums.sha256").unlink()  # checksums are optional
    go(dataset, run)
    assert dev_curve(run) == expected


@pytest.mark.parametrize("limit", [100, 8000])  # bytes: fails at the settings, at a checkpoint
def test_a_full_disk_is_an_error_and_saved_checkpoints_stay(dataset, tmp_path, writehead, limit):
    run = tmp_path / "run"
    go(dataset, run, replace(CONFIG, steps=4))
    before = contents(last_checkpoint(run))
    with full_disk(limit):
        code, _, err = writehead(*command(dataset, run))
    assert (code, "Traceback" in err, "could not be written" in err) == (2, False, True)
    assert contents(run / "checkpoints") == before
    assert go(dataset, run).step == CONFIG.steps
    assert not list(run.rglob(".*"))


def test_an_infinite_weight_stops_training_and_is_not_saved(dataset, tmp_path, monkeypatch):
    update = Stepper.update

    def spoil(self, batch, step):
        values = update(self, batch, step)
        if step == 4:  # before any loss shows it
            self.model.tokens.weight.data[3, 4] = float("inf")
        return values

    config = replace(CONFIG, checkpoint_every=1)
    with monkeypatch.context() as patch, pytest.raises(TrainingError, match="learning_rate"):
        patch.setattr(Stepper, "update", spoil)
        go(dataset, tmp_path, config)
    assert steps(tmp_path) == [2, 3, 4]
    assert go(dataset, tmp_path, replace(config, learning_rate=0.001)).step == CONFIG.steps
