"""Which settings, datasets and folders a run starts and resumes with."""

import json
import re
from dataclasses import replace
from itertools import count
from pathlib import Path
from unittest.mock import Mock

import pytest

from trainings import CONFIG, LANGUAGE, MODEL, command, go, last_checkpoint, pair_dataset
from writehead.config import TrainConfig
from writehead.errors import ConfigError, RunError
from writehead.paper.presets import FAMILIES, preset_names, train_preset
from writehead.training.loop import Trainer

SHORT = replace(CONFIG, steps=2)


@pytest.fixture
def run(dataset, tmp_path):
    go(dataset, tmp_path / "run", SHORT)
    return tmp_path / "run"


def plan(run: Path) -> dict:
    return json.loads((run / "train.json").read_text())


def test_every_preset_has_training_settings_that_fit_its_positions():
    for name in preset_names():
        config, model = train_preset(name), FAMILIES[name.partition("/")[0]]
        assert config.warmup < config.steps
        assert config.target_length <= model.target_positions
    with pytest.raises(ConfigError, match="did you mean 'tiny/multi-query'"):
        train_preset("tiny/multi-quary")


def test_other_settings_are_refused_by_name(dataset, run, refused):
    options = ("--set=model.f=21", "--set=train.seed=1")
    error = refused(*command(dataset, run, *options, preset="tiny/multi-head-2x8"))
    for words in ("model.f was 20 and is 21", "train.seed was 0", "model.g was 1 and is 2"):
        assert words in error


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 331}, "model.vocab_size was 330 and is 331"),
        ({"count": 100}, "another vocabulary"),
        ({"seed": 1}, "fingerprint"),  # the same tokenizer, but another dev split
        ({}, None),
    ],
)
def test_only_the_same_dataset_is_accepted_wherever_it_is(run, tmp_path, changes, words):
    other, longer = pair_dataset(tmp_path / "other", **changes), replace(CONFIG, steps=3)
    if words is None:
        assert go(other, run, longer).step == 3
        return
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    with pytest.raises(ConfigError, match=words):
        go(other, run, longer)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_settings_that_do_not_change_a_step_may_change(dataset, run, writehead):
    free = {"steps": 3, "log_every": 2, "keep": 2, "accumulate": 2, "learning_rate": 0.005}
    settings = [f"--set=train.{name}={value}" for name, value in free.items()]
    code, _, err = writehead(*command(dataset, run, *settings))
    assert (code, "train.learning_rate was 0.01 and is 0.005" in err) == (0, True)
    assert last_checkpoint(run).name == "step-00000003"


def test_a_run_without_a_checkpoint_accepts_new_settings(dataset, tmp_path, monkeypatch):
    run = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "train", Mock(side_effect=KeyboardInterrupt))
        go(dataset, run, replace(CONFIG, rows=8, seed=3))
    assert plan(run)["train"]["rows"] == 8
    assert go(dataset, run, SHORT).step == 2
    before = plan(run)
    assert before["train"]["rows"] == CONFIG.rows
    with pytest.raises(ConfigError, match=r"train\.rows was 4 and is 8"):
        go(dataset, run, replace(CONFIG, rows=8))
    (run / "checkpoints").rename(tmp_path / "elsewhere")
    with pytest.raises(RunError, match="finished and has no checkpoint"):
        go(dataset, run, replace(CONFIG, rows=8))
    assert plan(run) == before


def test_a_finished_run_keeps_its_settings(dataset, run, capsys):
    before = plan(run)
    go(dataset, run, replace(SHORT, steps=1, learning_rate=0.5))
    assert "already has 2 steps" in capsys.readouterr().err
    assert plan(run) == before


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--set=train.stepz=3", "did you mean 'steps'?"),
        ("--set=train.steps=many", "steps='many'"),
        ("--set=train.steps", "train.NAME=VALUE"),
        (f"--set=train.steps={'9' * 400}", "400 digits"),
        (f"--set=train.steps={'[' * 10_000}", "nested"),
        (f"--set=train.steps={'x' * 10**6}", "must be an integer"),
        (f"--set=train.{'x' * 10**6}=1", "unknown train field"),
        ("--set=train.clip=NaN", "NaN"),
        ("--set=train.accumulate=3", "accumulate=3"),
        (f"--set=train.seed={2**63}", "error: seed="),
        ("--set=train.seed=-1", "error: seed="),
        ("--set=train.average=4", "keep"),
        ("--set=train.target_length=49", "target_length=49"),
        ("--set=train.target_length=2", "fits in a row"),
        ("--set=model.eos=5", "model.eos=1"),
        ("--preset=tiny/multi-quary", "did you mean 'tiny/multi-query'?"),
        ("--device=cuda:99", "error: "),
    ],
    ids=count(),
)
def test_wrong_input_is_one_line_and_leaves_nothing_behind(
    dataset, tmp_path, refused, argument, words
):
    error = refused(*command(dataset, tmp_path / "run"), argument)
    assert words in error
    assert len(error) < 500
    assert not (tmp_path / "run").exists()


def test_unsuitable_datasets_and_folders_are_refused(dataset, text, tmp_path):
    for data, model, task in ((text, MODEL, "language"), (dataset, LANGUAGE, "translation")):
        with pytest.raises(ConfigError, match=f"preset for {task}"):
            go(data, tmp_path / "new", model=model)
    assert not (tmp_path / "new").exists()
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "text").write_text("all of it")
    for place in ("thesis", "thesis/text"):
        with pytest.raises(RunError, match="not a training run"):
            go(dataset, tmp_path / place)
    assert [path.name for path in (tmp_path / "thesis").iterdir()] == ["text"]


def test_the_documentation_lists_every_setting_with_its_default():
    table = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?`) \| (.*?) \|", table.split("## Settings")[1], re.MULTILINE)
    shown, defaults = {}, TrainConfig().to_json()
    for names, texts in rows:
        fields, values = re.findall(r"`(\w+)`", names), texts.split(", ")
        shown |= dict(zip(fields, values * (len(fields) // len(values)), strict=True))
    assert shown.keys() == defaults.keys()
    for name, value in shown.items():
        assert type(defaults[name])(value) == defaults[name], name
