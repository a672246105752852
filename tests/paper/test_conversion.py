"""The conversion experiment, stopped and resumed, on the built-in grammar and a tiny family."""

import dataclasses
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from writehead import load_run, save_run
from writehead.bench import decode
from writehead.cost import Setting
from writehead.interop.pretrained import RunFacts
from writehead.paper import speed
from writehead.paper.conversion import ROWS, SPEED, VARIANTS
from writehead.training.step import Stepper

FOLDER = "results/conversion/tiny"
TRAINED = "g1-aligned-10-teacher"
ONLY = ("--only=multi-head", "--only=g2-mean", "--only=g1-al*-10-teacher", "--steps=20")


@pytest.fixture
def run(writehead, tmp_path):
    def command(*options: str) -> tuple[int, str]:
        places = (f"--results={tmp_path / 'results'}", f"--runs={tmp_path / 'runs'}")
        given = ("reproduce", "conversion", "--scale=tiny", *places, "--device=cpu", *options)
        return writehead(*given)[::2]

    return command


def result(folder: Path, row: str) -> dict:
    return json.loads((folder / FOLDER / f"{row}.json").read_text(encoding="utf-8"))


def test_every_combination_is_a_row():
    assert len(VARIANTS) == 3 * 4 * (1 + 4 * 2)
    assert len(set(ROWS)) == len(ROWS) == len(VARIANTS) + 2
    assert VARIANTS[TRAINED].percent == 10


def test_rows_are_converted_trained_scored_and_resumed(run, tmp_path, monkeypatch):
    update = Stepper.update

    def stop(self, batch, step):
        if self.teacher is not None and step == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(self, batch, step)

    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "update", stop)
        assert run(*ONLY)[0] == 128 + signal.SIGTERM
    code, err = run(*ONLY)
    assert (code, "3 of 3 results exist" in err, "resuming after step 1" in err) == (0, True, True)
    head, plain, trained = (
        result(tmp_path, f"{row}-seed0") for row in ("multi-head", "g2-mean", TRAINED)
    )
    assert [one["steps"] for one in (head, plain, trained)] == [0, 0, 2]
    assert [one["model"]["g"] for one in (head, plain, trained)] == [8, 2, 1]
    assert [one["model"]["encoder_g"] for one in (head, trained)] == [None, 8]
    assert head["base"] == plain["base"] == trained["base"]
    assert trained["train"]["seed"] == 0
    for one in (head, plain, trained):
        assert list(one["scores"]["test"]["bleu"]) == ["greedy", "beam-4"]
    assert plain["scores"]["dev"]["ln_ppl"] != head["scores"]["dev"]["ln_ppl"]
    assert not list((tmp_path / "runs/conversion").glob("*/g1*"))  # runs are deleted
    code, err = run(*ONLY, "--seeds=2", "--set=train.learning_rate=0.003")
    assert (code, "4 of 4 results exist" in err) == (0, True)
    assert result(tmp_path, f"{TRAINED}-seed1")["train"]["learning_rate"] == 0.003
    shutil.rmtree(tmp_path / "runs")
    code, err = run(*ONLY[:-1], "--only=g4-mean", "--steps=3")
    assert (code, "was converted from a multi-head model that is not at" in err) == (2, True)


def test_rows_are_made_on_another_machine_with_a_copy_of_the_model(run, tmp_path):
    base = tmp_path / "runs/table1/tiny/multi-head-seed0"
    options = ("--only=g4-mean", "--only=g1-first-5", "--steps=20")
    assert run("--only=multi-head", options[-1])[0] == 0
    # the copy has no checkpoints, and may have rounded weights
    copy, model = tmp_path / "copy", load_run(base, dtype=torch.float16).model
    save_run(copy, model, tokenizer=base)
    shutil.copy(base / "train.json", copy)
    shutil.rmtree(tmp_path / "runs")
    code, err = run(*options)
    assert (code, "copy the model there" in err, "encoding" in err) == (2, True, False)
    shutil.copytree(copy, base)
    code, err = run(*options)
    assert (code, "was converted from another multi-head model" in err) == (2, True)
    (tmp_path / FOLDER / "multi-head-seed0.json").unlink()
    code, err = run(*options)
    assert (code, "2 of 2 results exist" in err) == (0, True)
    fingerprint = result(tmp_path, "g4-mean-seed0")["base"]
    assert fingerprint == result(tmp_path, "g1-first-5-seed0")["base"]
    assert fingerprint == RunFacts.read(copy).fingerprint
    # finished rows need neither the runs nor the text
    shutil.rmtree(tmp_path / "runs")
    assert run(*options)[0] == 0
    assert not list((tmp_path / "runs").rglob("*.safetensors"))
    plan = json.loads((copy / "train.json").read_text(encoding="utf-8"))
    plans = {"another dataset": plan | {"dataset": "ab"}}
    plans["train.steps is 7"] = plan | {"train": plan["train"] | {"steps": 7}}
    for words, changed in plans.items():
        shutil.copytree(copy, base, dirs_exist_ok=True)
        (base / "train.json").write_text(json.dumps(changed), encoding="utf-8")
        code, err = run("--only=g2-mean", options[-1])
        assert (code, words in err) == (2, True)


def test_the_time_of_each_model_is_measured_and_predicted(run, tmp_path, quick_chip, monkeypatch):
    sizes = {"setting": Setting(3, 4, 3), "repeats": 1, "steps": 1}
    quick = dataclasses.replace(speed.WORKLOADS["tiny"], **sizes)
    monkeypatch.setitem(speed.WORKLOADS, "tiny", quick)
    code, err = run(f"--only={SPEED}")
    assert (code, "1 of 1 results exist" in err) == (0, True)
    found = result(tmp_path, SPEED)
    models = [(row["preset"], row["setting"]["beam"]) for row in found["decode"]]
    names = ("multi-head", "g4", "g2", "g1", "multi-query")
    assert models == [(name, beam) for name in names for beam in (1, 4)]
    for row in found["decode"]:
        assert row["measured"][decode.OURS["true"]]["step_ms"]["median"] > 0
        assert row["floor"]["step_ms"]["true"] > 0
    assert found["decode"][6]["model"]["encoder_g"] == 8


def test_unknown_rows_are_refused(run):
    code, err = run("--only=g1-alined")
    assert (code, "did you mean 'g1-aligned'?" in err) == (2, True)
