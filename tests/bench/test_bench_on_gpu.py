"""Each benchmark at small sizes on a CUDA device: all that is ours and PyTorch's must answer."""

import json

import pytest

pytestmark = pytest.mark.gpu

QUICK = ("--batch=5", "--vocab-size=512", "--repeats=2")
SMALL = (*QUICK, "--source=24", "--target=40")


@pytest.fixture
def bench(writehead, quick_chip, tmp_path):
    def run(verb, *options):
        code, out, err = writehead("bench", verb, *options, "--output", tmp_path / "result.json")
        assert code == 0, out + err
        return json.loads((tmp_path / "result.json").read_text())

    return run


def test_attention_is_measured_every_way_that_pytorch_has(bench):
    shapes = ("--shape=64,512,1", "--shape=64,512,8", "--shape=1,4096,1")
    for shape in bench("attention", *shapes)["shapes"]:
        assert {"ours", "SDPA", "products"} <= shape["best"].keys()
        for name, way in shape["ways"].items():
            assert "absent" in way or way["relative_error"] < 0.02, name


def test_the_rows_of_table_2_are_measured_beside_their_peers(bench):
    one = ("--preset=tiny/multi-query", "--beam=1", "--padded", "--compiled")
    for options in (("--preset=tiny",), one):
        for row in bench("decode", "--force", *options, *SMALL)["rows"]:
            assert ("PyTorch, compiled, sdpa" in row["measured"]) == (options == one)
            for name, found in row["measured"].items():
                if name != "Hugging Face":
                    assert "step_ms" in found, (row["preset"], name, found)
                elif row["preset"] == "tiny/multi-head":
                    assert "step_ms" in found or "not installed" in found["absent"]


def test_language_models_are_measured_after_contexts(bench):
    contexts = ("--preset=tiny-lm", "--context=128", "--context=512")
    for row in bench("decode", *contexts, *QUICK)["contexts"]:
        assert "us" in row["attention"], row["attention"]
        for name, found in row["measured"].items():
            assert "step_ms" in found, (row["preset"], name, found)
