"""Models trained at the same time: as if alone, stopped and resumed, killed."""

import io
import json
import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from trainings import CONFIG, MODEL, assert_same_training, go, pair_dataset, steps
from writehead.demo.board import Board, Course
from writehead.demo.together import Training, train_together
from writehead.errors import TrainingError
from writehead.training.journal import read_log

MODELS = {"multi-head": replace(MODEL, g=2), "multi-query": MODEL}
ENDLESS = replace(CONFIG, steps=10**6, log_every=1, checkpoint_every=10**6, evaluate_every=10**6)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    return pair_dataset(tmp_path_factory.mktemp("pairs"))


def together(dataset, folder, config=CONFIG, shown=None, **other) -> bool:
    asked = {
        name: Training(dataset, folder / name, model, config, "cpu")
        for name, model in MODELS.items()
    }
    return train_together(asked | other, 1, Console(file=shown or io.StringIO()))


def when_all_train(monkeypatch, folder, act):
    """Does something once, as soon as every run of a folder has a log entry."""
    look, left = Board.look, [act]

    def struck(self, *, last=False):
        look(self, last=last)
        if left and all(read_log(folder / name) for name in MODELS):
            left.pop()()

    monkeypatch.setattr(Board, "look", struck)


@pytest.fixture
def quick_processes(monkeypatch):
    """Forks processes from one that has imported PyTorch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["writehead.demo.together", "torch._dynamo"])
    monkeypatch.setattr(multiprocessing, "get_context", lambda method=None: context)


def test_models_trained_at_once_are_those_trained_alone(dataset, tmp_path, quick_processes):
    shown = io.StringIO()
    assert together(dataset, tmp_path / "once", shown=shown)
    for name, model in MODELS.items():
        go(dataset, tmp_path / "alone" / name, model=model)
        assert_same_training(tmp_path / "once" / name, tmp_path / "alone" / name)
        assert "11 steps" in (tmp_path / "once" / f"{name}.log").read_text()
        assert f"{name}: step 11/11 loss=" in shown.getvalue()


def test_stopped_trainings_save_and_resume(dataset, tmp_path, monkeypatch, quick_processes):
    when_all_train(monkeypatch, tmp_path, lambda: signal.raise_signal(signal.SIGINT))
    assert not together(dataset, tmp_path, ENDLESS)
    assert not multiprocessing.active_children()
    [head], [query] = (steps(tmp_path / name) for name in MODELS)
    last = max(head, query) + 1
    assert together(dataset, tmp_path, replace(ENDLESS, steps=last))
    assert [steps(tmp_path / name) for name in MODELS] == [[last], [last]]
    for name, step in zip(MODELS, (head, query), strict=True):
        assert f"after step {step}" in (tmp_path / f"{name}.log").read_text()


def test_a_training_that_fails_or_is_killed_ends_the_others(
    dataset, tmp_path, monkeypatch, quick_processes
):
    bad = Training(tmp_path / "none", tmp_path / "bad", MODEL, ENDLESS, "cpu")
    with pytest.raises(TrainingError, match=r"^bad: there is no dataset at .*none"):
        together(dataset, tmp_path, ENDLESS, bad=bad)
    when_all_train(monkeypatch, tmp_path, lambda: multiprocessing.active_children()[0].kill())
    with pytest.raises(TrainingError, match=r"^multi-\w+: its process was killed"):
        together(dataset, tmp_path, ENDLESS)
    assert not multiprocessing.active_children()


def test_killed_without_warning_it_leaves_no_process_and_all_save(dataset, tmp_path, monkeypatch):
    def tell():
        for child in multiprocessing.active_children():  # they leave Ctrl-C to their parent
            status = Path(f"/proc/{child.pid}/status").read_text()
            assert int(status.partition("SigBlk:")[2].split()[0], 16) & 1 << signal.SIGINT - 1
        os.write(1, b"they train")

    told, teller = os.pipe()
    driver = os.fork()
    if driver == 0:
        try:
            os.dup2(teller, 1)  # which every process that it starts inherits
            os.close(teller)
            when_all_train(monkeypatch, tmp_path, tell)
            together(dataset, tmp_path, ENDLESS)
        finally:
            os._exit(1)
    os.close(teller)
    with open(told, "rb") as said:
        assert said.read(10) == b"they train"
        os.kill(driver, signal.SIGKILL)
        os.waitpid(driver, 0)
        said.read()  # ends when every process that could write to it has
    assert all(len(steps(tmp_path / name)) == 1 for name in MODELS)


def test_the_time_left_follows_from_the_steps_seen(tmp_path):
    course = Course(tmp_path, 100)
    for step, seconds in ((10, 50.0), (20, 55.0)):  # half a second per step
        with (tmp_path / "log.jsonl").open("a") as log:
            print(json.dumps({"step": step, "loss": 2.0, "tokens_per_second": 9.0}), file=log)
        course.look(seconds)
    assert course.line(55.0).endswith("left=0:00:40")
