"""A stopped or killed run ends with the same bits as an uninterrupted one."""

import json
import signal
from dataclasses import replace

import pytest

import trainings
from processes import environment, run_python
from trainings import CONFIG, LANGUAGE, MODEL, STEPS, assert_alike, assert_same_training, go, steps
from writehead.errors import TrainingError
from writehead.training.step import Stepper


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_resumes_exactly(dataset, text, tmp_path, signal_at, number):
    kinds = {signal.SIGINT: (dataset, MODEL, "adafactor")}
    data, model, optimizer = kinds.get(number, (text, LANGUAGE, "adamw"))
    config = replace(CONFIG, optimizer=optimizer, average=2)
    go(data, tmp_path / "whole", config, model)
    place = (trainings.last_checkpoint(tmp_path / "whole") / "training.json").read_text()
    assert (json.loads(place)["data"]["epoch"] > 0, model.dropout > 0) == (True, True)
    signal_at(number, 1, 4, 9, STEPS - 1)
    for stopped, kept in ((2, [2]), (5, [4, 5]), (10, [4, 8, 10])):
        outcome = go(data, tmp_path / "run", config, model)
        assert (outcome.step, outcome.stopped_by) == (stopped, number)
        assert steps(tmp_path / "run") == kept
    outcome = go(data, tmp_path / "run", config, model)
    assert (outcome.step, outcome.stopped_by) == (STEPS, number)
    assert_same_training(tmp_path / "run", tmp_path / "whole")


def test_a_run_that_failed_before_its_first_checkpoint_starts_again(dataset, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(TrainingError, match="became NaN"):
        update = Stepper.update
        patch.setattr(Stepper, "update", lambda *given: update(*given) * float("nan"))
        go(dataset, tmp_path / "run")
    calmer = replace(CONFIG, rows=2, learning_rate=0.001)  # any setting may change
    for run in ("run", "whole"):
        assert go(dataset, tmp_path / run, calmer).step == STEPS
    assert_same_training(tmp_path / "run", tmp_path / "whole")


def test_the_command_exits_with_the_signal(dataset, tmp_path, signal_at, writehead):
    go(dataset, tmp_path / "whole", model=replace(MODEL, dropout=0.0))
    signal_at(signal.SIGTERM, 4, 7)
    for accumulate, code in ((1, 143), (2, 143), (4, 0)):
        settings = ("--set=model.dropout=0", f"--set=train.accumulate={accumulate}")
        found, _, err = writehead(*trainings.command(dataset, tmp_path / "run", *settings))
        assert (found, "stopped after step" in err) == (code, code == 143)
    assert_alike(tmp_path / "run", tmp_path / "whole")


# forks a child per attempt, so that everything is imported once
DRIVER = """
import random, sys
from pathlib import Path
from torch.utils.tensorboard import SummaryWriter
from processes import killed_at
from trainings import go
from writehead.training import loop
from writehead.training.step import Stepper

loop.matrix_rate = lambda device, dtype: 1e9
dataset, run, whole = map(Path, sys.argv[1:])
generator, update = random.Random(2), Stepper.update

def announced(self, batch, step):
    sys.audit("step", str(run))
    return update(self, batch, step)

Stepper.update = announced
assert killed_at(10**9, whole, lambda: go(dataset, whole)) == 0  # is not killed
for attempt in range(1000):
    code = killed_at(generator.randint(0, 60 + 60 * attempt), run, lambda: go(dataset, run))
    if code >= 0:
        print(attempt, code)
        break
"""


def test_a_run_killed_again_and_again_ends_where_it_would_have(dataset, tmp_path):
    # a process that has loaded other libraries may round in another way
    runs = (tmp_path / "run", tmp_path / "whole")
    code, out, err = run_python(DRIVER, dataset, *runs, env=environment(OMP_NUM_THREADS="1"))
    killed, status = map(int, out.split()[-2:])
    assert (code, status, killed >= 3) == (0, 0, True), err
    assert_same_training(*runs)
    assert not list((tmp_path / "run").rglob(".*"))


def test_a_second_training_of_a_run_is_refused(dataset, tmp_path, monkeypatch, refused, capsys):
    update, said = Stepper.update, []

    def meanwhile(self, batch, step):
        if step == 5:
            capsys.readouterr()  # of the first training
            said.append(refused(*trainings.command(dataset, tmp_path)))
        return update(self, batch, step)

    monkeypatch.setattr(Stepper, "update", meanwhile)
    assert go(dataset, tmp_path).step == CONFIG.steps
    assert "another process is training" in said[0]
