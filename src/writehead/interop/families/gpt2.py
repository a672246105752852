"""GPT-2, whose matrices are transposed, and what GPT-BigCode shares with it."""

from typing import Any

from writehead.config import ModelConfig
from writehead.interop.families.family import (
    OUR_ACTIVATIONS,
    OUTPUT,
    Entries,
    Entry,
    Family,
    Fields,
    renamed,
)

LAYER = {
    "ln_1": "norm_attention",
    "attn.c_proj": "attention.P_o",
    "ln_2": "norm_feed_forward",
    "mlp.c_fc": "feed_forward.widen",
    "mlp.c_proj": "feed_forward.narrow",
}
QKV = {"attn.c_attn": "attention.P_q attention.P_k attention.P_v"}


def read_gpt(fields: Fields, activation: str) -> dict[str, Any]:
    """Reads the config of a multi-head model."""
    vocab_size, layers = fields.size("vocab_size"), fields.size("n_layer")
    d, h = fields.size("n_embd"), fields.size("n_head")
    k = fields.depth(d, h)
    fields.note("it has encoder-decoder attention", fields.flag("add_cross_attention"))
    fields.note("attention is not scaled", not fields.flag("scale_attn_weights", True))
    return {
        "task": "language",
        "vocab_size": vocab_size,
        "d": d,
        "f": fields.size("n_inner", 4 * d),
        "h": h,
        "g": h,
        "k": k,
        "v": k,
        "decoder_layers": layers,
        "target_positions": fields.size("n_positions", 1024),
        "tied": fields.flag("tie_word_embeddings", True),
        "norm": "layer",
        "norm_epsilon": fields.number("layer_norm_epsilon", 1e-5),
        "activation": fields.activation("activation_function", activation),
        "bias": True,
        "dropout": fields.fraction("resid_pdrop", 0.1),
        "logit_scale": 1.0,
    }


def read(fields: Fields) -> dict[str, Any]:
    """Reads a GPT-2 config."""
    by_layer = fields.flag("scale_attn_by_inverse_layer_idx")
    fields.note("attention is scaled by the layer index", by_layer)
    return read_gpt(fields, "gelu_new")


def write(config: ModelConfig) -> dict[str, Any]:
    """Returns the fields of GPT-2's config."""
    return {
        "vocab_size": config.vocab_size,
        "n_positions": config.target_positions,
        "n_embd": config.d,
        "n_layer": config.decoder_layers,
        "n_head": config.h,
        "n_inner": config.f,
        "activation_function": OUR_ACTIVATIONS.get(config.activation, config.activation),
        "layer_norm_epsilon": config.norm_epsilon,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout),
        "tie_word_embeddings": config.tied,
    }


def gpt_entries(config: ModelConfig, *, transposed: bool, heads: int | None) -> Entries:
    """Yields the names of all tensors; with `heads`, Q, K and V are joined head by head."""
    copies = (OUTPUT,) if config.tied else ()
    yield Entry("transformer.wte.weight", ("tokens.weight",), aliases=copies)
    yield Entry("transformer.wpe.weight", ("decoder.positions.weight",))
    yield Entry("transformer.ln_f", ("decoder.norm",))
    if not config.tied:
        yield Entry(OUTPUT, ("output.weight",))
    for i in range(config.decoder_layers):
        names = f"transformer.h.{i}", f"decoder.layers.{i}"
        yield from renamed(*names, LAYER, transposed=transposed)
        yield from renamed(*names, QKV, transposed=transposed, heads=heads)


def entries(config: ModelConfig) -> Entries:
    """Yields the names of all tensors."""
    return gpt_entries(config, transposed=True, heads=None)


GPT2 = Family(
    "gpt2",
    read,
    entries,
    "GPT2LMHeadModel",
    write,
    biased=True,
    prefix="transformer.",
    computed=r"transformer\.h\.\d+\.attn\.(masked_)?bias",
    tokens={"eos": 50_256, "bos": 50_256},
)
