"""JSON within limits: any file gives a value or one short error."""

import json
import math
from itertools import count

import pytest

from writehead.config import TrainConfig
from writehead.errors import ConfigError, RunError
from writehead.schema import with_settings
from writehead.util.json_files import JsonError, check_shape, parse_json, read_json

REFUSED = [
    ("", "not JSON"),
    ('{"a": 1', "not JSON"),
    ("\udcff", "not JSON"),
    ("[" * 100_000, "nested"),
    ('{"a":' * 100_000, "nested"),
    ("[" * 66 + "]" * 66, "nested"),
    ("9" * 400, "400 digits"),
    ("-0." + "9" * 5000, "digits"),
    ("NaN", "NaN"),
    ("-Infinity", "Infinity"),
    ("1e999", "1e999"),
    (json.dumps("x" * 2_000_000), "more than 1,000,000 bytes"),
]


@pytest.mark.parametrize(("text", "words"), REFUSED, ids=count())
def test_json_beyond_a_limit_is_a_short_error(tmp_path, text, words):
    path = tmp_path / "x.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(RunError) as caught:
        read_json(path, object, RunError, "make it again", max_bytes=1_000_000)
    sentence = str(caught.value)
    assert sentence.startswith(str(path))
    assert words in sentence
    assert sentence.endswith("; make it again")
    assert len(sentence) < 300


def test_values_of_the_shape_pass_and_nan_and_infinity_if_allowed(tmp_path):
    value = {"a": 3, "b": [2.5, 3, None], "c": {"x": []}, "d": True, "e": {"f": {}}}
    shape = {"a": range(4), "b": [(float, None)], "c": {str: [str]}, "d": object, "g?": int}
    check_shape(value, shape | {"e": ({"g": int}, {"f": dict})})
    value = parse_json('{"a": [NaN, -Infinity, 1e999, 1, 2.5]}', allow_nan=True)["a"]
    assert math.isnan(value[0])
    assert value[1:] == [-math.inf, math.inf, 1, 2.5]
    with pytest.raises(ConfigError, match=r"cannot be read: No such file or directory$"):
        read_json(tmp_path / "none", object, ConfigError)


@pytest.mark.parametrize(
    ("value", "shape", "words"),
    [
        (4, range(4), "an integer from 0 to 3"),
        (True, int, "an integer"),
        ("1", (float, None), "a number or null"),
        ([1, "x"], [int], "[1] is 'x'"),
        ({"a": {"b": []}}, {"a": {"b": str}}, "a.b is [], which should be text"),
        ({"a": 1}, {"a": int, "b": int}, "lacks b"),
        ({"\x1b[31m" * 999: 1}, {str: str}, "…"),
        (["x" * 10**7], [int], "…"),
    ],
    ids=count(),
)
def test_errors_name_the_place_of_a_value(value, shape, words):
    with pytest.raises(JsonError) as caught:
        check_shape(value, shape)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 200
    assert str(caught.value).isprintable()


def test_settings_are_json_or_words():
    changed = with_settings(TrainConfig(), {"clip": "null", "decay": "0.5", "precision": "float32"})
    assert (changed.clip, changed.decay, changed.precision) == (None, 0.5, "float32")
