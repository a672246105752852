"""Randomly initialised models of transformers, in which no bias is zero and no gain is one."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

transformers.utils.logging.disable_progress_bar()  # tests compare standard error

SIDES = {"encoder_layers": 3, "decoder_layers": 2}
SIDES |= {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
SIDES |= {f"{side}_ffn_dim": 44 for side in ("encoder", "decoder")}
MARIAN = {"vocab_size": 61, "d_model": 24, "max_position_embeddings": 37, **SIDES}
MARIAN |= {"pad_token_id": 60, "eos_token_id": 0, "decoder_start_token_id": 60}
MARIAN |= {"forced_eos_token_id": None, "bos_token_id": None}
M2M100 = {"vocab_size": 61, "d_model": 24, "max_position_embeddings": 37, **SIDES}
GPT = {"vocab_size": 61, "n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 37}
GPT |= {"n_inner": 50, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
LLAMA = {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 50, "num_hidden_layers": 3}
LLAMA |= {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 37}
LLAMA |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 50.0, "factor": 4.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 3.0, "original_max_position_embeddings": 16}

T5 = {"vocab_size": 61, "d_model": 24, "d_kv": 7, "d_ff": 50, "num_layers": 3, "num_heads": 5}
T5 |= {"num_decoder_layers": 2, "relative_attention_num_buckets": 6, "decoder_start_token_id": 0}
T5 |= {"relative_attention_max_distance": 9, "feed_forward_proj": "gated-gelu"}

MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "marian": ("marian", MARIAN | {"scale_embedding": True, "activation_function": "swish"}),
    "marian-two-vocabularies": (
        "marian",
        MARIAN
        | {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 53, "d_model": 20}
        | {"decoder_start_token_id": 52, "pad_token_id": 52},
    ),
    "m2m_100": ("m2m_100", M2M100),
    "m2m_100-unscaled": (
        "m2m_100",
        M2M100 | {"scale_embedding": False, "encoder_layers": 1, "activation_function": "gelu"},
    ),
    "gpt2": ("gpt2", GPT),
    "gpt2-untied": ("gpt2", GPT | {"tie_word_embeddings": False, "n_inner": None, "n_head": 3}),
    "gpt_bigcode": ("gpt_bigcode", GPT),
    "gpt_bigcode-multi-head": ("gpt_bigcode", GPT | {"multi_query": False, "n_layer": 2}),
    "llama": ("llama", LLAMA),
    "llama-biased": (
        "llama",
        LLAMA
        | {"attention_bias": True, "mlp_bias": True, "head_dim": 10, "tie_word_embeddings": True}
        | {"hidden_act": "gelu"},
    ),
    "llama-3": ("llama", LLAMA | {"rope_parameters": LLAMA3, "head_dim": 8}),
    "llama-linear": (
        "llama",
        LLAMA | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}},
    ),
    "mistral": ("mistral", LLAMA | {"sliding_window": 5, "num_key_value_heads": 3}),
    "t5": ("t5", T5 | {"feed_forward_proj": "relu"}),
    "t5-v1.1": ("t5", T5 | {"tie_word_embeddings": False}),
    "mt5": ("mt5", T5),
    "gemma": ("gemma", LLAMA | {"head_dim": 10, "num_key_value_heads": 1}),
}


def witness(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A model by its name in MODELS, in evaluation mode."""
    kind, sizes = MODELS[name]
    config = transformers.AutoConfig.for_model(kind, **sizes)
    auto = "AutoModelForSeq2SeqLM" if config.is_encoder_decoder else "AutoModelForCausalLM"
    model = getattr(transformers, auto).from_config(config, dtype=dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    tensors = dict(model.named_parameters()) | {
        name: B for name, B in model.named_buffers() if name == "final_logits_bias"
    }
    with torch.no_grad():
        for name, P in tensors.items():
            if not P.requires_grad and "bias" not in name:
                continue  # sinusoidal positions
            mean, std = 0.0, P.shape[-1] ** -0.5
            if P.dim() == 1 and name.endswith("weight"):
                mean, std = float(kind != "gemma"), 0.3
            elif P.dim() == 1 or "embed" in name or "shared" in name or name == "final_logits_bias":
                std = 0.5
            P.copy_(mean + std * torch.randn(P.shape, generator=generator, dtype=torch.float64))
    return model


def saved(folder: Path, name: str, **options) -> PreTrainedModel:
    """A model, written to a folder by its own code."""
    model = witness(name, **options)
    model.save_pretrained(folder)
    return model
