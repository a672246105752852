import json

import pytest

from texts import sentences
from writehead.config import DecodeConfig
from writehead.engine import Engine
from writehead.model.runs import run_bytes, run_fingerprint


def test_a_file_is_timed_from_loading_to_the_last_line(writehead, files, tmp_path):
    path, run = tmp_path / "translate.json", files / "run"
    options = ("--device=cpu", "--repeats=2", "--output", path)
    code, _, _ = writehead("bench", "translate", run, "--input", files / "text", *options)
    assert code == 0
    result = json.loads(path.read_text())
    assert result["sentences"] == 8
    assert (result["fingerprint"], result["bytes"]) == (run_fingerprint(run), run_bytes(run))
    assert result["quantization"] is None
    assert result["environment"]["command"].startswith("writehead bench translate")
    found = result["engines"]["ours"]
    assert result["engines"]["CTranslate2"]["absent"]  # its keys and values have one depth
    assert 0 < found["load_s"] < found["first_sentence_s"]
    lines, engine = ["", *sentences(7)], Engine.load(run, "cpu")
    for search, beam in (("greedy", 1), ("beam-4", 4)):
        one = found["searches"][search]
        outputs = engine.translate(lines, DecodeConfig(beam=beam, alpha=0.6))
        tokens = sum(len(engine.tokenizer.encode(output.text)) + 1 for output in outputs)
        assert one["tokens"] == tokens
        assert len(one["seconds"]["repeats"]) == 2
        assert one["sentences_per_second"] == pytest.approx(8 / one["seconds"]["median"])
        assert one["tokens_per_second"] == pytest.approx(tokens / one["seconds"]["median"])


def test_lines_equal_in_float32_are_counted(writehead, files, tmp_path):
    path = tmp_path / "translate.json"
    given = ("--input", files / "text", "--device=cpu", "--output", path, "--dtype=bfloat16")
    code, _, _ = writehead("bench", "translate", files / "run", *given, "--no-peers", "--beam=1")
    assert code == 0
    engines = json.loads(path.read_text())["engines"]
    equal = {name: one["searches"]["greedy"]["equal_lines"] for name, one in engines.items()}
    assert equal["ours"] == 8
    assert 1 <= equal["ours, float32"] <= 8  # one line is empty
