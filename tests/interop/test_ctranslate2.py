import dataclasses
import json

import pytest
import torch

from helpers import config, model
from writehead.config import DecodeConfig
from writehead.engine import beam_search
from writehead.errors import ConfigError
from writehead.interop.ctranslate2 import export_ctranslate2

ctranslate2 = pytest.importorskip("ctranslate2")


@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize(
    "changes",
    [
        {"g": 6},
        {"g": 2, "norm": "layer", "activation": "gelu", "tied": False},
        {"g": 1, "bias": True, "norm": "layer", "activation": "gelu_tanh", "logit_scale": 0.3},
        {"g": 1, "bos": 4, "eos": 7},
        {"g": 2, "encoder_g": 6, "activation": "silu", "embedding_scale": 1.7, "output_bias": True},
        {"g": 1, "encoder_g": 3, "positions": "sinusoidal", "position_offset": 2, "tied": False},
        {"g": 6, "encoder_g": 1, "position_offset": 2, "embedding_scale": 0.5},
    ],
    ids=["multi-head", "grouped-query", "multi-query", "tokens", "scales", "sinusoidal", "offset"],
)
def test_an_exported_model_gives_our_tokens_and_scores(tmp_path, changes, beam):
    made = model(config("translation", d=20, h=6, k=8, v=8, **changes), dtype=torch.float32)
    for name, weight in made.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(weight, mean=1.0, std=0.5)
    eos, tokens = made.config.eos, [f"token{i}" for i in range(made.config.vocab_size)]
    export_ctranslate2(made, tokens, tmp_path / "model")
    sources = [[5, 3, 9, 8], [6, 6], [11, 2, 3, 12, 4, 10]]
    options = DecodeConfig(beam=beam, max_length=9, alpha=0.0)
    expected = []
    for source in sources:
        state = made.start(torch.tensor([[*source, eos]]), 9, beam=beam)
        [[best, *_]] = beam_search(made.step, state, options, eos=eos)
        expected.append(best)
    translator = ctranslate2.Translator(str(tmp_path / "model"), "cpu", compute_type="float32")
    limits = {"max_decoding_length": 9, "min_decoding_length": 0, "length_penalty": 0}
    given = [[tokens[i] for i in source] for source in sources]
    results = translator.translate_batch(given, beam_size=beam, return_scores=True, **limits)
    for result, best in zip(results, expected, strict=True):
        assert result.hypotheses[0] == [tokens[i] for i in best.tokens]
        assert result.scores[0] == pytest.approx(best.log_probability, rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"window": 3}, "window=3"),
        ({"v": 5}, "v=5"),
        ({"cross_g": 1, "g": 2}, "cross_g=1"),
        ({"norm_place": "post"}, "norm_place='post'"),
        ({"gated": True}, "gated=True"),
        ({"positions": "rotary"}, "positions='rotary'"),
        ({"source_vocab_size": 11}, "source_vocab_size=11"),
        ({}, "translation"),
    ],
)
def test_what_ctranslate2_cannot_express_is_refused(tmp_path, changes, reason):
    task = "translation" if changes else "language"
    made = model(dataclasses.replace(config(task, k=8, v=8), **changes))
    with pytest.raises(ConfigError, match=reason):
        export_ctranslate2(made, [], tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_the_bundled_model_translates_the_same_in_ctranslate2(writehead, tmp_path):
    lines = ["How are you today?", "", "He said that he had never seen such a beautiful garden."]
    (tmp_path / "text").write_text("\n".join(lines))
    given = ("--input", tmp_path / "text", "--device=cpu", "--repeats=1")
    code, _, err = writehead("bench", "translate", *given, "--output", tmp_path / "record.json")
    assert code == 0, err
    result = json.loads((tmp_path / "record.json").read_text())
    assert result["run"] == "writehead/bundled/en-de"
    searches = result["engines"]["CTranslate2"]["searches"]
    assert [searches[name]["equal_lines"] for name in ("greedy", "beam-4")] == [3, 3]
