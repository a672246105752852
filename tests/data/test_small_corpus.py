"""Text too small for the default vocabulary gets the largest that it gives."""

import pytest

from corpora import files, sentences, write, write_pairs
from writehead.data.dataset import Dataset

PAIRS = [("The cat sat.", "Die Katze sass."), ("Hello world", "Hallo Welt"), ("Go!", "Los!")]


@pytest.fixture
def prepare(writehead, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    write_pairs(tmp_path, "three", PAIRS)
    write(tmp_path / "text", sentences(300, seed=0))
    return lambda *arguments: writehead("prepare", *arguments)


THREE = ("--source=three.a", "--target=three.b")


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    "given", [THREE, ("--text=text",), ("--embedded", "--pairs=40", "--max-words=5")]
)
def test_the_vocabulary_fits_the_text_and_is_said(prepare, tmp_path, given, workers):
    code, out, err = prepare("one", *given, f"--workers={workers}")
    assert code == 0, err
    data = Dataset.open(tmp_path / "one")
    assert 260 <= data.vocabulary < 32_000
    assert f"too small for a vocabulary of {data.config.vocabulary:,}" in err
    assert f"{data.vocabulary:,}" in err
    assert f"vocabulary {data.vocabulary:,}" in out
    prepare("two", *given, f"--workers={3 - workers}")
    assert files(tmp_path / "one") == files(tmp_path / "two")  # the same each time
    code, _, err = prepare("one", *given)
    assert (code, "already prepared" in err) == (0, True)
    line = "The cat sat and Hällo."
    assert data.tokenizer.decode(data.tokenizer.encode(line)) == line


def test_a_vocabulary_asked_for_is_an_error_that_names_the_largest(prepare, tmp_path):
    prepare("fitted", *THREE, "--workers=1")
    largest = Dataset.open(tmp_path / "fitted").vocabulary
    for vocabulary in (32_000, largest + 1):
        code, _, err = prepare("ds", *THREE, f"--vocabulary={vocabulary}", "--workers=1")
        assert code == 2
        assert f"a vocabulary of {largest} at most" in err
    code, _, err = prepare("fitted", *THREE, "--vocabulary=32000")
    assert (code, f"vocabulary {largest}, not 32000" in err) == (2, True)
    assert prepare("ds", *THREE, f"--vocabulary={largest}", "--workers=1")[0] == 0
