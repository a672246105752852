"""Frozen dataclasses for every size and option, with conversion to and from JSON.

The letters are the paper's: `d` model width, `h` read-heads (query heads), `k` and `v` depths of
keys and values. We add `f` for the feed-forward width (d_ff) and `g` for the write-heads, the heads
of K and V.
"""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Self

from writehead.errors import ConfigError
from writehead.schema import INT32, JsonConfig, check_bounds, check_sizes, check_types

MAX_LAYERS = 500  # per stack; building a layer takes time
MAX_STEPS = 99_999_999  # checkpoint names have eight digits for the step

Kind = Literal["multi-head", "multi-query", "grouped-query"]
Task = Literal["translation", "language"]


@dataclass(frozen=True)
class AttentionConfig:
    """The sizes of one attention layer, whose g write-heads are shared by h read-heads."""

    d: int
    h: int
    g: int
    k: int
    v: int
    window: int | None = None  # a query sees its own position and the window-1 before it (§4.1)
    bias: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        check_sizes(self, "d", "h", "g", "k", "v", "window")
        if self.h % self.g:
            raise ConfigError(f"g={self.g} write-heads must divide h={self.h} read-heads")

    @property
    def kind(self) -> Kind:
        """The paper's name for this layer; a single head counts as multi-head."""
        if self.g == self.h:
            return "multi-head"
        return "multi-query" if self.g == 1 else "grouped-query"

    @property
    def kv_size(self) -> int:
        """Elements of K and V per position: g(k + v)."""
        return self.g * (self.k + self.v)

    @property
    def parameters(self) -> int:
        """Parameters of P_q, P_k, P_v and P_o, including biases."""
        d, h, g, k, v = self.d, self.h, self.g, self.k, self.v
        biases = h * k + g * (k + v) + d if self.bias else 0
        return d * (h * k + g * k + g * v + h * v) + biases


@dataclass(frozen=True, kw_only=True)
class ModelConfig(JsonConfig):
    """A model: an encoder-decoder for translation, or a decoder-only language model.

    The `g` write-heads are what others call KV heads: `g = h` is multi-head attention, `g = 1`
    multi-query, and anything between grouped-query. `window` limits the decoder's self-attention.
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
        check_sizes(self, "vocab_size", "d", "f", "target_positions")
        check_bounds(self, "decoder_layers", ge=1, le=MAX_LAYERS)
        if self.task == "translation":
            check_sizes(self, "source_positions")
            check_bounds(self, "encoder_layers", ge=1, le=MAX_LAYERS)
        elif self.encoder_layers or self.source_positions:
            raise ConfigError("encoder_layers and source_positions of a language model must be 0")
        check_bounds(self, "dropout", ge=0, lt=1)
        check_bounds(self, "norm_epsilon", "logit_scale", gt=0)
        check_bounds(self, "pad", "bos", "eos", ge=0, lt=self.vocab_size)
        _ = self.decoder_attention  # checks h, g, k, v and window

    @cached_property
    def encoder_attention(self) -> AttentionConfig:
        """The encoder's self-attention; encoder-decoder attention has the same sizes."""
        return AttentionConfig(self.d, self.h, self.g, self.k, self.v, bias=self.bias)

    @cached_property
    def decoder_attention(self) -> AttentionConfig:
        """The decoder's self-attention, the only one with a window."""
        return dataclasses.replace(self.encoder_attention, window=self.window)

    @property
    def kind(self) -> Kind:
        """multi-head, multi-query or grouped-query; the same for all attention layers."""
        return self.decoder_attention.kind

    @property
    def attention_layers(self) -> int:
        """Attention layers in total: with an encoder, each decoder layer has two."""
        return self.encoder_layers + self.decoder_layers * (2 if self.encoder_layers else 1)

    @property
    def effective_logit_scale(self) -> float:
        """Factor of the decoder's output; with tied embeddings, logits then have unit variance."""
        if self.logit_scale is not None:
            return self.logit_scale
        return self.d**-0.5 if self.tied else 1.0

    def with_write_heads(self, g: int) -> Self:
        """Returns the same model with g write-heads and the feed-forward width that matches."""
        variant = dataclasses.replace(self, g=g)
        return dataclasses.replace(variant, f=matched_d_ff(variant, self))


@dataclass(frozen=True, kw_only=True)
class PrepareConfig(JsonConfig):
    """How to turn text into a dataset."""

    task: Task
    vocab_size: int = 32_000
    sample: int = 500_000  # lines to train the tokenizer on
    max_tokens: int | None = None  # per side; None: 255 for translation, else no limit
    max_ratio: float = 2.0  # of the longer to the shorter side of a pair, in tokens
    keep_duplicates: bool = False
    dev: int = 2000  # lines to hold out if there is no dev text, at most one in twenty
    seed: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        check_sizes(self, "vocab_size", "sample", "max_tokens")
        check_bounds(self, "seed", ge=0, lt=2**32)  # the limit of sentencepiece
        check_bounds(self, "max_ratio", ge=1)
        check_bounds(self, "dev", ge=0)

    @property
    def token_limit(self) -> int | None:
        """Maximum number of tokens per line, without eos, or None."""
        if self.max_tokens is None and self.task == "translation":
            return 255
        return self.max_tokens


@dataclass(frozen=True, kw_only=True)
class TrainConfig(JsonConfig):
    """How to train; the defaults are those of the paper's translation models and their library."""

    steps: int = 100_000
    rows: int = 128  # per step, each packed with several sequences
    source_length: int = 256
    target_length: int = 256
    accumulate: int = 1  # micro-batches per step
    optimizer: Literal["adafactor", "adamw"] = "adafactor"
    learning_rate: float = 0.01  # at the end of the warmup; the schedule follows
    schedule: Literal["inverse-sqrt", "cosine", "constant"] = "inverse-sqrt"
    warmup: int = 10_000
    decay: float = 0.1  # the last fraction of the steps, in which the learning rate falls to 0
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
        check_sizes(self, "rows", "source_length", "target_length", "accumulate", "warmup")
        check_sizes(self, "log_every", "evaluate_every", "evaluate_sequences", "checkpoint_every")
        check_sizes(self, "keep", "average")
        check_bounds(self, "steps", ge=1, le=MAX_STEPS)
        check_bounds(self, "seed", "weight_decay", "z_loss", ge=0)
        check_bounds(self, "decay", "label_smoothing", "beta1", "beta2", ge=0, lt=1)
        check_bounds(self, "learning_rate", "clip", gt=0)
        if self.rows % self.accumulate:
            raise ConfigError(f"accumulate={self.accumulate} must divide rows={self.rows}")
        if self.average > self.keep:
            raise ConfigError(f"average={self.average} exceeds keep={self.keep}; raise keep")


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig(JsonConfig):
    """How a run stores its matrices: `bits` per weight, a scale per `group` columns or per row."""

    bits: int = 8
    group: int | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if self.bits not in (8, 6, 5, 4):
            raise ConfigError(f"bits={self.bits} is not supported; choose 8, 6, 5 or 4")
        check_sizes(self, "group")

    @classmethod
    def of(cls, bits: int, group: int | None = None) -> Self:
        """Returns a config; `group` defaults to 32 columns, or to a whole row (0) for 8 bits."""
        if group is None:
            group = 0 if bits == 8 else 32
        return cls(bits=bits, group=group or None)

    @property
    def words(self) -> str:
        """A description, such as "6 bits with one scale per 32 columns"."""
        scales = "row" if self.group is None else f"{self.group} columns"
        return f"{self.bits} bits with one scale per {scales}"


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """How to search: beam search, greedy (`beam=1`), or sampling if `temperature` is set.

    The score of a hypothesis is its log probability divided by ((5 + length) / 6)^alpha.
    """

    max_length: int | None = None  # generated tokens, including eos; None: the caller decides
    min_length: int = 0
    beam: int | None = None  # None: 4 in Engine.translate unless sampling, else 1
    alpha: float = 0.6
    n_best: int = 1
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0  # sequence i is sampled with seed + i

    def __post_init__(self) -> None:
        check_types(self)
        check_sizes(self, "max_length", "beam", "n_best", "top_k")
        check_bounds(self, "seed", ge=0)
        check_bounds(self, "alpha", ge=-10, le=10)
        check_bounds(self, "temperature", gt=0)
        check_bounds(self, "top_p", gt=0, le=1)
        check_bounds(self, "min_length", ge=0, le=self.max_length or INT32)
        if self.temperature is None and (self.top_k or self.top_p) is not None:
            raise ConfigError("top_k and top_p need sampling; set temperature too")
        if self.temperature is not None and max(self.n_best, self.width) > 1:
            raise ConfigError("sampling returns one sequence; set beam and n_best to 1")
        if self.beam is not None and self.n_best > self.beam:
            raise ConfigError(f"n_best={self.n_best} is larger than beam={self.beam}; raise beam")

    @property
    def width(self) -> int:
        """Hypotheses per sentence: `beam`, or 1 if it is not set."""
        return 1 if self.beam is None else self.beam

    def with_default_beam(self, beam: int) -> Self:
        """Returns the options with `beam` set if it was not; for sampling, it is set to 1."""
        if self.beam is not None:
            return self
        return dataclasses.replace(self, beam=beam if self.temperature is None else 1)


def matched_d_ff(variant: ModelConfig, baseline: ModelConfig) -> int:
    """Returns the d_ff that gives `variant` as many parameters as `baseline` (§4.1), rounded."""
    for name in ("task", "vocab_size", "d", "encoder_layers", "decoder_layers", "tied", "bias"):
        if getattr(variant, name) != getattr(baseline, name):
            raise ConfigError(f"d_ff can be matched only if {name} is equal in both configs")
    saved = baseline.attention_layers * (
        baseline.decoder_attention.parameters - variant.decoder_attention.parameters
    )
    column = 2 * variant.d + int(variant.bias)
    layers = variant.encoder_layers + variant.decoder_layers
    f = round(baseline.f + saved / (layers * column))
    if f < 1:
        raise ConfigError(f"the matching d_ff would be {f}; choose fewer or smaller heads")
    return f
