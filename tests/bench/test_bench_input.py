"""What every benchmark refuses, before it measures or loads anything."""

import json

import pytest

ONE = "attention --shape=1,2,1"
TRANSLATE = "translate run --input=text"
TRAIN = "train --preset=tiny/multi-query"


@pytest.fixture(autouse=True)
def _no_chip(monkeypatch):
    monkeypatch.setattr("writehead.bench.floor.measure_chip", None)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("attention --shape=3,7", "b,m,g"),
        ("attention --shape=0,7,1", "at least 1"),
        ("attention --shape=3,7,3", "must divide h=8"),
        (f"{TRANSLATE} --dtype=float31", "float31"),
        (f"{ONE} --output=/dev/null/x.json", "/dev/null"),
        ("decode --preset=tiny/multi-quary", "did you mean"),
        ("decode --length=257", "tiny/multi-head has fewer positions than 257"),
        ("decode --length=0", "target=0"),
        ("decode --beam=1025", "beam=1025 must be from 1 to 1024"),
        ("translate run --input=nowhere", "nowhere"),
        ("translate run --input=blank", "no line"),
        ("translate nowhere --input=text", "nowhere"),
        (f"{TRANSLATE} --beam=9000", "beam=9000"),
        (f"{TRAIN} --output=/dev/null/x.json", "/dev/null"),
        ("train --preset=tiny-lm/multi-query", "needs a dataset"),
        ("plot long .", "not JSON"),
        ("plot empty.json .", "has no rows"),
        ("plot damaged.json .", "batch"),
    ],
)
def test_bad_input_is_one_sentence_before_anything_is_measured(refused, files, command, words):
    record = {"dtype": "", "environment": {"hardware": {"device": ""}}, "rows": []}
    (files / "empty.json").write_text(json.dumps(record))
    row = {"kind": "", "model": {}, "setting": {"batch": "many"}}
    (files / "damaged.json").write_text(json.dumps(record | {"rows": [row]}))
    verb, *options = command.split()
    assert words in refused("bench", verb, *options, *["--device=cpu"] * (verb != "plot"))


@pytest.mark.parametrize("command", [ONE, "decode", TRANSLATE, TRAIN])
def test_an_existing_result_is_not_replaced_unasked(refused, files, command):
    path = files / "result.json"
    path.write_text("mine")
    options = (*command.split(), "--device=cpu", "--output", path)
    assert f"{path} exists" in refused("bench", *options)
    assert path.read_text() == "mine"
