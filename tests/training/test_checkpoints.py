"""Checkpoints: loadable, kept as asked, averaged, and safe from crashes, damage and full disks."""

import errno
import hashlib
import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch.testing import assert_close

from trainings import CONFIG, MODEL, SETTINGS, curve, go, last_checkpoint, steps, weights
from writehead.config import TrainConfig
from writehead.decoding import Engine
from writehead.errors import ConfigError, RunError, TrainingError
from writehead.model.runs import load_run
from writehead.training import checkpoint
from writehead.training.checkpoint import average_run
from writehead.training.loop import Trainer
from writehead.training.step import Stepper

EVERY = replace(CONFIG, steps=7, checkpoint_every=1, keep=3)


@pytest.fixture(scope="module")
def trained(dataset, tmp_path_factory):
    """A run of seven checkpoints, of which the last three are averaged."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("writehead.training.loop.matrix_rate", lambda device, dtype: 1e9)
        run = tmp_path_factory.mktemp("runs") / "trained"
        go(dataset, run, replace(EVERY, average=3, keep=7))
        return run


def test_every_checkpoint_and_the_finished_run_are_runs(trained):
    for folder in (trained, *(trained / "checkpoints").iterdir()):
        assert load_run(folder).model.config.vocabulary == 330
        assert list(Engine.load(folder, "cpu").translate(["Kalo."]))
    assert (
        sorted(path.stat().st_mode & 0o777 for path in last_checkpoint(trained).iterdir())
        == [0o644] * 6
    )


def test_the_finished_run_is_the_mean_of_the_last_checkpoints(trained):
    found = [weights(trained / "checkpoints" / f"step-0000000{i}") for i in (5, 6, 7)]
    for name, T in weights(trained).items():
        assert_close(T, (found[0][name] + found[1][name] + found[2][name]) / 3)
        assert T.dtype == torch.float32


def test_average_makes_a_run_of_the_mean_of_the_last_checkpoints(trained, tmp_path, writehead):
    code, _, err = writehead("average", trained, tmp_path / "mean", "--last", "2")
    assert (code, "the mean of step-00000006, step-00000007" in err) == (0, True)
    found = [weights(trained / "checkpoints" / f"step-0000000{i}") for i in (6, 7)]
    for name, T in weights(tmp_path / "mean").items():
        assert_close(T, torch.stack([one[name] for one in found]).mean(0))
    assert load_run(tmp_path / "mean").tokenizer is not None
    for arguments, words in (
        ((tmp_path / "mean",), "exists; choose another place"),
        ((tmp_path / "new", "--last", "8"), "has 7 checkpoints and 8 are to be averaged"),
        ((tmp_path / "new", "--last", "0"), "ask for 1 or more"),
    ):
        code, _, err = writehead("average", trained, *arguments)
        assert (code, words in err.replace("\n", " ")) == (2, True), err
    with pytest.raises(RunError, match=r"there is no run at .*nowhere; check the path"):
        average_run(tmp_path / "nowhere", tmp_path / "new", 1)
    with pytest.raises(RunError, match="has no checkpoints; give the folder that `writehead train"):
        average_run(tmp_path / "mean", tmp_path / "new", 1)


def test_an_average_that_is_there_is_replaced_if_forced_only(trained, tmp_path, writehead):
    place = tmp_path / "mean"
    writehead("average", trained, place, "--last=2")
    before = (place / "model.safetensors").read_bytes()
    code, _, err = writehead("average", trained, place, "--last=3")
    assert (code, err.count("\n")) == (2, 1)
    assert f"{place} exists; choose another place, or pass --force to replace it" in err
    with pytest.raises(RunError, match="exists; choose another place, or pass overwrite=True"):
        average_run(trained, place, 3)
    assert (place / "model.safetensors").read_bytes() == before
    (tmp_path / "folder").mkdir()
    _, _, err = writehead("average", trained, tmp_path / "folder")
    assert err.endswith(f"{tmp_path / 'folder'} exists; choose another place\n")  # none to force
    (tmp_path / "folder").rmdir()
    assert writehead("average", trained, place, "--last=3", "--force")[0] == 0
    assert (place / "model.safetensors").read_bytes() != before
    for name, T in weights(place).items():
        assert torch.equal(T, weights(trained)[name])
    assert [path.name for path in tmp_path.iterdir()] == ["mean"]


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("run", "run holds more than a run (checkpoints, log.jsonl, tensorboard)"),
        ("run/checkpoints/step-00000007", "holds more than a run (optimizer.safetensors"),
        ("folder", "folder is not a run, so it is not overwritten"),
        ("folder/notes", "notes is not a run, so it is not overwritten"),
        ("mean", "mean holds more than a run (notes)"),
    ],
)
def test_force_averages_into_no_place_that_holds_more_than_a_run(
    trained, tmp_path, writehead, place, words
):
    shutil.copytree(trained, tmp_path / "run")
    average_run(trained, tmp_path / "mean", 2)
    (tmp_path / "folder").mkdir()
    for folder in ("folder", "mean"):
        (tmp_path / folder / "notes").write_text("mine")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    code, _, err = writehead("average", tmp_path / "run", tmp_path / place, "--last=2", "--force")
    assert (code, err.count("\n")) == (2, 1)
    assert words in err
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_the_last_and_the_best_are_kept(dataset, tmp_path, monkeypatch):
    scores = {2: 1.5, 4: 3.0, 6: 2.0, 7: 2.5}
    monkeypatch.setattr(
        Trainer,
        "_evaluate",
        lambda self: self.dev.update({str(self.step): scores[self.step]}) or {},
    )
    go(dataset, tmp_path, replace(EVERY, evaluate_every=2, keep=2))
    assert steps(tmp_path) == [2, 6, 7]


def test_the_best_is_the_best_of_those_that_were_saved(dataset, tmp_path, monkeypatch):
    scores = {1: 0.1, 2: 1.5, 3: 0.2, 4: 3.0, 5: 0.3, 6: 2.0, 7: 2.5}
    monkeypatch.setattr(
        Trainer,
        "_evaluate",
        lambda self: self.dev.update({str(self.step): scores[self.step]}) or {},
    )
    go(dataset, tmp_path, replace(EVERY, evaluate_every=1, checkpoint_every=2, keep=1))
    assert steps(tmp_path) == [2, 7]


def test_what_a_crash_left_behind_goes(dataset, tmp_path):
    go(dataset, tmp_path, replace(EVERY, steps=4))
    expected = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.safetensors"))
    for leftover in ("checkpoints/.step-00000005.abc", ".finished", "..finished.abc"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "model.safetensors").write_bytes(b"half")
    go(dataset, tmp_path, replace(EVERY, steps=4))
    found = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.safetensors"))
    assert found == expected


def test_the_same_command_again_finishes_what_a_crash_left_unfinished(dataset, tmp_path):
    go(dataset, tmp_path)
    expected = weights(tmp_path)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).unlink()
    assert go(dataset, tmp_path).step == CONFIG.steps
    for name, T in weights(tmp_path).items():
        assert torch.equal(T, expected[name])


@pytest.mark.parametrize("checksum", ["none", "fitting"])
def test_a_finished_model_that_is_whole_is_left_alone(dataset, tmp_path, capsys, checksum):
    go(dataset, tmp_path)
    path, beside = tmp_path / "model.safetensors", tmp_path / "checksums.sha256"
    save_file({name: 2 * T for name, T in weights(tmp_path).items()}, path)
    beside.unlink()
    if checksum == "fitting":
        beside.write_text(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n")
    content, moment = path.read_bytes(), path.stat().st_mtime_ns
    capsys.readouterr()
    assert go(dataset, tmp_path).step == CONFIG.steps
    said = f"{tmp_path} has its 11 steps already; there is nothing to do\n"
    assert capsys.readouterr().err == said
    assert (path.read_bytes(), path.stat().st_mtime_ns) == (content, moment)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.model", "byte"])
def test_a_finished_model_that_is_not_whole_is_made_again_and_that_is_said(
    dataset, tmp_path, capsys, name
):
    go(dataset, tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    if name == "byte":
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    else:
        (tmp_path / name).unlink()
    plan = (tmp_path / "train.json").read_bytes()
    capsys.readouterr()
    go(dataset, tmp_path, replace(CONFIG, average=2))  # what was not trained with is not used here
    fault = (
        "model.safetensors does not fit its checksum" if name == "byte" else f"{name} is missing"
    )
    first, second = capsys.readouterr().err.splitlines()
    assert first == (
        f"{tmp_path} has its 11 steps already; the finished model is made again from its "
        f"checkpoints, as {fault}; not used: train.average was 1 and is 2"
    )
    assert second.startswith(f"{tmp_path} is ready: trained, 11 steps")
    assert path.read_bytes() == whole
    assert load_run(tmp_path).tokenizer is not None
    assert (tmp_path / "train.json").read_bytes() == plan


def test_a_run_killed_after_more_steps_does_not_pass_off_its_old_model(
    dataset, tmp_path, monkeypatch
):
    go(dataset, tmp_path, replace(CONFIG, steps=4))

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("writehead.training.loop.average_weights", killed)
    with pytest.raises(KeyboardInterrupt):
        go(dataset, tmp_path)
    monkeypatch.setattr("writehead.training.loop.average_weights", checkpoint.average_weights)
    assert steps(tmp_path) == [4, 8, 11]
    go(dataset, tmp_path)
    last = weights(last_checkpoint(tmp_path))
    assert all(torch.equal(T, last[name]) for name, T in weights(tmp_path).items())


def test_a_finished_run_without_checkpoints_is_not_trained_over(dataset, tmp_path):
    go(dataset, tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(RunError, match="finished and has no checkpoint to go on from"):
        go(dataset, tmp_path)


def test_a_run_can_go_on_for_more_steps(dataset, tmp_path, capsys):
    go(dataset, tmp_path, replace(CONFIG, steps=4))
    before = weights(tmp_path)
    go(dataset, tmp_path, replace(CONFIG, steps=8))
    said = capsys.readouterr().err
    assert "going on after step 4; train.steps was 4 and is 8" in said
    assert steps(tmp_path) == [4, 8]
    assert any(not torch.equal(T, before[name]) for name, T in weights(tmp_path).items())


def test_a_run_in_training_says_what_to_load(dataset, tmp_path, writehead):
    go(dataset, tmp_path / "run")
    (tmp_path / "run" / "config.json").unlink()
    text = tmp_path / "text"
    text.write_text("Kalo.\n")
    code, _, err = writehead(
        "evaluate", tmp_path / "run", "--source", text, "--reference", text, "--device=cpu"
    )
    assert code == 2
    assert "has not finished training" in err
    assert "checkpoints/step-00000011" in err.replace("\n", "")


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "training.json"])
def test_a_checkpoint_cut_short_is_said_and_the_one_before_serves(
    dataset, tmp_path, writehead, name
):
    command = ("train", dataset, "--preset=tiny/multi-query", "--run", tmp_path / "run", *SETTINGS)
    go(dataset, tmp_path / "run")
    expected = curve(tmp_path / "run")
    path = last_checkpoint(tmp_path / "run") / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    code, _, err = writehead(*command)
    assert code == 2
    assert "step-00000011" in err.replace("\n", "")
    assert "damaged or cut short" in err.replace("\n", " ")
    assert "Traceback" not in err
    shutil.rmtree(path.parent)
    assert writehead(*command)[0] == 0
    assert curve(tmp_path / "run") == expected


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_a_byte_that_changed_in_a_checkpoint_is_found_and_the_one_before_serves(
    dataset, tmp_path, name
):
    go(dataset, tmp_path)
    expected = curve(tmp_path)
    path = last_checkpoint(tmp_path) / name
    spoilt = bytearray(path.read_bytes())
    spoilt[-3] ^= 1  # of a mantissa, so that the number is one as before
    path.write_bytes(spoilt)
    with pytest.raises(RunError) as found:
        go(dataset, tmp_path)
    said = str(found.value)
    assert said.startswith(f"checkpoint {path.parent} is damaged or cut short: {path} is not as it")
    assert said.endswith("; delete that folder, and training goes on from the one before")
    assert "yourself" not in said
    if name == "model.safetensors":
        with pytest.raises(RunError, match="step-00000011 is damaged or cut short"):
            average_run(tmp_path, tmp_path / "mean", 2)
    shutil.rmtree(path.parent)
    go(dataset, tmp_path)
    assert curve(tmp_path) == expected


def test_a_checkpoint_without_a_checksum_serves_as_well(dataset, tmp_path):
    go(dataset, tmp_path, replace(CONFIG, steps=4))
    for path in last_checkpoint(tmp_path).glob("*.sha256"):
        path.unlink()
    assert go(dataset, tmp_path).step == CONFIG.steps


def test_a_checkpoint_without_a_moment_or_a_place_is_damaged(dataset, tmp_path):
    go(dataset, tmp_path)
    path = last_checkpoint(tmp_path) / "training.json"
    whole = json.loads(path.read_text())
    for damaged in ([], {}, {**whole, "data": {}}, {**whole, "meter": {"nll": 1.0}}):
        path.write_text(json.dumps(damaged))
        with pytest.raises((RunError, ConfigError)):
            go(dataset, tmp_path)
    path.write_text(json.dumps(whole))
    checkpoint.save_file({}, path.with_name("optimizer.safetensors"))
    with pytest.raises(RunError, match="damaged or cut short"):
        go(dataset, tmp_path)


@pytest.mark.parametrize("at", ["save_file", "journal", "plan"])
def test_a_full_disk_is_said_in_a_sentence_and_what_was_saved_stays(
    dataset, tmp_path, monkeypatch, writehead, at
):
    command = ("train", dataset, "--preset=tiny/multi-query", "--run", tmp_path / "run", *SETTINGS)
    go(dataset, tmp_path / "run", replace(CONFIG, steps=4))
    before = weights(last_checkpoint(tmp_path / "run"))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    if at == "save_file":
        monkeypatch.setattr(checkpoint, "save_file", full)
    elif at == "journal":
        monkeypatch.setattr("writehead.training.journal.Journal.log", full)
    else:
        monkeypatch.setattr("writehead.training.plan.write_file", full)
    code, _, err = writehead(*command)
    assert code == 2
    assert "No space left on device" in err.replace("\n", " ")
    assert "Traceback" not in err
    assert steps(tmp_path / "run") == [4]
    monkeypatch.undo()
    for name, T in weights(last_checkpoint(tmp_path / "run")).items():
        assert torch.equal(T, before[name])
    assert go(dataset, tmp_path / "run").step == CONFIG.steps
    assert not list((tmp_path / "run").rglob(".*"))


@pytest.mark.parametrize("spoilt", ["loss", "gradient", "weight"])
@pytest.mark.parametrize("log_every", [1, 100])
def test_what_is_no_number_stops_training_and_the_last_good_checkpoint_stays(
    dataset, tmp_path, monkeypatch, spoilt, log_every
):
    update = Stepper.update

    def spoil(self, batch, step):
        if step == 4 and spoilt == "gradient":
            hook = self.model.tokens.weight.register_hook(lambda G: G * float("inf"))
        values = update(self, batch, step)
        if step == 4 and spoilt == "loss":
            values[0] = float("nan")
        elif step == 4 and spoilt == "weight":
            self.model.tokens.weight.data[3, 4] = float("nan")
            values = torch.zeros(3)  # as if nobody had noticed
        elif step == 4:
            hook.remove()
        return values

    monkeypatch.setattr(Stepper, "update", spoil)
    config = replace(CONFIG, log_every=log_every, checkpoint_every=3)
    if spoilt == "weight":  # the next step's loss would show it
        config = replace(config, checkpoint_every=5)
    left = "there is no checkpoint yet" if spoilt == "weight" else "checkpoint is from before"
    with pytest.raises(TrainingError, match=rf"{left}.*\. Lower train\.learning_rate"):
        go(dataset, tmp_path, config)
    assert steps(tmp_path) == ([] if spoilt == "weight" else [3])
    for _, path in checkpoint.list_checkpoints(tmp_path):
        assert all(T.isfinite().all() for T in weights(path).values())
    monkeypatch.setattr(Stepper, "update", update)
    calmer = replace(config, learning_rate=0.001)
    assert go(dataset, tmp_path, calmer).step == CONFIG.steps


def test_more_checkpoints_cannot_be_averaged_than_are_kept():
    with pytest.raises(ConfigError, match="raise keep"):
        TrainConfig(average=4, keep=3)
    assert MODEL.dropout > 0
