"""Defaults that suit: presets that train, runs that accept a correction, scores without traps."""

import json
import os
from dataclasses import replace

import pytest

from texts import sentences
from trainings import CONFIG, go
from writehead.errors import ConfigError, RunError
from writehead.paper.experiments import find_experiment
from writehead.paper.presets import FAMILIES, preset_names, train_preset
from writehead.training.loop import Trainer


def test_every_preset_has_the_training_settings_of_its_experiment_that_fit_its_positions():
    for family, table in (("wmt14", "table1"), ("lm1b", "table3")):
        for suffix, scale in (("", "paper"), ("-small", "small")):
            found = train_preset(f"{family}{suffix}/multi-query")
            assert found == find_experiment(table, scale).train
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


def test_evaluate_scores_the_bundled_model_and_does_not_overwrite_its_input(
    boxed, dataset, tmp_path, writehead
):
    for seed, name in enumerate(("en", "de")):
        (tmp_path / name).write_text("\n".join(sentences(3, seed=seed, longest=3)))
    pairs = ("--source", tmp_path / "en", "--reference", tmp_path / "de", "--device=cpu")
    runs = ((), (boxed,))
    answers = [json.loads(writehead("evaluate", *run, *pairs, "--json")[1]) for run in runs]
    assert {answer["run"] for answer in answers} == {"writehead/boxed/en-de"}
    assert answers[0]["bleu"] == answers[1]["bleu"]
    os.symlink(tmp_path / "en", tmp_path / "symbolic")
    os.link(tmp_path / "de", tmp_path / "hard")
    text, rows = ("--text", tmp_path / "en"), ("--dataset", dataset)
    outputs = {tmp_path / name: pairs for name in ("en", "de", "symbolic", "hard")}
    outputs |= {boxed / "model.safetensors": pairs, dataset / "dataset.json": rows}
    for given, output in (*((one, path) for path, one in outputs.items()), (text, text[1])):
        before = output.read_bytes()
        code, _, err = writehead("evaluate", boxed, *given, "--output", output, "--force")
        assert (code, "is an input" in err, output.read_bytes()) == (2, True, before), output
