"""A run that was stopped or killed goes on as if it had not been, to the bit."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trainings import (
    CONFIG,
    LANGUAGE,
    MODEL,
    SETTINGS,
    STEPS,
    assert_same_training,
    curve,
    go,
    last_checkpoint,
    steps,
    weights,
)
from writehead.errors import TrainingError
from writehead.training.step import Stepper


@pytest.mark.parametrize("optimizer", ["adafactor", "adamw"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_was_told_to_stop_goes_on_to_the_bit(
    dataset, tmp_path, signal_at, optimizer, number
):
    config = replace(CONFIG, optimizer=optimizer, average=2)
    go(dataset, tmp_path / "whole", config)
    signal_at(number, 1, 2, 6, 9)
    for stopped in (2, 3, 7, 10):
        outcome = go(dataset, tmp_path / "run", config)
        assert (outcome.step, outcome.stopped_by) == (stopped, number)
    assert go(dataset, tmp_path / "run", config).step == STEPS
    assert_same_training(tmp_path / "run", tmp_path / "whole")


def test_a_run_whose_loss_is_no_number_before_its_first_checkpoint_begins_anew(
    dataset, tmp_path, monkeypatch
):
    update = Stepper.update
    monkeypatch.setattr(Stepper, "update", lambda *given: update(*given) * float("nan"))
    with pytest.raises(TrainingError) as caught:
        go(dataset, tmp_path / "run")
    assert str(caught.value) == (
        "the loss became nan by step 3; there is no checkpoint yet, so the run begins anew. Lower "
        "train.learning_rate or raise train.warmup, and run the command again"
    )
    monkeypatch.setattr(Stepper, "update", update)
    calmer = replace(CONFIG, learning_rate=0.001, warmup=5)
    for run in ("run", "whole"):
        assert go(dataset, tmp_path / run, calmer).step == STEPS
    assert_same_training(tmp_path / "run", tmp_path / "whole")


def test_a_language_model_goes_on_to_the_bit(text, tmp_path, signal_at):
    go(text, tmp_path / "whole", model=LANGUAGE)
    signal_at(signal.SIGTERM, 5)
    assert go(text, tmp_path / "run", model=LANGUAGE).stopped_by == signal.SIGTERM
    go(text, tmp_path / "run", model=LANGUAGE)
    assert_same_training(tmp_path / "run", tmp_path / "whole")


def test_the_trainings_here_have_dropout_and_cross_an_epochs_end(dataset, tmp_path):
    go(dataset, tmp_path / "run")
    progress = json.loads((last_checkpoint(tmp_path / "run") / "training.json").read_text())
    assert progress["data"]["epoch"] >= 1
    assert json.loads((tmp_path / "run" / "config.json").read_text())["model"]["dropout"] > 0


def test_a_stop_leaves_a_checkpoint_only_until_the_next_one(dataset, tmp_path, signal_at):
    signal_at(signal.SIGTERM, 4)
    go(dataset, tmp_path)
    assert steps(tmp_path) == [4, 5]
    go(dataset, tmp_path)
    assert steps(tmp_path) == [4, 8, 11]


def test_a_stop_in_the_last_step_is_an_end(dataset, tmp_path, signal_at):
    signal_at(signal.SIGTERM, STEPS - 1)
    outcome = go(dataset, tmp_path)
    assert (outcome.step, outcome.stopped_by) == (STEPS, None)
    assert (tmp_path / "config.json").is_file()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_command_says_how_to_go_on_and_exits_with_the_signal(
    dataset, tmp_path, signal_at, writehead, number, code
):
    command = ("train", dataset, "--preset=tiny/multi-query", "--run", tmp_path / "r", *SETTINGS)
    signal_at(number, 4)
    got, _, err = writehead(*command)
    assert got == code
    assert "stopped after step 5 of 11, which is saved; run the same command again" in err
    got, _, err = writehead(*command)
    assert got == 0
    assert "going on after step 5\n" in err
    go(dataset, tmp_path / "whole")
    assert_same_training(tmp_path / "r", tmp_path / "whole")


def test_parts_of_a_batch_may_change_on_the_way(dataset, tmp_path, signal_at):
    model = replace(MODEL, dropout=0.0)
    go(dataset, tmp_path / "whole", model=model)
    signal_at(signal.SIGTERM, 4, 7)
    for accumulate in (1, 2, 4):
        go(dataset, tmp_path / "run", replace(CONFIG, accumulate=accumulate), model)
    for ours, theirs in zip(curve(tmp_path / "run"), curve(tmp_path / "whole"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    for name, T in weights(tmp_path / "whole").items():
        torch.testing.assert_close(weights(tmp_path / "run")[name], T, rtol=1e-3, atol=1e-4)


# forks a child for each attempt, so that everything is imported once
DRIVER = """
import os, random, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
import writehead.training.loop as loop
from torch.utils.tensorboard import SummaryWriter
from trainings import go
from writehead.training.step import Stepper

loop.matrix_rate = lambda device, dtype: 1e9
dataset, run = map(Path, sys.argv[1:3])
generator = random.Random(int(sys.argv[3]))
events = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree", "step")
update = Stepper.update

def told(self, batch, step):
    sys.audit("step", str(run))
    return update(self, batch, step)

Stepper.update = told
for attempt in range(1000):
    child = os.fork()
    if child == 0:
        left = generator.randint(0, 40 + 12 * attempt)
        def hook(event, arguments):
            global left
            if event in events and str(run) in str(arguments):
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
        go(dataset, run)
        os._exit(0)
    generator.random()
    status = os.waitpid(child, 0)[1]
    if os.WIFEXITED(status):
        print("killed", attempt, "status", os.WEXITSTATUS(status))
        break
"""


@pytest.mark.parametrize("seed", [2])
def test_killed_again_and_again_at_any_moment_it_ends_where_it_would_have(dataset, tmp_path, seed):
    go(dataset, tmp_path / "whole")
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), *sys.path]))
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(dataset), str(tmp_path / "run"), str(seed)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    killed, status = int(done.stdout.split()[1]), int(done.stdout.split()[3])
    assert status == 0, done.stderr
    assert killed >= 3
    assert_same_training(tmp_path / "run", tmp_path / "whole")
    assert not list((tmp_path / "run").rglob(".*"))


def test_a_second_training_into_the_same_folder_is_refused_in_a_sentence(
    dataset, tmp_path, monkeypatch, writehead
):
    update, said = Stepper.update, []

    def meanwhile(self, batch, step):
        if step == 5:
            command = ("train", dataset, "--preset=tiny/multi-query", "--run", tmp_path / "run")
            said.append(writehead(*command, *SETTINGS, "--device=cpu"))
        return update(self, batch, step)

    monkeypatch.setattr(Stepper, "update", meanwhile)
    assert go(dataset, tmp_path / "run").step == CONFIG.steps
    [(code, out, err)] = said
    assert (code, out) == (2, "")
    sentence = f"error: another process is training into {tmp_path / 'run'}; wait for it or end it"
    assert err.splitlines()[-1].startswith(sentence)
    assert "Traceback" not in err
    assert not list((tmp_path / "run").glob(".*"))
    monkeypatch.setattr(Stepper, "update", update)
    go(dataset, tmp_path / "whole")
    assert_same_training(tmp_path / "run", tmp_path / "whole")
