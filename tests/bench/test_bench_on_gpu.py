"""Each benchmark at small sizes on a CUDA device."""

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


def test_attention_is_measured_by_every_method(bench):
    shapes = ("--shape=64,512,1", "--shape=64,512,8", "--shape=1,4096,1")
    for row in bench("attention", *shapes)["rows"]:
        assert "us" in row["measured"]["ours"]
        for name, method in row["measured"].items():
            assert "absent" in method or method["relative_error"] < 0.02, name


def test_the_rows_of_table_2_are_measured_beside_their_peers(bench):
    peers = ("--peer=pytorch", "--peer=torch-compile", "--peer=ctranslate2", "--peer=hugging-face")
    for row in bench("decode", "--preset=tiny", *peers, *SMALL)["rows"]:
        for name, measured in row["measured"].items():
            if name in ("Hugging Face", "CTranslate2"):
                assert "step_ms" in measured or measured["absent"]
            else:
                assert "step_ms" in measured, (row["preset"], name, measured)


def test_language_models_are_measured_after_contexts(bench):
    contexts = ("--preset=tiny-lm", "--context=128", "--context=512")
    for row in bench("context", *contexts, *QUICK)["rows"]:
        for name, measured in row["measured"].items():
            assert "step_ms" in measured, (row["preset"], name, measured)
