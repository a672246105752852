"""Every size and option as frozen dataclasses, the only schema; JSON in and out.

The letters are the paper's: `d` model width, `h` read-heads, `k` and `v` depths of keys and
values. Two are ours: `f` the feed-forward width (d_ff) and `g` the write-heads, the heads of K
and V. `g = h` is multi-head attention, `g = 1` multi-query, anything between grouped-query.
"""

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Self

from writehead.errors import ConfigError, shown
from writehead.schema import JsonConfig, check_positive, check_seed, check_types

MAX_LAYERS = 500  # per side, because building each layer takes time
MAX_STEPS = 99_999_999  # checkpoint names have eight digits for the step
MAX_DIVISORS = 12  # to list in a message

Kind = Literal["multi-head", "multi-query", "grouped-query"]
Task = Literal["translation", "language"]

MAX_COUNT = 2**31 - 1


@dataclass(frozen=True)
class AttentionConfig:
    """The sizes of one attention layer, with g write-heads serving h read-heads.

    `window` limits a query to its own position and the window-1 before it (§4.1).
    """

    d: int
    h: int
    g: int
    k: int
    v: int
    window: int | None = None
    bias: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        check_positive(self, "d", "h", "g", "k", "v", "window")
        if self.h % self.g:
            small = [g for g in range(1, math.isqrt(self.h) + 1) if self.h % g == 0]
            divisors = sorted({*small, *(self.h // g for g in small)})
            more = ", …" if len(divisors) > MAX_DIVISORS else ""
            raise ConfigError(
                f"g={self.g} write-heads cannot serve h={self.h} read-heads evenly; "
                f"choose g from {', '.join(map(str, divisors[:MAX_DIVISORS]))}{more}"
            )

    @property
    def kind(self) -> Kind:
        """What the paper's tables call this layer; with one head there is nothing to share."""
        if self.g == self.h:
            return "multi-head"
        return "multi-query" if self.g == 1 else "grouped-query"

    @property
    def kv_size(self) -> int:
        """Elements of K and V that one position adds to the memory: g(k + v)."""
        return self.g * (self.k + self.v)

    @property
    def parameters(self) -> int:
        """Elements of P_q, P_k, P_v and P_o, and of their biases where there are any."""
        d, h, g, k, v = self.d, self.h, self.g, self.k, self.v
        biases = h * k + g * (k + v) + d if self.bias else 0
        return d * (h * k + g * k + g * v + h * v) + biases


@dataclass(frozen=True, kw_only=True)
class ModelConfig(JsonConfig):
    """A whole model: the encoder-decoder for translation, or the decoder-only language model.

    The defaults are those of the library the paper used (docs/paper-map.md). `window` applies to
    the decoder's self-attention only, as in §4.1. `bos`, `eos` and `pad` are token ids.
    """

    task: Task
    vocab_size: int
    d: int
    f: int
    h: int
    g: int
    k: int
    v: int
    window: int | None = None
    encoder_layers: int = 0
    decoder_layers: int
    source_positions: int = 0
    target_positions: int = 256
    tied: bool = True
    norm: Literal["rms", "layer"] = "rms"
    norm_epsilon: float = 1e-6
    activation: Literal["relu", "gelu", "gelu_tanh"] = "relu"
    bias: bool = False
    dropout: float = 0.1
    logit_scale: float | None = None
    pad: int = 0
    bos: int = 0
    eos: int = 1

    def __post_init__(self) -> None:
        check_types(self)
        check_positive(self, "vocab_size", "d", "f", "target_positions")
        check_positive(self, "decoder_layers", most=MAX_LAYERS)
        if self.task == "translation":
            check_positive(self, "source_positions")
            check_positive(self, "encoder_layers", most=MAX_LAYERS)
        elif self.encoder_layers or self.source_positions:
            raise ConfigError(
                "a language model has no encoder; leave encoder_layers and source_positions at 0"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"dropout={self.dropout} is not a probability below 1")
        if self.norm_epsilon <= 0.0:
            raise ConfigError(f"norm_epsilon={self.norm_epsilon} must be above 0")
        if self.logit_scale is not None and self.logit_scale <= 0.0:
            raise ConfigError(f"logit_scale={self.logit_scale} must be above 0, or null")
        for name in ("pad", "bos", "eos"):
            token = getattr(self, name)
            if not 0 <= token < self.vocab_size:
                raise ConfigError(
                    f"{name}={token} is outside the vocabulary of {self.vocab_size}; "
                    f"choose an id from 0 to {self.vocab_size - 1}"
                )
        _ = self.decoder_attention  # checks h, g, k, v and window

    @cached_property
    def encoder_attention(self) -> AttentionConfig:
        """The encoder's self-attention; the encoder-decoder attention has the same sizes."""
        return AttentionConfig(self.d, self.h, self.g, self.k, self.v, bias=self.bias)

    @cached_property
    def decoder_attention(self) -> AttentionConfig:
        """The decoder's self-attention, the only one that `window` limits."""
        return dataclasses.replace(self.encoder_attention, window=self.window)

    @property
    def kind(self) -> Kind:
        """multi-head, multi-query or grouped-query: all attention layers are of one kind."""
        return self.decoder_attention.kind

    @property
    def attention_layers(self) -> int:
        """One in each encoder layer; in each decoder layer two, or one without an encoder."""
        return self.encoder_layers + self.decoder_layers * (2 if self.encoder_layers else 1)

    @property
    def feed_forward_layers(self) -> int:
        """One in each layer of either side."""
        return self.encoder_layers + self.decoder_layers

    @property
    def effective_logit_scale(self) -> float:
        """What the last layer's output is multiplied by before the output embedding.

        Tied embeddings start at unit variance, so d^-0.5 brings their logits back to it.
        """
        if self.logit_scale is not None:
            return self.logit_scale
        return self.d**-0.5 if self.tied else 1.0

    def with_write_heads(self, g: int) -> Self:
        """The same model with g write-heads, its feed-forward width matched to keep the total."""
        variant = dataclasses.replace(self, g=g)
        return dataclasses.replace(variant, f=matched_d_ff(variant, self))


@dataclass(frozen=True, kw_only=True)
class PrepareConfig(JsonConfig):
    """What to make of text: the vocabulary, and which lines are left out.

    The tokenizer learns from `sample` lines. A pair is left out where a side has more than
    `max_tokens` or the sides' lengths differ by more than `max_ratio`. Without a `max_tokens`,
    that is 255 for translation (256 with the end) and any length for a language model, whose
    batches cut long text. Where no dev text is given, `dev` lines are held out, though never more
    than a twentieth.
    """

    task: Task
    vocab_size: int = 32_000
    sample: int = 500_000
    max_tokens: int | None = None
    max_ratio: float = 2.0
    keep_duplicates: bool = False
    dev: int = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        check_positive(self, "vocab_size", "sample", "max_tokens")
        check_seed(self.seed, bits=32)  # the limit of sentencepiece
        if self.max_ratio < 1.0:
            raise ConfigError(f"max_ratio={self.max_ratio} must be at least 1")
        if self.dev < 0:
            raise ConfigError(f"dev={self.dev} lines cannot be held out; give 0 or more")

    @property
    def token_limit(self) -> int | None:
        """The most tokens of a line, its end not counted; None where any length will do."""
        if self.max_tokens is None and self.task == "translation":
            return 255
        return self.max_tokens


@dataclass(frozen=True, kw_only=True)
class TrainConfig(JsonConfig):
    """How to train; the defaults are those of the paper's translation runs and their library.

    A step reads `rows` rows of `source_length` and `target_length` tokens, packed with sentences,
    whatever the number of processes; `accumulate` splits them so that they fit. The learning rate
    rises for `warmup` steps to `learning_rate`, falls as `schedule` says, and goes to 0 over the
    last `decay` of the steps.
    """

    steps: int = 100_000
    rows: int = 128
    source_length: int = 256
    target_length: int = 256
    accumulate: int = 1
    optimizer: Literal["adafactor", "adamw"] = "adafactor"
    learning_rate: float = 0.01
    schedule: Literal["inverse-sqrt", "cosine", "constant"] = "inverse-sqrt"
    warmup: int = 10_000
    decay: float = 0.1
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.98
    clip: float | None = 1.0
    label_smoothing: float = 0.1
    z_loss: float = 1e-4
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    compile: Literal["auto", "yes", "no"] = "auto"
    parallel: Literal["ddp", "fsdp"] = "ddp"
    seed: int = 0
    log_every: int = 50
    evaluate_every: int = 1000
    evaluate_sequences: int = 2000
    checkpoint_every: int = 1000
    keep: int = 3
    average: int = 1

    def __post_init__(self) -> None:
        check_types(self)
        counts = ("rows", "source_length", "target_length", "accumulate", "warmup")
        periods = ("log_every", "evaluate_every", "evaluate_sequences", "checkpoint_every")
        check_positive(self, *counts, *periods, "keep", "average")
        check_positive(self, "steps", most=MAX_STEPS)
        check_seed(self.seed)
        if self.rows % self.accumulate:
            raise ConfigError(
                f"rows={self.rows} cannot be split into accumulate={self.accumulate} equal parts"
            )
        if self.average > self.keep:
            raise ConfigError(
                f"average={self.average} checkpoints are to be averaged, and keep={self.keep} are "
                f"kept; raise keep"
            )
        for name in ("decay", "label_smoothing", "beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(f"{name}={getattr(self, name)} must be from 0 to below 1")
        for name in ("learning_rate", "clip"):
            value = getattr(self, name)
            if value is not None and value <= 0.0:
                raise ConfigError(f"{name}={value} must be above 0")
        for name in ("weight_decay", "z_loss"):
            if getattr(self, name) < 0.0:
                raise ConfigError(f"{name}={getattr(self, name)} must not be negative")


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig(JsonConfig):
    """How a run stores its matrices: in `bits`, with a scale for each `group` columns of a row.

    Without a group, a row has one scale.
    """

    bits: int = 8
    group: int | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if self.bits not in (8, 6, 5, 4):
            raise ConfigError(f"bits={self.bits} are not offered; choose 8, 6, 5 or 4")
        check_positive(self, "group")

    @classmethod
    def of(cls, bits: int, group: int | None = None) -> Self:
        """The config of `bits` with `group` columns to a scale, 0 for whole rows.

        Without a group, that is whole rows in 8 bits, where more scales change next to nothing,
        and 32 below: the fewer the bits, the more a scale of its own is worth to a few columns.
        """
        if group is None:
            return cls(bits=bits, group=None if bits == 8 else 32)
        if group < 0:
            raise ConfigError(f"group={group} must be 0, for whole rows, or a number of columns")
        return cls(bits=bits, group=None if group == 0 else group)

    @property
    def words(self) -> str:
        """The same in words, as "6 bits with a scale for 32 columns"."""
        scales = "a scale a row" if self.group is None else f"a scale for {self.group} columns"
        return f"{self.bits} bits with {scales}"


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """How to search: `beam=1` is greedy, or sampling where `temperature` is set.

    Without a `beam`, `Engine.translate` follows 4 hypotheses, or 1 when sampling; every other
    search follows 1. Each sequence is sampled with its own seed: the first with `seed`, the next
    with `seed` + 1, and so on.

    `alpha` is the length penalty's: a hypothesis scores log P / ((5 + length) / 6)^alpha.
    `max_length` and `min_length` count the tokens produced, the end token included; without a
    `max_length`, whoever searches gives each row its own.
    """

    max_length: int | None = None
    min_length: int = 0
    beam: int | None = None
    alpha: float = 0.6
    n_best: int = 1
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        check_seed(self.seed)
        for name in ("max_length", "beam", "n_best", "top_k"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MAX_COUNT:
                bound = "at least 1" if value < 1 else f"at most {MAX_COUNT}"
                raise ConfigError(f"{name}={shown(value)} must be {bound}")
        longest = MAX_COUNT if self.max_length is None else self.max_length
        if not 0 <= self.min_length <= longest:
            raise ConfigError(
                f"min_length={shown(self.min_length)} must be between 0 and max_length={longest}"
            )
        if self.n_best > 1 and self.temperature is not None:
            raise ConfigError(f"sampling follows one hypothesis; set n_best={self.n_best} to 1")
        if self.beam is not None and self.n_best > self.beam:
            raise ConfigError(
                f"n_best={self.n_best} hypotheses need a beam as wide; raise beam={self.beam}"
            )
        if not -10.0 <= self.alpha <= 10.0:
            raise ConfigError(f"alpha={self.alpha} must be from -10 to 10; the paper's is 0.6")
        if self.temperature is None:
            if self.top_k is not None or self.top_p is not None:
                raise ConfigError("top_k and top_p are for sampling; set temperature too")
        else:
            if not (self.temperature > 0.0 and math.isfinite(self.temperature)):
                raise ConfigError(
                    f"temperature={self.temperature} must be above 0; leave it out for greedy"
                )
            if self.width > 1:
                raise ConfigError(f"sampling follows one hypothesis; set beam={self.beam} to 1")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p={self.top_p} must be above 0 and at most 1")

    @property
    def width(self) -> int:
        """The number of hypotheses per sentence: `beam`, or 1 if it is not set."""
        return 1 if self.beam is None else self.beam

    def with_default_beam(self, beam: int) -> Self:
        """Returns the options with `beam` set if it was not; with sampling, it is set to 1."""
        if self.beam is not None:
            return self
        return dataclasses.replace(self, beam=beam if self.temperature is None else 1)


def matched_d_ff(variant: ModelConfig, baseline: ModelConfig) -> int:
    """The feed-forward width that gives `variant` as many parameters as `baseline` (§4.1).

    The attention parameters that a variant saves are spread over its feed-forward layers. For
    the paper's rows the division is exact: 5440 and 6784, 9088 and 9984. Elsewhere it is rounded.
    """
    fixed = ("task", "vocab_size", "d", "encoder_layers", "decoder_layers", "tied", "bias")
    for name in fixed:
        ours, theirs = getattr(variant, name), getattr(baseline, name)
        if ours != theirs:
            raise ConfigError(
                f"widths can be matched only where {name} is equal; it is {ours} in the variant "
                f"and {theirs} in the baseline"
            )
    saved = baseline.attention_layers * (
        baseline.decoder_attention.parameters - variant.decoder_attention.parameters
    )
    column = 2 * variant.d + int(variant.bias)
    f = round(baseline.f + saved / (variant.feed_forward_layers * column))
    if f < 1:
        raise ConfigError(
            f"the variant's attention alone is larger than the baseline's layers (d_ff would be "
            f"{f}); choose fewer or smaller heads"
        )
    return f
