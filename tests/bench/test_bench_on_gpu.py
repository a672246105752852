"""Each benchmark at small sizes on a CUDA device."""

import json

import pytest
import torch

from helpers import config, model
from writehead.bench.plain_torch import PlainDecoder

pytestmark = pytest.mark.gpu


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


@pytest.mark.parametrize("family", ["tiny", "tiny-lm"])
def test_models_are_measured_beside_their_peers(bench, family):
    sizes = ("--batch=5", "--length=40", "--repeats=2")
    for row in bench("decode", f"--preset={family}", *sizes)["rows"]:
        for name, measured in row["measured"].items():
            if name not in ("Hugging Face", "CTranslate2"):
                assert "step_ms" in measured, (row["preset"], name, measured)


@pytest.mark.parametrize("beam", [1, 3])
def test_compiled_pytorch_finds_the_tokens_of_a_cpu(beam):
    made = model(config("translation", h=4, g=1, k=16, v=16), dtype=torch.float32)
    source = torch.randint(3, made.config.vocab_size, (4, 7))
    expected = PlainDecoder(made, source, 9, beam).run()
    decoder = PlainDecoder(made.cuda(), source.cuda(), 9, beam)
    for _ in range(2):
        assert torch.equal(decoder.run(), expected)
