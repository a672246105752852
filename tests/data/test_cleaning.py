"""Normalisation, duplicate detection, length ratios, and the tokenizer."""

import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corpora import sentences
from writehead.data.cleaning import Seen, fingerprint, normalise, unlike
from writehead.data.tokenizer import END, PAD, Tokenizer
from writehead.errors import DataError

ODD = "漢字かな|𝔘𝔫𝔦𝔠𝔬𝔡𝔢|👩🏽‍🚀 🇩🇪|עברית العربية|ﬁ ½ ℃ …|<pad> </s> <unk> <0x41>|\U0010ffff"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(sentences(300, seed=1), 420)


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


@pytest.mark.parametrize("text", ODD.split("|"))
def test_odd_text_contains_no_special_token(tokenizer, text):
    ids = tokenizer.encode(text)
    assert min(ids) > 2
    assert tokenizer.decode([PAD, *ids, END, PAD]) == text


def test_the_tokenizer_is_deterministic_and_encodes_batches_like_single_texts(tokenizer):
    again, texts = Tokenizer.train(sentences(300, seed=1), 420), sentences(50, seed=2)
    assert (again.model, again.vocabulary) == (tokenizer.model, 420)
    assert tokenizer.encode_all(texts) == [tokenizer.encode(text) for text in texts]
    for vocabulary, words in ((100, "260 or more"), (270, "larger"), (50_000, "smaller")):
        with pytest.raises(DataError, match=words):
            Tokenizer.train(sentences(20, seed=1), vocabulary)


@given(st.lists(st.lists(st.integers(0, 30)), max_size=12))
def test_seen_agrees_with_a_set(batches):
    ours, plain = Seen(), set()
    for batch in batches:
        values, expected = np.array(batch, dtype=np.uint64), []
        assert ours.contains(values).tolist() == [v in plain for v in batch]
        for value in batch:
            expected.append(value not in plain)
            plain.add(value)
        assert ours.add(values).tolist() == expected
        assert len(ours) == len(plain)


def test_fingerprints_depend_on_the_side_and_ratios_are_lenient_for_short_lines():
    rows = [("a", "b"), ("b", "a"), ("ab", ""), ("", "ab"), ("ab",)]
    assert len({fingerprint(row) for row in rows}) == len(rows)
    found = [unlike(lengths, 2.0) for lengths in ([1, 9], [1, 11], [60, 32], [80, 32])]
    assert found == [False, True, False, True]
