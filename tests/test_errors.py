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


def test_long_values_are_shortened():
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    for value in (HOSTILE, 10**400, -(10**5000), [HOSTILE] * 9, {HOSTILE: 1}, nested):
        assert len(shown(value)) <= 60


def test_a_sentence_is_one_bounded_line():
    assert one_line("a  sentence: naïve – 日本") == "a  sentence: naïve – 日本"
    line = one_line(HOSTILE)
    assert len(line) <= 2000
    assert not UNSAFE.search(line)
    for name in (HOSTILE, "x" * 10_000_000):
        advice = nearest(name, [HOSTILE, "cuda", "cpu"])
        assert len(advice) < 200
        assert not UNSAFE.search(advice)
