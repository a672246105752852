import sys
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest

from corpora import pairs, sentences
from writehead.config import PrepareConfig
from writehead.data import hub
from writehead.data.hub import hub_inputs
from writehead.data.prepare import prepare
from writehead.errors import DataError, MissingPackage


def write_translations(path, rows):
    """Parquet as wmt/wmt14 has it: a column `translation` of {"de", "en"}."""
    path.parent.mkdir(parents=True, exist_ok=True)
    column = [{"de": german, "en": english} for english, german in rows]
    pyarrow.parquet.write_table(pyarrow.table({"translation": column}), path)


def write_texts(path, lines):
    """Parquet as lm1b has it: a column `text`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table({"text": lines}), path)


def rows_of(corpora):
    chunks = [chunk for corpus in corpora for chunk in corpus.chunks()]
    return [row for chunk in chunks for row in zip(*chunk.sides, strict=True)]


@pytest.fixture
def wmt14(tmp_path):
    folder = tmp_path / "wmt14"
    rows = pairs(60)
    write_translations(folder / "de-en" / "train-00000-of-00002.parquet", rows[:35])
    write_translations(folder / "de-en" / "train-00001-of-00002.parquet", rows[35:])
    write_translations(folder / "de-en" / "validation-00000-of-00001.parquet", pairs(7, seed=1))
    write_translations(folder / "de-en" / "test-00000-of-00001.parquet", pairs(5, seed=2))
    write_translations(folder / "fr-en" / "train-00000-of-00001.parquet", pairs(5, seed=3))
    return folder


def test_a_folder_of_wmt14s_layout_is_read_in_the_direction_asked_for(wmt14):
    inputs = hub_inputs(str(wmt14), "en-de")
    assert rows_of(inputs.train) == pairs(60)
    assert rows_of(inputs.dev) == pairs(7, seed=1)
    assert rows_of(inputs.test) == pairs(5, seed=2)
    other_way = hub_inputs(str(wmt14), "de-en")
    assert rows_of(other_way.dev) == [(b, a) for a, b in pairs(7, seed=1)]


def test_it_is_prepared_with_all_its_splits(wmt14, tmp_path):
    config = PrepareConfig(task="translation", vocabulary=330)
    dataset = prepare(tmp_path / "ds", hub_inputs(str(wmt14), "en-de"), config, workers=1)
    sizes = {name: len(dataset.split(name)) for name in dataset.splits}
    assert sizes == {"train": 60, "dev": 7, "test": 5}
    last = dataset.split("test").target(4).tolist()
    assert dataset.tokenizer.decode(last) == pairs(5, seed=2)[4][1]


def test_lm1bs_test_set_is_its_dev_set(tmp_path):
    folder = tmp_path / "lm1b"
    write_texts(folder / "plain_text" / "train" / "0000.parquet", sentences(30, seed=0))
    write_texts(folder / "plain_text" / "train" / "0001.parquet", [*sentences(9, seed=1), None])
    write_texts(folder / "plain_text" / "test" / "0000.parquet", sentences(4, seed=2))
    inputs = hub_inputs(str(folder))
    lines = [*sentences(30, seed=0), *sentences(9, seed=1), ""]
    assert rows_of(inputs.train) == [(line,) for line in lines]
    assert rows_of(inputs.dev) == [(line,) for line in sentences(4, seed=2)]
    assert inputs.test == ()


def test_one_parquet_file_is_a_training_set(tmp_path):
    write_texts(tmp_path / "anything.parquet", ["one", "two"])
    inputs = hub_inputs(str(tmp_path / "anything.parquet"))
    assert rows_of(inputs.train) == [("one",), ("two",)]
    assert inputs.dev == ()


@pytest.mark.parametrize(
    ("name", "pair", "words"),
    [
        ("wmt14", None, "none called text; for pairs say which, as in --pair en-de"),
        ("wmt14", "en-fi", "has de and en, not 'fi'"),
        ("wmt14", "ende", "write it as in en-de"),
        ("empty", None, "has no parquet files"),
        ("nameless", None, "has no parquet files called train"),
        ("damaged", None, "is not readable parquet"),
    ],
)
def test_a_folder_that_cannot_be_meant_is_told_why(wmt14, tmp_path, name, pair, words):
    (tmp_path / "empty").mkdir()
    write_texts(tmp_path / "nameless" / "trained.parquet", ["x"])
    write_texts(tmp_path / "damaged" / "train.parquet", sentences(50, seed=0))
    content = (tmp_path / "damaged" / "train.parquet").read_bytes()
    (tmp_path / "damaged" / "train.parquet").write_bytes(content[:-9])
    with pytest.raises(DataError) as caught:
        rows_of(hub_inputs(str(tmp_path / name), pair).train)
    assert words in str(caught.value)


class FakeHub:
    """The hub's client, with two datasets; one has parquet only where the hub converts to it."""

    def __init__(self, wmt14, lm1b):
        self.stored = {("wmt/wmt14", "main"): wmt14}
        self.stored["billion-word-benchmark/lm1b", "main"] = None
        self.stored["billion-word-benchmark/lm1b", "refs/convert/parquet"] = lm1b
        self.fetched = []

    def HfApi(self):
        return self

    def dataset_info(self, repository, *, revision, timeout):
        assert timeout > 0
        if (repository, revision) not in self.stored:
            raise ConnectionError(f"404 for {repository}\nand more")
        folder = self.stored[repository, revision]
        files = ["README.md", "lm1b.py"]
        if folder is not None:
            files += [path.relative_to(folder).as_posix() for path in folder.rglob("*.parquet")]
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=file) for file in files])

    def hf_hub_download(self, repository, file, *, repo_type, revision):
        self.fetched.append(file)
        return str(self.stored[repository, revision] / file)


def test_wmt14_and_lm1b_are_fetched_by_name(wmt14, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path / "..")
    lm1b = tmp_path / "converted"
    write_texts(lm1b / "plain_text" / "train" / "0000.parquet", ["one line"])
    write_texts(lm1b / "plain_text" / "test" / "0000.parquet", ["another"])
    fake = FakeHub(wmt14, lm1b)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    inputs = hub_inputs("wmt14")
    assert rows_of(inputs.train) == pairs(60)  # English into German
    assert not any("fr-en" in file for file in fake.fetched)
    assert rows_of(hub_inputs("wmt/wmt14", "de-en").dev)[0] == pairs(7, seed=1)[0][::-1]
    assert rows_of(hub_inputs("lm1b").dev) == [("another",)]
    with pytest.raises(
        DataError, match=r"nobody/none could not be fetched .*404 for nobody/none\)"
    ):
        hub_inputs("nobody/none")


def test_without_the_extra_its_name_is_told(monkeypatch, wmt14):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingPackage, match=r"pyarrow .* pip install 'writehead\[hub\]'"):
        rows_of(hub_inputs(str(wmt14), "en-de").train)
    with pytest.raises(MissingPackage, match="huggingface_hub is not installed"):
        hub_inputs("somebody/something")
    assert set(hub.NAMED) == {"wmt14", "lm1b"}
