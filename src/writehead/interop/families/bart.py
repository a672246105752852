"""What BART, mBART, Marian and M2M-100 share; BART and mBART cannot be imported."""

from collections.abc import Mapping
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
    "self_attn.q_proj": "attention.P_q",
    "self_attn.k_proj": "attention.P_k",
    "self_attn.v_proj": "attention.P_v",
    "self_attn.out_proj": "attention.P_o",
    "self_attn_layer_norm": "norm_attention",
    "fc1": "feed_forward.widen",
    "fc2": "feed_forward.narrow",
    "final_layer_norm": "norm_feed_forward",
}
CROSS = {
    "encoder_attn.q_proj": "cross.P_q",
    "encoder_attn.k_proj": "cross.P_k",
    "encoder_attn.v_proj": "cross.P_v",
    "encoder_attn.out_proj": "cross.P_o",
    "encoder_attn_layer_norm": "norm_cross",
}


def read_layers(
    fields: Fields, *, activation: str = "gelu", scaled: bool = False
) -> dict[str, Any]:
    """Reads the sizes of both stacks; the norms of these models have PyTorch's epsilon."""
    d, h = fields.size("d_model"), fields.size("decoder_attention_heads")
    k, positions = fields.depth(d, h), fields.size("max_position_embeddings", 1024)
    for name in ("attention_heads", "ffn_dim"):
        encoder, decoder = (fields.size(f"{side}_{name}") for side in ("encoder", "decoder"))
        fields.note(
            f"the encoder has {name}={encoder} and the decoder {decoder}", encoder != decoder
        )
    return {
        "task": "translation",
        "vocab_size": fields.size("vocab_size"),
        "d": d,
        "f": fields.size("decoder_ffn_dim"),
        "h": h,
        "g": h,
        "k": k,
        "v": k,
        "encoder_layers": fields.size("encoder_layers"),
        "decoder_layers": fields.size("decoder_layers"),
        "source_positions": positions,
        "target_positions": positions,
        "tied": fields.flag("tie_word_embeddings", True),
        "embedding_scale": d**0.5 if fields.flag("scale_embedding", scaled) else None,
        "norm": "layer",
        "norm_epsilon": 1e-5,
        "activation": fields.activation("activation_function", activation),
        "bias": True,
        "dropout": fields.fraction("dropout", 0.1),
        "logit_scale": 1.0,
    }


def write_layers(config: ModelConfig) -> dict[str, Any]:
    """Returns the fields of Marian's or M2M-100's config."""
    both = {"layers": 0, "attention_heads": config.h, "ffn_dim": config.f}
    sides = {"encoder": config.encoder_layers, "decoder": config.decoder_layers}
    sizes = {
        f"{side}_{name}": size
        for side, layers in sides.items()
        for name, size in {**both, "layers": layers}.items()
    }
    return sizes | {
        "vocab_size": config.vocab_size,
        "d_model": config.d,
        "max_position_embeddings": config.target_positions,
        "tie_word_embeddings": config.tied,
        "scale_embedding": config.embedding_scale is not None,
        "activation_function": OUR_ACTIVATIONS.get(config.activation, config.activation),
        "dropout": config.dropout,
        "is_encoder_decoder": True,
    }


def read_bart(fields: Fields) -> dict[str, Any]:
    """Reads BART or mBART, whose embedding norms we cannot express."""
    fields.note("the embeddings have norms", True)
    place = "post" if fields.data["model_type"] == "bart" else "pre"
    return read_layers(fields) | {"norm_place": place, "position_offset": 2, "output_bias": True}


def layer_entries(config: ModelConfig) -> Entries:
    """Yields the embeddings and the layers; final norms and biases differ between families."""
    sides = ("encoder", "decoder")
    names = [f"model.{side}.embed_tokens.weight" for side in sides]
    copies = (OUTPUT,) if config.tied else ()
    if config.source_vocab_size is None:
        aliases = (*names, *copies)
        yield Entry("model.shared.weight", ("tokens.weight",), aliases=aliases)
    else:
        yield Entry(names[0], ("source_tokens.weight",))
        yield Entry(names[1], ("tokens.weight",), aliases=copies)
    if not config.tied:
        yield Entry(OUTPUT, ("output.weight",))
    layers: Mapping[str, int]
    layers = {"encoder": config.encoder_layers, "decoder": config.decoder_layers}
    for side, count in layers.items():
        for i in range(count):
            names_in_layer = LAYER if side == "encoder" else LAYER | CROSS
            yield from renamed(f"model.{side}.layers.{i}", f"{side}.layers.{i}", names_in_layer)


BART = Family("bart", read_bart)
MBART = Family("mbart", read_bart)
