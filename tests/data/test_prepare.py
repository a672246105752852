"""From text to a dataset: what is kept and left out, and what an error or a kill leaves behind."""

import json
import re
import tracemalloc
from collections import Counter
from dataclasses import replace

import pytest

from corpora import files, pair_inputs, pairs, sentences, write, write_pairs
from processes import run_python
from texts import full_disk
from writehead.config import PrepareConfig
from writehead.data.bpe import normalise
from writehead.data.corpus import pairs as embedded_pairs
from writehead.data.dataset import Dataset
from writehead.data.prepare import prepare
from writehead.data.sources import Inputs, TextFiles, parallel_files, text_files
from writehead.errors import DataError
from writehead.util.progress import Reporter

SMALL = PrepareConfig(task="translation", vocab_size=400, dev=0)
REASONS = {"empty": 2, "too long": 2, "source and target identical": 1, "lengths too unlike": 1}
REASONS |= {"duplicate": 2, "also in the held-out text": 1}


def texts(dataset, split="train"):
    """The rows of a split, decoded."""
    rows, decode = dataset.split(split), dataset.tokenizer.decode
    return [tuple(decode(side[i]) for side in rows.sides.values()) for i in range(len(rows))]


def test_pairs_are_kept_in_order_and_omissions_counted_by_reason(tmp_path):
    good, more, dev = pairs(200), pairs(90, seed=1), pairs(10, seed=9)
    bad = [
        ("", "x"),
        ("only source", " \u200b"),
        ("same words here", "same  words here"),
        (good[3][0] + " ", good[3][1]),
        good[5],
        ("short", "of a translation that goes on and on " * 3),
        ("long " * 300, "lang " * 300),
        ("y" * 3_000_000, "y"),
        (f"\t{dev[4][0]}", dev[4][1]),
    ]
    (a, b), (c, d) = (write_pairs(tmp_path, *one) for one in (("1", good), ("2", [*more, *bad])))
    e, f = write_pairs(tmp_path, "dev", [*dev, dev[0], ("same", "same"), ("", "x")])
    inputs, before = parallel_files([a, c], [b, d], [e], [f]), set(tmp_path.iterdir())
    dataset = prepare(tmp_path / "ds", inputs, SMALL, threads=1)
    assert set(tmp_path.iterdir()) == {*before, tmp_path / "ds"}
    assert texts(dataset) == good + more
    assert texts(dataset, "dev") == [*dev, dev[0], ("same", "same")]  # all that can be used
    splits, train = dataset.info["splits"], dataset.split("train")
    assert (splits["train"]["dropped"], splits["dev"]["dropped"]) == (REASONS, {"empty": 1})
    assert dataset.info["dropped"]["empty"] == 3
    assert splits["train"]["source_tokens"] == int(train.source.lengths.sum())
    kept = prepare(tmp_path / "kept", inputs, replace(SMALL, keep_duplicates=True), threads=1)
    assert texts(kept) == [*good, *more, good[3], good[5]]


def test_a_language_model_keeps_long_lines_unless_a_limit_is_set(tmp_path):
    lines = [*sentences(100, seed=2), "wort " * 2000]
    inputs = text_files([write(tmp_path / "text", lines)], [])
    for limit, kept in ((None, 101), (700, 100)):
        config = PrepareConfig(task="language", vocab_size=400, dev=0, max_tokens=limit)
        dataset = prepare(tmp_path / str(limit), inputs, config, threads=1)
        assert texts(dataset) == [(normalise(line),) for line in lines[:kept]]


@pytest.mark.parametrize(("dev", "held_out"), [(9, 9), (2000, 20)])
def test_without_dev_text_at_most_a_twentieth_of_train_is_held_out(tmp_path, dev, held_out):
    inputs, found = pair_inputs(tmp_path, pairs(400)), []
    for seed in (0, 1):
        config = replace(SMALL, dev=dev, seed=seed)
        dataset = prepare(tmp_path / str(seed), inputs, config, threads=1)
        found.append(texts(dataset, "dev"))
        assert sorted(texts(dataset) + found[-1]) == sorted(pairs(400))
        assert len(found[-1]) == held_out
    assert found[0] != found[1]


def test_held_out_lines_are_shown_as_such(tmp_path, writehead):
    pair_inputs(tmp_path, pairs(200))
    sides = [
        f"--{name}={tmp_path / 'train'}.{end}" for name, end in (("source", "a"), ("target", "b"))
    ]
    code, out, err = writehead("prepare", tmp_path / "ds", *sides, "--vocab-size=400", "--dev=7")
    assert code == 0, err
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert ("200" in rows["train"], "held out of train" in rows["dev"]) == (True, True)


def test_tokenizers_of_interrupted_attempts_are_removed_whatever_their_settings(tmp_path):
    other, key = tmp_path / ".ds.notes.tokenizer", "0123456789abcdef"
    for path in (other, tmp_path / f".ds.{key}.tokenizer", tmp_path / f".ds.x.{key}.tokenizer"):
        path.touch()
    prepare(tmp_path / "ds", pair_inputs(tmp_path, pairs(60)), SMALL, threads=1)
    left = {path.name for path in tmp_path.glob(".*")}
    assert left == {other.name, f".ds.x.{key}.tokenizer"}


def test_the_number_of_threads_changes_no_byte(tmp_path):
    inputs, config = pair_inputs(tmp_path, pairs(4500, longest=5)), replace(SMALL, dev=50)
    one, two = (prepare(tmp_path / str(n), inputs, config, threads=n).directory for n in (1, 2))
    assert files(one) == files(two)


def test_only_an_empty_folder_is_replaced_and_an_error_leaves_nothing(tmp_path):
    inputs, other = pair_inputs(tmp_path, pairs(100)), TextFiles((tmp_path / "train.b",) * 2)
    for name in ("ds", "full"):
        (tmp_path / name).mkdir()
    before = files(prepare(tmp_path / "ds", inputs, SMALL, threads=1).directory)
    assert files(prepare(tmp_path / "ds", inputs, SMALL, threads=2).directory) == before
    write(tmp_path / "full" / "precious", ["x"])
    for place, given, config, words in (
        ("ds", inputs, replace(SMALL, vocab_size=410), "another vocab_size"),
        ("ds", inputs, replace(SMALL, split_digits=True), "another split_digits"),
        ("ds", Inputs((other,)), SMALL, "another text"),
        ("full", inputs, SMALL, "not a dataset"),
        ("full/precious", inputs, SMALL, "not a dataset"),
        ("full/precious/ds", inputs, SMALL, "could not be written"),
        ("new", inputs, replace(SMALL, vocab_size=262), "too small"),
        ("new", inputs, replace(SMALL, task="language"), "language.* needs 1"),
    ):
        with pytest.raises(DataError, match=words):
            prepare(tmp_path / place, given, config, threads=1)
    assert not (tmp_path / "new").exists()
    assert (files(tmp_path / "ds"), files(tmp_path / "full")) == (before, {"precious": b"x\n"})


def test_only_one_process_prepares_a_dataset(tmp_path):
    paths, refused = write_pairs(tmp_path, "train", pairs(100)), []

    class Meanwhile(TextFiles):
        def rows(self):
            if not refused:
                with pytest.raises(DataError, match="another process") as error:
                    prepare(tmp_path / "ds", Inputs((TextFiles(paths),)), SMALL, threads=1)
                refused.append(error)
            return super().rows()

    prepare(tmp_path / "ds", Inputs((Meanwhile(paths),)), SMALL, threads=1)
    assert refused
    expected = prepare(tmp_path / "alone", Inputs((TextFiles(paths),)), SMALL, threads=1)
    assert files(tmp_path / "ds") == files(expected.directory)


class Generated:
    """A corpus made while it is read, so that all memory used belongs to `prepare`."""

    sides, lines = 1, 0

    def identity(self):
        return {"lines": self.lines}

    def rows(self):
        words = sentences(100, seed=1)
        return ((f"{words[i % 100]} {i}",) for i in range(self.lines))


def test_memory_does_not_grow_with_the_text(tmp_path):
    config = PrepareConfig(task="language", vocab_size=400, sample=1000, dev=10)
    corpus, peaks = Generated(), []
    for corpus.lines in (1_000, 4_000):
        tracemalloc.start()
        dataset = prepare(tmp_path / str(corpus.lines), Inputs((corpus,)), config, threads=1)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # lists of the tokens would take 8 bytes each
    assert peaks[1] - peaks[0] < 2 * dataset.info["splits"]["train"]["target_tokens"]


def test_a_full_disk_is_an_error_and_leaves_no_files(tmp_path):
    inputs = pair_inputs(tmp_path, pairs(2000, longest=8))
    before = sorted(tmp_path.iterdir())
    for limit in (10, 10_000, 30_000):  # while sampling, learning and encoding
        with full_disk(limit), pytest.raises(DataError, match="free disk space"):
            prepare(tmp_path / "ds", inputs, SMALL, threads=1)
        assert sorted(tmp_path.iterdir()) == before


def test_each_text_is_repeated_as_often_as_asked_without_its_duplicates(tmp_path):
    often, once = pairs(60), pairs(50, seed=1)
    (a, b), (c, d) = (
        write_pairs(tmp_path, *one)
        for one in (("often", [*often, often[3]]), ("once", [*once, often[0]]))
    )
    inputs = replace(parallel_files([a, c], [b, d], [], []), repeat=(3, 1))
    dataset = prepare(tmp_path / "ds", inputs, SMALL, threads=1)
    assert Counter(texts(dataset)) == Counter(often * 3 + once)
    assert dataset.info["splits"]["train"]["lines"] == 112
    assert dataset.info["dropped"] == {"duplicate": 2}
    held_out = prepare(tmp_path / "dev", inputs, replace(SMALL, dev=5), threads=1)
    dev = texts(held_out, "dev")
    assert len({*dev}) == 5
    assert not {*dev} & {*texts(held_out)}  # no copy of a held-out pair is left
    with pytest.raises(DataError, match="another text"):
        prepare(tmp_path / "ds", replace(inputs, repeat=(2, 1)), SMALL, threads=1)


def test_a_source_keeps_all_its_translations(tmp_path):
    rows = pairs(40)
    a, b = write_pairs(tmp_path, "human", rows)
    _, c = write_pairs(
        tmp_path, "teacher", [(x, y if i % 4 else y * 2) for i, (x, y) in enumerate(rows)]
    )
    dataset = prepare(tmp_path / "ds", parallel_files([a, a], [b, c], [], []), SMALL, threads=1)
    assert Counter(x for x, _ in texts(dataset)) == {
        x: 1 + (i % 4 == 0) for i, (x, _) in enumerate(rows)
    }


def test_lines_of_excluded_texts_are_not_trained_on(tmp_path):
    rows = [
        *pairs(60),
        ("Hello, World!", "Hallo Welt"),
        ("Hi", "HALLO?"),
        ("Hi world", "Hallo"),
        ("!?", "?!"),
    ]
    test = write(
        tmp_path / "test", ["hello world", "hallo", rows[7][0].upper(), "", " ", "!", "?!"]
    )
    inputs = replace(pair_inputs(tmp_path, rows), excluded=text_files([test], []).train)
    dataset = prepare(tmp_path / "ds", inputs, SMALL, threads=1)
    assert texts(dataset) == [row for i, row in enumerate(rows[:60]) if i != 7]
    assert dataset.info["dropped"] == {"in the excluded text": 5}
    with pytest.raises(DataError, match="another text"):
        prepare(tmp_path / "ds", replace(inputs, excluded=()), SMALL, threads=1)


def sizes(folder):
    dataset = Dataset.open(folder)
    return {name: len(dataset.split(name)) for name in dataset.splits}


@pytest.fixture
def command(writehead, monkeypatch, tmp_path):
    """Runs `writehead prepare ds …` in a fresh folder: exit code, output, errors."""
    monkeypatch.chdir(tmp_path)
    return lambda *given, folder="ds": writehead("prepare", folder, "--threads=1", *given)


def test_the_command_makes_a_dataset_and_prints_a_table(command, tmp_path):
    a, b = write_pairs(tmp_path, "train", [*pairs(200), pairs(200)[7], ("", "x")])
    c, d = write_pairs(tmp_path, "dev", pairs(20, seed=1))
    options = ["--source", a, "--target", b, "--dev-source", c, "--dev-target", d]
    code, out, _ = command(*options, "--vocab-size=400")
    assert (code, "duplicate" in out, "empty" in out) == (0, True, True)
    assert sizes(tmp_path / "ds") == {"train": 200, "dev": 20}
    options = ("--embedded", "--pairs=150", "--max-words=9", "--vocab-size=350")
    assert command(*options, folder="embedded")[0] == 0
    assert sizes(tmp_path / "embedded") == {"train": 150, "dev": 150, "test": 150}
    dataset = Dataset.open(tmp_path / "embedded")
    assert texts(dataset) == list(embedded_pairs("train", 150, max_words=9))


def test_the_command_repeats_excludes_and_varies(command, tmp_path):
    a, b = write_pairs(tmp_path, "train", pairs(80))
    c, d = write_pairs(tmp_path, "more", pairs(30, seed=1))
    test = write(tmp_path / "test", [pairs(80)[2][0]])
    given = ["--source", a, "--target", b, "--source", c, "--target", d, "--vocab-size=400"]
    options = ["--repeat=1", "--repeat=2", "--exclude", test, "--vary-case=1", "--dev=0"]
    code, out, _ = command(*given, *options)
    assert (code, "in the excluded text): 1" in out) == (0, True)
    rows = texts(Dataset.open(tmp_path / "ds"))
    assert len(rows) == 79 + 2 * 30
    assert {x for x, _ in rows} - {x for x, _ in pairs(80) + pairs(30, seed=1)}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--source=a", "--target=b", "--repeat=2", "--repeat=3"], "2 repeat counts .* 1 training"),
        (["--source=a", "--target=b", "--repeat=0"], "at least 1"),
        (["--source=a", "--target=b", "--vary-case=2"], "vary_case=2.0 .* at most 1"),
        (["--text=a", "--vary-copies=0.1"], "for translation"),
        (["--source=a", "--target=b", "--exclude=none"], "none cannot be read"),
    ],
)
def test_wrong_weights_and_shares_are_one_sentence(command, tmp_path, options, words):
    write(tmp_path / "a", ["x y"])
    write(tmp_path / "b", ["z"])
    code, _, err = command(*options)
    assert (code, len(err.strip().splitlines())) == (2, 1), err
    assert re.search(words, err), err


@pytest.mark.parametrize("given", ["--text=text", "--embedded --pairs=40 --max-words=5"])
def test_text_too_small_for_the_default_vocabulary_gets_the_largest(command, tmp_path, given):
    write(tmp_path / "text", ["The cat sat.", "Hello world", "Go!"])
    code, out, err = command(*given.split())
    assert (code, "too small for a vocabulary" in err) == (0, True), err
    data = Dataset.open(tmp_path / "ds")
    largest, line = data.vocab_size, "The cat sat and Hällo."
    assert 260 <= largest < data.config.vocab_size
    assert f"vocabulary: {largest:,}" in out
    assert data.tokenizer.decode(data.tokenizer.encode(line)) == line
    for folder, vocab_size, expected, words in (
        ("ds", None, 0, "already prepared"),
        ("ds", 32_000, 2, "another vocab_size"),
        ("new", largest + 1, 2, f"use {largest} or less"),
        ("new", largest, 0, ""),
    ):
        options = [] if vocab_size is None else [f"--vocab-size={vocab_size}"]
        code, _, err = command(*given.split(), *options, folder=folder)
        assert (code, words in err) == (expected, True), err


CONFIG = PrepareConfig(task="translation", vocab_size=330, dev=10)

# forks a child per kill point, so that everything is imported once, and PyTorch never
DRIVER = """
import json, sys
from pathlib import Path
from corpora import PrepareConfig, pair_inputs, pairs, prepare
from processes import killed_at

root, config = Path(sys.argv[1]), PrepareConfig(**json.loads(sys.argv[2]))
inputs = pair_inputs(root, pairs(60))
for point in range(200):
    folder = root / str(point)
    folder.mkdir()
    code = killed_at(point, folder, lambda: prepare(folder / "ds", inputs, config, threads=1))
    if code >= 0:
        print(point, code)
        break
"""


def test_killed_at_any_file_operation_the_same_command_makes_the_same_dataset(tmp_path, capsys):
    inputs = pair_inputs(tmp_path, pairs(60))
    expected = files(prepare(tmp_path / "ds", inputs, CONFIG, threads=1).directory)
    code, out, err = run_python(DRIVER, tmp_path, json.dumps(CONFIG.to_json()))
    assert code == 0, err
    points, status = map(int, out.split())
    assert (status, points > 20) == (0, True)
    complete = left = 0
    for point in range(points):
        folder = tmp_path / str(point)
        try:
            complete += files(Dataset.open(folder / "ds").directory) == expected
        except DataError:
            assert not (folder / "ds").exists(), point
        left += any(folder.glob(".ds.*.tokenizer")) and not (folder / "ds").exists()
        again = prepare(folder / "ds", inputs, CONFIG, threads=1, progress=Reporter())
        assert files(again.directory) == expected, point
        assert not list(folder.glob(".*")), point
    assert 0 < complete < points
    assert capsys.readouterr().err.count("tokenizer of an interrupted attempt") == left > 0
