"""The same command goes on; another one is refused in a sentence that names the difference."""

import json
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from trainings import CONFIG, LANGUAGE, SETTINGS, go, last_checkpoint, pair_dataset
from writehead.config import TrainConfig
from writehead.data.dataset import Dataset
from writehead.errors import ConfigError, RunError

SHORT = replace(CONFIG, steps=2)


@pytest.fixture
def run(dataset, tmp_path):
    go(dataset, tmp_path / "run", SHORT)
    return tmp_path / "run"


def command(dataset, run, *settings, preset="tiny/multi-query"):
    settings = (*SETTINGS, "--set=train.steps=2", *settings)
    return ("train", dataset, "--preset", preset, "--run", run, "--device=cpu", *settings)


@pytest.mark.parametrize(
    ("settings", "difference"),
    [
        (["--set=model.f=21"], "model.f was 20 and is 21"),
        (["--set=model.dropout=0.2"], "model.dropout was 0.1 and is 0.2"),
        (["--set=train.seed=1"], "train.seed was 0 and is 1"),
        (["--set=train.rows=8"], "train.rows was 4 and is 8"),
        (["--set=train.optimizer=adamw"], "train.optimizer was 'adafactor' and is 'adamw'"),
        (["--set=train.label_smoothing=0"], "train.label_smoothing was 0.1 and is 0"),
    ],
)
def test_other_settings_are_refused_by_name(dataset, run, writehead, settings, difference):
    code, _, err = writehead(*command(dataset, run, *settings))
    assert code == 2
    assert f"was started differently: {difference}. Use the same settings" in err.replace("\n", " ")


def test_another_preset_is_refused(dataset, run, writehead):
    code, _, err = writehead(*command(dataset, run, preset="tiny/multi-head-2x8"))
    assert code == 2
    assert "model.g was 1 and is 2" in err.replace("\n", " ")


def test_another_vocabulary_is_refused(run, tmp_path, writehead):
    (tmp_path / "other").mkdir()
    other = pair_dataset(tmp_path / "other", vocabulary=331)
    code, _, err = writehead(*command(other, run))
    assert code == 2
    assert "the dataset has another vocabulary; model.vocabulary was 330 and is 331" in err


def test_another_text_of_the_same_vocabulary_size_is_refused(run, tmp_path):
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match="the dataset has another vocabulary"):
        go(pair_dataset(tmp_path / "other", count=100), run)


@pytest.fixture
def cousin(dataset, tmp_path):
    """Another dataset as large and with the same tokenizer: other lines are held out."""
    (tmp_path / "cousin").mkdir()
    path = pair_dataset(tmp_path / "cousin", seed=1)
    one, other = Dataset.open(dataset), Dataset.open(path)
    assert one.tokenizer.fingerprint == other.tokenizer.fingerprint
    assert len(one.split("train")) == len(other.split("train"))
    return path


def without_its_dataset(run):
    """Makes the plan of a run what older ones are."""
    plan = json.loads((run / "train.json").read_text())
    assert len(plan.pop("dataset")) == 16
    (run / "train.json").write_text(json.dumps(plan))


def test_another_dataset_of_the_same_vocabulary_is_refused(dataset, cousin, run, writehead):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    names = [Dataset.open(place).fingerprint for place in (dataset, cousin)]
    code, _, err = writehead(*command(cousin, run, "--set=train.steps=3"))
    assert (code, err.count("\n")) == (2, 1)
    assert err == (
        f"error: {run} was started differently: the dataset is another of the same vocabulary, "
        f"its fingerprint was {names[0]} and is {names[1]}. Use the same settings and dataset to "
        f"go on, or another folder to start anew\n"
    )
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    assert writehead(*command(dataset, run, "--set=train.steps=3"))[0] == 0


def test_a_dataset_that_was_prepared_again_elsewhere_is_the_same(run, tmp_path):
    (tmp_path / "again").mkdir()
    assert go(pair_dataset(tmp_path / "again"), run, replace(CONFIG, steps=3)).step == 3


def test_a_run_from_before_datasets_were_noted_goes_on_and_claims_none(dataset, cousin, run):
    without_its_dataset(run)
    for step, data in ((3, cousin), (4, dataset)):
        assert go(data, run, replace(CONFIG, steps=step)).step == step
        plan = json.loads((run / "train.json").read_text())
        assert (plan["train"]["steps"], plan["dataset"]) == (step, None)


def test_what_does_not_enter_a_step_may_change_and_is_said(dataset, run, writehead):
    free = {"steps": 3, "log_every": 2, "keep": 2, "accumulate": 2, "learning_rate": 0.005}
    settings = [f"--set=train.{name}={value}" for name, value in free.items()]
    code, _, err = writehead(*command(dataset, run, *settings))
    assert code == 0
    assert "train.learning_rate was 0.01 and is 0.005" in err.replace("\n", " ")
    assert last_checkpoint(run).name == "step-00000003"


def test_fewer_steps_than_the_run_has_change_nothing(dataset, run, writehead):
    before = (run / "train.json").read_bytes()
    code, _, err = writehead(*command(dataset, run, "--set=train.steps=1"))
    assert code == 0
    assert "has its 2 steps already; there is nothing to do" in err
    assert (run / "train.json").read_bytes() == before


def test_a_finished_run_keeps_its_plan_and_says_which_settings_were_not_used(
    dataset, run, writehead
):
    before = (run / "train.json").read_bytes()
    settings = ("--set=train.learning_rate=0.5", "--set=train.keep=2")
    code, _, err = writehead(*command(dataset, run, *settings))
    assert code == 0
    said = (
        f"{run} has its 2 steps already; there is nothing to do; not used: train.learning_rate "
        "was 0.01 and is 0.5, train.keep was 3 and is 2\n"
    )
    assert err == said
    assert (run / "train.json").read_bytes() == before
    assert "not used" not in writehead(*command(dataset, run))[2]


def test_fewer_steps_than_planned_but_more_than_done_are_a_new_plan(dataset, tmp_path, signal_at):
    signal_at(signal.SIGTERM, 2)
    assert go(dataset, tmp_path / "run", CONFIG).step == 3
    assert go(dataset, tmp_path / "run", replace(CONFIG, steps=4)).step == 4
    assert json.loads((tmp_path / "run" / "train.json").read_text())["train"]["steps"] == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set=train.stepz=3"], "unknown train field 'stepz'; did you mean 'steps'?"),
        (["--set=model.drop=3"], "unknown model field 'drop'; did you mean 'dropout'?"),
        (["--set=train.steps=many"], "steps='many' is not a whole number"),
        (["--set=train.steps"], "is not train.NAME=VALUE or model.NAME=VALUE"),
        (["--set=data.steps=3"], "is not train.NAME=VALUE or model.NAME=VALUE"),
        (["--set=train.accumulate=3"], "rows=4 cannot be split into accumulate=3"),
        (["--set=train.target_length=49"], "rows of 49 tokens are longer than the 48 learned"),
        (["--set=train.source_length=49"], "rows of 49 tokens are longer than the 48 learned"),
        (["--set=train.target_length=2"], "fits a row of 48 source and 2 target tokens"),
        (["--set=model.end=5"], "model.end is 5, and in the dataset's tokens it is 1; leave model"),
        (["--set=model.start=2"], "model.start is 2, and in the dataset's tokens it is 0"),
        (["--set=model.pad=3"], "model.pad is 3, and in the dataset's tokens it is 0"),
        (["--preset=tiny/multi-quary"], "did you mean 'tiny/multi-query'?"),
        (["--preset=tiny-lm/multi-query"], "the preset is a language model"),
        (["--device=cuda:99"], "error: "),
    ],
)
def test_what_cannot_be_meant_is_one_line_and_exit_code_2(
    dataset, tmp_path, writehead, arguments, words
):
    given = [*command(dataset, tmp_path / "run"), *arguments]
    if "--preset=tiny-lm/multi-query" in arguments:
        given = [word for word in given if not re.search("encoder|source_pos", str(word))]
    code, _, err = writehead(*given)
    assert code == 2
    assert words in err.replace("\n", " ")
    assert "Traceback" not in err


def test_a_dataset_of_the_other_task_is_refused(dataset, text, tmp_path):
    with pytest.raises(ConfigError, match="is for a language model and the preset is a transl"):
        go(text, tmp_path / "run")
    with pytest.raises(ConfigError, match="choose a preset for translation"):
        go(dataset, tmp_path / "run", model=LANGUAGE)
    assert not (tmp_path / "run").exists()


def test_a_folder_with_other_things_is_not_trained_into(dataset, tmp_path):
    (tmp_path / "thesis.txt").write_text("all of it")
    with pytest.raises(RunError, match="holds something else"):
        go(dataset, tmp_path)
    with pytest.raises(RunError, match="holds something else"):
        go(dataset, tmp_path / "thesis.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_damaged_plan_is_said(dataset, run):
    for text in ("", "[]", "{}", '{"tokenizer": 1, "model": 2, "train": 3}'):
        (run / "train.json").write_text(text)
        with pytest.raises(RunError, match=r"train\.json .*; start in another folder"):
            go(dataset, run, SHORT)


def test_the_documentation_has_every_setting_with_its_default():
    table = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?`) \| (.*?) \|", table.split("## Every setting")[1], re.MULTILINE)
    shown: dict[str, object] = {}
    for names, defaults in rows:
        fields, values = re.findall(r"`(\w+)`", names), defaults.split(", ")
        values = values * len(fields) if len(values) == 1 else values
        shown |= dict(zip(fields, values, strict=True))
    defaults = TrainConfig().to_json()
    assert shown.keys() == defaults.keys()
    for name, value in shown.items():
        assert type(defaults[name])(value) == defaults[name], name
