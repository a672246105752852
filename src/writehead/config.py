"""Frozen dataclasses for every size and option, with conversion to and from JSON.

The letters are the paper's: `d` model width, `h` read-heads (query heads), `k` and `v` depths of
keys and values. We add `f` for the feed-forward width (d_ff) and `g` for the write-heads, the heads
of K and V.
"""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Self

from writehead.errors import ConfigError, shown
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
    scale: float | None = None  # of the logits; None: k^-0.5

    def __post_init__(self) -> None:
        check_types(self)
        check_sizes(self, "d", "h", "g", "k", "v", "window")
        check_bounds(self, "scale", gt=0)
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
    source_vocab_size: int | None = None  # of a separate source embedding; None: shared
    d: int
    f: int
    h: int
    g: int
    encoder_g: int | None = None  # write-heads of the encoder's self-attention; None: g
    cross_g: int | None = None  # write-heads of encoder-decoder attention; None: g
    k: int
    v: int
    window: int | None = None
    encoder_layers: int = 0
    decoder_layers: int
    source_positions: int = 0
    target_positions: int = 256
    positions: Literal["learned", "sinusoidal", "rotary", "relative"] = "learned"
    position_offset: int = 0  # position of the first token; the table has as many additional rows
    sinusoid: Literal["d", "d-2"] = "d"  # denominator of the exponents; see `sinusoidal`
    rotary_base: float = 10_000.0
    rotary_factor: float = 1.0  # divides the frequencies; see ops.rotary.Scaling
    rotary_original: int | None = None
    rotary_low: float = 1.0
    rotary_high: float = 4.0
    relative_buckets: int = 32  # biases per read-head, each for a range of distances
    relative_distance: int = 128  # all distances from here on share a bias
    attention_scale: float | None = None  # multiplies the attention logits; None: k^-0.5
    tied: bool = True
    embedding_scale: float | None = None  # multiplies the token embeddings; None: 1
    norm: Literal["rms", "layer"] = "rms"
    norm_place: Literal["pre", "post"] = "pre"  # "post": norm(X + sublayer(X)), no final norm
    norm_epsilon: float = 1e-6
    norm_offset: float = 0.0  # added to the gains of RMS norms
    activation: Literal["relu", "gelu", "gelu_tanh", "silu"] = "relu"
    gated: bool = False  # the feed-forward layer computes P_2(activation(P_1 x) * P_3 x)
    bias: bool = False
    dropout: float = 0.1
    logit_scale: float | None = None
    output_bias: bool = False
    pad: int = 0
    bos: int = 0
    eos: int = 1

    def __post_init__(self) -> None:
        check_types(self)
        check_sizes(self, "vocab_size", "source_vocab_size", "d", "f", "target_positions")
        check_bounds(self, "decoder_layers", ge=1, le=MAX_LAYERS)
        if self.task == "translation":
            check_sizes(self, "source_positions")
            check_bounds(self, "encoder_layers", ge=1, le=MAX_LAYERS)
        else:
            self._check_no_encoder()
        self._check_positions()
        check_bounds(self, "dropout", ge=0, lt=1)
        scales = "logit_scale", "embedding_scale", "attention_scale"
        check_bounds(self, "norm_epsilon", *scales, gt=0)
        check_bounds(self, "pad", "bos", "eos", ge=0, lt=self.vocab_size)
        if self.norm == "layer" and self.norm_offset:
            raise ConfigError("norm_offset is for RMS norms; set norm='rms' or norm_offset=0")
        check_bounds(self, "pad", "eos", lt=self.source_vocab_size or self.vocab_size)
        # these properties check h, k, v, window, and each number of write-heads
        _ = self.decoder_attention, self.encoder_attention, self.cross_attention

    def _check_no_encoder(self) -> None:
        if self.encoder_layers or self.source_positions:
            raise ConfigError("encoder_layers and source_positions of a language model must be 0")
        for name in ("source_vocab_size", "encoder_g", "cross_g"):
            if getattr(self, name) is not None:
                raise ConfigError(f"{name} is for translation; a language model has no encoder")

    def _check_positions(self) -> None:
        check_bounds(self, "position_offset", ge=0, le=INT32)
        check_bounds(self, "rotary_base", gt=1)
        check_bounds(self, "rotary_factor", "rotary_low", gt=0)
        check_bounds(self, "rotary_high", gt=self.rotary_low)
        check_sizes(self, "rotary_original")
        check_bounds(self, "relative_buckets", ge=4, le=INT32)
        check_bounds(self, "relative_distance", gt=self.relative_buckets // 2, le=INT32)
        if self.positions == "sinusoidal" and self.d % 2:
            raise ConfigError(f"sinusoidal positions need an even d, not d={self.d}")
        if self.positions == "rotary" and self.k % 2:
            raise ConfigError(f"rotary positions need an even k, not k={self.k}")
        if self.positions in ("rotary", "relative") and self.position_offset:
            raise ConfigError(
                f"{self.positions} positions have no offset; set position_offset to 0"
            )
        if self.positions == "relative" and self.relative_buckets % 2:
            raise ConfigError(f"relative_buckets={self.relative_buckets} must be even")

    @cached_property
    def encoder_attention(self) -> AttentionConfig:
        """The encoder's self-attention."""
        return self._attention(self.encoder_g)

    @cached_property
    def cross_attention(self) -> AttentionConfig:
        """The decoder's attention to the output of the encoder."""
        return self._attention(self.cross_g)

    @cached_property
    def decoder_attention(self) -> AttentionConfig:
        """The decoder's self-attention, the only one with a window."""
        return dataclasses.replace(self._attention(self.g), window=self.window)

    def _attention(self, g: int | None) -> AttentionConfig:
        g = self.g if g is None else g
        scale = self.attention_scale
        return AttentionConfig(self.d, self.h, g, self.k, self.v, bias=self.bias, scale=scale)

    @property
    def kind(self) -> Kind:
        """The kind of the decoder's self-attention: multi-head, multi-query or grouped-query."""
        return self.decoder_attention.kind

    @property
    def cross_layers(self) -> int:
        """Layers with encoder-decoder attention: all decoder layers, or 0 without an encoder."""
        return self.decoder_layers if self.encoder_layers else 0

    @property
    def feed_forward_parameters(self) -> int:
        """Parameters of one feed-forward layer, including biases."""
        wide = 2 * self.f if self.gated else self.f
        return self.d * (wide + self.f) + (wide + self.d if self.bias else 0)

    @property
    def layer_parameters(self) -> int:
        """Parameters of all attention and feed-forward layers, without norms."""
        return (
            self.encoder_layers * self.encoder_attention.parameters
            + self.decoder_layers * self.decoder_attention.parameters
            + self.cross_layers * self.cross_attention.parameters
            + (self.encoder_layers + self.decoder_layers) * self.feed_forward_parameters
        )

    @property
    def effective_logit_scale(self) -> float:
        """Factor of the logits; its default gives them unit variance with tied embeddings."""
        if self.logit_scale is not None:
            return self.logit_scale
        return self.d**-0.5 if self.tied else 1.0

    def with_write_heads(self, g: int) -> Self:
        """Returns the model with g write-heads in all attention layers, and a matched d_ff."""
        variant = dataclasses.replace(self, g=g, encoder_g=None, cross_g=None)
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
    split_digits: bool = False  # each digit is a token, so that models copy numbers reliably
    vary_case: float = 0.0  # share of training pairs whose case is changed
    vary_copies: float = 0.0  # share with another number or name, or an added emoji

    def __post_init__(self) -> None:
        check_types(self)
        check_sizes(self, "vocab_size", "sample", "max_tokens")
        check_bounds(self, "seed", ge=0, lt=2**32)  # the limit of sentencepiece
        check_bounds(self, "max_ratio", ge=1)
        check_bounds(self, "dev", ge=0)
        check_bounds(self, "vary_case", "vary_copies", ge=0)
        if self.vary_case + self.vary_copies > 1:
            raise ConfigError(
                f"vary_case={self.vary_case} and vary_copies={self.vary_copies} are shares of the "
                f"training pairs; their sum must be at most 1"
            )
        if self.task == "language" and (self.vary_case or self.vary_copies):
            raise ConfigError("vary_case and vary_copies are for translation; leave them out")

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values; without unused newer ones, as in older datasets."""
        newer = ("split_digits", "vary_case", "vary_copies")
        fields = super().to_json()
        return {name: value for name, value in fields.items() if value or name not in newer}

    @property
    def token_limit(self) -> int | None:
        """Maximum number of tokens per line, without eos, or None."""
        if self.max_tokens is None and self.task == "translation":
            return 255
        return self.max_tokens


@dataclass(frozen=True, kw_only=True)
class VocabularyConfig(JsonConfig):
    """What a dataset shares with its models: sizes, special tokens and languages.

    The defaults are those of the tokenizer that writehead trains.
    """

    vocab_size: int
    source_vocab_size: int | None = None
    pad: int = 0
    bos: int = 0  # before each translation
    eos: int = 1
    source_lang: str | None = None
    target_lang: str | None = None

    def __post_init__(self) -> None:
        check_types(self)
        check_sizes(self, "vocab_size", "source_vocab_size")
        check_bounds(self, "pad", "bos", "eos", ge=0, lt=self.vocab_size)

    @classmethod
    def of(
        cls, model: ModelConfig, source_lang: str | None = None, target_lang: str | None = None
    ) -> Self:
        """Returns the vocabulary of a model, used for two languages."""
        names = ("vocab_size", "source_vocab_size", "pad", "bos", "eos")
        fields = {name: getattr(model, name) for name in names}
        return cls(**fields, source_lang=source_lang, target_lang=target_lang)


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
    distill: float = 0.5  # weight of the distillation loss, if there is a teacher
    distill_temperature: float = 1.0
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
        check_bounds(self, "distill", ge=0, le=1)
        check_bounds(self, "learning_rate", "clip", "distill_temperature", gt=0)
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
    min_p: float | None = None  # keeps tokens at least min_p times as likely as the likeliest
    repetition_penalty: float | None = None  # above 1: repeats become less likely; not for beams
    seed: int = 0  # sequence i is sampled with seed + i

    def __post_init__(self) -> None:
        check_types(self)
        check_sizes(self, "max_length", "beam", "n_best", "top_k")
        check_bounds(self, "seed", ge=0, lt=2**63)
        check_bounds(self, "alpha", ge=-10, le=10)
        check_bounds(self, "temperature", gt=0)
        check_bounds(self, "repetition_penalty", gt=0, le=1e30)
        check_bounds(self, "top_p", gt=0, le=1)
        check_bounds(self, "min_p", ge=0, le=1)
        check_bounds(self, "min_length", ge=0, le=INT32)
        if self.max_length is not None and self.min_length > self.max_length:
            raise ConfigError(
                f"min_length={self.min_length} exceeds max_length={self.max_length}; change one"
            )
        if self.temperature is None:
            for name in ("top_k", "top_p", "min_p"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"{name} is for sampling; set temperature too")
        elif max(self.n_best, self.width) > 1:
            raise ConfigError("sampling returns one sequence; set beam and n_best to 1")
        if self.repetition_penalty is not None and max(self.n_best, self.width) > 1:
            raise ConfigError("repetition_penalty is not for beam search; set beam and n_best to 1")
        if self.beam is not None and self.n_best > self.beam:
            raise ConfigError(f"n_best={self.n_best} is larger than beam={self.beam}; raise beam")

    @property
    def width(self) -> int:
        """Hypotheses per sentence: `beam`, or 1 if it is not set."""
        return 1 if self.beam is None else self.beam

    def with_default_beam(self, beam: int) -> Self:
        """Returns the options with `beam` set, to 1 if the other options exclude beam search."""
        if self.beam is not None:
            return self
        one = self.temperature is not None or self.repetition_penalty is not None
        return dataclasses.replace(self, beam=1 if one else beam)


def check_options(options: object, beam: int = 1) -> DecodeConfig:
    """Returns the options with `beam` set if it was not; raises if they are not a DecodeConfig."""
    if not isinstance(options, DecodeConfig):
        raise ConfigError(
            f"options must be a DecodeConfig, not {shown(options)} of type "
            f"{type(options).__name__}; pass one, such as DecodeConfig(beam=4)"
        )
    return options.with_default_beam(beam)


@dataclass(frozen=True)
class Batching:
    """The sizes of batches.

    `tokens` limits slots × beam × (longest source or prompt + longest output). The default depends
    on the device.
    """

    tokens: int | None = None
    lines: int = 4096  # tokenized together; up to two such groups are read ahead

    def __post_init__(self) -> None:
        check_types(self)
        check_sizes(self, "tokens", "lines")


def matched_d_ff(variant: ModelConfig, baseline: ModelConfig) -> int:
    """Returns the d_ff that gives `variant` as many parameters as `baseline` (§4.1), rounded."""
    sizes = ("task", "vocab_size", "source_vocab_size", "d", "encoder_layers", "decoder_layers")
    for name in (*sizes, "tied", "bias", "output_bias"):
        if getattr(variant, name) != getattr(baseline, name):
            raise ConfigError(f"d_ff can be matched only if {name} is the same in both configs")
    missing = baseline.layer_parameters - variant.layer_parameters
    column = (3 if variant.gated else 2) * variant.d + variant.bias * (2 if variant.gated else 1)
    layers = variant.encoder_layers + variant.decoder_layers
    f = round(variant.f + missing / (layers * column))
    if f < 1:
        raise ConfigError(f"the matching d_ff would be {f}; choose fewer or smaller heads")
    return f
