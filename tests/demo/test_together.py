"""Models trained at the same time: as if alone, stopped and gone on with, and what goes wrong."""

import io
import multiprocessing
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from trainings import CONFIG, MODEL, assert_same_training, go, pair_dataset, steps
from writehead.demo.board import Board
from writehead.demo.together import Training, train_together
from writehead.errors import TrainingError
from writehead.training.journal import read_log

MODELS = {"multi-head": replace(MODEL, g=2), "multi-query": MODEL}
ENDLESS = replace(CONFIG, steps=10**6, log_every=1, checkpoint_every=10**6, evaluate_every=10**6)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    return pair_dataset(tmp_path_factory.mktemp("pairs"))


def trainings(dataset, folder, config=CONFIG):
    return {
        name: Training(dataset, folder / name, model, config, "cpu")
        for name, model in MODELS.items()
    }


def together(asked) -> bool:
    return train_together(asked, 1, Console(file=io.StringIO()))


@pytest.fixture
def when_all_train(monkeypatch):
    """Does something once, as soon as every run of a folder has a log entry."""

    def arrange(folder, act):
        look, left = Board.look, [act]

        def struck(self, *, last=False):
            look(self, last=last)
            if left and all(read_log(folder / name) for name in MODELS):
                left.pop()()

        monkeypatch.setattr(Board, "look", struck)

    return arrange


@pytest.fixture
def quick_processes(monkeypatch):
    """Processes that are forked from one that has imported PyTorch, and not each its own start."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["writehead.demo.together", "torch._dynamo"])
    monkeypatch.setattr(multiprocessing, "get_context", lambda method=None: context)


@pytest.mark.usefixtures("quick_processes")
def test_models_trained_at_once_are_those_trained_alone(dataset, tmp_path):
    said = io.StringIO()
    assert train_together(trainings(dataset, tmp_path / "once"), 1, Console(file=said))
    assert "multi-head: step 11/11 loss=" in said.getvalue()
    for name, model in MODELS.items():
        go(dataset, tmp_path / "alone" / name, model=model)
        assert_same_training(tmp_path / "once" / name, tmp_path / "alone" / name)
        assert "is ready: trained, 11 steps" in (tmp_path / "once" / f"{name}.log").read_text()


@pytest.mark.usefixtures("quick_processes")
def test_told_to_stop_all_save_and_go_on(dataset, tmp_path, when_all_train):
    when_all_train(tmp_path, lambda: signal.raise_signal(signal.SIGINT))
    assert not together(trainings(dataset, tmp_path, ENDLESS))
    assert not multiprocessing.active_children()
    saved = {name: steps(tmp_path / name) for name in MODELS}
    assert all(len(found) == 1 for found in saved.values())
    last = max(found[0] for found in saved.values()) + 1
    assert together(trainings(dataset, tmp_path, replace(ENDLESS, steps=last)))
    for name, found in saved.items():
        assert f"going on after step {found[0]}" in (tmp_path / f"{name}.log").read_text()
        assert steps(tmp_path / name) == [last]


@pytest.mark.usefixtures("quick_processes")
def test_where_one_fails_its_sentence_comes_out_and_the_others_end(dataset, tmp_path):
    asked = trainings(dataset, tmp_path, ENDLESS)
    bad = replace(asked["multi-query"], dataset=tmp_path / "none")
    with pytest.raises(TrainingError, match=r"^multi-query: there is no dataset at .*none; make"):
        together(asked | {"multi-query": bad})
    assert not multiprocessing.active_children()


@pytest.mark.usefixtures("quick_processes")
def test_a_process_that_is_killed_is_said_to_be(dataset, tmp_path, when_all_train):
    when_all_train(tmp_path, lambda: multiprocessing.active_children()[0].kill())
    with pytest.raises(
        TrainingError, match=r"^multi-\w+: its process was killed, perhaps for want"
    ):
        together(trainings(dataset, tmp_path, ENDLESS))
    assert not multiprocessing.active_children()
    assert sum(len(steps(tmp_path / name)) for name in MODELS) == 1  # the other one's


def test_killed_with_no_warning_it_leaves_no_process_and_all_save(
    dataset, tmp_path, when_all_train
):
    told, tell = os.pipe()
    driver = os.fork()
    if driver == 0:
        try:
            os.dup2(tell, 1)  # which every process that it starts inherits
            os.close(tell)
            when_all_train(tmp_path, lambda: os.write(1, b"they train"))
            together(trainings(dataset, tmp_path, ENDLESS))
        finally:
            os._exit(1)
    os.close(tell)
    with open(told, "rb") as said:
        assert said.read(10) == b"they train"
        os.kill(driver, signal.SIGKILL)
        os.waitpid(driver, 0)
        said.read()  # ends when every process that could write to it has
    assert all(len(steps(tmp_path / name)) == 1 for name in MODELS)


def test_new_processes_leave_ctrl_c_to_the_one_that_starts_them(dataset, tmp_path):
    # in a process of its own, since Python's helper of new ones begins with the first of them
    script = f"""
import io, signal
from pathlib import Path
from rich.console import Console
from trainings import CONFIG, MODEL
from writehead.demo import together

class Noted(together._Helper):
    def __init__(self, *given):
        super().__init__(*given)
        status = Path(f"/proc/{{self._process.pid}}/status").read_text()
        mask = int(status.partition("SigBlk:")[2].split()[0], 16)
        print(bool(mask & 1 << signal.SIGINT - 1), flush=True)
        signal.raise_signal(signal.SIGTERM)

together._Helper = Noted
data, run = Path({str(dataset)!r}), Path({str(tmp_path / "run")!r})
one = together.Training(data, run, MODEL, CONFIG, "cpu")
if __name__ == "__main__":
    together.train_together({{"one": one, "other": one}}, 1, Console(file=io.StringIO()))
"""
    (tmp_path / "script.py").write_text(script)
    folders = os.pathsep.join(sys.path)
    found = subprocess.run(
        [sys.executable, tmp_path / "script.py"],
        env={**os.environ, "PYTHONPATH": folders},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.stdout.split() == ["True", "True"], found.stderr
