"""Untrusted values in messages: one line, short, and safe for a terminal."""

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from writehead.errors import shown

UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


@settings(max_examples=20)
@given(st.one_of(st.text(), st.integers(), st.floats(), st.lists(st.text()), st.binary()))
def test_any_value_is_shown_on_one_short_line(value):
    text = shown(value)
    assert len(text) <= 62
    assert not UNSAFE.search(text)
    if isinstance(value, str) and len(repr(value)) <= 50:
        assert text == repr(value)
