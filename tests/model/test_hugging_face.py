"""Hugging Face's GPTBigCode, multi-head and multi-query, as an independent implementation.

The same weights must give the same logits, greedy sequences and beams; in float64, where no two
tokens are nearly equally likely.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM
from writehead.hugging_face_config import import_config

from writehead.config import DecodeConfig, ModelConfig
from writehead.engine import beam_search
from writehead.model import LanguageModel

VOCABULARY, D, H, LAYERS, POSITIONS = 61, 48, 6, 3, 40
K = D // H
PAD, EOS = 0, 1


def witness(multi_query: bool, tied: bool = True, seed: int = 0) -> GPTBigCodeForCausalLM:
    """Their model, with random weights throughout: no bias is zero and no norm is one."""
    sizes = {"vocab_size": VOCABULARY, "n_positions": POSITIONS, "n_embd": D, "n_layer": LAYERS}
    sizes |= {"n_head": H, "n_inner": 101, "multi_query": multi_query, "tie_word_embeddings": tied}
    tokens = {"pad_token_id": PAD, "bos_token_id": PAD, "eos_token_id": EOS}
    kind = {"activation_function": "gelu_pytorch_tanh", "layer_norm_epsilon": 1e-5}
    config = GPTBigCodeConfig(**sizes, **tokens, **kind)
    model = GPTBigCodeForCausalLM(config).double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, P in model.named_parameters():
            mean, std = 0.0, P.shape[-1] ** -0.5
            if "ln_" in name:
                mean, std = float(name.endswith("weight")), 0.3
            elif "wte" in name or "wpe" in name or "bias" in name:
                std = 0.5
            P.copy_(mean + std * torch.randn(P.shape, generator=generator, dtype=P.dtype))
    return model


def ours(theirs: GPTBigCodeForCausalLM) -> LanguageModel:
    """Our model with their weights."""
    g = 1 if theirs.config.multi_query else H
    sizes = {"vocab_size": VOCABULARY, "d": D, "f": 101, "h": H, "g": g, "k": K, "v": K}
    sizes |= {"decoder_layers": LAYERS, "target_positions": POSITIONS, "logit_scale": 1.0}
    kind = {"norm": "layer", "norm_epsilon": 1e-5, "activation": "gelu_tanh", "bias": True}
    ids = {"pad": PAD, "bos": PAD, "eos": EOS}
    tied = theirs.config.tie_word_embeddings
    config = ModelConfig(task="language", tied=tied, **sizes, **kind, **ids)
    given = theirs.state_dict()
    weights = {
        "tokens.weight": given["transformer.wte.weight"],
        "decoder.positions.weight": given["transformer.wpe.weight"],
    }
    if not config.tied:
        weights["output.weight"] = given["lm_head.weight"]
    modules = {"decoder.norm": "transformer.ln_f"}
    for i in range(LAYERS):
        mine, their = f"decoder.layers.{i}", f"transformer.h.{i}"
        modules |= {
            f"{mine}.norm_attention": f"{their}.ln_1",
            f"{mine}.norm_feed_forward": f"{their}.ln_2",
            f"{mine}.attention.P_o": f"{their}.attn.c_proj",
            f"{mine}.feed_forward.widen": f"{their}.mlp.c_fc",
            f"{mine}.feed_forward.narrow": f"{their}.mlp.c_proj",
        }
        for kind in ("weight", "bias"):
            packed = given[f"{their}.attn.c_attn.{kind}"]
            for name, P in zip("qkv", unpack(packed, g), strict=True):
                weights[f"{mine}.attention.P_{name}.{kind}"] = P
    for mine, their in modules.items():
        for kind in ("weight", "bias"):
            weights[f"{mine}.{kind}"] = given[f"{their}.{kind}"]
    model = LanguageModel(config).double().eval()
    model.load_state_dict(weights)  # strict: every one of our weights is set, once
    return model


def unpack(packed: Tensor, g: int) -> tuple[Tensor, ...]:
    """Their c_attn as P_q, P_k and P_v: q of all heads, k, v; or q, k, v head after head."""
    if g == 1:
        return packed.split([D, K, K])
    heads = packed.unflatten(0, (H, 3, K))
    return tuple(heads[:, i].flatten(0, 1) for i in range(3))


def some_tokens(b: int, n: int, seed: int = 1) -> Tensor:
    return torch.randint(2, VOCABULARY, (b, n), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=["multi-head", "multi-query"])
def multi_query(request) -> bool:
    return request.param == "multi-query"


@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_their_config_is_read_and_forward_passes_and_cached_steps_give_their_logits(
    tmp_path, multi_query, tied
):
    theirs = witness(multi_query, tied)
    model, tokens, lengths = ours(theirs), some_tokens(3, 12), [7, 1, 4]
    theirs.config.save_pretrained(tmp_path)
    imported = import_config(tmp_path / "config.json")
    assert replace(imported.config, pad=PAD, bos=PAD, eos=EOS) == model.config
    assert imported.approximations == ()
    expected = theirs(tokens).logits
    assert expected.std() > 0.5  # far from zero, and so from one another
    assert_close(model(tokens), expected)
    state = model.start(tokens[:, :7], 12, prompt_lengths=torch.tensor(lengths))
    fed = state.first
    for t in range(5):
        logits = model.step(fed, state)
        assert_close(logits, torch.stack([expected[i, n + t - 1] for i, n in enumerate(lengths)]))
        fed = torch.stack([tokens[i, n + t] for i, n in enumerate(lengths)])


LENGTHS = [5, 1, 3, 7, 2, 4]


def generate(theirs: GPTBigCodeForCausalLM, seed: int, row: int, eos: int | None, **options):
    """Their search over one prompt, alone: the sequences, and their scores if it has beams."""
    prompt = some_tokens(len(LENGTHS), max(LENGTHS), seed)[row : row + 1, : LENGTHS[row]]
    output = theirs.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=PAD,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    return output.sequences[:, LENGTHS[row] :].tolist(), getattr(output, "sequences_scores", None)


def cut(tokens: list[int], eos: int) -> tuple[tuple[int, ...], bool]:
    """The tokens before the end token, and whether there is one."""
    return (tuple(tokens[: tokens.index(eos)]), True) if eos in tokens else (tuple(tokens), False)


def end_of_some(theirs: GPTBigCodeForCausalLM, seed: int) -> int:
    """A token that their greedy search comes to from about half of the prompts, but not at once."""
    theirs.generation_config.eos_token_id = None
    places = range(len(LENGTHS))
    rows = [generate(theirs, seed, row, None, max_new_tokens=12)[0][0] for row in places]
    counts = {token: sum(token in row[1:] for row in rows) for token in range(2, VOCABULARY)}
    return min(counts, key=lambda token: abs(counts[token] - len(LENGTHS) / 2))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("beam", [1, 4])
def test_searches_find_what_theirs_find(multi_query, beam, seed):
    theirs = witness(multi_query, seed=seed)
    model, eos = ours(theirs), end_of_some(theirs, seed)
    config = DecodeConfig(max_length=12, beam=beam, n_best=beam, alpha=0.0)
    prompts = some_tokens(len(LENGTHS), max(LENGTHS), seed)
    state = model.start(prompts, max(LENGTHS) + 12, prompt_lengths=torch.tensor(LENGTHS))
    beams = {"num_beams": 4, "num_return_sequences": 4, "length_penalty": 0.0}
    options = {} if beam == 1 else beams | {"early_stopping": "never"}
    endings = set()
    for row, found in enumerate(beam_search(model.step, state, config, eos=eos)):
        sequences, scores = generate(theirs, seed, row, eos, max_new_tokens=12, **options)
        expected = [cut(tokens, eos) for tokens in sequences]
        assert [(one.tokens, one.finished) for one in found] == expected
        if scores is not None:
            assert_close(torch.tensor([one.score for one in found]), scores, atol=1e-4, rtol=1e-5)
        endings |= {finished for _, finished in expected}
    assert True in endings
