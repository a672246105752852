"""§4.1: rows of Tables 1 and 3 as configs, smaller families, the bundled model and its teacher.

A preset is named `family/row`. A family sets the sizes of the multi-head baseline. A row changes
only the attention; `matched_d_ff` widens the feed-forward layers to keep the number of parameters.
"""

from dataclasses import replace

from writehead.config import ModelConfig, TrainConfig, matched_d_ff
from writehead.errors import ConfigError, nearest


def _model(
    vocab_size: int, d: int, f: int, h: int, k: int, layers: tuple[int, int], dropout: float = 0.1
) -> ModelConfig:
    """Returns a multi-head config; without encoder layers, a language model that is not tied."""
    encoder, decoder = layers
    return ModelConfig(
        task="translation" if encoder else "language",
        vocab_size=vocab_size,
        d=d,
        f=f,
        h=h,
        g=h,
        k=k,
        v=k,
        encoder_layers=encoder,
        decoder_layers=decoder,
        source_positions=256 if encoder else 0,
        target_positions=256,
        tied=bool(encoder),
        dropout=dropout,
    )


# The multi-head baseline of each family. The vocabularies of the first two follow from the paper's
# totals of 211M and 192M parameters.
FAMILIES: dict[str, ModelConfig] = {
    "wmt14": _model(33_280, d=1024, f=4096, h=8, k=128, layers=(6, 6)),
    "lm1b": _model(32_000, d=1024, f=8192, h=8, k=128, layers=(0, 6)),
    "wmt14-small": _model(16_384, d=512, f=2048, h=8, k=64, layers=(6, 6)),
    "lm1b-small": _model(16_384, d=512, f=4096, h=8, k=64, layers=(0, 6)),
    # fits in 16 MB at 6 bits per weight; a deep encoder and a shallow decoder decode fast
    "bundled": _model(8192, d=384, f=1120, h=6, k=64, layers=(8, 2)),
    # its teacher: about as large as wmt14, with a deep encoder and a shallow decoder
    "bundled-teacher": _model(16_384, d=1024, f=4096, h=8, k=128, layers=(10, 4)),
    "tiny": _model(1024, d=128, f=512, h=8, k=16, layers=(2, 2), dropout=0.0),
    "tiny-lm": _model(1024, d=128, f=512, h=8, k=16, layers=(0, 2), dropout=0.0),
}

# The training settings of each family. The paper names only steps, batches and smoothing (§4.1).
_SMALL = TrainConfig(
    learning_rate=0.02,  # stable in a multi-query run of 8,000 steps
    warmup=1000,  # with 300 the learning rate falls too early for so few steps
    decay=0.2,  # the loss drops most while the learning rate falls to 0
)
_TABLE = replace(_SMALL, log_every=100, evaluate_every=1000, checkpoint_every=1000, keep=1)
TRAINING: dict[str, TrainConfig] = {
    "wmt14": TrainConfig(),
    "lm1b": TrainConfig(steps=136_000, rows=256, label_smoothing=0.0),
    # half of §4.1's tokens per step, because a short run benefits more from steps
    "wmt14-small": replace(_TABLE, steps=6000, rows=64),
    "lm1b-small": replace(_TABLE, steps=4000, label_smoothing=0.0),
    "bundled": replace(_SMALL, steps=12_000),
    "bundled-teacher": replace(
        _SMALL, steps=20_000, rows=64, evaluate_every=4000, checkpoint_every=4000, keep=1
    ),
    # minutes on two CPU cores
    "tiny": TrainConfig(
        steps=1900,
        rows=8,
        source_length=64,
        target_length=64,
        learning_rate=0.04,
        schedule="cosine",
        warmup=110,
        decay=0.0,
        label_smoothing=0.0,
        z_loss=0.0,
        evaluate_every=200,
        evaluate_sequences=300,
        checkpoint_every=500,
    ),
}
TRAINING["tiny-lm"] = TRAINING["tiny"]

WINDOW = 32  # §4.1: the current position and the previous 31


def rows(family: str) -> dict[str, ModelConfig]:
    """Returns the configs of a family by row, in the order of the paper's table.

    The last four rows cache as much per position as multi-query: h small heads with h × k constant.
    """
    baseline = FAMILIES[family]
    variants = {"multi-head": baseline, "multi-query": replace(baseline, g=1)}
    if baseline.task == "translation":
        for kind in ("multi-head", "multi-query"):
            variants[f"{kind}-local"] = replace(variants[kind], window=WINDOW)
    for h in (1, 2, 4, 8):
        k = baseline.k // h
        variants[f"multi-head-{h}x{k}"] = replace(baseline, h=h, g=h, k=k, v=k)
    return {
        name: replace(variant, f=matched_d_ff(variant, baseline))
        for name, variant in variants.items()
    }


def preset_names() -> list[str]:
    """Lists all presets as "family/row"."""
    return [f"{family}/{row}" for family in FAMILIES for row in rows(family)]


def preset(name: str) -> ModelConfig:
    """Returns the model config of a preset, such as "wmt14/multi-query"."""
    if not isinstance(name, str):
        raise ConfigError(f"preset must be a name such as 'wmt14/multi-query', not {name!r:.60}")
    family, _, row = name.partition("/")
    if family not in FAMILIES or row not in rows(family):
        known = [one for one in preset_names() if one.startswith(f"{family}/")] or preset_names()
        raise ConfigError(f"unknown preset {name!r}; {nearest(name, known)}")
    return rows(family)[row]


def train_preset(name: str) -> TrainConfig:
    """Returns the training settings of a preset; all rows of a family share them."""
    preset(name)  # raises if the preset does not exist
    return TRAINING[name.partition("/")[0]]
