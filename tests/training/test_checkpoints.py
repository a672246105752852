"""The log, and checkpoints: which are kept, their average, and safety from crashes and damage."""

import random
import shutil
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file
from torch.testing import assert_close

import trainings
from corpora import pair_inputs, pairs
from texts import full_disk
from trainings import CONFIG, LANGUAGE, MODEL, dev_curve, go, last_checkpoint, steps, weights
from writehead.config import PrepareConfig
from writehead.data.dataset import Dataset
from writehead.data.prepare import prepare
from writehead.engine import Engine
from writehead.errors import ConfigError, RunError, TrainingError
from writehead.runs.folder import load_run
from writehead.training import loop
from writehead.training.checkpoint import average_run
from writehead.training.evaluate import Likelihood
from writehead.training.journal import read_log
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


def test_a_run_that_is_continued_does_not_keep_its_old_model(dataset, tmp_path, monkeypatch):
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
        code, _, err = writehead(*trainings.command(dataset, run))
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


def test_every_interval_is_logged_and_shown_on_tensorboard(dataset, tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    go(dataset, tmp_path / "run")
    entries = read_log(tmp_path / "run")
    assert [e["step"] for e in entries if "loss" in e] == [3, 6, 9, 11]
    assert [e["step"] for e in entries if "dev_ln_ppl" in e] == [5, 10, 11]
    board = events.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    for name in ("loss", "ln_ppl", "gradient_norm", "dev_ln_ppl", "utilisation"):
        shown = {event.step: event.value for event in board.Scalars(name)}
        assert shown == pytest.approx({e["step"]: e[name] for e in entries if name in e}), name
    # an entry is the mean over the steps since the one before
    go(dataset, tmp_path / "each", replace(CONFIG, log_every=1))
    norms = {e["step"]: e["gradient_norm"] for e in read_log(tmp_path / "each") if "loss" in e}
    for first, last in ((1, 3), (4, 6), (7, 9), (10, 11)):
        mean = sum(norms[step] for step in range(first, last + 1)) / (last + 1 - first)
        [found] = [e["gradient_norm"] for e in entries if e["step"] == last and "loss" in e]
        assert found == pytest.approx(mean)


def test_a_dev_split_without_usable_lines_is_ignored(tmp_path):
    rows = pairs(90, longest=4)
    [held] = random.Random("0/dev").sample(range(90), 1)  # the line that `prepare` holds out
    rows[held] = ("", "")
    config = PrepareConfig(task="translation", vocab_size=330, dev=1)
    prepare(tmp_path / "data", pair_inputs(tmp_path, rows), config, threads=1)
    go(tmp_path / "data", tmp_path / "run")
    assert not any("dev_ln_ppl" in entry for entry in read_log(tmp_path / "run"))


def test_pairs_too_long_for_a_row_are_announced_and_text_is_cut(dataset, text, tmp_path, capsys):
    split = Dataset.open(dataset).split("train")
    lengths = zip(split.source.lengths + 1, split.target.lengths + 1, strict=True)
    skipped = sum(source > 20 or target > 17 for source, target in lengths)
    assert 0 < skipped < len(split)
    narrow = replace(CONFIG, steps=1, source_length=20, target_length=17)
    for data, model, announced in ((dataset, MODEL, True), (text, LANGUAGE, False)):
        go(data, tmp_path / model.task, narrow, model)
        assert (f"skipping {skipped} pairs" in capsys.readouterr().err) == announced


def test_only_a_last_entry_that_was_cut_short_is_dropped(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert [entry["step"] for entry in read_log(tmp_path)] == [1, 2]
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(RunError, match=r"log\.jsonl"):
        read_log(tmp_path)
