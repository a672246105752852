"""The log, TensorBoard and the messages on the screen."""

import random
from dataclasses import replace

import pytest

from corpora import pair_inputs, pairs
from trainings import CONFIG, LANGUAGE, MODEL, go
from writehead.config import PrepareConfig
from writehead.data.dataset import Dataset
from writehead.data.prepare import prepare
from writehead.errors import RunError
from writehead.training.journal import read_log


def test_every_interval_is_logged_and_shown_on_tensorboard(dataset, tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    go(dataset, tmp_path / "run")
    entries = read_log(tmp_path / "run")
    assert [e["step"] for e in entries if "loss" in e] == [3, 6, 9, 11]
    assert [e["step"] for e in entries if "dev_ln_ppl" in e] == [5, 10, 11]
    board = events.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    for name in ("loss", "ln_ppl", "gradient_norm", "dev_ln_ppl", "utilisation"):
        shown = {event.step: event.value for event in board.Scalars(name)}
        assert shown == pytest.approx({e["step"]: e[name] for e in entries if name in e}), name
    # an entry is the mean over the steps since the one before
    go(dataset, tmp_path / "each", replace(CONFIG, log_every=1))
    norms = {e["step"]: e["gradient_norm"] for e in read_log(tmp_path / "each") if "loss" in e}
    for first, last in ((1, 3), (4, 6), (7, 9), (10, 11)):
        mean = sum(norms[step] for step in range(first, last + 1)) / (last + 1 - first)
        [found] = [e["gradient_norm"] for e in entries if e["step"] == last and "loss" in e]
        assert found == pytest.approx(mean)


def test_a_dev_split_without_usable_lines_is_ignored(tmp_path):
    rows = pairs(90, longest=4)
    [held] = random.Random("0/dev").sample(range(90), 1)  # the line that `prepare` holds out
    rows[held] = ("", "")
    config = PrepareConfig(task="translation", vocab_size=330, dev=1)
    prepare(tmp_path / "data", pair_inputs(tmp_path, rows), config, threads=1)
    go(tmp_path / "data", tmp_path / "run")
    assert not any("dev_ln_ppl" in entry for entry in read_log(tmp_path / "run"))


def test_pairs_too_long_for_a_row_are_announced_and_text_is_cut(dataset, text, tmp_path, capsys):
    split = Dataset.open(dataset).split("train")
    lengths = zip(split.source.lengths + 1, split.target.lengths + 1, strict=True)
    skipped = sum(source > 20 or target > 17 for source, target in lengths)
    assert 0 < skipped < len(split)
    narrow = replace(CONFIG, steps=1, source_length=20, target_length=17)
    for data, model, announced in ((dataset, MODEL, True), (text, LANGUAGE, False)):
        go(data, tmp_path / model.task, narrow, model)
        assert (f"skipping {skipped} pairs" in capsys.readouterr().err) == announced


def test_only_a_last_entry_that_was_cut_short_is_dropped(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert [entry["step"] for entry in read_log(tmp_path)] == [1, 2]
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(RunError, match=r"log\.jsonl"):
        read_log(tmp_path)
