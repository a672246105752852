"""Each benchmark at small sizes on a CUDA device: all that is ours and PyTorch's must answer."""

import json

import pytest

pytestmark = pytest.mark.gpu

QUICK = ("--batch=5", "--vocabulary=512", "--repeats=2")
SMALL = (*QUICK, "--source=24", "--target=40")


def test_attention_is_measured_every_way_that_pytorch_has(writehead, quick_chip, tmp_path):
    path = tmp_path / "attention.json"
    shapes = ("--shape=64,512,1", "--shape=64,512,8", "--shape=1,4096,1")
    code, out, err = writehead("bench", "attention", *shapes, "--output", path)
    assert code == 0, err
    for shape in json.loads(path.read_text())["shapes"]:
        assert {"ours", "SDPA", "products"} <= shape["best"].keys(), out
        for name, way in shape["ways"].items():
            assert "absent" in way or way["relative_error"] < 0.02, name


def test_the_rows_of_table_2_are_measured_beside_their_peers(writehead, quick_chip, tmp_path):
    path = tmp_path / "decode.json"
    code, _, err = writehead("bench", "decode", "--preset=tiny", *SMALL, "--output", path)
    assert code == 0, err
    for row in json.loads(path.read_text())["rows"]:
        for name, found in row["measured"].items():
            if name != "Hugging Face":
                assert "step_ms" in found, (row["preset"], name, found)
            elif row["preset"] == "tiny/multi-head":
                assert "step_ms" in found or "not installed" in found["absent"]


def test_plain_pytorch_is_measured_compiled_where_asked_for(writehead, quick_chip, tmp_path):
    path = tmp_path / "decode.json"
    one = ("--preset=tiny/multi-query", "--beam=1", "--padded", "--compiled")
    code, _, err = writehead("bench", "decode", *one, *SMALL, "--output", path)
    assert code == 0, err
    [row] = json.loads(path.read_text())["rows"]
    for backend in ("sdpa", "eager"):
        found = row["measured"][f"PyTorch, compiled, {backend}"]
        assert "step_ms" in found, found


def test_language_models_are_measured_behind_contexts(writehead, quick_chip, tmp_path):
    path = tmp_path / "contexts.json"
    contexts = ("--preset=tiny-lm", "--context=128", "--context=512")
    code, _, err = writehead("bench", "decode", *contexts, *QUICK, "--output", path)
    assert code == 0, err
    for row in json.loads(path.read_text())["contexts"]:
        assert "us" in row["attention"], row["attention"]
        for name, found in row["measured"].items():
            assert "step_ms" in found, (row["preset"], name, found)
