import json
import os
from pathlib import Path

import numpy as np
import pytest

from corpora import translation_dataset
from writehead.data.bpe import BPETokenizer
from writehead.data.dataset import Dataset, token_dtype
from writehead.errors import DataError


@pytest.fixture
def folder(tmp_path):
    return translation_dataset(tmp_path, count=60).directory


def change_info(folder, **changes):
    path = folder / "dataset.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_ids_past_65535_take_four_bytes(folder, monkeypatch):
    assert [token_dtype(n) for n in (1 << 16, (1 << 16) + 1)] == [np.uint16, np.uint32]
    before = Dataset.open(folder).split("train").source[7].tolist()
    for path in folder.glob("*.tokens"):
        np.fromfile(path, dtype=np.uint16).astype(np.uint32).tofile(path)
    change_info(folder, vocab_size=70_000)
    monkeypatch.setattr(BPETokenizer, "vocab_size", 70_000)
    assert Dataset.open(folder).split("train").source[7].tolist() == before


def test_the_fingerprint_depends_on_the_data_alone(folder, tmp_path):
    for name in ("same", "other"):
        (tmp_path / name).mkdir()
    one, same = Dataset.open(folder), translation_dataset(tmp_path / "same", count=60)
    change_info(same.directory, writehead="0.0.1")
    assert Dataset.open(same.directory).fingerprint == one.fingerprint
    assert translation_dataset(tmp_path / "other", count=61).fingerprint != one.fingerprint
    for path in sorted((Path(__file__).parents[2] / "results").glob("table[13]/*/*.json")):
        facts = json.loads(path.read_text(encoding="utf-8"))["data"]
        written = facts.pop("fingerprint")
        assert Dataset(folder, facts, one.config).fingerprint == written


def unsort(folder):
    offsets = np.fromfile(folder / "train.target.offsets", dtype=np.uint64)
    offsets[[3, 4]] = offsets[[4, 3]]
    offsets.tofile(folder / "train.target.offsets")


def replace_tokenizer(folder):
    lines = [f"another text {i} of words" for i in range(200)]
    BPETokenizer.train(lines, 290).save(folder / "tokenizer.model")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: folder.rename(folder.parent / "elsewhere"), "does not exist"),
        (lambda folder: change_info(folder, format=1), "prepare the text again"),
        (lambda folder: change_info(folder, vocab_size=399), "tokenizer.model"),
        (lambda folder: change_info(folder, config={"vocab_siz": 1}), "did you mean 'vocab_size'"),
        (lambda folder: os.truncate(folder / "train.source.tokens", 20), "damaged"),
        (unsort, "damaged"),
        (lambda folder: (folder / "train.target.tokens").unlink(), "train.target.tokens"),
        (replace_tokenizer, "tokenizer.model"),
        (lambda folder: (folder / "tokenizer.model").unlink(), "tokenizer.model"),
    ],
)
def test_a_damaged_dataset_is_refused(folder, damage, words):
    damage(folder)
    with pytest.raises(DataError, match=words):
        Dataset.open(folder)
