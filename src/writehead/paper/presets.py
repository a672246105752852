"""§4.1: every row of Tables 1 and 3 as a config, smaller families, and the bundled model.

A preset is named `family/row`. A family sets the sizes of the multi-head baseline and the training
settings. A row changes only the attention; `matched_d_ff` then widens the feed-forward layers to
keep the number of parameters.
"""

import dataclasses

from writehead.config import ModelConfig, TrainConfig, matched_d_ff
from writehead.errors import ConfigError, nearest

# the multi-head baseline of each family
FAMILIES: dict[str, ModelConfig] = {
    # Table 1; the vocabulary of about 33.3k follows from the total of 211M
    "wmt14": ModelConfig(
        task="translation",
        vocab_size=33_280,
        d=1024,
        f=4096,
        h=8,
        g=8,
        k=128,
        v=128,
        encoder_layers=6,
        decoder_layers=6,
        source_positions=256,
        target_positions=256,
    ),
    # Table 3; the untied vocabulary of 32.0k follows from the total of 192M
    "lm1b": ModelConfig(
        task="language",
        vocab_size=32_000,
        d=1024,
        f=8192,
        h=8,
        g=8,
        k=128,
        v=128,
        decoder_layers=6,
        tied=False,
    ),
}
FAMILIES["wmt14-small"] = dataclasses.replace(
    FAMILIES["wmt14"], vocab_size=16_384, d=512, f=2048, k=64, v=64
)
FAMILIES["lm1b-small"] = dataclasses.replace(
    FAMILIES["lm1b"], vocab_size=16_384, d=512, f=4096, k=64, v=64
)
# what fits 16 MB in six bits a weight; a deep encoder and a shallow decoder, for quick decoding
FAMILIES["bundled"] = dataclasses.replace(
    FAMILIES["wmt14"],
    vocab_size=8192,
    d=384,
    f=1120,
    h=6,
    g=6,
    k=64,
    v=64,
    encoder_layers=8,
    decoder_layers=2,
)
FAMILIES["tiny"] = dataclasses.replace(
    FAMILIES["wmt14"],
    vocab_size=1024,
    d=128,
    f=512,
    k=16,
    v=16,
    encoder_layers=2,
    decoder_layers=2,
    dropout=0.0,
)
FAMILIES["tiny-lm"] = dataclasses.replace(
    FAMILIES["lm1b"], vocab_size=1024, d=128, f=512, k=16, v=16, decoder_layers=2, dropout=0.0
)

# The default training settings of each family. `experiments.py` gives the reasons for those of the
# paper's tables, and a test checks that the two agree.
_SMALL = TrainConfig(learning_rate=0.02, warmup=1000, decay=0.2)
_TABLE = dataclasses.replace(
    _SMALL, log_every=100, evaluate_every=1000, checkpoint_every=1000, keep=1
)
TRAINING: dict[str, TrainConfig] = {
    "wmt14": TrainConfig(),
    "lm1b": TrainConfig(steps=136_000, rows=256, label_smoothing=0.0),
    "wmt14-small": dataclasses.replace(_TABLE, steps=6000, rows=64),
    "lm1b-small": dataclasses.replace(_TABLE, steps=4000, label_smoothing=0.0),
    "bundled": dataclasses.replace(_SMALL, steps=12_000),
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
    """The rows of a family in the order of the paper's table, by name.

    The last four have as much K and V a position as multi-query has: one head's, split as h × k.
    """
    baseline = FAMILIES[family]
    variants = {
        "multi-head": baseline,
        "multi-query": dataclasses.replace(baseline, g=1),
    }
    if baseline.task == "translation":
        for kind in ("multi-head", "multi-query"):
            variants[f"{kind}-local"] = dataclasses.replace(variants[kind], window=WINDOW)
    for h in (1, 2, 4, 8):
        k = baseline.k // h
        variants[f"multi-head-{h}x{k}"] = dataclasses.replace(baseline, h=h, g=h, k=k, v=k)
    return {
        name: dataclasses.replace(variant, f=matched_d_ff(variant, baseline))
        for name, variant in variants.items()
    }


def preset_names() -> list[str]:
    """All presets, family by family, each in its table's order."""
    return [f"{family}/{row}" for family in FAMILIES for row in rows(family)]


def preset(name: str) -> ModelConfig:
    """Returns the model config of a preset, such as "wmt14/multi-query"."""
    if not isinstance(name, str):
        raise ConfigError(
            f"a preset is named by text, such as 'wmt14/multi-query', not by {name!r:.60}; "
            f"preset_names() has all of them"
        )
    family, _, row = name.partition("/")
    if family in FAMILIES and row in rows(family):
        return rows(family)[row]
    if family in FAMILIES and not row:
        own = ", ".join(f"{family}/{row}" for row in rows(family))
        raise ConfigError(f"{name!r} is a family; choose one of its presets: {own}")
    raise ConfigError(f"unknown preset {name!r}; {nearest(name, preset_names())}")


def train_preset(name: str) -> TrainConfig:
    """Returns the training settings of a preset; all rows of a family share them."""
    preset(name)  # raises if the preset does not exist
    return TRAINING[name.partition("/")[0]]
