"""`explain` on other people's models and chips: totals by transformers, chips by name."""

import json

import pytest
import torch
import transformers

from writehead import cost
from writehead.errors import ConfigError
from writehead.hugging_face_config import import_config

SIDES = {
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 52,
    "decoder_ffn_dim": 52,
}
BART = {"d_model": 24, "vocab_size": 97, "max_position_embeddings": 31, "pad_token_id": 1, **SIDES}
T5 = {"d_model": 24, "vocab_size": 97, "num_heads": 5, "d_kv": 7, "d_ff": 51, "num_layers": 3}
GPT = {"n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 31, "vocab_size": 97}
LLAMA = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 51,
    "vocab_size": 97,
    "max_position_embeddings": 31,
    "pad_token_id": 0,
}
MODELS = [
    ("bart", BART, 4),
    ("mbart", BART, 4),
    ("marian", BART | {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 89}, 4),
    ("m2m_100", BART, 4),
    ("m2m_100", BART | {"encoder_ffn_dim": 60}, 4),
    ("t5", T5, 5),
    ("t5", T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, 5),
    ("mt5", T5 | {"num_decoder_layers": 2}, 5),
    ("gpt2", GPT, 4),
    ("gpt2", GPT | {"n_inner": 50, "tie_word_embeddings": False}, 4),
    ("gpt_bigcode", GPT, 1),
    ("gpt_bigcode", GPT | {"multi_query": False}, 4),
    ("llama", LLAMA, 2),
    ("llama", LLAMA | {"head_dim": 10, "attention_bias": True, "mlp_bias": True}, 2),
    ("mistral", LLAMA | {"sliding_window": 8}, 2),
    ("gemma", LLAMA | {"head_dim": 10}, 2),
    ("gemma2", LLAMA | {"head_dim": 10, "sliding_window": 8}, 2),
    ("qwen2", LLAMA, 2),
    ("qwen3", LLAMA | {"head_dim": 10}, 2),
]


def saved(folder, kind, sizes):
    config = transformers.AutoConfig.for_model(kind, **sizes)
    config.save_pretrained(folder)
    return config


@pytest.mark.parametrize(("kind", "sizes", "g"), MODELS)
def test_a_hugging_face_config_has_the_parameters_and_heads_of_its_model(tmp_path, kind, sizes, g):
    config = saved(tmp_path, kind, sizes)
    auto = "AutoModelForSeq2SeqLM" if config.is_encoder_decoder else "AutoModelForCausalLM"
    with torch.device("meta"):
        model = getattr(transformers, auto).from_config(config)
    found = import_config(tmp_path / "config.json")
    counted = sum(cost.parameters(found.config).values())
    exact = sum(P.numel() for P in set(model.parameters()))
    assert counted == pytest.approx(exact, rel=0.05 if found.approximations else 0.02)
    assert found.config.g == g
    assert found.config.window == (8 if kind == "mistral" else None)


def test_explain_says_what_it_approximates(tmp_path, writehead):
    saved(tmp_path, "qwen2", LLAMA)
    for path in (tmp_path, tmp_path / "config.json"):
        answer = json.loads(writehead("explain", path, "--target=31", "--json")[1])
        assert answer["kind"] == "grouped-query"
        assert "gated" in answer["approximations"][0]
        assert "biases" in answer["approximations"][1]
    assert writehead("explain", tmp_path, "--target=31")[1].count("approximated") == 2
    code, _, err = writehead("explain", tmp_path, "--target=32")
    assert (code, "31 positions" in err) == (2, True)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "an object"),
        (" " * (1 << 20) + "{}", "more than"),
        ('{"model_type": "resnet"}', "supported: bart"),
        ('{"model_type": ["gpt2"]}', "supported: bart"),
        ('{"model_type": "gpt2"}', "lacks vocab_size"),
        (json.dumps({"model_type": "gpt2", **GPT, "n_layer": 10**30}), "n_layer"),
        (json.dumps({"model_type": "gpt2", **GPT, "n_head": True}), "n_head"),
        (json.dumps({"model_type": "gpt2", **GPT, "n_embd": -3}), "n_embd"),
        (json.dumps({"model_type": "gpt2", **GPT, "n_head": 7}), "heads must divide"),
        (json.dumps({"model_type": "gpt2", **GPT, "tie_word_embeddings": 3}), "tied=3"),
    ],
)
def test_a_file_that_is_no_such_config_is_refused_in_a_sentence(tmp_path, content, words):
    file = tmp_path / "config.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=words) as caught:
        import_config(file)
    assert len(str(caught.value)) < len(str(file)) + 150


def test_every_chip_has_a_source_and_an_unknown_one_is_answered_with_all(writehead):
    for name, chip in cost.CHIPS.items():
        out = writehead("explain", "wmt14/multi-query", "--batch=1", "--chip", name)[1]
        assert chip.source in " ".join(out.split())
    code, _, err = writehead("explain", "wmt14/multi-query", "--chip=xyz")
    assert code == 2
    assert all(name in err for name in cost.CHIPS)
