"""Hugging Face's GPTBigCode, multi-head and multi-query, as a witness: the same weights must give
the same logits, the same greedy sequences and the same beams.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM

from writehead.config import DecodeConfig, ModelConfig
from writehead.decoding import beam_search, greedy
from writehead.model import LanguageModel

VOCABULARY, D, H, LAYERS, POSITIONS = 61, 48, 6, 3, 40
K = D // H
PAD, END = 0, 1


def witness(multi_query: bool, tied: bool = True, seed: int = 0) -> GPTBigCodeForCausalLM:
    """Their model, with random weights throughout: no bias is zero and no norm is one."""
    config = GPTBigCodeConfig(
        vocab_size=VOCABULARY,
        n_positions=POSITIONS,
        n_embd=D,
        n_layer=LAYERS,
        n_head=H,
        n_inner=101,
        activation_function="gelu_pytorch_tanh",
        layer_norm_epsilon=1e-5,
        multi_query=multi_query,
        tie_word_embeddings=tied,
        pad_token_id=PAD,
        bos_token_id=PAD,
        eos_token_id=END,
    )
    model = GPTBigCodeForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, P in model.named_parameters():
            mean, std = 0.0, P.shape[-1] ** -0.5
            if "ln_" in name:
                mean, std = float(name.endswith("weight")), 0.3
            elif "wte" in name or "wpe" in name or "bias" in name:
                std = 0.5
            P.copy_(mean + std * torch.randn(P.shape, generator=generator))
    return model


def ours(theirs: GPTBigCodeForCausalLM) -> LanguageModel:
    """Our model with their weights."""
    g = 1 if theirs.config.multi_query else H
    config = ModelConfig(
        task="language",
        vocabulary=VOCABULARY,
        d=D,
        f=101,
        h=H,
        g=g,
        k=K,
        v=K,
        decoder_layers=LAYERS,
        target_positions=POSITIONS,
        tied=theirs.config.tie_word_embeddings,
        norm="layer",
        norm_epsilon=1e-5,
        activation="gelu_tanh",
        bias=True,
        logit_scale=1.0,
        pad=PAD,
        start=PAD,
        end=END,
    )
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
    model = LanguageModel(config).eval()
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
def test_a_forward_pass_and_cached_steps_give_their_logits(multi_query, tied):
    theirs = witness(multi_query, tied)
    model = ours(theirs)
    tokens = some_tokens(3, 17)
    expected = theirs(tokens).logits
    assert expected.std() > 0.5  # far from nothing, and so from one another
    assert_close(model(tokens), expected, atol=1e-5, rtol=1e-5)

    state = model.start(tokens[:, :5], 17)
    cache = theirs(tokens[:, :4], use_cache=True).past_key_values
    assert state.first.tolist() == tokens[:, 4].tolist()
    for t in range(4, 17):
        logits = model.step(tokens[:, t], state)
        step = theirs(tokens[:, t : t + 1], past_key_values=cache, use_cache=True)
        cache = step.past_key_values
        assert_close(logits, step.logits[:, 0], atol=1e-5, rtol=1e-5)
        assert_close(logits, expected[:, t], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_prompts_of_different_lengths_give_the_logits_that_each_gives_them_alone(multi_query):
    theirs = witness(multi_query, seed=2)
    model = ours(theirs)
    tokens, lengths = some_tokens(3, 12), [7, 1, 4]
    state = model.start(tokens[:, :7], 12, prompt_lengths=torch.tensor(lengths))
    fed = state.first
    for t in range(5):
        logits = model.step(fed, state)
        for row, n in enumerate(lengths):
            expected = theirs(tokens[row : row + 1, : n + t]).logits[0, -1]
            assert_close(logits[row], expected, atol=1e-5, rtol=1e-5)
        fed = torch.stack([tokens[row, n + t] for row, n in enumerate(lengths)])


LENGTHS = [5, 1, 3, 7, 2, 4]


def prompts(seed: int) -> Tensor:
    return some_tokens(len(LENGTHS), max(LENGTHS), seed)


def generate(theirs: GPTBigCodeForCausalLM, seed: int, row: int, end: int | None, **options):
    """What their search makes of one prompt, alone."""
    prompt = prompts(seed)[row : row + 1, : LENGTHS[row]]
    output = theirs.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        eos_token_id=end,
        pad_token_id=PAD,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    return output.sequences[:, LENGTHS[row] :].tolist(), output


def cut(tokens: list[int], end: int) -> tuple[tuple[int, ...], bool]:
    """The tokens before the end token, and whether there is one."""
    return (tuple(tokens[: tokens.index(end)]), True) if end in tokens else (tuple(tokens), False)


def end_of_some(theirs: GPTBigCodeForCausalLM, seed: int, length: int) -> int:
    """A token that their greedy search comes to from about half of the prompts, but not at once."""
    theirs.generation_config.eos_token_id = None
    rows = [
        generate(theirs, seed, row, None, max_new_tokens=length)[0][0]
        for row in range(len(LENGTHS))
    ]
    counts = {token: sum(token in row[1:] for row in rows) for token in range(2, VOCABULARY)}
    return min(counts, key=lambda token: abs(counts[token] - len(LENGTHS) / 2))


def started(model: LanguageModel, seed: int, length: int):
    lengths = torch.tensor(LENGTHS)
    return model.start(prompts(seed), max(LENGTHS) + length, prompt_lengths=lengths)


@pytest.mark.parametrize("seed", range(3))
def test_greedy_search_finds_what_theirs_finds(multi_query, seed):
    theirs = witness(multi_query, seed=seed)
    model = ours(theirs)
    end = end_of_some(theirs, seed, 20)
    got = greedy(model.step, started(model, seed, 20), DecodeConfig(max_length=20), end=end)
    expected = [
        cut(generate(theirs, seed, row, end, max_new_tokens=20)[0][0], end)
        for row in range(len(LENGTHS))
    ]
    assert [(one.tokens, one.finished) for one in got] == expected
    assert {finished for _, finished in expected} == {True, False}


@pytest.mark.parametrize("seed", range(3))
def test_beam_search_finds_all_the_beams_that_theirs_finds(multi_query, seed):
    theirs = witness(multi_query, seed=seed)
    model = ours(theirs)
    end = end_of_some(theirs, seed, 12)
    config = DecodeConfig(max_length=12, beam=4, n_best=4, alpha=0.0)
    got = beam_search(model.step, started(model, seed, 12), config, end=end)
    endings = []
    for row, found in enumerate(got):
        sequences, output = generate(
            theirs,
            seed,
            row,
            end,
            num_beams=4,
            num_return_sequences=4,
            length_penalty=0.0,
            early_stopping="never",
            max_new_tokens=12,
        )
        expected = [cut(tokens, end) for tokens in sequences]
        assert [(one.tokens, one.finished) for one in found] == expected
        scores = torch.tensor([one.score for one in found])
        assert_close(scores, output.sequences_scores, atol=1e-4, rtol=1e-5)
        endings += [finished for _, finished in expected]
    assert True in endings
