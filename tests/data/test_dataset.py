import json
from pathlib import Path

import numpy as np
import pytest

from corpora import language_dataset, translation_dataset
from writehead.data.dataset import Dataset
from writehead.data.tokenizer import Tokenizer
from writehead.errors import DataError


@pytest.fixture
def folder(tmp_path):
    return translation_dataset(tmp_path, count=60).directory


def test_a_dataset_says_what_it_holds(folder):
    dataset = Dataset.open(str(folder))
    split = dataset.split("train")
    assert (dataset.task, dataset.vocabulary, dataset.splits) == ("translation", 400, ["train"])
    assert len(split) == 60
    assert split.source_lengths.tolist() == [len(split.source(i)) for i in range(60)]
    assert split.target_lengths.tolist() == [len(split.target(i)) for i in range(60)]
    assert isinstance(split.sides["target"].tokens, np.memmap)


def test_the_fingerprint_is_the_one_that_the_results_carry(folder):
    opened = Dataset.open(folder)
    paths = sorted((Path(__file__).parents[2] / "results").glob("table[13]/*/*.json"))
    assert paths
    for path in paths:
        facts = json.loads(path.read_text(encoding="utf-8"))["data"]
        written = facts.pop("fingerprint")
        assert Dataset(folder, {"format": 1, **facts}, opened.config).fingerprint == written


def test_the_fingerprint_tells_datasets_apart_and_not_where_they_are_or_who_made_them(tmp_path):
    for name in ("one", "same", "other"):
        (tmp_path / name).mkdir()
    one, same = (translation_dataset(tmp_path / name, count=60) for name in ("one", "same"))
    change_info(same.directory, writehead="0.0.1")
    assert Dataset.open(same.directory).fingerprint == one.fingerprint
    assert translation_dataset(tmp_path / "other", count=61).fingerprint != one.fingerprint


def test_a_language_model_has_no_source(tmp_path):
    split = language_dataset(tmp_path, count=80).split("train")
    assert sorted(split.sides) == ["target"]
    with pytest.raises(DataError, match="has no source"):
        split.source(0)


def change_info(folder, **changes):
    path = folder / "dataset.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def drop_key(folder):
    path = folder / "dataset.json"
    info = json.loads(path.read_text())
    del info["splits"]
    path.write_text(json.dumps(info))


def unsort(folder):
    path = folder / "train.target.offsets"
    offsets = np.fromfile(path, dtype=np.uint64)
    offsets[3], offsets[4] = offsets[4], offsets[3]
    offsets.tofile(path)


def replace_tokenizer(folder):
    lines = [f"another text {i} of words" for i in range(200)]
    Tokenizer.train(lines, 290).save(folder / "tokenizer.model")


def cut(folder):
    path = folder / "train.source.tokens"
    path.write_bytes(path.read_bytes()[:-2])


DAMAGE = {
    "no longer there": lambda folder: folder.rename(folder.parent / "elsewhere"),
    "no info": lambda folder: (folder / "dataset.json").unlink(),
    "no JSON": lambda folder: (folder / "dataset.json").write_text("{"),
    "someone else's": lambda folder: (folder / "dataset.json").write_text("[1]"),
    "newer": lambda folder: change_info(folder, format=2, writehead="9.0"),
    "without splits": drop_key,
    "ill config": lambda folder: change_info(folder, config={"task": "translation", "vocab": 1}),
    "cut": cut,
    "unsorted": unsort,
    "missing file": lambda folder: (folder / "train.target.tokens").unlink(),
    "another tokenizer": replace_tokenizer,
    "no tokenizer": lambda folder: (folder / "tokenizer.model").unlink(),
}


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("no longer there", "there is no dataset at"),
        ("no info", "has no dataset.json, so it is no dataset"),
        ("no JSON", "is not JSON"),
        ("someone else's", "was not written by `writehead prepare`"),
        ("newer", "install a newer one"),
        ("without splits", "lacks splits"),
        ("ill config", "did you mean 'vocabulary'"),
        ("cut", "the dataset is damaged: prepare it again"),
        ("unsorted", "do not fit"),
        ("missing file", "train.target.tokens cannot be read: No such file"),
        ("another tokenizer", "the tokens were made with"),
        ("no tokenizer", "tokenizer.model cannot be read"),
    ],
)
def test_a_dataset_that_is_not_whole_is_refused_with_what_is_wrong(folder, damage, words):
    DAMAGE[damage](folder)
    with pytest.raises(DataError) as caught:
        Dataset.open(folder)
    assert words in str(caught.value)


def test_a_split_that_is_not_there_is_told_with_those_that_are(folder):
    with pytest.raises(DataError, match="only train; ask for one of these"):
        Dataset.open(folder).split("xyz")
