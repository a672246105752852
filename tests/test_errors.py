"""Untrusted values in messages: one line, short, and safe for a terminal."""

import re

from hypothesis import given
from hypothesis import strategies as st

from writehead.errors import nearest, one_line, shown

HOSTILE = "\x1b]0;title\x07\x1b[31m\x9b2J\r\n\x7f\u202eevil\u2066\u2028 " * 500
UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


@given(st.one_of(st.text(), st.integers(), st.floats(), st.lists(st.text()), st.binary()))
def test_any_value_is_shown_on_one_short_line(value):
    text = shown(value)
    assert len(text) <= 62
    assert not UNSAFE.search(text)
    if isinstance(value, str) and len(repr(value)) <= 50:
        assert text == repr(value)


def test_a_sentence_is_one_bounded_line():
    assert one_line("a  sentence: naïve – 日本") == "a  sentence: naïve – 日本"
    for line, limit in ((one_line(HOSTILE), 2000), (nearest("xyz", [HOSTILE, "cuda"]), 200)):
        assert len(line) <= limit
        assert not UNSAFE.search(line)
