"""T5 and mT5, which are only explained."""

from typing import Any

from writehead.interop.families.family import MAX_SIZE, Family, Fields


def read(fields: Fields) -> dict[str, Any]:
    """Reads a T5 or mT5 config."""
    fields.note("it has relative position biases, which are left out", True)
    layers, k = fields.size("num_layers"), fields.size("d_kv")
    is_first, h = fields.data["model_type"] == "t5", fields.size("num_heads")
    kind, _, name = str(fields.get("feed_forward_proj", "relu")).rpartition("-")
    names = {"feed_forward_proj": "gelu_new" if kind and name == "gelu" else name}
    activation = Fields(fields.file, names).activation("feed_forward_proj", "relu")
    tied = fields.get("tie_word_embeddings", is_first)
    # T5 scales like our default
    is_scaled = fields.get("scale_decoder_outputs", True) is not False
    return {
        "task": "translation",
        "vocab_size": fields.size("vocab_size"),
        "d": fields.size("d_model"),
        "f": fields.size("d_ff"),
        "h": h,
        "g": h,
        "k": k,
        "v": k,
        "encoder_layers": layers,
        "decoder_layers": fields.size("num_decoder_layers", layers),
        "source_positions": MAX_SIZE,
        "target_positions": MAX_SIZE,
        "positions": "sinusoidal",
        "tied": tied,
        "norm_epsilon": fields.get("layer_norm_epsilon", 1e-6),
        "activation": activation,
        "gated": bool(kind),
        "logit_scale": None if is_scaled else 1.0,
    }


T5 = Family("t5", read)
MT5 = Family("mt5", read)
