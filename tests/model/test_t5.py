"""T5's relative positions: its encoder and decoder, with random weights, give our logits."""

import pytest
import torch
from torch.testing import assert_close

from writehead.config import DecodeConfig, ModelConfig
from writehead.engine import beam_search
from writehead.model import TranslationModel

transformers = pytest.importorskip("transformers")
CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # their norm computes in float32
SIZES = {"d": 24, "f": 31, "h": 6, "k": 5}
NAMES = {
    "attention": (0, "SelfAttention", "layer_norm"),
    "cross": (1, "EncDecAttention", "layer_norm"),
    "feed_forward": (-1, "DenseReluDense", "layer_norm"),
}
PROJECTIONS = {"P_q": "q", "P_k": "k", "P_v": "v", "P_o": "o"}
WIDE = {"gate": "wi_0", "widen": "wi_1", "narrow": "wo"}


@torch.no_grad()
def models():
    """Their model and ours, with their weights."""
    torch.manual_seed(3)
    config = transformers.T5Config(
        **{"vocab_size": 37, "d_model": SIZES["d"], "d_kv": SIZES["k"], "d_ff": SIZES["f"]},
        **{"num_layers": 3, "num_decoder_layers": 3, "num_heads": SIZES["h"]},
        **{"relative_attention_num_buckets": 6, "relative_attention_max_distance": 9},
        **{"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    )
    theirs = transformers.T5ForConditionalGeneration(config).double().eval()
    for P in theirs.parameters():
        P.normal_(std=1.0 if P.dim() == 1 else P.shape[-1] ** -0.5)
    relative = {"positions": "relative", "relative_buckets": 6, "relative_distance": 9}
    kind = {"gated": True, "activation": "gelu_tanh", "tied": False, "attention_scale": 1.0}
    layers = {"encoder_layers": 3, "decoder_layers": 3, "source_positions": 30}
    shared = {"task": "translation", "vocab_size": 37, "g": SIZES["h"], "v": SIZES["k"]}
    ours = TranslationModel(ModelConfig(**shared, **SIZES, **relative, **kind, **layers)).double()
    ours.tokens.weight.copy_(theirs.shared.weight)
    ours.output.weight.copy_(theirs.lm_head.weight)
    for stack, their in ((ours.encoder, theirs.encoder), (ours.decoder, theirs.decoder)):
        stack.norm.weight.copy_(their.final_layer_norm.weight)
        bias = their.block[0].layer[0].SelfAttention.relative_attention_bias
        stack.relative_bias.weight.copy_(bias.weight)
        for layer, block in zip(stack.layers, their.block, strict=True):
            for name, (i, inner, norm) in NAMES.items():
                if not hasattr(layer, name):
                    continue
                weights = WIDE if name == "feed_forward" else PROJECTIONS
                for mine, other in weights.items():
                    P = getattr(getattr(block.layer[i], inner), other)
                    getattr(getattr(layer, name), mine).weight.copy_(P.weight)
                own = getattr(layer, f"norm_{name}")
                own.weight.copy_(getattr(block.layer[i], norm).weight)
    return theirs, ours.eval()


@torch.no_grad()
def test_forward_passes_and_beams_equal_those_of_t5():
    theirs, ours = models()
    source, target = torch.randint(2, 37, (3, 23)), torch.randint(2, 37, (3, 17))
    lengths = torch.tensor([23, 9, 15])
    mask = torch.arange(23) < lengths.unsqueeze(1)
    expected = theirs(source, attention_mask=mask, decoder_input_ids=target).logits
    assert expected.std() > 0.5
    assert_close(ours(source, target, source_lengths=lengths), expected, **CLOSE)
    state = ours.pack().start(source, 17, source_lengths=lengths)
    assert_close(torch.stack([ours.step(t, state) for t in target.T], dim=1), expected, **CLOSE)
    config = DecodeConfig(max_length=14, beam=4, alpha=0.0)
    state = ours.start(source, 14, source_lengths=lengths)
    found = beam_search(ours.step, state, config, eos=1)
    options = {
        "max_new_tokens": 14,
        "decoder_start_token_id": 0,
        "length_penalty": 0.0,
        "early_stopping": False,
    }
    texts = theirs.generate(source, attention_mask=mask, num_beams=4, do_sample=False, **options)
    for [best], text in zip(found, texts.tolist(), strict=True):
        text = [*text[1:], 1]
        assert list(best.tokens) == text[: text.index(1)]
