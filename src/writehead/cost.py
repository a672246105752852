"""Operations and bytes of any config at any point, and the least time they take on a chip.

What is counted, here and everywhere in this library:
- An operation is one multiplication or one addition of a matrix product. Norms, softmax and sums
  are left out: next to the products they are few, and a good kernel hides them.
- Bytes are of three kinds: weights, K and V of the memory that a step reads, and activations that
  pass from one part to the next. The floor leaves activations out, because fused kernels and
  on-chip caches can keep them from ever reaching memory.
- Attention is counted over the visible pairs of query and memory position alone.
- The floor of a part is the larger of its operations over the chip's matrix rate and its bytes
  over the chip's bandwidth; the floor of a whole is the sum of its parts'.
"""

import dataclasses
import math
from dataclasses import dataclass

from writehead.config import AttentionConfig, ModelConfig
from writehead.errors import ConfigError, nearest

# bytes of each position of a row besides K and V: two int32 of its history, one of a forced prefix,
# and an int64 of its ancestors
NOTES = 20


@dataclass(frozen=True)
class Chip:
    """What a floor is measured by: bytes of memory, bytes a second, operations a second."""

    name: str
    memory: float
    bandwidth: float
    flops: float
    source: str

    def __post_init__(self) -> None:
        for name in ("memory", "bandwidth", "flops"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(
                    f"a chip's {name}={getattr(self, name)} must be above 0 and finite"
                )


# Matrix rates are for dense bf16 products with float32 accumulation. Data sheets also list rates
# with 2:4 sparsity, which are twice as high, or, for GeForce cards, with 16-bit accumulation.
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("h200", 139 * 2**30, 4.3e12, 790e12, "measured: a copy, and an 8192³ bf16 product"),
        Chip("h100", 80e9, 3.35e12, 989e12, "NVIDIA H100 SXM data sheet"),
        Chip("b200", 180e9, 8e12, 2250e12, "NVIDIA HGX B200 data sheet"),
        Chip("a100", 80e9, 2.039e12, 312e12, "NVIDIA A100 80GB SXM data sheet"),
        Chip("a100-40gb", 40e9, 1.555e12, 312e12, "NVIDIA A100 40GB SXM data sheet"),
        Chip("l40s", 48e9, 0.864e12, 362e12, "NVIDIA L40S data sheet"),
        Chip("l4", 24e9, 0.3e12, 121e12, "NVIDIA L4 data sheet"),
        Chip("rtx-4090", 24e9, 1.008e12, 165e12, "NVIDIA Ada GPU architecture white paper"),
        Chip("rtx-5090", 32e9, 1.792e12, 209e12, "NVIDIA RTX Blackwell architecture white paper"),
        Chip("mi300x", 192e9, 5.3e12, 1307e12, "AMD Instinct MI300X data sheet"),
        Chip("tpu-v2", 64e9, 2.4e12, 180e12, "data sheet of the four chips that the paper timed"),
        # 8 channels of DDR5-4800; 56 cores × 1,024 operations of AMX × 2.0 GHz
        Chip("cpu", 512e9, 0.307e12, 115e12, "Intel Xeon Platinum 8480+ data sheet, bf16 by AMX"),
    )
}


def find_chip(name: str) -> Chip:
    """Returns the chip of that name; the error for an unknown name lists all chips."""
    if name not in CHIPS:
        hint = nearest(name, CHIPS)
        guess = f"; {hint}" if hint.startswith("did") else ""
        raise ConfigError(f"unknown chip {name!r:.40}; known: {', '.join(CHIPS)}{guess}")
    return CHIPS[name]


@dataclass(frozen=True)
class Setting:
    """What is decoded or trained on: `batch` sentences of `source` tokens into `target` tokens.

    A language model has no source. `element` is the bytes of a weight or activation.
    """

    batch: int
    source: int
    target: int
    beam: int = 1
    element: int = 2

    def __post_init__(self) -> None:
        for name in ("batch", "target", "beam", "element"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.source < 0:
            raise ConfigError(f"source={self.source} must not be negative")

    @property
    def rows(self) -> int:
        """Hypotheses that step together."""
        return self.batch * self.beam


@dataclass(frozen=True)
class Part:
    """The work of one kind of layer: operations, and bytes by what they are."""

    name: str
    operations: int
    weights: int
    kv: int
    activations: int

    @property
    def bytes(self) -> int:
        """All bytes accessed."""
        return self.weights + self.kv + self.activations

    def times(self, factor: int) -> "Part":
        """The same work, `factor` times."""
        counts = (self.operations, self.weights, self.kv, self.activations)
        return Part(self.name, *(factor * count for count in counts))

    def floor(self, chip: Chip) -> float:
        """The least seconds it takes: by operations, or by bytes of weights, K and V."""
        return max(self.operations / chip.flops, (self.weights + self.kv) / chip.bandwidth)


@dataclass(frozen=True)
class Work:
    """Parts that are done one after another."""

    parts: tuple[Part, ...]

    @property
    def operations(self) -> int:
        """Multiplications and additions of all parts."""
        return sum(part.operations for part in self.parts)

    @property
    def bytes(self) -> int:
        """Bytes accessed by all parts."""
        return sum(part.bytes for part in self.parts)

    def floor(self, chip: Chip) -> float:
        """The least seconds that all parts take in turn."""
        return sum(part.floor(chip) for part in self.parts)


def parameters(config: ModelConfig) -> dict[str, int]:
    """Parameters by part; their sum is the model's."""
    d, feed_forward = config.d, _feed_forward_parameters(config)
    norms = config.attention_layers + config.feed_forward_layers + 1 + bool(config.encoder_layers)
    norm_size = d * (2 if config.norm == "layer" and config.bias else 1)
    counts = {
        "token embedding": config.vocab_size * d,
        "output embedding": 0 if config.tied else config.vocab_size * d,
        "positions": (config.source_positions + config.target_positions) * d,
        "encoder attention": config.encoder_layers * config.encoder_attention.parameters,
        "encoder feed-forward": config.encoder_layers * feed_forward,
        "decoder self-attention": config.decoder_layers * config.decoder_attention.parameters,
        "encoder-decoder attention": (config.attention_layers - config.feed_forward_layers)
        * config.encoder_attention.parameters,
        "decoder feed-forward": config.decoder_layers * feed_forward,
        "norms": norms * norm_size,
    }
    return {name: count for name, count in counts.items() if count}


def kv_bytes(config: ModelConfig, setting: Setting) -> dict[str, int]:
    """Bytes of K and V: what a target and a source token add to them, and all that is allocated."""
    position = config.decoder_layers * config.decoder_attention.kv_size * setting.element
    has_source = config.encoder_layers > 0
    kept = setting.target if config.window is None else min(config.window, setting.target)
    source = position if has_source else 0
    return {
        "target_token": position,
        "source_token": source,
        "self": setting.rows * kept * position,
        "encoder": setting.batch * setting.source * source,
        "total": setting.rows * kept * position + setting.batch * setting.source * source,
    }


def encoder(config: ModelConfig, setting: Setting) -> Work:
    """What `start` does: the encoder, and the K and V that the decoder will read."""
    return _encoder(config, setting, setting.batch * setting.source**2)


def decoder_step(
    config: ModelConfig, setting: Setting, position: int | None = None, *, padded: bool = False
) -> Work:
    """One step of the decoder that feeds the token at `position` (from 0; the last by default).

    `padded` reads the memory to its capacity whatever the position, as the paper's decoder did.
    """
    position = setting.target - 1 if position is None else position
    if not 0 <= position < setting.target:
        raise ConfigError(f"position={position} must be from 0 to {setting.target - 1}")
    m = setting.target if padded else position + 1
    return _decoder(config, setting, 1, m if config.window is None else min(m, config.window))


def decoder_sequence(config: ModelConfig, setting: Setting, *, padded: bool = False) -> Work:
    """All `target` steps of the decoder."""
    n = setting.target
    if padded:
        return _decoder(config, setting, n, n * min(n, config.window or n))
    return _decoder(config, setting, n, visible_pairs(n, config.window))


def _decoder(config: ModelConfig, setting: Setting, steps: int, pairs: int) -> Work:
    """`steps` steps in which each row reads `pairs` positions of its own memory in all."""
    attention, rows, e = config.decoder_attention, setting.rows, setting.element
    passes = config.decoder_layers * steps
    read = e * attention.kv_size
    own = _mixing("self: K and V", attention, rows * steps, rows * pairs, rows * pairs * read, e)
    parts = [
        _projections("self: projections", attention, rows, e).times(passes),
        own.times(config.decoder_layers),
        _feed_forward("feed-forward", config, rows, e).times(passes),
        _output(config, rows, e).times(steps),
    ]
    if config.encoder_layers:
        once = setting.batch * setting.source * read  # the beams of a sentence share it
        cross = _mixing("cross: K and V", attention, rows, rows * setting.source, once, e)
        parts[2:2] = [
            _read_projections("cross: projections", attention, rows, e).times(passes),
            cross.times(passes),
        ]
    return Work(tuple(parts))


@dataclass(frozen=True)
class Pairs:
    """Visible pairs of query and memory position in a whole batch, by kind of attention."""

    encoder: int
    self: int
    cross: int


def training_step(config: ModelConfig, setting: Setting, pairs: Pairs | None = None) -> Work:
    """Forward and backward over `batch` rows of source and target, the optimizer left out.

    The backward pass does each product twice, once for either operand's gradient, so everything
    counts three times. `pairs` are given where rows are packed with several sentences; otherwise
    each row is one.
    """
    if pairs is None:
        source, target = setting.source, setting.target
        one = Pairs(source**2, visible_pairs(target, config.window), source * target)
        pairs = Pairs(*(setting.batch * count for count in vars(one).values()))
    attention, e = config.decoder_attention, setting.element
    tokens, layers = setting.batch * setting.target, config.decoder_layers
    parts = [
        *_encoder(config, setting, pairs.encoder).parts,
        _projections("self: projections", attention, tokens, e).times(layers),
        _mixing("self: attention", attention, tokens, pairs.self, 0, e).times(layers),
        _feed_forward("feed-forward", config, tokens, e).times(layers),
        _output(config, tokens, e),
    ]
    if config.encoder_layers:
        parts += [
            _read_projections("cross: projections", attention, tokens, e).times(layers),
            _mixing("cross: attention", attention, tokens, pairs.cross, 0, e).times(layers),
        ]
    return Work(tuple(part.times(3) for part in parts))


def visible_pairs(n: int, window: int | None = None) -> int:
    """Pairs of query and memory position in causal attention over n positions."""
    w = n if window is None else min(window, n)
    return w * (w + 1) // 2 + (n - w) * w


def memory_bytes(config: ModelConfig, setting: Setting) -> int:
    """Bytes that decoding takes: weights, K and V, what a search notes, and a workspace.

    The workspace is that of the encoder's widest layer and that of a step, whose logits are most
    of it: a captured step keeps its own while the encoder works.
    """
    return _weight_bytes(config, setting) + setting.batch * _sentence_bytes(config, setting)


def largest_batch(config: ModelConfig, setting: Setting, chip: Chip) -> int:
    """The most sentences that decode together in the chip's memory."""
    free = chip.memory - _weight_bytes(config, setting)
    return max(0, int(free // _sentence_bytes(config, setting)))


def _weight_bytes(config: ModelConfig, setting: Setting) -> int:
    return sum(parameters(config).values()) * setting.element


def _sentence_bytes(config: ModelConfig, setting: Setting) -> int:
    """What one more sentence takes: K and V, what is noted of it, its share of the workspace."""
    one = dataclasses.replace(setting, batch=1)
    notes = setting.beam * setting.target * NOTES
    # residuals, their norm, a feed-forward layer; the largest of each 32 logits is float32
    step = (2 * config.d + config.f + config.vocab_size) * setting.element + config.vocab_size // 8
    encoder = setting.source * _encoder_width(config) * setting.element
    return kv_bytes(config, one)["total"] + notes + setting.beam * step + encoder


def _encoder_width(config: ModelConfig) -> int:
    """Numbers that the encoder holds at once for each source token."""
    if not config.encoder_layers:
        return 0
    attention = config.encoder_attention
    # what was attended to is held as it comes, masked, and with its heads side by side
    attending = attention.h * (attention.k + 3 * attention.v) + attention.kv_size
    return config.d + max(config.d + config.f, attending)


def _encoder(config: ModelConfig, setting: Setting, pairs: int) -> Work:
    if not config.encoder_layers:
        return Work(())
    attention, tokens = config.encoder_attention, setting.batch * setting.source
    layers, e = config.encoder_layers, setting.element
    memory = Part(
        "cross: K and V projected",
        operations=2 * tokens * attention.d * attention.kv_size,
        weights=e * _kv_parameters(attention),
        kv=0,
        activations=e * tokens * (attention.d + attention.kv_size),
    )
    return Work(
        (
            _projections("encoder: projections", attention, tokens, e).times(layers),
            _mixing("encoder: attention", attention, tokens, pairs, 0, e).times(layers),
            _feed_forward("encoder: feed-forward", config, tokens, e).times(layers),
            memory.times(config.decoder_layers),
        )
    )


def _feed_forward_parameters(config: ModelConfig) -> int:
    return 2 * config.d * config.f + (config.d + config.f if config.bias else 0)


def _kv_parameters(attention: AttentionConfig) -> int:
    """P_k and P_v, with their biases."""
    return (attention.d + int(attention.bias)) * attention.kv_size


def _projections(name: str, attention: AttentionConfig, tokens: int, e: int) -> Part:
    """P_q, P_k, P_v and P_o over `tokens` positions."""
    d, h, k, v = attention.d, attention.h, attention.k, attention.v
    products = dataclasses.replace(attention, bias=False).parameters
    return Part(
        name,
        operations=2 * tokens * products,
        weights=e * attention.parameters,
        kv=0,
        activations=e * tokens * (2 * d + h * (k + v) + attention.kv_size),
    )


def _read_projections(name: str, attention: AttentionConfig, tokens: int, e: int) -> Part:
    """P_q and P_o alone: the memory's K and V are projected once, before."""
    d, h, k, v = attention.d, attention.h, attention.k, attention.v
    return Part(
        name,
        operations=2 * tokens * d * h * (k + v),
        weights=e * (attention.parameters - _kv_parameters(attention)),
        kv=0,
        activations=e * tokens * (2 * d + h * (k + v)),
    )


def _mixing(
    name: str, attention: AttentionConfig, tokens: int, pairs: int, kv: int, e: int
) -> Part:
    """Logits and weighted sums: `tokens` queries over `pairs` visible positions in all."""
    h, k, v = attention.h, attention.k, attention.v
    return Part(
        name,
        operations=2 * pairs * h * (k + v),
        weights=0,
        kv=kv,
        activations=e * tokens * h * (k + v),
    )


def _feed_forward(name: str, config: ModelConfig, tokens: int, e: int) -> Part:
    return Part(
        name,
        operations=4 * tokens * config.d * config.f,
        weights=e * _feed_forward_parameters(config),
        kv=0,
        activations=e * tokens * 2 * (config.d + config.f),
    )


def _output(config: ModelConfig, tokens: int, e: int) -> Part:
    return Part(
        "output",
        operations=2 * tokens * config.d * config.vocab_size,
        weights=e * config.d * config.vocab_size,
        kv=0,
        activations=e * tokens * (config.d + config.vocab_size),
    )
