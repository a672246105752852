"""A table is run row by row, stopped and resumed, on the built-in grammar and a tiny family."""

import dataclasses
import json
import os
import shutil
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
from typer.testing import CliRunner

from writehead.cli import app
from writehead.cli.paper import read_seeds
from writehead.config import TrainConfig
from writehead.cost import Setting
from writehead.data.corpus import pairs
from writehead.paper import experiments, speed
from writehead.paper.experiments import find_experiment
from writehead.paper.tables import TABLE_1_TRAINING, TABLE_3_TRAINING
from writehead.training.step import Stepper
from writehead.util.locks import locked

ROOT = Path(__file__).parents[2]
ROWS = ("multi-head", "multi-query")
BOTH = ("--only=multi-head", "--only=multi-query", "--steps=4")
QUERY = ("--only=multi-query", "--steps=4")
RUN, RESULT = "runs/table1/tiny/multi-query-seed0", "results/table1/tiny/multi-query-seed0.json"


def command(folder: Path, table: str, *options: str, scale: str | None = "tiny") -> list[str]:
    places = (f"--results={folder / 'results'}", f"--runs={folder / 'runs'}", "--device=cpu")
    return ["reproduce", table, *([f"--scale={scale}"] if scale else []), *places, *options]


@pytest.fixture
def run(writehead, tmp_path):
    """Runs a table in the test's folder: exit code and standard error."""
    return lambda *given, **other: writehead(*command(tmp_path, *given, **other))[::2]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Two rows of Table 1, run without a stop."""
    folder = tmp_path_factory.mktemp("whole")
    done = CliRunner().invoke(app, command(folder, "table1", *BOTH))
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def copied(whole, tmp_path) -> Path:
    """The test's folder with the runs and the dataset of both rows, and no results."""
    shutil.copytree(whole / "runs", tmp_path / "runs")
    return tmp_path


def result(folder: Path, path: str = RESULT) -> dict[str, object]:
    return json.loads((folder / path).read_text(encoding="utf-8"))


def timeless(found: dict[str, object]) -> dict[str, object]:
    """A result without what depends on the machine, the time, the folder and resuming."""
    return {**found, **dict.fromkeys(("timings", "environment", "run", "log"))}


def moments(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*.json")}


def test_a_stopped_table_resumes_to_the_same_results(run, tmp_path, whole, monkeypatch):
    update = Stepper.update

    def stop(self, batch, step):
        if step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(self, batch, step)

    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "update", stop)
        code, err = run("table1", *BOTH)
    assert (code, "resuming" in err) == (128 + signal.SIGTERM, False)
    assert not list((tmp_path / "results").rglob("*.json"))
    with locked(tmp_path / "runs/table1/tiny/.multi-head-seed0.lock"):  # by another process
        code, err = run("table1", *BOTH)
    assert (code, "1 of 2 results exist" in err, result(tmp_path)["row"]) == (0, True, ROWS[1])
    code, err = run("table1", *BOTH)
    assert (code, "resuming after step 2" in err, "2 of 2 results" in err) == (0, True, True)
    for row in ROWS:
        path = RESULT.replace("multi-query", row)
        assert timeless(result(tmp_path, path)) == timeless(result(whole, path))
    before = moments(tmp_path)
    code, err = run("table1", *BOTH)
    assert (code, "2 of 2 results exist" in err, moments(tmp_path)) == (0, True, before)


def test_rows_differ_in_their_attention_alone_and_say_what_they_were_made_of(whole):
    head, query = (result(whole, RESULT.replace("multi-query", row)) for row in ROWS)
    for name in ("parameters", "train", "data"):
        assert head[name] == query[name]
    assert [entry["step"] for entry in head["log"]] == [entry["step"] for entry in query["log"]]
    different = {name for name in head["model"] if head["model"][name] != query["model"][name]}
    assert different == {"g", "f"}
    assert (query["train"]["steps"], query["data"]["vocab_size"]) == (4, 600)
    dev, test = query["scores"]["dev"], query["scores"]["test"]
    assert (dev["sentences"], list(dev["bleu"])) == (16, ["greedy"])
    assert list(test["bleu"]) == ["greedy", "beam-4"]
    assert "tok:intl" in test["bleu"]["beam-4"]["intl_signature"]
    assert query["log"][-1]["dev_ln_ppl"] == pytest.approx(dev["ln_ppl"], rel=1e-4)


def test_other_settings_or_data_neither_resume_a_run_nor_join_a_result(run, whole, copied):
    plan, before = copied / RUN / "train.json", moments(copied)
    for setting, words in (
        ("--steps=5", "train.steps is 4 instead of 5"),
        ("--set=train.clip=0.5", "train.clip is 1.0 instead of 0.5"),
    ):
        code, err = run("table1", *QUERY, setting)
        assert (code, err.count("\n"), moments(copied)) == (2, 1, before)
        assert f"{copied / RUN} was started with other settings: {words}" in err
    right = plan.read_text()
    plan.write_text(json.dumps(json.loads(right) | {"dataset": "another"}))
    code, err = run("table1", *QUERY)
    assert (code, str(copied / RUN) in err, (copied / RESULT).exists()) == (2, True, False)
    plan.write_text(right)
    # settings that do not change a step may change
    code, err = run("table1", *QUERY, "--set=train.checkpoint_every=3", "--set=train.log_every=2")
    assert code == 0, err
    assert result(copied)["scores"] == result(whole)["scores"]
    code, err = run("table1", "--only=multi-head-local", "--steps=5")
    assert (code, "train.steps is 4 instead of 5" in err) == (2, True)


def test_a_dataset_that_another_process_prepares_is_waited_for(run, tmp_path, monkeypatch):
    with ExitStack() as held:
        assert held.enter_context(locked(tmp_path / "runs/data/.table1-tiny.turn"))
        monkeypatch.setattr("writehead.paper.reproduce.time.sleep", lambda _: held.close())
        code, err = run("table1", *QUERY)
    assert (code, "1 of 1 results exist" in err) == (0, True)


def test_table_3_is_scored_per_word(run, tmp_path, monkeypatch):
    for name, split, count in (("books.txt", "train", 300), ("books.valid.txt", "dev", 16)):
        lines = (source for source, _ in pairs(split, count, max_words=7))
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    tiny = dataclasses.replace(find_experiment("table1", "tiny"), table="table3", family="tiny-lm")
    experiment = dataclasses.replace(tiny, text=experiments.language_files)
    monkeypatch.setitem(experiments.EXPERIMENTS, ("table3", "tiny"), experiment)
    options = ("--only=multi-head-2x8", "--steps=2", "--seeds=1,", f"--data={tmp_path}")
    code, err = run("table3", *options)
    assert code == 0, err
    found = result(tmp_path, "results/table3/tiny/multi-head-2x8-seed1.json")
    assert (found["train"]["seed"], found["scores"]["dev"]["lines"]) == (1, 16)
    assert found["scores"]["dev"]["ppl_per_word"] > 1
    assert [read_seeds(text) for text in ("3", "0,2", "2,")] == [(0, 1, 2), (0, 2), (2,)]


@pytest.fixture
def quick_table_2(monkeypatch, quick_chip) -> None:
    """Sizes that are timed at once."""
    monkeypatch.setattr(speed, "WARMUP", 1)
    monkeypatch.setattr("writehead.bench.train.GRAMMAR_PAIRS", 300)
    train = TrainConfig(rows=2, source_length=16, target_length=16)
    sizes = {"setting": Setting(3, 4, 3), "repeats": 1, "steps": 1, "train": train}
    quick = dataclasses.replace(speed.WORKLOADS["tiny"], **sizes)
    monkeypatch.setitem(speed.WORKLOADS, "tiny", quick)


def test_table_2_times_both_searches_and_a_training_step(run, tmp_path, quick_table_2, monkeypatch):
    query = ("table2", "--only=multi-query")
    assert run(*query, scale=None)[0] == 0
    found = result(tmp_path, "results/table2/tiny/multi-query.json")
    settings = [(row["setting"]["batch"], row["setting"]["beam"]) for row in found["decode"]]
    assert settings == [(3, 1), (3, 4)]
    for row in found["decode"]:
        assert list(row["measured"]) == ["ours, padded", "ours, true lengths"]
    assert found["training"]["us_per_token"] > 0
    code, err = run(*query)
    assert (code, "1 of 1 results exist" in err) == (0, True)
    lock = f".tiny-{speed.platform.node()}.lock"
    with locked(tmp_path / "runs/table2" / lock):
        code, err = run("table2", "--only=multi-head")
    assert (code, "0 of 1 results exist" in err) == (0, True)
    assert speed.default_scale("cpu") == "tiny"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert speed.default_scale("auto") == "paper"


def test_text_is_read_from_files_and_from_a_copy_of_the_hub(tmp_path):
    for stem in (*experiments.PAIRS, experiments.PAIRS_DEV, experiments.PAIRS_TEST):
        for side in ("en", "de"):
            (tmp_path / f"{stem}.{side}").write_text(f"{stem} {side}\n")
    found = experiments.translation_files(tmp_path)
    test = experiments.read_lines(found.scored["test"])
    assert (len(found.inputs.train), test) == (3, (["newstest2014 en"], ["newstest2014 de"]))
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    for split in ("train", "test"):
        table = arrow.table({"text": [f"{split} line"]})
        parquet.write_table(table, tmp_path / f"{split}.parquet")
    dev = experiments.language_hub(tmp_path).scored["dev"]
    assert experiments.read_lines(dev)[1] == ["test line"]


def test_the_papers_scale_is_the_papers_experiment():
    for table, paper in (("table1", TABLE_1_TRAINING), ("table3", TABLE_3_TRAINING)):
        experiment = find_experiment(table, "paper")
        train = experiment.train
        assert (train.steps, train.rows * train.target_length) == (paper.steps, paper.tokens)
        assert train.label_smoothing == (0.1 if table == "table1" else 0.0)
        assert experiment.with_steps(train.steps // 2).warmup == train.warmup // 2
