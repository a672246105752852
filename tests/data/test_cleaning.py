import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from writehead.data.cleaning import Seen, fingerprint, normalise, unlike


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
def test_normalised_text_is_stable_and_has_single_spaces_and_no_control_characters(text):
    once = normalise(text)
    assert normalise(once) == once == once.strip()
    assert "  " not in once
    assert not any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in once)


def test_fingerprints_depend_on_the_side():
    rows = [("a", "b"), ("b", "a"), ("ab", ""), ("", "ab"), ("ab",)]
    assert len({fingerprint(row) for row in rows}) == len(rows)
    assert all(0 <= fingerprint(row) < 1 << 64 for row in rows)


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


def test_length_ratios_are_lenient_for_short_lines():
    found = [unlike(lengths, 2.0) for lengths in ([1, 9], [1, 11], [60, 32], [80, 32])]
    assert found == [False, True, False, True]
