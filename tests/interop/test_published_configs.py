"""The config files of published models, with the fields that they have on the hub."""

import json
import logging

import pytest

from writehead.errors import ConfigError
from writehead.interop.pretrained import read_config

OPUS = {
    "model_type": "marian",
    "architectures": ["MarianMTModel"],
    "activation_dropout": 0.0,
    "activation_function": "swish",
    "add_bias_logits": False,
    "add_final_layer_norm": False,
    "attention_dropout": 0.0,
    "bad_words_ids": [[58100]],
    "bos_token_id": 0,
    "classif_dropout": 0.0,
    "classifier_dropout": 0.0,
    "d_model": 512,
    "decoder_attention_heads": 8,
    "decoder_ffn_dim": 2048,
    "decoder_layerdrop": 0.0,
    "decoder_layers": 6,
    "decoder_start_token_id": 58100,
    "decoder_vocab_size": 58101,
    "dropout": 0.1,
    "encoder_attention_heads": 8,
    "encoder_ffn_dim": 2048,
    "encoder_layerdrop": 0.0,
    "encoder_layers": 6,
    "eos_token_id": 0,
    "extra_pos_embeddings": 58101,
    "forced_eos_token_id": 0,
    "init_std": 0.02,
    "is_encoder_decoder": True,
    "max_length": 512,
    "max_position_embeddings": 512,
    "normalize_before": False,
    "normalize_embedding": False,
    "num_beams": 6,
    "num_hidden_layers": 6,
    "pad_token_id": 58100,
    "scale_embedding": True,
    "share_encoder_decoder_embeddings": True,
    "static_position_embeddings": True,
    "use_cache": True,
    "vocab_size": 58101,
}
M2M = {
    "model_type": "m2m_100",
    "activation_dropout": 0.0,
    "activation_function": "relu",
    "attention_dropout": 0.1,
    "bos_token_id": 0,
    "d_model": 1024,
    "decoder_attention_heads": 16,
    "decoder_ffn_dim": 4096,
    "decoder_layerdrop": 0.05,
    "decoder_layers": 12,
    "decoder_start_token_id": 2,
    "dropout": 0.1,
    "early_stopping": True,
    "encoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
    "encoder_layerdrop": 0.05,
    "encoder_layers": 12,
    "eos_token_id": 2,
    "is_encoder_decoder": True,
    "max_length": 200,
    "max_position_embeddings": 1024,
    "num_beams": 5,
    "num_hidden_layers": 12,
    "pad_token_id": 1,
    "scale_embedding": True,
    "use_cache": True,
    "vocab_size": 128112,
}
T5 = {
    "architectures": ["T5ForConditionalGeneration"],
    "d_ff": 1024,
    "d_kv": 64,
    "d_model": 512,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.1,
    "eos_token_id": 1,
    "feed_forward_proj": "gated-gelu",
    "initializer_factor": 1.0,
    "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-06,
    "model_type": "t5",
    "num_decoder_layers": 8,
    "num_heads": 6,
    "num_layers": 8,
    "output_past": True,
    "pad_token_id": 0,
    "relative_attention_num_buckets": 32,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 32128,
}
GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_type": "cls_index",
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
SANTACODER = {
    "activation_function": "gelu_pytorch_tanh",
    "architectures": ["GPTBigCodeForCausalLM"],
    "attention_softmax_in_fp32": True,
    "attn_pdrop": 0.1,
    "bos_token_id": 49152,
    "embd_pdrop": 0.1,
    "eos_token_id": 49152,
    "inference_runner": 0,
    "layer_norm_epsilon": 1e-05,
    "max_batch_size": None,
    "max_sequence_length": None,
    "model_type": "gpt_bigcode",
    "multi_query": True,
    "n_embd": 2048,
    "n_head": 16,
    "n_inner": 8192,
    "n_layer": 24,
    "n_positions": 2048,
    "pad_key_length": True,
    "pre_allocate_kv_cache": False,
    "resid_pdrop": 0.1,
    "scale_attention_softmax_in_fp32": True,
    "scale_attn_weights": True,
    "torch_dtype": "float32",
    "vocab_size": 49280,
}
LLAMA3 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 128256,
}
MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 32000,
}
GEMMA = {
    "architectures": ["GemmaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "head_dim": 256,
    "hidden_act": "gelu",
    "hidden_activation": None,
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 16384,
    "max_position_embeddings": 8192,
    "model_type": "gemma",
    "num_attention_heads": 8,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 256000,
}
NLLB = M2M | {"max_length": 200, "vocab_size": 256206, "tokenizer_class": "NllbTokenizer"}
MT5 = T5 | {"model_type": "mt5", "vocab_size": 250112, "architectures": None}

# the config.json, the generation_config.json, and what a ModelConfig must have
PUBLISHED = {
    "opus-mt-en-de": (
        OPUS,
        {"bad_words_ids": [[58100]], "decoder_start_token_id": 58100, "num_beams": 6}
        | {"eos_token_id": 0, "forced_eos_token_id": 0, "pad_token_id": 58100, "max_length": 512},
        {"task": "translation", "vocab_size": 58101, "source_vocab_size": None, "d": 512}
        | {"f": 2048, "h": 8, "g": 8, "k": 64, "encoder_layers": 6, "norm_place": "post"}
        | {"positions": "sinusoidal", "sinusoid": "d", "position_offset": 0, "activation": "silu"}
        | {"embedding_scale": 512**0.5, "output_bias": True, "tied": True, "bias": True}
        | {"pad": 58100, "bos": 58100, "eos": 0, "norm": "layer", "target_positions": 512},
    ),
    "nllb-200-distilled-600M": (
        NLLB,
        {"bos_token_id": 0, "decoder_start_token_id": 2, "eos_token_id": 2, "max_length": 200},
        {"vocab_size": 256206, "d": 1024, "f": 4096, "h": 16, "decoder_layers": 12}
        | {"positions": "sinusoidal", "sinusoid": "d-2", "position_offset": 2, "bos": 2, "eos": 2}
        | {"pad": 1, "activation": "relu", "embedding_scale": 32.0, "norm_place": "pre"},
    ),
    "m2m100_418M": (
        M2M,
        {"bos_token_id": 0, "decoder_start_token_id": 2, "eos_token_id": 2, "pad_token_id": 1},
        {"vocab_size": 128112, "source_positions": 1024, "sinusoid": "d-2", "bos": 2, "pad": 1},
    ),
    "mt5-small": (
        MT5,
        {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0},
        {"vocab_size": 250112, "d": 512, "f": 1024, "h": 6, "k": 64, "encoder_layers": 8}
        | {"tied": False, "gated": True, "activation": "gelu_tanh", "logit_scale": 1.0},
    ),
    "t5-v1_1-small": (
        T5,
        None,
        {"positions": "relative", "relative_buckets": 32, "relative_distance": 128, "tied": False}
        | {"attention_scale": 1.0, "logit_scale": 1.0, "pad": 0, "bos": 0, "eos": 1, "norm": "rms"}
        | {"source_positions": 512, "bias": False},
    ),
    "santacoder": (
        SANTACODER,
        None,
        {"task": "language", "d": 2048, "f": 8192, "h": 16, "g": 1, "k": 128, "eos": 49152}
        | {"positions": "learned", "target_positions": 2048, "activation": "gelu_tanh"},
    ),
    "gpt2": (
        GPT2,
        {"bos_token_id": 50256, "eos_token_id": 50256},
        {"f": 3072, "h": 12, "g": 12, "bos": 50256, "eos": 50256, "norm_epsilon": 1e-5}
        | {"bias": True, "norm": "layer", "tied": True},
    ),
    "Llama-3.2-1B-Instruct": (
        LLAMA3,
        {"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "temperature": 0.6},
        {"d": 2048, "f": 8192, "h": 32, "g": 8, "k": 64, "rotary_base": 5e5, "rotary_factor": 32.0}
        | {"rotary_original": 8192, "rotary_low": 1.0, "rotary_high": 4.0, "tied": True}
        | {"bos": 128000, "eos": 128001, "gated": True, "target_positions": 131072},
    ),
    "Mistral-7B-v0.1": (
        MISTRAL,
        {"bos_token_id": 1, "eos_token_id": 2},
        {"window": 4096, "g": 8, "k": 128, "tied": False, "bos": 1, "eos": 2, "norm_epsilon": 1e-5},
    ),
    "gemma-2b": (
        GEMMA,
        {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0},
        {"g": 1, "k": 256, "activation": "gelu_tanh", "norm_offset": 1.0, "tied": True}
        | {"embedding_scale": 2048**0.5, "bos": 2, "eos": 1, "pad": 0, "rotary_base": 1e4},
    ),
}


def write(folder, config, generation):
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_read(tmp_path, name, caplog):
    config, generation, expected = PUBLISHED[name]
    with caplog.at_level(logging.WARNING):
        found = read_config(write(tmp_path, config, generation))
    assert {field: getattr(found, field) for field in expected} == expected
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "end"), [("opus-mt-en-de", 0), ("mt5-small", 1), ("gpt2", 50256), ("gemma-2b", 1)]
)
def test_missing_tokens_are_those_of_the_family(tmp_path, name, end):
    config, _, expected = PUBLISHED[name]
    shorter = {field: value for field, value in config.items() if not field.endswith("token_id")}
    found = read_config(write(tmp_path, shorter, None))
    assert (found.eos, found.bos) == (end, expected.get("bos", found.pad))


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("gpt2", {"quantization_config": {"bits": 4}}, "cannot be imported: .*quantization_config"),
        ("Mistral-7B-v0.1", {"layer_types": 5}, "cannot be imported: only some of its layers"),
        ("gemma-2b", {"rope_parameters": "yarn"}, "rope_parameters='yarn', not an object"),
        ("gemma-2b", {"rope_scaling": {"rope_type": []}}, r"rotary positions is \[\]"),
        ("gemma-2b", {"rope_scaling": {"rope_type": "yarn"}}, "rotary positions is 'yarn'"),
        ("Llama-3.2-1B-Instruct", {"eos_token_id": [128001, 128256]}, "eos_token_id=128256"),
        ("t5-v1_1-small", {"feed_forward_proj": "foo-gelu"}, "activation 'foo-gelu'"),
        ("t5-v1_1-small", {"dropout_rate": 1.5}, "dropout_rate=1.5"),
        ("opus-mt-en-de", {"scale_embedding": "yes"}, "scale_embedding='yes', not true or false"),
        ("santacoder", {"layer_norm_epsilon": 0}, "layer_norm_epsilon=0, not a number above 0"),
        ("santacoder", {"eos_token_id": None, "vocab_size": 40000}, "lacks eos_token_id; add it"),
    ],
)
def test_what_is_not_expressed_is_named_by_its_field(tmp_path, name, changes, words):
    write(tmp_path, PUBLISHED[name][0] | {"bos_token_id": 0} | changes, None)
    with pytest.raises(ConfigError, match=words) as caught:
        read_config(tmp_path)
    assert "config.json" in str(caught.value)


def test_an_error_names_the_file_with_the_value(tmp_path):
    write(tmp_path, GPT2, {"eos_token_id": 50257})
    with pytest.raises(ConfigError, match=r"generation_config\.json has eos_token_id=50257"):
        read_config(tmp_path)
