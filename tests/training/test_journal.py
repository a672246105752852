import json
import os
import pty
import random
from contextlib import suppress
from dataclasses import replace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from corpora import pair_inputs, pairs, write_pairs
from trainings import CONFIG, LANGUAGE, MODEL, curve, go
from writehead import cost
from writehead.config import PrepareConfig
from writehead.data.dataset import Dataset
from writehead.data.prepare import prepare
from writehead.data.sources import parallel_files
from writehead.model import load_run
from writehead.training.journal import Journal, read_log

ENTRY = {"loss": 2.0, "ln_ppl": 1.5, "tokens_per_second": 12345.6, "utilisation": 0.625}


def test_entries_after_the_start_and_half_a_line_go(tmp_path):
    lines = [json.dumps({"step": step, "loss": 1.0 / step}) for step in (2, 4, 6)]
    (tmp_path / "log.jsonl").write_text("\n".join([*lines, '{"step": 8, "lo']))
    assert [entry["step"] for entry in read_log(tmp_path)] == [2, 4, 6]
    with Journal(tmp_path, 4, 10) as journal:
        journal.log(6, ENTRY)
    assert [entry["step"] for entry in read_log(tmp_path)] == [2, 4, 6]
    assert read_log(tmp_path)[-1] == {"step": 6, **ENTRY}


def test_a_run_without_a_log_has_no_entries(tmp_path):
    assert read_log(tmp_path) == []


def test_a_quiet_journal_says_and_writes_nothing(tmp_path, capsys):
    with Journal(tmp_path, 0, 10, quiet=True) as journal:
        journal.log(6, ENTRY)
        journal.say("something")
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr() == ("", "")


def test_a_line_has_the_loss_the_speed_the_utilisation_and_the_time_left(tmp_path, capsys):
    with Journal(tmp_path, 0, 10) as journal:
        journal.log(6, ENTRY)
    said = capsys.readouterr().err
    assert said.startswith("step 6/10 loss=2 ln_ppl=1.5 tokens/s=12,346 utilisation=62% left=0:0")


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="there are no terminals here")
def test_a_terminal_of_80_columns_shows_a_bar_with_what_matters(tmp_path, monkeypatch):
    ours, theirs = pty.openpty()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        with Journal(tmp_path, 0, 10) as journal:
            journal.log(6, ENTRY)
            journal.count(7)  # a step without an entry moves the bar all the same
    read = b""
    with suppress(OSError):  # which is how a terminal ends; a read may bring a part only
        while part := os.read(ours, 1 << 16):
            read += part
    shown = read.decode()
    os.close(ours)
    assert "7/10" in shown
    assert "tokens/s=12,346 utilisation=62% left=0:0" in shown


def test_every_step_is_counted_on_the_bar_and_not_only_those_that_are_logged(
    dataset, tmp_path, monkeypatch
):
    counted = []
    monkeypatch.setattr(Journal, "count", lambda journal, step: counted.append(step))
    go(dataset, tmp_path / "run")
    assert counted == list(range(1, CONFIG.steps + 1))


def test_a_training_that_takes_hours_on_a_cpu_begins_with_a_word_of_advice(
    dataset, tmp_path, monkeypatch, capsys
):
    go(dataset, tmp_path / "short")
    assert "hours" not in capsys.readouterr().err

    def slow(device, dtype):  # so that the products of 11 steps alone take 5.5 hours
        setting = cost.Setting(CONFIG.rows, CONFIG.source_length, CONFIG.target_length)
        model = replace(MODEL, vocabulary=330)
        step = cost.training_step(model, setting, cost.Pairs(0, 0, 0)).operations
        return step / 1800

    monkeypatch.setattr("writehead.training.loop.matrix_rate", slow)
    go(dataset, tmp_path / "long")
    [line] = [one for one in capsys.readouterr().err.splitlines() if "hours" in one]
    assert "5.5 hours" in line
    assert "train.steps" in line
    go(dataset, tmp_path / "long")  # nothing is left to do
    assert "hours" not in capsys.readouterr().err


def test_the_log_has_every_step_and_tensorboard_shows_the_log(dataset, tmp_path):
    go(dataset, tmp_path)
    entries = read_log(tmp_path)
    assert [e["step"] for e in entries if "loss" in e] == [3, 6, 9, 11]
    assert [e["step"] for e in entries if "dev_ln_ppl" in e] == [5, 10, 11]
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    for name in ("loss", "ln_ppl", "gradient_norm", "dev_ln_ppl", "utilisation"):
        shown = {event.step: event.value for event in board.Scalars(name)}
        logged = {e["step"]: e[name] for e in entries if name in e}
        assert shown == pytest.approx(logged), name


def test_a_dev_split_of_no_lines_is_as_none(tmp_path):
    rows = pairs(90, longest=4)
    [held] = random.Random("0/dev").sample(range(90), 1)  # the line that `prepare` puts aside
    rows[held] = ("", "")
    for name, dev in (("without", 0), ("with", 1)):
        config = PrepareConfig(task="translation", vocabulary=330, dev=dev)
        data = prepare(tmp_path / name, pair_inputs(tmp_path, rows), config, workers=1)
        go(tmp_path / name, tmp_path / f"run-{name}")
    assert [len(data.split(name)) for name in ("train", "dev")] == [89, 0]
    assert curve(tmp_path / "run-with") == curve(tmp_path / "run-without")


def test_a_dev_split_of_pairs_longer_than_the_positions_is_as_none(tmp_path):
    train = write_pairs(tmp_path, "train", pairs(90, longest=4))
    dev = write_pairs(tmp_path, "dev", [(a * 9, b * 9) for a, b in pairs(2, seed=3, longest=4)])
    inputs = parallel_files(*([file] for file in (*train, *dev)))
    config = PrepareConfig(task="translation", vocabulary=330)
    data = prepare(tmp_path / "pairs", inputs, config, workers=1)
    assert len(data.split("dev")) == 2
    go(tmp_path / "pairs", tmp_path / "run")
    assert [entry["step"] for entry in read_log(tmp_path / "run")] == [3, 6, 9, 11]


def test_training_opens_with_what_is_trained_where(dataset, text, tmp_path, capsys):
    go(dataset, tmp_path / "pairs")
    count = sum(P.numel() for P in load_run(tmp_path / "pairs").model.parameters())
    opening = f"{count:,} parameters on cpu; 11 steps of 4 × (48 + 48) tokens"
    assert capsys.readouterr().err.splitlines()[0] == opening
    go(dataset, tmp_path / "pairs")  # where there is nothing to do it does not
    assert "parameters on cpu" not in capsys.readouterr().err
    go(text, tmp_path / "text", model=LANGUAGE)
    assert "; 11 steps of 4 × 48 tokens\n" in capsys.readouterr().err


def test_training_opens_with_how_many_pairs_are_longer_than_a_row(dataset, text, tmp_path, capsys):
    split = Dataset.open(dataset).split("train")
    ends = [(len(split.source(i)) + 1, len(split.target(i)) + 1) for i in range(len(split))]
    long = sum(source > 20 or target > 17 for source, target in ends)
    assert 0 < long < len(split)
    narrow = replace(CONFIG, steps=2, source_length=20, target_length=17)
    go(dataset, tmp_path / "narrow", narrow)
    said = capsys.readouterr().err.splitlines()
    assert said[1] == (
        f"note: training leaves out {long} of {len(split)} pairs, which are longer than a row of "
        f"(20 + 17) tokens"
    )
    assert sum("leaves out" in line for line in said) == 1
    go(dataset, tmp_path / "wide", replace(CONFIG, steps=2))
    go(text, tmp_path / "text", narrow, LANGUAGE)  # text is cut, and none of it left out
    assert "leaves out" not in capsys.readouterr().err


def test_an_entry_is_the_mean_over_all_steps_since_the_one_before(dataset, tmp_path):
    # an evaluation between two entries takes nothing from them
    go(dataset, tmp_path / "each", replace(CONFIG, log_every=1))
    go(dataset, tmp_path / "run")
    norms = {e["step"]: e["gradient_norm"] for e in curve(tmp_path / "each") if "loss" in e}
    for entry in curve(tmp_path / "run"):
        if "loss" in entry:
            own = range(entry["step"] - 2 + (entry["step"] == 11), entry["step"] + 1)
            mean = sum(norms[step] for step in own) / len(own)
            assert entry["gradient_norm"] == pytest.approx(mean)
