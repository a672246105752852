"""What every benchmark refuses, before it measures or loads anything."""

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
        (f"{ONE} --dtype=float31", "float31"),
        (f"{ONE} --output=/dev/null/x.json", "/dev/null"),
        ("decode --preset=tiny/multi-quary", "did you mean"),
        ("decode --preset=tiny/multi-query --rows=multi-head", "tiny/multi-query"),
        ("decode --preset=tiny-lm", "choose a translation model"),
        ("decode --peer=ctranslate", "did you mean 'ctranslate2'"),
        ("decode --vocab-size=3", "at least 4"),
        ("decode --target=257", "256, the learned positions of tiny/multi-head"),
        ("decode --beam=0", "beam=0"),
        ("decode --beam=1025", "the 1024 tokens of tiny/multi-head"),
        ("context --preset=tiny", "choose a language model"),
        ("context --context=1", "context=1 at least 2"),
        ("translate plain --input=nowhere", "nowhere"),
        ("translate plain --input=blank", "no line"),
        ("translate nowhere --input=text", "nowhere"),
        (f"{TRANSLATE} --beam=9000", "beam=9000"),
        (f"{TRAIN} --output=/dev/null/x.json", "/dev/null"),
        ("plot long .", "not JSON"),
        ("plot empty.json .", "nothing to draw"),
    ],
)
def test_bad_input_is_one_sentence_before_anything_is_measured(
    writehead, no_chip, files, monkeypatch, command, words
):
    monkeypatch.chdir(files)
    (files / "empty.json").write_text(
        '{"bench": "decode", "dtype": "", "environment": {"hardware": {"device": ""}, "date": ""}}'
    )
    verb, *options = command.split()
    device = [] if verb == "plot" else ["--device=cpu"]
    code, out, err = writehead("bench", verb, *device, *options)
    assert (code, out) == (2, "")
    assert words in err.splitlines()[-1]


@pytest.mark.parametrize("command", [ONE, "decode", "context", TRANSLATE, TRAIN])
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
