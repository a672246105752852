"""What every benchmark refuses, before it measures or loads anything."""

import json

import pytest

ONE = "attention --shape=1,2,1"
TRANSLATE = "translate plain --input=text"
TRAIN = "train --preset=tiny/multi-query"


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
        ("decode --beam=0", "beam=0"),
        ("decode --beam=1025", "beam=1025 must be from 1 to 1024"),
        ("translate plain --input=nowhere", "nowhere"),
        ("translate plain --input=blank", "no line"),
        ("translate nowhere --input=text", "nowhere"),
        (f"{TRANSLATE} --beam=9000", "beam=9000"),
        (f"{TRAIN} --output=/dev/null/x.json", "/dev/null"),
        ("train --preset=tiny-lm/multi-query", "needs a dataset"),
        ("plot long .", "not JSON"),
        ("plot empty.json .", "has no rows"),
        ("plot damaged.json .", "batch"),
    ],
)
def test_bad_input_is_one_sentence_before_anything_is_measured(
    writehead, no_chip, files, monkeypatch, command, words
):
    monkeypatch.chdir(files)
    record = {"dtype": "", "environment": {"hardware": {"device": ""}}, "rows": []}
    (files / "empty.json").write_text(json.dumps(record))
    row = {"kind": "", "model": {}, "setting": {"batch": "many"}}
    (files / "damaged.json").write_text(json.dumps(record | {"rows": [row]}))
    verb, *options = command.split()
    device = [] if verb == "plot" else ["--device=cpu"]
    code, out, err = writehead("bench", verb, *device, *options)
    assert (code, out) == (2, "")
    assert words in err.splitlines()[-1]


@pytest.mark.parametrize("command", [ONE, "decode", TRANSLATE, TRAIN])
def test_an_existing_result_is_not_replaced_unasked(
    writehead, no_chip, files, tmp_path, monkeypatch, command
):
    monkeypatch.chdir(files)
    path = tmp_path / "result.json"
    path.write_text("mine")
    code, out, err = writehead("bench", *command.split(), "--device=cpu", "--output", path)
    assert (code, out) == (2, "")
    assert f"{path} exists" in err
    assert path.read_text() == "mine"
