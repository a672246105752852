import pytest

from texts import sentences
from writehead.config import DecodeConfig
from writehead.engine import Engine
from writehead.model.runs import run_bytes, run_fingerprint


def test_a_file_is_timed_from_loading_to_the_last_line(bench, small_runs, tmp_path):
    lines, run = ["", *sentences(7)], small_runs / "translation"
    (tmp_path / "text").write_text("\n".join(lines))
    options = ("--input", tmp_path / "text", "--device=cpu")
    result = bench("translate", run, *options, "--repeats=2")
    assert (result["sentences"], result["quantization"]) == (8, None)
    assert (result["fingerprint"], result["bytes"]) == (run_fingerprint(run), run_bytes(run))
    found = result["engines"]["ours"]
    assert result["engines"]["CTranslate2"]["absent"]  # its keys and values have one depth
    assert 0 < found["load_s"] < found["first_sentence_s"]
    engine = Engine.load(run, "cpu")
    for search, beam in (("greedy", 1), ("beam-4", 4)):
        one = found["searches"][search]
        outputs = engine.translate(lines, DecodeConfig(beam=beam, alpha=0.6))
        tokens = sum(len(engine.tokenizer.encode(output.text)) + 1 for output in outputs)
        assert one["tokens"] == tokens
        assert len(one["seconds"]["repeats"]) == 2
        assert one["sentences_per_second"] == pytest.approx(8 / one["seconds"]["median"])
        assert one["tokens_per_second"] == pytest.approx(tokens / one["seconds"]["median"])
    half = bench("translate", run, *options, "--dtype=bfloat16", "--no-peers", "--beam=1")
    searches = {name: one["searches"] for name, one in half["engines"].items()}
    equal = {name: one["greedy"]["equal_lines"] for name, one in searches.items()}
    assert equal["ours"] == 8
    assert 1 <= equal["ours, float32"] <= 8  # one line is empty
