import json
import subprocess
import sys

import pytest

from corpora import pairs, sentences, write, write_pairs
from writehead.data.dataset import Dataset


@pytest.fixture
def prepare(writehead, monkeypatch, tmp_path):
    """Runs `writehead prepare ds …` in a folder of its own: exit code, output, errors."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: writehead("prepare", "ds", *arguments)


@pytest.fixture
def text_options(tmp_path):
    a, b = write_pairs(tmp_path, "train", [*pairs(200), pairs(200)[7], ("", "x")])
    c, d = write_pairs(tmp_path, "dev", pairs(20, seed=1))
    options = ["--source", a, "--target", b, "--dev-source", c, "--dev-target", d]
    return [*options, "--vocabulary", "400", "--workers", "1"]


def test_files_become_a_dataset_and_a_table(prepare, text_options, tmp_path):
    code, out, err = prepare(*text_options)
    assert code == 0
    assert "duplicate" in out
    assert "empty" in out
    assert "encoding train …" in err
    dataset = Dataset.open(tmp_path / "ds")
    assert {name: len(dataset.split(name)) for name in dataset.splits} == {"train": 200, "dev": 20}
    code, out, err = prepare(*text_options)
    assert code == 0
    assert "already prepared" in err
    code, out, err = prepare(*text_options, "--max-ratio", "3")
    assert code == 2
    assert "max_ratio 2.0, not 3.0" in err


def test_text_becomes_a_language_models_dataset(prepare, tmp_path):
    text = write(tmp_path / "books", sentences(200, seed=0))
    options = ("--text", text, "--vocabulary", "400", "--workers", "1")
    code, _, err = prepare(*options, "--dev", "6")
    assert code == 0
    assert "held out" not in err
    dataset = Dataset.open(tmp_path / "ds")
    assert dataset.task == "language"
    assert (len(dataset.split("train")), len(dataset.split("dev"))) == (194, 6)


def test_a_dev_split_smaller_than_asked_for_is_said(prepare, tmp_path):
    text = write(tmp_path / "books", sentences(200, seed=0))
    options = ("--text", text, "--vocabulary", "400", "--workers", "1")
    code, _, err = prepare(*options, "--dev", "50")
    assert code == 0
    said = "10 lines are held out as dev, a twentieth of the text, which is less than 50"
    assert said in " ".join(err.split())
    assert len(Dataset.open(tmp_path / "ds").split("dev")) == 10


def test_the_embedded_corpus_becomes_a_dataset_with_three_splits(prepare, tmp_path):
    grammar = pytest.importorskip("writehead.data.grammar")
    code, _, _ = prepare("--embedded", "--pairs", "600", "--vocabulary", "600", "--workers", "1")
    assert code == 0
    dataset = Dataset.open(tmp_path / "ds")
    assert dataset.splits == ["train", "dev", "test"]
    train = dataset.split("train")
    first = next(iter(grammar.pairs("train", 1)))
    assert dataset.tokenizer.decode(train.source(0).tolist()) == first[0]
    assert dataset.tokenizer.decode(train.target(0).tolist()) == first[1]
    source = json.loads((tmp_path / "ds" / "dataset.json").read_text())["sources"][-1]
    assert source == {"split": "train", "embedded": "train", "pairs": 600, "seed": 0}


def make_wrong(tmp_path):
    write(tmp_path / "three", ["a", "b", "c"])
    write(tmp_path / "two", ["a", "b"])
    (tmp_path / "nothing").write_bytes(b"")
    (tmp_path / "latin").write_bytes("für\nschön\nüber\n".encode("latin-1"))
    (tmp_path / "packed.xz").write_bytes(b"\xfd7zXZ\x00 and no more")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--source three --target two", "three has 3 lines and two has 2 lines; three is longer"),
        ("--source three --target latin", "latin is not UTF-8 in line 1"),
        ("--source nothing --target two", "nothing is empty"),
        ("--source two --target packed.xz", "packed.xz is damaged or cut short"),
        ("--source two --target none", "there is no file none"),
        ("--source two", "1 --source for 0 --target"),
        ("--source two --target two --text three", "both --source and --target and --text given"),
        ("", "no text given; give one of"),
        ("--text two --dev-source two", "goes with --source and --target, not with --text"),
        ("--text two --pair en-de", "--pair goes with --hub"),
        ("--text three --vocabulary 999", "this text gives a vocabulary of"),
        ("--text three --vocabulary 0", "vocabulary=0 must be at least 1"),
        ("--text three --workers 0", "workers=0"),
        ("--embedded --pairs 0", "--pairs 0 must be at least 1"),
        ("--hub . --pair ende", "write it as in en-de"),
        ("--hub .", "has no parquet files"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(prepare, tmp_path, arguments, words):
    make_wrong(tmp_path)
    before = sorted(tmp_path.iterdir())
    code, out, err = prepare(
        *arguments.split(), *(["--workers", "1"] * ("workers" not in arguments))
    )
    assert code == 2
    assert out == ""
    assert words in err.replace(f"{tmp_path}/", "")
    assert [line for line in err.splitlines() if not line.endswith("…")] == [err.splitlines()[-1]]
    assert sorted(tmp_path.iterdir()) == before


def test_preparing_never_loads_pytorch(tmp_path):
    code = (
        "import sys; import writehead.data.prepare, writehead.data.choosing, "
        "writehead.data.summary; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
