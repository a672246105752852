"""T5 and mT5, with relative positions and unscaled attention."""

from typing import Any

from writehead.config import ModelConfig
from writehead.interop.families.family import OUTPUT, Entries, Entry, Family, Fields, renamed

ATTENTION = {"q": "P_q", "k": "P_k", "v": "P_v", "o": "P_o"}
POSITIONS = 512  # if a file does not say; the models were trained with these


def read(fields: Fields) -> dict[str, Any]:
    """Reads a T5 or mT5 config; T5 v1.1 and mT5 have gated layers."""
    layers, k, d = fields.size("num_layers"), fields.size("d_kv"), fields.size("d_model")
    is_t5, h = fields.data["model_type"] == "t5", fields.size("num_heads")
    gated, activation = _feed_forward(fields)
    tied = fields.flag("tie_word_embeddings", True)
    # in files of transformers before version 5, untied embeddings mean that outputs are not scaled
    is_scaled = is_t5 and fields.flag("scale_decoder_outputs", tied)
    positions = fields.size("n_positions", POSITIONS)
    return {
        "task": "translation",
        "vocab_size": fields.size("vocab_size"),
        "d": d,
        "f": fields.size("d_ff"),
        "h": h,
        "g": h,
        "k": k,
        "v": k,
        "encoder_layers": layers,
        "decoder_layers": fields.size("num_decoder_layers", layers),
        "source_positions": positions,
        "target_positions": positions,
        "positions": "relative",
        "relative_buckets": fields.size("relative_attention_num_buckets", 32),
        "relative_distance": fields.size("relative_attention_max_distance", 128),
        "attention_scale": 1.0,
        "tied": tied,
        "norm_epsilon": fields.number("layer_norm_epsilon", 1e-6),
        "activation": activation,
        "gated": gated,
        "dropout": fields.fraction("dropout_rate", 0.1),
        "logit_scale": d**-0.5 if is_scaled else 1.0,
    }


def _feed_forward(fields: Fields) -> tuple[bool, str]:
    """Reads values such as gated-gelu, which means the tanh approximation."""
    value = fields.get("feed_forward_proj", "relu")
    if value == "gated-gelu":
        return True, fields.known_activation("gelu_new")
    gated = isinstance(value, str) and value.startswith("gated-")
    return gated, fields.known_activation(value.removeprefix("gated-") if gated else value)


def entries(config: ModelConfig) -> Entries:
    """Yields the names of all tensors; each T5 layer is one of our sublayers."""
    copies = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    head = (OUTPUT,) if config.tied else ()
    yield Entry("shared.weight", ("tokens.weight",), aliases=(*copies, *head))
    if not config.tied:
        yield Entry(OUTPUT, ("output.weight",))
    wide = {"wi": "widen"} if not config.gated else {"wi_0": "gate", "wi_1": "widen"}
    feed_forward = wide | {"wo": "narrow"}
    for side, count in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
        sublayers = {"SelfAttention": ("norm_attention", "attention", ATTENTION)}
        if side == "decoder":
            sublayers["EncDecAttention"] = "norm_cross", "cross", ATTENTION
        sublayers["DenseReluDense"] = "norm_feed_forward", "feed_forward", feed_forward
        for i in range(count):
            ours = f"{side}.layers.{i}"
            for j, (theirs, (norm, sublayer, names)) in enumerate(sublayers.items()):
                layer = f"{side}.block.{i}.layer.{j}"
                yield Entry(f"{layer}.layer_norm", (f"{ours}.{norm}",))
                yield from renamed(f"{layer}.{theirs}", f"{ours}.{sublayer}", names)
        bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias"
        yield Entry(bias, (f"{side}.relative_bias",))
        yield Entry(f"{side}.final_layer_norm", (f"{side}.norm",))


def write(config: ModelConfig) -> dict[str, Any]:
    """Returns the fields of T5's config."""
    name = "gelu" if config.activation == "gelu_tanh" else config.activation
    return {
        "vocab_size": config.vocab_size,
        "d_model": config.d,
        "d_kv": config.k,
        "d_ff": config.f,
        "num_heads": config.h,
        "num_layers": config.encoder_layers,
        "num_decoder_layers": config.decoder_layers,
        "n_positions": config.target_positions,
        "relative_attention_num_buckets": config.relative_buckets,
        "relative_attention_max_distance": config.relative_distance,
        "layer_norm_epsilon": config.norm_epsilon,
        "feed_forward_proj": f"gated-{name}" if config.gated else config.activation,
        "dropout_rate": config.dropout,
        "tie_word_embeddings": config.tied,
        "scale_decoder_outputs": False,
        "is_encoder_decoder": True,
    }


COMPUTED = r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"
T5, MT5 = (
    Family(
        *(name, read, entries, architecture, write, "translation"),
        prefix="",
        computed=COMPUTED,
        tokens={"eos": 1, "pad": 0, "bos": 0},
    )
    for name, architecture in (
        ("t5", "T5ForConditionalGeneration"),
        ("mt5", "MT5ForConditionalGeneration"),
    )
)
