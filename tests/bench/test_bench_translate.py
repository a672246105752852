import json

import pytest

from texts import engine, sentences, tokenizer
from writehead.config import DecodeConfig
from writehead.decoding import Engine
from writehead.model import save_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    tokenizer().save(folder / "tokenizer")
    save_run(folder / "run", engine("translation").model, tokenizer=folder / "tokenizer")
    return folder / "run"


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text"
    path.write_text("\n".join(["", *sentences(7)]))
    return path


def test_a_file_is_timed_from_loading_to_the_last_line(writehead, run, text, tmp_path):
    path = tmp_path / "translate.json"
    options = ("--device=cpu", "--dtype=float64", "--repeats=2", "--output", path)
    code, out, err = writehead("bench", "translate", run, "--input", text, *options)
    assert code == 0
    assert "ours: 8 lines, beam-4, pass 3 of 3" in err
    assert err.endswith(f"written: {path}\n")
    assert "On a CPU the engine is plain PyTorch" in out
    result = json.loads(path.read_text())
    assert result["sentences"] == 8
    assert result["cold"] is False
    assert result["environment"]["command"].startswith("writehead bench translate")
    [found] = result["engines"].values()
    assert 0 < found["load_s"] < found["first_sentence_s"]
    lines, loaded = ["", *sentences(7)], Engine.load(run, "cpu")
    for search, beam in (("greedy", 1), ("beam-4", 4)):
        one = found["searches"][search]
        outputs = loaded.translate(lines, DecodeConfig(beam=beam, alpha=0.6))
        tokens = sum(len(loaded.tokenizer.encode(output.text)) + 1 for output in outputs)
        assert one["tokens"] == tokens
        assert len(one["seconds"]["repeats"]) == 2
        assert one["sentences_per_second"] == pytest.approx(8 / one["seconds"]["median"])
        assert one["tokens_per_second"] == pytest.approx(tokens / one["seconds"]["median"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"--input": "nowhere"}, "cannot be read"),
        ({"--input": "empty"}, "there is no line to translate"),
        ({"--repeats": "0"}, "0 repeats cannot be timed"),
        ({"--beam": "0"}, "beam=0"),
        ({"--beam": "9000"}, "--beam 9000 is past the"),
        ({"RUN": "nowhere"}, "nowhere"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_2(
    writehead, run, text, tmp_path, monkeypatch, changes, words
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").write_text("\n \n")
    given = {"RUN": run, "--input": text, "--device": "cpu", **changes}
    place = given.pop("RUN")
    options = [part for pair in given.items() for part in pair]
    code, out, err = writehead("bench", "translate", place, *options)
    assert (code, out) == (2, "")
    assert words in err.splitlines()[-1]
    assert "loading" not in err  # it is said before anything is done


def test_an_interrupted_pass_says_what_is_left(writehead, run, text, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("writehead.bench.translate.clocked", interrupted)
    path = tmp_path / "translate.json"
    code, _, err = writehead(
        "bench", "translate", run, "-i", text, "--device=cpu", "--output", path
    )
    assert (code, path.exists()) == (130, False)
    assert "pass 1 of 3" in err
    assert err.endswith(f"interrupted; there is no result yet, and {path} was not made\n")
