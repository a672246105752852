"""Which settings, datasets and folders a run starts and resumes with."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from trainings import CONFIG, LANGUAGE, MODEL, command, go, last_checkpoint, pair_dataset
from writehead.config import TrainConfig
from writehead.engine import Engine
from writehead.errors import ConfigError, RunError
from writehead.paper.presets import FAMILIES, preset_names, train_preset

SHORT = replace(CONFIG, steps=2)


@pytest.fixture
def run(dataset, tmp_path):
    go(dataset, tmp_path / "run", SHORT)
    return tmp_path / "run"


def test_every_preset_has_training_settings_that_fit_its_positions():
    for name in preset_names():
        config, model = train_preset(name), FAMILIES[name.partition("/")[0]]
        assert config.warmup < config.steps
        assert config.target_length <= model.target_positions
    with pytest.raises(ConfigError, match="did you mean 'tiny/multi-query'"):
        train_preset("tiny/multi-quary")


def test_only_settings_that_do_not_change_a_step_may_change(dataset, run, refused, writehead):
    options = ("--set=model.f=21", "--set=train.seed=1")
    error = refused(*command(dataset, run, *options, preset="tiny/multi-head-2x8"))
    for words in ("model.f was 20 and is 21", "train.seed was 0", "model.g was 1 and is 2"):
        assert words in error
    free = {"steps": 3, "log_every": 2, "keep": 2, "accumulate": 2, "learning_rate": 0.005}
    settings = [f"--set=train.{name}={value}" for name, value in free.items()]
    code, _, err = writehead(*command(dataset, run, *settings))
    assert (code, "train.learning_rate was 0.01 and is 0.005" in err) == (0, True)
    assert last_checkpoint(run).name == "step-00000003"


@pytest.mark.parametrize(("warmup", "noted"), [(2, False), (3, True), (9, True)])
def test_a_warmup_that_does_not_end_before_the_training_is_noted(
    dataset, tmp_path, writehead, warmup, noted
):
    settings = ("--set=train.steps=3", f"--set=train.warmup={warmup}")
    code, _, err = writehead(*command(dataset, tmp_path / "run", *settings))
    assert (code, f"note: train.warmup={warmup} " in err) == (0, noted)


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


def test_a_finished_run_keeps_its_settings(dataset, run, capsys):
    before = (run / "train.json").read_text()
    go(dataset, run, replace(SHORT, steps=1, learning_rate=0.5))
    assert "already has 2 steps" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"train\.rows was 4 and is 8"):
        go(dataset, run, replace(CONFIG, rows=8))
    (run / "checkpoints").rename(run.with_name("elsewhere"))
    with pytest.raises(RunError, match="finished and has no checkpoint"):
        go(dataset, run, replace(CONFIG, rows=8))
    assert (run / "train.json").read_text() == before


def test_a_run_whose_training_has_not_finished_says_so(run, refused):
    (run / "config.json").unlink()
    error = refused("translate", run, "--device=cpu", stdin=b"the cat.")
    assert "has not finished; run the same command again" in error
    assert "checkpoints/step-00000002" in error
    assert "translation" in Engine.load(last_checkpoint(run), "cpu").model.config.task


def test_unsuitable_datasets_and_folders_are_refused(dataset, text, tmp_path):
    for data, model, task in ((text, MODEL, "language"), (dataset, LANGUAGE, "translation")):
        with pytest.raises(ConfigError, match=f"dataset is for a {task} model"):
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
