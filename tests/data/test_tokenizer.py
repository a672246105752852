"""Normalisation and the tokenizer."""

import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corpora import sentences
from writehead.data.bpe import EOS, PAD, BPETokenizer, normalise
from writehead.errors import DataError

ODD = "漢字かな|𝔘𝔫𝔦𝔠𝔬𝔡𝔢|👩🏽‍🚀 🇩🇪|עברית العربية|ﬁ ½ ℃ …|<pad> </s> <unk> <0x41>|\U0010ffff"


@pytest.fixture(scope="module")
def tokenizer():
    return BPETokenizer.train(sentences(300, seed=1), 420)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("  two\t words \r", "two words"),
        ("a\u00a0b\u3000c\u2028d", "a b c d"),
        ("nul\x00 bell\x07 \x7fend", "nul bell end"),
        ("\ufeffsoft\u00adhyphen zero\u200bwidth", "softhyphen zerowidth"),
        ("e\u200b\u0301", "\u00e9"),
        ("ﬁ ½ … „Ja“ ™", "ﬁ ½ … „Ja“ ™"),
        ("👨\u200d👩\u200d👧", "👨\u200d👩\u200d👧"),
        ("\u2581a", "_a"),
        ("lone \ud800 surrogate", "lone \ufffd surrogate"),
        (" \u200b \x01 ", ""),
    ],
)
def test_normalising_repairs_text_and_loses_no_letter(text, expected):
    assert normalise(text) == expected


@given(st.text())
def test_any_text_is_normalised_once_and_survives_the_tokenizer(tokenizer, text):
    once = normalise(text)
    assert normalise(once) == once == once.strip() == tokenizer.decode(tokenizer.encode(text))
    assert "  " not in once
    assert not any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in once)


def test_with_split_digits_each_digit_is_a_token():
    texts = [f"{line} in 2025, {i % 10}00 of 2025" for i, line in enumerate(sentences(300, seed=3))]
    joined, split = (BPETokenizer.train(texts, 420, split_digits=on) for on in (False, True))
    assert any(re.search(r"\d\d", piece) for piece in joined.pieces)
    assert not any(re.search(r"\d.", piece) for piece in split.pieces if len(piece) < 6)
    assert split.decode(split.encode("20,25 of 2025")) == "20,25 of 2025"


def test_the_tokenizer_is_deterministic_and_encodes_batches_like_single_texts(tokenizer, tmp_path):
    again, texts = BPETokenizer.train(sentences(300, seed=1), 420), sentences(50, seed=2)
    assert (again.model, again.vocab_size) == (tokenizer.model, 420)
    for text in ODD.split("|"):
        ids = tokenizer.encode(text)
        assert (min(ids) > 2, tokenizer.decode([PAD, *ids, EOS, PAD])) == (True, text)
    batch = [ids.tolist() for ids in tokenizer.encode_all(texts)]
    assert batch == [tokenizer.encode(text) for text in texts]
    for vocab_size, words in ((100, "260 or more"), (270, "too small"), (50_000, "too large")):
        with pytest.raises(DataError, match=words):
            BPETokenizer.train(sentences(20, seed=1), vocab_size)
    with pytest.raises(DataError, match="none/bpe could not be written: No such file"):
        tokenizer.save(tmp_path / "none" / "bpe")
