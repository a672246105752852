"""Which settings and datasets a run resumes with."""

import json
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from trainings import CONFIG, LANGUAGE, MODEL, command, go, last_checkpoint, pair_dataset
from writehead.config import TrainConfig
from writehead.errors import ConfigError, RunError

SHORT = replace(CONFIG, steps=2)


@pytest.fixture
def run(dataset, tmp_path):
    go(dataset, tmp_path / "run", SHORT)
    return tmp_path / "run"


def test_other_settings_are_refused_by_name(dataset, run, writehead):
    options = ("--set=model.f=21", "--set=train.seed=1")
    code, _, err = writehead(*command(dataset, run, *options, preset="tiny/multi-head-2x8"))
    assert code == 2
    for words in ("model.f was 20 and is 21", "train.seed was 0", "model.g was 1 and is 2"):
        assert words in err.replace("\n", " ")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 331}, "model.vocab_size was 330 and is 331"),
        ({"count": 100}, "another vocabulary"),
        ({"seed": 1}, "fingerprint"),  # the same tokenizer, but other lines are held out
        ({}, None),
    ],
)
def test_only_the_same_dataset_is_accepted_wherever_it_is(run, tmp_path, changes, words):
    other, longer = pair_dataset(tmp_path / "other", **changes), replace(CONFIG, steps=3)
    if words is not None:
        before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
        with pytest.raises(ConfigError, match=words):
            go(other, run, longer)
        assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
        plan = json.loads((run / "train.json").read_text())
        plan["dataset"] = None  # as in runs of older versions, which accept any of the same tokens
        (run / "train.json").write_text(json.dumps(plan))
    if words in (None, "fingerprint"):
        assert go(other, run, longer).step == 3
        plan = json.loads((run / "train.json").read_text())
        assert (plan["dataset"] is None) == (words is not None)


def test_settings_that_do_not_change_a_step_may_change(dataset, run, writehead):
    free = {"steps": 3, "log_every": 2, "keep": 2, "accumulate": 2, "learning_rate": 0.005}
    settings = [f"--set=train.{name}={value}" for name, value in free.items()]
    code, _, err = writehead(*command(dataset, run, *settings))
    assert (code, "train.learning_rate was 0.01 and is 0.005" in err) == (0, True)
    assert last_checkpoint(run).name == "step-00000003"


def test_a_finished_run_keeps_its_settings(dataset, run, capsys):
    before = (run / "train.json").read_bytes()
    for steps, rate in ((1, 0.5), (2, SHORT.learning_rate)):
        capsys.readouterr()
        go(dataset, run, replace(SHORT, steps=steps, learning_rate=rate))
        said = capsys.readouterr().err
        assert ("2 steps already" in said, "learning_rate" in said) == (True, rate == 0.5)
    assert (run / "train.json").read_bytes() == before


def test_a_stopped_run_may_take_fewer_steps(dataset, tmp_path, signal_at):
    signal_at(signal.SIGTERM, 2)
    assert go(dataset, tmp_path / "run").step == 3
    assert go(dataset, tmp_path / "run", replace(CONFIG, steps=4)).step == 4
    assert json.loads((tmp_path / "run" / "train.json").read_text())["train"]["steps"] == 4


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--set=train.stepz=3", "did you mean 'steps'?"),
        ("--set=train.steps=many", "steps='many'"),
        ("--set=train.steps", "train.NAME=VALUE"),
        ("--set=train.accumulate=3", "accumulate=3"),
        (f"--set=train.seed={2**63}", "error: seed="),
        ("--set=train.seed=-1", "error: seed="),
        ("--set=train.average=4", "keep"),
        ("--set=train.target_length=49", "rows of 49 tokens"),
        ("--set=train.target_length=2", "fits a row"),
        ("--set=model.eos=5", "model.eos is 5"),
        ("--preset=tiny/multi-quary", "did you mean 'tiny/multi-query'?"),
        ("--device=cuda:99", "error: "),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(dataset, tmp_path, writehead, argument, words):
    code, _, err = writehead(*command(dataset, tmp_path / "run"), argument)
    assert (code, "Traceback" in err) == (2, False)
    assert words in err.replace("\n", " ")
    assert "train.seed" not in argument or not (tmp_path / "run").exists()


def test_unsuitable_datasets_and_folders_are_refused(dataset, text, run, tmp_path):
    for data, model, task in ((text, MODEL, "language"), (dataset, LANGUAGE, "translation")):
        with pytest.raises(ConfigError, match=f"preset for {task}"):
            go(data, tmp_path / "new", model=model)
    assert not (tmp_path / "new").exists()
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "text").write_text("all of it")
    for place in ("thesis", "thesis/text"):
        with pytest.raises(RunError, match="something else"):
            go(dataset, tmp_path / place)
    assert [path.name for path in (tmp_path / "thesis").iterdir()] == ["text"]
    checkpoint = last_checkpoint(run)
    checkpoint.rename(tmp_path / "gone")
    with pytest.raises(RunError, match="no checkpoint"):
        go(dataset, run, SHORT)
    (tmp_path / "gone").rename(checkpoint)


def test_the_documentation_lists_every_setting_with_its_default():
    table = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?`) \| (.*?) \|", table.split("## Every setting")[1], re.MULTILINE)
    shown, defaults = {}, TrainConfig().to_json()
    for names, texts in rows:
        fields, values = re.findall(r"`(\w+)`", names), texts.split(", ")
        shown |= dict(zip(fields, values * (len(fields) // len(values)), strict=True))
    assert shown.keys() == defaults.keys()
    for name, value in shown.items():
        assert type(defaults[name])(value) == defaults[name], name
