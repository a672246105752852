"""A table is run row by row, stopped and gone on with, on the grammar and a tiny family."""

import dataclasses
import fcntl
import itertools
import json
import re
import shutil
import signal
from pathlib import Path

import pytest

from trainings import TIMES, last_checkpoint
from writehead.config import TrainConfig
from writehead.data import prepare
from writehead.errors import ConfigError
from writehead.paper import reproduce as reproduction
from writehead.paper import speed, texts
from writehead.paper.experiments import EXPERIMENTS, SCALES, find_experiment, read_seeds
from writehead.paper.presets import FAMILIES
from writehead.paper.reproduce import Job, reproduce
from writehead.paper.speed import SPEEDS, choose_scale
from writehead.paper.tables import TABLE_1_TRAINING, TABLE_3_TRAINING
from writehead.training.checkpoint import list_checkpoints
from writehead.training.loop import Trainer

ROWS = ("multi-head", "multi-query")


@pytest.fixture(autouse=True)
def _no_time_for_the_matrix_rate(monkeypatch):
    monkeypatch.setattr("writehead.training.loop.matrix_rate", lambda device, dtype: 1e9)


def run(writehead, folder: Path, table: str, *more: object) -> tuple[int, str, str]:
    places = (f"--results={folder / 'results'}", f"--runs={folder / 'runs'}", "--device=cpu")
    return writehead("reproduce", table, "--scale=tiny", *places, *more)


def to_report(folder: Path) -> str:
    """What is said of results that are all there."""
    return f"writehead report --results {folder / 'results'} makes tables of them"


def result(folder: Path, table: str, name: str) -> dict[str, object]:
    path = folder / "results" / table / "tiny" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))


def timeless(found: dict[str, object]) -> dict[str, object]:
    """A result without what depends on the machine, the hour and the folder."""
    log = [
        {name: value for name, value in entry.items() if name not in TIMES}
        for entry in found["log"]
    ]
    apart = ("timings", "environment", "run")
    return {name: value for name, value in found.items() if name not in apart} | {"log": log}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Two rows of Table 1, run without a stop."""
    folder = tmp_path_factory.mktemp("whole")
    experiment = find_experiment("table1", "tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("writehead.training.loop.matrix_rate", lambda device, dtype: 1e9)
        ending = reproduce(
            Job(
                experiment=experiment,
                train=experiment.with_steps(4),
                rows=ROWS,
                seeds=(0,),
                data=None,
                results=folder / "results",
                runs=folder / "runs",
                device="cpu",
            )
        )
    assert (ending.done, ending.of, ending.stopped_by) == (2, 2, None)
    return folder


def test_a_table_stopped_by_the_clock_goes_on_to_the_same_results(writehead, tmp_path, whole):
    only = [f"--only={row}" for row in ROWS]
    code, _, err = run(writehead, tmp_path, "table1", *only, "--steps=4", "--minutes=0")
    assert code == 128 + 15
    assert "table1, scale tiny: row 1 of 2, multi-head, seed 0\n" in err
    stopped = re.search(r"stopped at multi-head, seed 0, after step (\d) of 4; 0 of 2 results", err)
    assert 1 <= int(stopped[1]) < 4
    assert not list((tmp_path / "results").rglob("*.json"))

    code, _, err = run(writehead, tmp_path, "table1", *only, "--steps=4")
    assert code == 0
    assert f"going on after step {stopped[1]}" in err
    assert re.search(r"row 2 of 2, multi-query, seed 0; \d:\d\d:\d\d left\n", err)
    for row in ROWS:
        ours, theirs = (result(place, "table1", f"{row}-seed0") for place in (tmp_path, whole))
        assert timeless(ours) == timeless(theirs)
    sessions = result(tmp_path, "table1", "multi-head-seed0")["timings"]["sessions"]
    spans = [(one["from_step"], one["to_step"]) for one in sessions]
    assert spans == [(0, int(stopped[1])), (int(stopped[1]), 4)]

    trained = [path for _, path in list_checkpoints(tmp_path / "runs/table1/tiny/multi-head-seed0")]
    moment = trained[-1].stat().st_mtime_ns
    code, _, err = run(writehead, tmp_path, "table1", *only, "--steps=4")
    assert code == 0
    assert err.count("is there; skipped") == 2
    assert "all 2 results are there, so nothing was trained; give another folder" in err
    assert trained[-1].stat().st_mtime_ns == moment


def test_a_signal_after_the_last_step_of_a_row_stops_before_its_scoring(
    writehead, tmp_path, monkeypatch
):
    go = Trainer.run_to_end

    def told_at_the_end(*given):
        outcome = go(*given)
        signal.raise_signal(signal.SIGINT)
        return outcome

    only = [f"--only={row}" for row in ROWS]
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "run_to_end", told_at_the_end)
        code, _, err = run(writehead, tmp_path, "table1", *only, "--steps=2")
    assert code == 128 + signal.SIGINT
    assert "stopped at multi-head, seed 0, after step 2 of 2; 0 of 2 results are there" in err
    code, _, err = run(writehead, tmp_path, "table1", "--only=multi-head", "--steps=2")
    assert code == 0, err
    assert "has its 2 steps already" in err
    assert "1 of 1 results are there" in err


def test_the_time_that_is_left_is_told_by_rows_of_the_same_device_only(writehead, tmp_path, whole):
    shutil.copytree(whole / "results", tmp_path / "results")
    (tmp_path / "results/table1/tiny/multi-query-seed0.json").unlink()
    done = tmp_path / "results/table1/tiny/multi-head-seed0.json"
    result = json.loads(done.read_text())
    result["environment"]["hardware"]["device"] = "a chip far away"
    done.write_text(json.dumps(result))
    only = [f"--only={row}" for row in ROWS]
    _, _, err = run(writehead, tmp_path, "table1", *only, "--steps=4", "--minutes=0")
    assert "row 2 of 2, multi-query, seed 0\n" in err


def test_rows_differ_in_their_attention_alone(whole):
    head, query = (result(whole, "table1", f"{row}-seed0") for row in ROWS)
    assert head["parameters"] == query["parameters"]
    assert head["train"] == query["train"]
    assert head["data"] == query["data"]
    assert [entry["step"] for entry in head["log"]] == [entry["step"] for entry in query["log"]]
    different = {name for name in head["model"] if head["model"][name] != query["model"][name]}
    assert different == {"g", "f"}


def test_a_result_says_what_it_was_made_of(whole):
    found = result(whole, "table1", "multi-query-seed0")
    assert found["train"]["steps"] == 4
    assert found["data"]["vocabulary"] == 600
    assert found["data"]["splits"]["train"]["sequences"] > 1000
    assert len(found["data"]["fingerprint"]) == 16
    assert found["environment"]["versions"]["torch"]
    dev, test = found["scores"]["dev"], found["scores"]["test"]
    assert (dev["sentences"], list(dev["bleu"])) == (16, ["greedy"])
    assert list(test["bleu"]) == ["greedy", "beam-4"]
    for search in test["bleu"].values():
        assert "tok:intl" in search["intl_signature"]
        assert "tok:13a" in search["13a_signature"]
    assert found["log"][-1]["dev_ln_ppl"] == pytest.approx(dev["ln_ppl"], rel=1e-4)
    assert found["timings"]["training_s"] > 0


def test_a_finished_row_keeps_the_others_to_its_settings_and_text(
    writehead, whole, tmp_path, monkeypatch
):
    code, _, err = run(writehead, whole, "table1", "--only=multi-head-local", "--steps=5")
    assert code == 2
    assert "train.steps is 4 in it and 5 elsewhere" in err
    settings = ("--steps=4", "--set=train.learning_rate=0.5")
    _, _, err = run(writehead, whole, "table1", *settings)
    assert "train.learning_rate is 0.04" in err
    assert err.endswith("use the same settings, or give these their own --results and --runs\n")
    monkeypatch.setattr(texts, "GRAMMAR_PAIRS", 1900)
    places = (f"--results={whole / 'results'}", f"--runs={tmp_path}", "--device=cpu")
    code, _, err = writehead("reproduce", "table1", "--scale=tiny", "--steps=4", *places)
    assert code == 2
    assert "its dataset is another" in err


def test_a_row_that_another_process_is_at_is_passed_over(writehead, whole):
    lock = whole / "runs" / "table1" / "tiny" / ".multi-query-local-seed0.lock"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        code, _, err = run(writehead, whole, "table1", "--only=multi-query-local", "--steps=4")
    assert code == 0
    assert "multi-query-local, seed 0: another process is at it; passed over" in err
    assert err.endswith(
        "0 of 1 results are there; other processes are at work on the rest, and none is left for "
        "this one\n"
    )


def test_a_row_that_was_passed_over_is_taken_once_its_process_has_stopped(
    writehead, whole, tmp_path, monkeypatch
):
    held = (tmp_path / "runs/table1/tiny/.multi-head-seed0.lock", [])
    finish = reproduction._finish

    def stop_the_other(*given):
        if held[1]:
            held[1].pop().close()
        finish(*given)

    shutil.copytree(whole / "runs", tmp_path / "runs")
    held[1].append(held[0].open("w"))
    fcntl.flock(held[1][0], fcntl.LOCK_EX)
    monkeypatch.setattr(reproduction, "_finish", stop_the_other)
    rows = ("--only=multi-head", "--only=multi-query", "--steps=4")
    code, _, err = run(writehead, tmp_path, "table1", *rows)
    assert code == 0
    assert "multi-head, seed 0: another process is at it; passed over\n" in err
    assert err.index("row 1 of 2, multi-query") < err.index("row 2 of 2, multi-head")
    assert err.endswith(f"2 of 2 results are there; {to_report(tmp_path)}\n")


def test_rows_begun_on_another_dataset_are_refused_before_any_is_trained(
    writehead, whole, tmp_path
):
    runs = tmp_path / "runs"
    shutil.copytree(whole / "runs", runs)
    folder = runs / "table1/tiny/multi-query-seed0"
    plan = json.loads((folder / "train.json").read_text())
    (folder / "train.json").write_text(json.dumps(plan | {"dataset": "another"}))
    code, out, err = writehead(
        *("reproduce", "table1", "--scale=tiny", "--only=multi-head", "--only=multi-query"),
        *("--device=cpu", "--steps=4", f"--results={tmp_path / 'results'}", f"--runs={runs}"),
    )
    assert (code, out) == (2, "")
    assert f"error: {folder} was begun on another dataset than {runs / 'data/table1-tiny'}; " in err
    assert not list(tmp_path.glob("results/**/*.json"))


@pytest.mark.parametrize(
    ("settings", "difference"),
    [
        (["--steps=5"], "train.steps is 4 in it and 5 here"),
        (["--steps=3"], "train.steps is 4 in it and 3 here"),
        (["--set=train.clip=0.5"], "train.clip is 1.0 in it and 0.5 here"),
        (["--set=train.label_smoothing=0.2"], "train.label_smoothing is 0.1 in it and 0.2 here"),
    ],
)
def test_a_run_begun_with_other_settings_is_neither_gone_on_with_nor_scored(
    writehead, whole, tmp_path, settings, difference
):
    folder = whole / "runs/table1/tiny/multi-query-seed0"
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    code, out, err = writehead(
        *("reproduce", "table1", "--scale=tiny", "--only=multi-query", "--device=cpu"),
        *("--steps=4", f"--results={tmp_path}", f"--runs={whole / 'runs'}", *settings),
    )
    assert (code, out) == (2, "")
    assert f"error: {folder} was begun with other settings: {difference}; " in err
    assert err.endswith("use the same settings, or give these their own --runs\n")
    assert err.count("\n") == 1
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    assert not list(tmp_path.rglob("*.json"))


def test_a_run_goes_on_with_what_does_not_enter_a_step_changed(writehead, tmp_path, whole):
    command = ("--only=multi-query", "--steps=4")
    run(writehead, tmp_path, "table1", *command, "--minutes=0")
    settings = ("--set=train.checkpoint_every=3", "--set=train.keep=2", "--set=train.log_every=2")
    code, _, err = run(writehead, tmp_path, "table1", *command, *settings)
    assert code == 0, err
    assert "train.log_every was 20 and is 2" in err
    ours, theirs = (result(place, "table1", "multi-query-seed0") for place in (tmp_path, whole))
    assert ours["scores"] == theirs["scores"]


def test_a_run_with_more_steps_than_its_plan_says_is_not_scored(writehead, tmp_path):
    command = ("--only=multi-query", "--steps=4")
    run(writehead, tmp_path, "table1", *command, "--minutes=0")
    place = last_checkpoint(tmp_path / "runs/table1/tiny/multi-query-seed0") / "training.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), "step": 5}))
    (place.parent / "checksums.sha256").unlink()
    place.parent.rename(place.parent.with_name("step-00000005"))
    code, _, err = run(writehead, tmp_path, "table1", *command)
    assert code == 2
    assert "has 5 steps and 4 were asked for, so it is not scored" in err
    assert not list((tmp_path / "results").rglob("*.json"))


def test_a_second_process_waits_for_the_dataset_that_the_first_prepares(
    writehead, tmp_path, monkeypatch
):
    make, command, said = prepare._make, ("--only=multi-query", "--steps=4", "--minutes=0"), []

    def interrupted(seconds):
        raise KeyboardInterrupt

    def meanwhile(job):
        said.append(run(writehead, tmp_path, "table1", *command))
        with monkeypatch.context() as patch:
            patch.setattr("writehead.paper.reproduce.time.sleep", interrupted)
            said.append(run(writehead, tmp_path, "table1", *command[:2]))
        make(job)

    monkeypatch.setattr(prepare, "_make", meanwhile)
    code, _, err = run(writehead, tmp_path, "table1", *command)
    assert (code, "after step" in err) == (128 + 15, True)  # the first one went on undisturbed
    (out_of_time, _, late), (by_hand, _, early) = said
    assert out_of_time == 128 + 15
    assert "stopped at the dataset, which another process is preparing; 0 of 1 results" in late
    assert by_hand == 128 + 2
    waiting = f"another process is preparing {tmp_path / 'runs/data/table1-tiny'}; waiting for it\n"
    assert waiting in early


def test_whoever_waited_goes_on_with_the_dataset_that_is_there(writehead, whole, monkeypatch):
    lock, looks = whole / "runs/data/.table1-tiny.turn", []
    only = ("--only=multi-head-local", "--steps=4", "--minutes=60")
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)

        def look(seconds):
            looks.append(seconds)
            if len(looks) == 3:
                fcntl.flock(held, fcntl.LOCK_UN)

        with monkeypatch.context() as patch:
            patch.setattr("writehead.paper.reproduce.time.sleep", look)
            code, _, err = run(writehead, whole, "table1", *only)
    assert code == 0, err
    assert len(looks) == 3
    assert err.count("waiting for it") == 1
    assert "is already prepared from the same text" in err
    assert f"1 of 1 results are there; {to_report(whole)}" in err
    assert not lock.exists()


def test_table_3_is_scored_a_word_on_its_own_text_and_on_another(writehead, tmp_path):
    command = ("--only=multi-head-2x8", "--steps=2", "--seeds=1,")
    code, _, err = run(writehead, tmp_path, "table3", *command)
    assert code == 0, err
    found = result(tmp_path, "table3", "multi-head-2x8-seed1")
    assert found["train"]["seed"] == 1
    dev, other = found["scores"]["dev"], found["scores"]["other"]
    assert (dev["lines"], other["lines"]) == (16, 16)
    assert 1 < dev["ppl_per_word"] < other["ppl_per_word"]  # it never saw German
    assert found["data"]["sources"][0]["side"] == 0


@pytest.fixture
def quick_table_2(monkeypatch) -> None:
    """A size for a CPU that takes seconds less, on a chip that is measured in no time."""
    monkeypatch.setattr("writehead.bench.floor.BLOCK", {"cuda": 1 << 20, "cpu": 1 << 20})
    monkeypatch.setattr("writehead.bench.floor.PRODUCT", {"cuda": 64, "cpu": 64})
    short = dataclasses.replace(TrainConfig(), rows=4, source_length=32, target_length=32)
    quick = dataclasses.replace(SPEEDS["tiny"], batch=3, source=8, target=7, repeats=1, steps=1)
    monkeypatch.setitem(SPEEDS, "tiny", dataclasses.replace(quick, train=short))


def test_table_2_on_a_cpu_has_a_size_for_a_cpu_and_says_so(writehead, tmp_path, quick_table_2):
    places = (f"--results={tmp_path / 'results'}", f"--runs={tmp_path / 'runs'}")
    code, _, err = writehead("reproduce", "table2", "--only=multi-query", "--device=cpu", *places)
    assert code == 0, err
    assert "on a CPU table2 is timed at scale tiny; --scale paper is the paper's size" in err
    assert "table2, scale tiny: 3 sentences of 8 tokens into 7 by tiny models" in err
    assert "hours" not in err.partition("table2, scale tiny: 3 sentences")[2]
    found = result(tmp_path, "table2", "multi-query")
    assert (found["scale"], found["decode"][0]["setting"]["batch"]) == ("tiny", 3)


def test_a_larger_size_on_a_cpu_is_said_to_take_long(
    writehead, tmp_path, monkeypatch, quick_table_2
):
    monkeypatch.setitem(speed.SPEEDS, "small", speed.SPEEDS["tiny"])
    places = (f"--results={tmp_path / 'results'}", f"--runs={tmp_path / 'runs'}")
    command = ("reproduce", "table2", "--device=cpu", "--only=multi-query", *places)
    code, _, err = writehead(*command, "--scale=small")
    assert code == 0, err
    assert "on a CPU that may take hours; the sizes of --scale tiny are for one\n" in err


def test_table_2_is_the_papers_where_there_is_a_gpu(monkeypatch):
    assert choose_scale("cpu") == "tiny"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert choose_scale("auto") == "paper"


def test_table_2_times_a_row_by_both_searches_and_a_training_step(
    writehead, tmp_path, quick_table_2
):
    code, _, err = run(writehead, tmp_path, "table2", "--only=multi-query")
    assert code == 0, err
    found = result(tmp_path, "table2", "multi-query")
    figures = r"training [\d.e+]+, greedy [\d.e+]+ \+ [\d.e+]+, beam 4 [\d.e+]+ \+ [\d.e+]+"
    assert re.search(rf"multi-query: µs a token: {figures}; \S+/multi-query\.json\n", err)
    assert [row["setting"]["beam"] for row in found["decode"]] == [1, 4]
    for row in found["decode"]:
        assert list(row["measured"]) == ["ours, padded", "ours, true lengths"]
    assert found["training"]["us_per_token"] > 0
    code, _, err = run(writehead, tmp_path, "table2", "--only=multi-query")
    assert code == 0
    assert "is there; skipped" in err


def test_a_second_process_of_table_2_waits_for_the_text_that_the_first_prepares(
    writehead, tmp_path, monkeypatch, quick_table_2
):
    make, said, chips = prepare._make, [], itertools.count()
    monkeypatch.setattr(speed, "chip_name", lambda device: f"chip-{next(chips)}")

    def interrupted(seconds):
        raise KeyboardInterrupt

    def meanwhile(job):
        said.append(run(writehead, tmp_path, "table2", "--only=multi-query", "--minutes=0"))
        with monkeypatch.context() as patch:
            patch.setattr("writehead.paper.reproduce.time.sleep", interrupted)
            said.append(run(writehead, tmp_path, "table2", "--only=multi-query"))
        make(job)

    monkeypatch.setattr(prepare, "_make", meanwhile)
    code, _, err = run(writehead, tmp_path, "table2", "--only=multi-query")
    assert code == 0, err  # the first one went on undisturbed
    (out_of_time, _, late), (by_hand, _, early) = said
    assert out_of_time == 128 + 15
    assert "stopped at the dataset, which another process is preparing; 0 of 1 results" in late
    assert by_hand == 128 + 2
    waiting = f"another process is preparing {tmp_path / 'runs/data/grammar-200'}; waiting for it\n"
    assert waiting in early


@pytest.mark.parametrize("is_same_chip", [False, True])
def test_two_processes_of_table_2_share_the_rows_unless_they_share_a_chip(
    writehead, tmp_path, monkeypatch, quick_table_2, is_same_chip
):
    time_row, said = speed._time, []

    def meanwhile(job, sizes, row, *rest):
        if not said:
            said.append(())  # the other one is not disturbed in turn
            said[0] = run(writehead, tmp_path, "table2", *only)
        return time_row(job, sizes, row, *rest)

    only = ("--only=multi-head", "--only=multi-query")
    monkeypatch.setattr(speed, "_time", meanwhile)
    if not is_same_chip:
        monkeypatch.setattr(speed, "chip_name", lambda device: f"chip-{len(said)}")
    code, _, err = run(writehead, tmp_path, "table2", *only)
    ((other, _, theirs),) = said
    assert (other, code) == (0, 0), err
    left = "another process is timing on cpu here; the rows are left to it\n"
    assert (left in theirs) is is_same_chip
    passed = "multi-head: another process is at it; passed over\n"
    assert (passed in theirs) is not is_same_chip
    done = 0 if is_same_chip else 1
    assert f"{done} of 2 results are there; other processes are at work on the rest" in theirs
    assert ("multi-query: another process has it; skipped\n" in err) is not is_same_chip
    assert err.endswith(f"2 of 2 results are there; {to_report(tmp_path)}\n")
    assert not list((tmp_path / "runs").rglob("*.lock"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["table1", "--only=multi-qery"], "has no row 'multi-qery'; did you mean 'multi-query'?"),
        (["table3", "--only=multi-query-local"], "did you mean 'multi-query'?"),
        (["table2", "--only=multi-head-1x128"], "table2 has no row 'multi-head-1x128'"),
        (["table4"], "there is no 'table4' to reproduce; did you mean"),
        (["table1", "--scale=smal"], "there is no scale 'smal'; did you mean 'small'?"),
        (["table2", "--scale=smal"], "there is no scale 'smal'; did you mean 'small'?"),
        (["table2", "--steps=3"], "--steps is for table1 and table3"),
        (["table1", "--steps=0"], "steps=0 must be at least 1"),
        (["table1", "--seeds=none"], "is no number, as 3, and no list"),
        (["table1", "--seeds=0"], "names no seed"),
        (["table1", "--minutes=-1"], "--minutes -1.0 is no time"),
        (["table1", "--set=model.g=2"], "is not train.NAME=VALUE"),
        (["table1", "--scale=paper", "--data=nowhere"], "there is no folder nowhere"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    writehead, tmp_path, monkeypatch, arguments, words
):
    monkeypatch.chdir(tmp_path)
    code, out, err = writehead("reproduce", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert words in err
    assert err.count("\n") == 1


def test_results_that_cannot_be_written_are_told_before_the_training(writehead, tmp_path):
    (tmp_path / "results").write_text("a file where a folder should be")
    code, _, err = run(writehead, tmp_path, "table1", "--only", "multi-query")
    assert code == 2
    assert "could not be written" in err
    assert not (tmp_path / "runs").exists()


def test_missing_text_is_named_file_by_file(writehead, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("books.txt.xz", "lm1b-heldout.dev.txt"):
        (tmp_path / name).write_text("some text\n")
    code, _, err = writehead("reproduce", "table3", "--data=.")
    assert code == 2
    assert ". lacks books.valid.txt (plain, .xz, .gz or .bz2)" in err
    code, _, err = writehead("reproduce", "table1")
    assert code == 2
    names = ("europarl-1", "europarl-2", "tatoeba", "newstest2013", "newstest2014")
    assert f"data lacks {', '.join(f'{n}.{side}' for n in names for side in ('en', 'de'))}" in err


def test_the_documentation_says_how_to_get_every_file():
    text = (Path(__file__).parents[2] / "docs" / "reproducing.md").read_text(encoding="utf-8")
    for name in (texts.BOOKS, texts.BOOKS_DEV, texts.NEWS):
        assert f"`{name}`" in text.partition("## Where to get the text")[2]
    for stem in (*texts.PAIRS, texts.PAIRS_DEV, texts.PAIRS_TEST):
        assert f"> data/{stem}." in text


def test_many_processes_of_one_training_are_told_to_share_rows_instead(
    writehead, tmp_path, monkeypatch
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = run(writehead, tmp_path, "table1")
    assert code == 2
    assert "start the same command once a GPU" in err


def test_files_are_read_as_the_small_tables_need_them(tmp_path):
    for stem in (*texts.PAIRS, texts.PAIRS_DEV, texts.PAIRS_TEST):
        for side in ("en", "de"):
            (tmp_path / f"{stem}.{side}").write_text(f"{stem} {side} one\n{stem} {side} two\n")
    found = texts.translation_files(tmp_path)
    assert len(found.inputs.train) == 3
    test = found.scored["test"]()
    assert test.name == "newstest2014"
    assert test.sources == ["newstest2014 en one", "newstest2014 en two"]
    assert test.targets == ["newstest2014 de one", "newstest2014 de two"]


def test_a_hub_copy_in_a_folder_serves_the_papers_scale(tmp_path, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table
    for split in ("train", "test"):
        parquet.write_table(table({"text": [f"{split} line"] * 2}), tmp_path / f"{split}.parquet")
    found = texts.language_hub(tmp_path)
    assert found.scored["dev"]().targets == ["test line", "test line"]
    assert list(found.scored) == ["dev"]

    monkeypatch.setattr(texts, "hub_inputs", lambda name, pair: (name, pair))
    monkeypatch.setattr(texts, "named_test_set", lambda name: ([f"{name} en"], [f"{name} de"]))
    found = texts.translation_hub(None)
    assert found.inputs == ("wmt14", "en-de")
    test = found.scored["test"]()
    assert (test.name, test.sources) == ("sacrebleu -t wmt14", ["wmt14 en"])
    assert found.scored["dev"]().targets == ["wmt13 de"]


def test_the_papers_scale_is_the_papers_experiment():
    one, three = (find_experiment(table, "paper") for table in ("table1", "table3"))
    assert one.train == TrainConfig()
    assert one.train.steps == TABLE_1_TRAINING.steps == 100_000
    assert one.train.rows * one.train.target_length == TABLE_1_TRAINING.tokens
    assert three.train.steps == TABLE_3_TRAINING.steps == 136_000
    assert three.train.rows * three.train.target_length == TABLE_3_TRAINING.tokens == 65_536
    assert three.train.label_smoothing == 0.0
    assert one.prepare.vocabulary == FAMILIES["wmt14"].vocabulary


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=lambda one: one.name)
def test_every_setting_of_an_experiment_has_a_reason(experiment):
    assert experiment.scale in SCALES
    known = {field.name for field in dataclasses.fields(TrainConfig)}
    for name, because in experiment.settings.items():
        assert name in known
        assert because.why
    own = experiment.train
    assert experiment.with_steps(own.steps) == experiment.with_steps(None) == own
    assert experiment.with_steps(own.steps // 2).warmup == own.warmup // 2
    assert experiment.with_steps(1).warmup == 1


def test_seeds_are_a_count_or_a_list():
    assert read_seeds("3") == (0, 1, 2)
    assert read_seeds("0,2") == (0, 2)
    assert read_seeds("2,") == (2,)
    for text in ("", ",", "-1", "1,-1", "x"):
        with pytest.raises(ConfigError):
            read_seeds(text)
