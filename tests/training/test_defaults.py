"""Defaults that suit: presets that train, runs that accept a correction, scores without traps."""

import json
import os
from dataclasses import replace

import pytest

from texts import sentences
from trainings import CONFIG, SETTINGS, go, last_checkpoint, steps
from writehead.config import PrepareConfig, TrainConfig
from writehead.errors import ConfigError, RunError
from writehead.paper.experiments import find_experiment
from writehead.paper.presets import FAMILIES, preset_names, train_preset
from writehead.training.loop import Trainer


@pytest.mark.parametrize(
    ("family", "table", "scale"),
    [
        ("wmt14", "table1", "paper"),
        ("lm1b", "table3", "paper"),
        ("wmt14-small", "table1", "small"),
        ("lm1b-small", "table3", "small"),
    ],
)
def test_presets_of_the_papers_tables_train_as_their_experiments_do(family, table, scale):
    assert train_preset(f"{family}/multi-query") == find_experiment(table, scale).train


def test_every_preset_has_training_settings_that_fit_its_positions():
    for name in preset_names():
        config, model = train_preset(name), FAMILIES[name.partition("/")[0]]
        assert config.warmup < config.steps
        assert config.target_length <= model.target_positions
    assert train_preset("tiny/multi-head") == train_preset("tiny-lm/multi-query")
    assert train_preset("tiny/multi-head").steps < 5000
    with pytest.raises(ConfigError, match="did you mean 'tiny/multi-query'"):
        train_preset("tiny/multi-quary")


def test_train_takes_the_presets_settings(dataset, tmp_path, writehead):
    command = ("train", dataset, "--preset", "tiny/multi-query", "--run", tmp_path / "run")
    code, _, err = writehead(*command, "--device=cpu", "--set=train.steps=2")
    assert code == 0
    assert "2 steps of 8 × (64 + 64) tokens" in err
    plan = json.loads((tmp_path / "run" / "train.json").read_text())
    assert plan["train"] == train_preset("tiny/multi-query").to_json() | {"steps": 2}
    assert plan["model"]["dropout"] == 0.0


def test_a_run_without_a_finished_step_accepts_new_settings(dataset, tmp_path, monkeypatch):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "run_to_end", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            go(dataset, run, replace(CONFIG, rows=8, seed=3))
    assert json.loads((run / "train.json").read_text())["train"]["rows"] == 8
    assert go(dataset, run, replace(CONFIG, steps=2)).step == 2
    assert json.loads((run / "train.json").read_text())["train"]["rows"] == CONFIG.rows
    before = (run / "train.json").read_bytes()
    with pytest.raises(ConfigError, match=r"train\.rows was 4 and is 8"):
        go(dataset, run, replace(CONFIG, rows=8))
    for checkpoint in list((run / "checkpoints").iterdir()):
        checkpoint.rename(tmp_path / checkpoint.name)
    with pytest.raises(RunError, match="finished and has no checkpoint"):
        go(dataset, run, replace(CONFIG, rows=8))
    assert (run / "train.json").read_bytes() == before


@pytest.mark.parametrize("seed", ["-1", "1" * 20, str(2**63)])
def test_a_seed_out_of_range_is_refused_and_leaves_nothing_behind(
    dataset, tmp_path, writehead, seed
):
    run = tmp_path / "run"
    command = ("train", dataset, "--preset=tiny/multi-query", "--run", run, "--device=cpu")
    settings = (*SETTINGS, "--set=train.steps=1")
    code, _, err = writehead(*command, *settings, f"--set=train.seed={seed}")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("error: seed=")
    assert not run.exists()
    assert writehead(*command, *settings, f"--set=train.seed={2**63 - 1}")[0] == 0
    assert steps(run) == [1]


@pytest.mark.parametrize(
    ("kind", "most"),
    [(TrainConfig, 2**63 - 1), (lambda **one: PrepareConfig(task="language", **one), 2**32 - 1)],
)
def test_seeds_have_a_range(kind, most):
    assert kind(seed=most).seed == most
    for seed in (-1, most + 1, 10**300):
        with pytest.raises(ConfigError, match="seed="):
            kind(seed=seed)


@pytest.fixture
def files(tmp_path):
    """Sources and references to score, and a file of empty lines."""
    for name, lines in (("en", sentences(3, longest=3)), ("de", sentences(3, seed=1, longest=3))):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    (tmp_path / "empty").write_text("\n  \n\t\n")
    return tmp_path


def test_evaluate_scores_the_bundled_model_where_no_run_is_given(bundled, files, writehead):
    given = ("--source", files / "en", "--reference", files / "de", "--device=cpu", "--json")
    answers = [json.loads(writehead("evaluate", *run, *given)[1]) for run in ((), (bundled,))]
    assert {answer["run"] for answer in answers} == {"writehead/bundled/en-de"}
    assert answers[0]["bleu"] == answers[1]["bleu"]


@pytest.mark.parametrize("side", ["source", "reference"])
def test_evaluate_refuses_lines_that_are_all_empty(bundled, files, writehead, side):
    given = {"source": files / "en", "reference": files / "de"} | {side: files / "empty"}
    options = [word for name, path in given.items() for word in (f"--{name}", path)]
    code, _, err = writehead("evaluate", *options, "--device=cpu")
    assert (code, err.count("\n")) == (2, 1)
    assert f"every {side} line is empty" in err


@pytest.mark.parametrize("link", [None, os.symlink, os.link], ids=["itself", "symbolic", "hard"])
@pytest.mark.parametrize("name", ["en", "de"])
def test_evaluate_does_not_overwrite_its_input(bundled, files, writehead, name, link):
    output = files / name
    if link is not None:
        link(files / name, files / "link")
        output = files / "link"
    before = (files / name).read_bytes()
    given = ("--source", files / "en", "--reference", files / "de", "--device=cpu")
    code, _, err = writehead("evaluate", *given, "--output", output, "--force")
    assert (code, "is an input" in err) == (2, True)
    assert (files / name).read_bytes() == before
    weights = bundled / "model.safetensors"
    before = weights.read_bytes()
    assert writehead("evaluate", *given, "--output", weights, "--force")[0] == 2
    assert weights.read_bytes() == before


def test_evaluate_does_not_overwrite_text_or_a_dataset(dataset, text, tmp_path, writehead):
    go(dataset, tmp_path / "run", replace(CONFIG, steps=1))
    for option, file in (("--text", tmp_path / "text"), ("--dataset", dataset / "dataset.json")):
        if option == "--text":
            file.write_text("a line\n")
        before = file.read_bytes()
        given = file if option == "--text" else dataset
        command = ("evaluate", last_checkpoint(tmp_path / "run"), option, given)
        code, _, err = writehead(*command, "--output", file, "--force")
        assert (code, "is an input" in err) == (2, True)
        assert file.read_bytes() == before
