"""`explain` on other people's models and chips: totals by transformers, chips by name."""

import json

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from writehead import cost
from writehead.errors import ConfigError
from writehead.interop.families import describe

SIDES = {"attention_heads": 4, "ffn_dim": 52}
BART = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in SIDES.items()}
BART |= {"d_model": 24, "encoder_layers": 3, "decoder_layers": 2, "vocab_size": 97}
BART |= {"max_position_embeddings": 31, "pad_token_id": 1}
T5 = {"d_model": 24, "vocab_size": 97, "num_heads": 5, "d_kv": 7, "d_ff": 51, "num_layers": 3}
GPT = {"n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 31, "vocab_size": 97}
LLAMA = {"hidden_size": 24, "num_hidden_layers": 3, "intermediate_size": 51, "vocab_size": 97}
LLAMA |= {"num_attention_heads": 6, "num_key_value_heads": 2}
LLAMA |= {"max_position_embeddings": 31, "pad_token_id": 0}
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


def parameters(model):
    """Trainable parameters, and the bias of the output, which transformers stores as a buffer.

    The sinusoidal positions of Marian are a frozen parameter.
    """
    biases = [B for name, B in model.named_buffers() if name == "final_logits_bias"]
    trainable = [P for P in model.parameters() if P.requires_grad]
    return sum(P.numel() for P in trainable + biases)


@pytest.mark.parametrize(("kind", "sizes", "g"), MODELS)
def test_a_hugging_face_config_has_the_sizes_and_the_work_of_its_model(tmp_path, kind, sizes, g):
    config = saved(tmp_path, kind, sizes)
    auto = "AutoModelForSeq2SeqLM" if config.is_encoder_decoder else "AutoModelForCausalLM"
    with torch.device("meta"):
        model = getattr(transformers, auto).from_config(config, attn_implementation="eager")
    found = describe(tmp_path / "config.json")
    counted, exact = sum(cost.parameters(found.config).values()), parameters(model)
    assert (found.config.g, found.config.window) == (g, 8 if kind == "mistral" else None)
    if found.approximations:
        assert counted == pytest.approx(exact, rel=0.05)
        return
    assert counted == exact
    b, m, n = 2, 7 if config.is_encoder_decoder else 0, 11
    target = torch.ones(b, n, dtype=torch.long, device="meta")
    inputs = {"decoder_input_ids": target} if m else {}
    with FlopCounterMode(display=False) as flops, torch.no_grad():
        model(input_ids=target[:, : m or n], **inputs)
    pairs = cost.Pairs(b * m * m, b * n * n, b * m * n)  # eager attention computes hidden pairs too
    work = cost.training_step(found.config, cost.Setting(b, m, n), pairs)
    assert work.operations == 3 * flops.get_total_flops()


def test_the_options_of_layers_are_read(tmp_path):
    def read(kind, **fields):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **fields}))
        return describe(tmp_path / "config.json")

    marian = read("marian", **BART, activation_function="swish", scale_embedding=True).config
    assert (marian.activation, marian.embedding_scale) == ("silu", 24**0.5)
    assert (marian.norm_place, marian.positions) == ("post", "sinusoidal")
    for place in ({"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5}}):
        llama = read("llama", **LLAMA, **place, rms_norm_eps=1e-5).config
        assert (llama.rotary_base, llama.norm_epsilon, llama.gated) == (5e5, 1e-5, True)
    scaled = read("llama", **LLAMA, rope_theta=5e5, rope_scaling={"rope_type": "llama3"})
    assert "scaling" in scaled.approximations[0]
    assert read("t5", **T5).config.effective_logit_scale == 24**-0.5


def test_explain_compares_a_model_with_mixed_write_heads_with_both_extremes(writehead):
    sizes = ("--batch=8", "--set=model.encoder_g=8", "--set=model.cross_g=2")
    answer = json.loads(writehead("explain", "wmt14/multi-query", *sizes, "--json")[1])
    compared = answer["comparison"]
    assert compared["mixed"]["f"] == answer["config"]["f"]
    sizes_in_order = [compared[kind]["kv_bytes"] for kind in ("multi-query", "mixed", "multi-head")]
    assert sizes_in_order == sorted(set(sizes_in_order))
    out = writehead("explain", "wmt14/multi-query", *sizes)[1]
    assert "encoder_g=8, cross_g=2" in out
    assert "mixed" in out


def test_explain_says_what_it_approximates(tmp_path, writehead, refused):
    saved(tmp_path, "qwen2", LLAMA)
    for path in (tmp_path, tmp_path / "config.json"):
        answer = json.loads(writehead("explain", path, "--target=31", "--json")[1])
        assert answer["kind"] == "grouped-query"
        assert "biases" in answer["approximations"][0]
    assert writehead("explain", tmp_path, "--target=31")[1].count("approximated") == 1
    assert "31 positions" in refused("explain", tmp_path, "--target=32")


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
        (json.dumps({"model_type": "gpt2", **GPT, "activation_function": "x"}), "activation 'x'"),
        (json.dumps({"model_type": "gpt2", **GPT, "activation_function": []}), "supported: relu"),
        (json.dumps({"model_type": "llama", **LLAMA, "rope_theta": "x"}), "rope_theta='x'"),
        (json.dumps({"model_type": "gpt2", **GPT, "n_head": 7}), "heads must divide"),
        (
            json.dumps({"model_type": "gpt2", **GPT, "tie_word_embeddings": 3}),
            "tie_word_embeddings=3",
        ),
    ],
)
def test_a_file_that_is_no_such_config_is_refused_in_a_sentence(tmp_path, content, words):
    file = tmp_path / "config.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=words) as caught:
        describe(file)
    assert len(str(caught.value)) < len(str(file)) + 150


def test_every_chip_has_a_source_and_an_unknown_one_is_answered_with_all(writehead, refused):
    for name, chip in cost.CHIPS.items():
        out = writehead("explain", "wmt14/multi-query", "--batch=1", "--chip", name)[1]
        assert chip.source in " ".join(out.split())
    error = refused("explain", "wmt14/multi-query", "--chip=xyz")
    assert all(name in error for name in cost.CHIPS)


def test_the_cache_of_a_language_model_has_no_source_tokens(writehead):
    texts = [writehead("explain", f"{name}/multi-query")[1] for name in ("tiny", "tiny-lm")]
    assert all("per target token" in text and "the largest batch is" in text for text in texts)
    assert ["per source token" in text for text in texts] == [True, False]
