import errno
import json
import multiprocessing
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from corpora import files, pair_inputs, pairs, sentences, write, write_pairs
from writehead.config import PrepareConfig
from writehead.data import prepare as room
from writehead.data.cleaning import normalise
from writehead.data.dataset import Dataset
from writehead.data.prepare import prepare
from writehead.data.sources import Chunk, Inputs, TextFiles, parallel_files, text_files
from writehead.errors import ConfigError, DataError

SMALL = PrepareConfig(task="translation", vocabulary=400, dev=0)


def texts(dataset, split="train"):
    """The rows of a split as text again."""
    rows, decode = dataset.split(split), dataset.tokenizer.decode
    if dataset.task == "language":
        return [decode(rows.target(i).tolist()) for i in range(len(rows))]
    return [
        (decode(rows.source(i).tolist()), decode(rows.target(i).tolist())) for i in range(len(rows))
    ]


def test_every_pair_is_in_the_dataset_in_order(tmp_path):
    rows = pairs(300)
    dataset = prepare(tmp_path / "ds", pair_inputs(tmp_path, rows), SMALL, workers=1)
    assert texts(dataset) == rows
    assert dataset.vocabulary == 400
    info = json.loads((tmp_path / "ds" / "dataset.json").read_text())
    train = dataset.split("train")
    assert info["splits"]["train"]["source_tokens"] == int(train.source_lengths.sum())
    assert info["splits"]["train"]["target_tokens"] == int(train.target_lengths.sum())
    assert info["dropped"] == {}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ds", "train.a", "train.b"]


def test_what_is_left_out_is_counted_by_its_reason(tmp_path):
    good = pairs(200)
    bad = [
        ("", "x"),
        ("only source", " \u200b"),
        ("same words here", "same  words here"),
        (good[3][0] + " ", good[3][1]),
        good[5],
        ("short", "of a translation that goes on and on " * 3),
        ("long " * 300, "lang " * 300),
        ("y" * 3_000_000, "y"),
    ]
    dev = pairs(10, seed=9)
    leaked = [(f"\t{dev[4][0]}", dev[4][1])]
    train = write_pairs(tmp_path, "train", [*good, *bad, *leaked])
    held_out = write_pairs(tmp_path, "dev", [*dev, dev[0], ("same", "same"), ("", "x")])
    inputs = parallel_files(train[:1], train[1:], held_out[:1], held_out[1:])
    dataset = prepare(tmp_path / "ds", inputs, SMALL, workers=1)
    assert texts(dataset) == good
    # held-out text is kept as it is, as far as it can be used
    assert texts(dataset, "dev") == [*dev, dev[0], ("same", "same")]
    assert dataset.info["splits"]["train"]["dropped"] == {
        "empty": 2,
        "too long": 2,
        "source and target identical": 1,
        "lengths too unlike": 1,
        "duplicate": 2,
        "also in the held-out text": 1,
    }
    assert dataset.info["splits"]["dev"]["dropped"] == {"empty": 1}
    assert dataset.info["dropped"]["empty"] == 3


def test_duplicates_are_kept_where_asked(tmp_path):
    rows = [*pairs(100), *pairs(50)]
    config = replace(SMALL, keep_duplicates=True)
    dataset = prepare(tmp_path / "ds", pair_inputs(tmp_path, rows), config, workers=1)
    assert texts(dataset) == rows


def test_a_language_model_keeps_long_lines_unless_told_otherwise(tmp_path):
    lines = [*sentences(100, seed=2), "wort " * 2000]
    inputs = text_files([write(tmp_path / "text", lines)], [])
    config = PrepareConfig(task="language", vocabulary=400, dev=0)
    dataset = prepare(tmp_path / "all", inputs, config, workers=1)
    assert texts(dataset) == [normalise(line) for line in lines]
    config = replace(config, max_tokens=700)
    assert len(prepare(tmp_path / "some", inputs, config, workers=1).split("train")) == 100


def test_lines_are_held_out_from_train_where_there_is_no_dev_text(tmp_path):
    rows = pairs(400)
    inputs = pair_inputs(tmp_path, rows)
    dataset = prepare(tmp_path / "ds", inputs, replace(SMALL, dev=2000), workers=1)
    train, dev = texts(dataset), texts(dataset, "dev")
    assert len(dev) == 20  # a twentieth
    assert sorted(train + dev) == sorted(rows)
    other = prepare(tmp_path / "other", inputs, replace(SMALL, dev=9, seed=1), workers=1)
    assert len(texts(other, "dev")) == 9
    assert not set(texts(other, "dev")) <= set(dev)


def test_several_files_follow_one_another(tmp_path):
    first, second = pairs(150), pairs(90, seed=1)
    a, b = write_pairs(tmp_path, "first", first), write_pairs(tmp_path, "second", second)
    inputs = parallel_files([a[0], b[0]], [a[1], b[1]], [], [])
    dataset = prepare(tmp_path / "ds", inputs, SMALL, workers=1)
    assert texts(dataset) == first + second


def test_more_processes_change_nothing_but_the_time(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "FEW", 0)
    inputs = pair_inputs(tmp_path, [*pairs(4500, longest=5), *pairs(200)])
    one = prepare(tmp_path / "one", inputs, replace(SMALL, dev=50), workers=1)
    two = prepare(tmp_path / "two", inputs, replace(SMALL, dev=50), workers=2)
    assert files(one.directory) == files(two.directory)


def test_ids_past_65535_are_stored_in_four_bytes(tmp_path, monkeypatch):
    """The files' type follows from the vocabulary; a small one stands for a large one here."""
    inputs = pair_inputs(tmp_path, pairs(100))
    prepare(tmp_path / "ds", inputs, SMALL, workers=1)
    wide = np.dtype(np.uint32)
    monkeypatch.setattr("writehead.data.dataset.token_dtype", lambda vocabulary: wide)
    monkeypatch.setattr("writehead.data.workers.token_dtype", lambda vocabulary: wide)
    dataset = prepare(tmp_path / "wide", inputs, SMALL, workers=1)
    assert texts(dataset) == pairs(100)
    size = (tmp_path / "ds" / "train.source.tokens").stat().st_size
    assert (tmp_path / "wide" / "train.source.tokens").stat().st_size == 2 * size


def test_the_same_again_is_nothing_to_do_and_another_is_refused(tmp_path):
    inputs = pair_inputs(tmp_path, pairs(100))
    before = files(prepare(tmp_path / "ds", inputs, SMALL, workers=1).directory)
    assert files(prepare(tmp_path / "ds", inputs, SMALL, workers=2).directory) == before
    with pytest.raises(DataError, match=r"prepared otherwise \(vocabulary 400, not 410\)"):
        prepare(tmp_path / "ds", inputs, replace(SMALL, vocabulary=410), workers=1)
    other = pair_inputs(tmp_path, pairs(100, seed=1))
    with pytest.raises(DataError, match="other text"):
        prepare(tmp_path / "ds", other, SMALL, workers=1)
    assert files(tmp_path / "ds") == before


def test_what_is_no_dataset_is_not_replaced_but_an_empty_folder_may_be(tmp_path):
    inputs = pair_inputs(tmp_path, pairs(100))
    (tmp_path / "empty").mkdir()
    assert len(prepare(tmp_path / "empty", inputs, SMALL, workers=1).split("train")) == 100
    (tmp_path / "full").mkdir()
    write(tmp_path / "full" / "precious", ["x"])
    for name in ("full", "full/precious"):
        with pytest.raises(DataError, match="exists and is no dataset"):
            prepare(tmp_path / name, inputs, SMALL, workers=1)


def test_two_at_once_in_one_place_are_refused(tmp_path):
    inputs = pair_inputs(tmp_path, pairs(100))

    class Meanwhile(Inputs):
        def splits(self):
            return {"train": (self,)}

        sides = 2

        def identity(self):
            return {}

        def chunks(self):
            with pytest.raises(DataError, match="another process is preparing"):
                prepare(tmp_path / "ds", inputs, SMALL, workers=1)
            return inputs.train[0].chunks()

    prepare(tmp_path / "ds", Meanwhile(train=inputs.train), SMALL, workers=1)


def test_an_error_leaves_nothing_behind(tmp_path):
    source, target = write_pairs(tmp_path, "train", pairs(100))
    before = sorted(tmp_path.iterdir())
    for config, words in (
        (replace(SMALL, vocabulary=30_000), "ask for a smaller one"),
        (replace(SMALL, vocabulary=262), "ask for a larger one"),
    ):
        with pytest.raises(DataError, match=words):
            prepare(tmp_path / "ds", parallel_files([source], [target], [], []), config, workers=1)
        assert sorted(tmp_path.iterdir()) == before


def test_text_of_which_nothing_is_left_is_an_error(tmp_path):
    same = [(line, line) for line in sentences(100, seed=0)]
    with pytest.raises(
        DataError, match=r"none of the 100 train lines can be used .*identical: 100"
    ):
        prepare(tmp_path / "ds", pair_inputs(tmp_path, same), SMALL, workers=1)


def test_an_error_in_another_process_is_the_same_sentence(tmp_path):
    inputs = pair_inputs(tmp_path, pairs(100))
    with pytest.raises(DataError, match="ask for a smaller one"):
        prepare(tmp_path / "ds", inputs, replace(SMALL, vocabulary=30_000), workers=2)


class Deadly(TextFiles):
    """Pairs of files in the midst of which a process that encodes them is killed."""

    def chunks(self):
        for chunk in super().chunks():
            yield chunk
            for process in multiprocessing.active_children():
                process.kill()


def test_a_killed_process_is_one_sentence_and_no_dataset(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "FEW", 0)
    corpus = Deadly(write_pairs(tmp_path, "train", pairs(9000, longest=4)))
    with pytest.raises(DataError, match="was killed, perhaps for want of memory"):
        prepare(tmp_path / "ds", Inputs(train=(corpus,)), SMALL, workers=2)
    assert not (tmp_path / "ds").exists()


class Endless:
    """A corpus that is made as it is read, so that all memory used is ours."""

    sides = 1

    def __init__(self, lines: int) -> None:
        self.lines = lines

    def identity(self) -> dict[str, object]:
        return {"made": self.lines}

    def chunks(self):
        words = [
            "alpha",
            "beta",
            "gamma",
            "delta",
            "epsilon",
            "zeta",
            "eta",
            "theta",
            "iota",
            "kappa",
        ]
        for first in range(0, self.lines, 2000):
            side = [f"{words[i % 10]} {i} {words[i % 7]} " * 9 for i in range(first, first + 2000)]
            yield Chunk(first, (side,), (first + 2000) / self.lines)


def test_memory_does_not_grow_with_the_text(tmp_path):
    """Peak memory of a fresh process, ten times the text: at most what fingerprints need more."""
    code = (
        "import resource, sys; from test_prepare import Endless, PrepareConfig, Inputs, prepare\n"
        "config = PrepareConfig(task='language', vocabulary=400, sample=1000, dev=10)\n"
        "lines = int(sys.argv[2])\n"
        "prepare(sys.argv[1], Inputs(train=(Endless(lines),)), config, workers=1)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    peaks = []
    for lines in (4_000, 24_000):
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / f"ds{lines}"), str(lines)],
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])},
            capture_output=True,
            text=True,
            check=True,
        )
        peaks.append(int(done.stdout) * 1024)
    tokens = Dataset.open(tmp_path / "ds24000").info["splits"]["train"]["target_tokens"]
    assert tokens > 1_000_000
    # lists of the tokens would take 8 MB more; fingerprints take 0.2 MB
    assert peaks[1] - peaks[0] < 4_000_000


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path):
    inputs = pair_inputs(tmp_path, pairs(2000, longest=8))
    before = sorted(tmp_path.iterdir())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (10, 10_000, 30_000):  # while sampling, learning and encoding
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        try:
            with pytest.raises(DataError, match=r"could not be written: .*free some space"):
                prepare(tmp_path / "ds", inputs, SMALL, workers=1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert sorted(tmp_path.iterdir()) == before
    assert len(prepare(tmp_path / "ds", inputs, SMALL, workers=1).split("train")) == 2000


def test_nobody_takes_the_place_while_a_failed_run_clears_it(tmp_path, monkeypatch):
    inputs, remove, refused = pair_inputs(tmp_path, pairs(100)), room._remove, []

    def fail(job):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def watched(path):
        remove(path)
        if path.name == ".ds.partial" and not refused:
            with pytest.raises(DataError) as found:  # as by another process, at this moment
                prepare(tmp_path / "ds", inputs, SMALL, workers=1)
            refused.append(str(found.value))

    monkeypatch.setattr(room, "_make", fail)
    monkeypatch.setattr(room, "_remove", watched)
    with pytest.raises(DataError, match="could not be made"):
        prepare(tmp_path / "ds", inputs, SMALL, workers=1)
    [sentence] = refused
    assert "another process is preparing" in sentence
    assert not list(tmp_path.glob(".*"))


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path):
    write(tmp_path / "file", ["x"])
    with pytest.raises(DataError, match="could not be made"):
        prepare(tmp_path / "file" / "ds", pair_inputs(tmp_path, pairs(100)), SMALL, workers=1)


@pytest.mark.parametrize(
    ("field", "value"),
    [("vocabulary", 0), ("max_ratio", 0.5), ("dev", -1), ("max_tokens", 0), ("sample", 0)],
)
def test_a_config_that_cannot_be_meant_is_refused(field, value):
    with pytest.raises(ConfigError, match=field):
        replace(SMALL, **{field: value})


def test_the_task_and_the_text_must_agree(tmp_path):
    inputs = text_files([write(tmp_path / "text", ["x"])], [])
    with pytest.raises(DataError, match="translation takes 2"):
        prepare(tmp_path / "ds", inputs, SMALL, workers=1)
