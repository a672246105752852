"""Operations and bytes of any config, and a lower bound of the time they take on a chip.

Counted are:
- operations: multiplications and additions of matrix products, but not norms, softmax or sums
- bytes of weights, of the K and V that a step reads, and of activations between parts
- attention over visible pairs of query and memory position only

The floor of a part is the larger of operations / FLOPS and bytes / bandwidth. It leaves activations
out, because fused kernels and on-chip caches can avoid writing them to memory. The floor of a
sequence of parts is the sum of their floors.
"""

import dataclasses
from dataclasses import dataclass

from writehead.config import ModelConfig
from writehead.errors import ConfigError, nearest, shown
from writehead.schema import check_bounds, check_types

# bytes per position of a row besides K and V: two int32 of its history, one int32 of a forced
# prefix, and an int64 of its ancestors
SEARCH_BYTES = 20


@dataclass(frozen=True)
class Chip:
    """Bytes of memory, bytes per second, and operations per second of an accelerator."""

    name: str
    memory: float
    bandwidth: float
    flops: float
    source: str

    def __post_init__(self) -> None:
        check_types(self)
        check_bounds(self, "memory", "bandwidth", "flops", gt=0)


# FLOPS are for dense bf16 products with float32 accumulation. Data sheets also list rates with 2:4
# sparsity, which are twice as high, or, for GeForce cards, with 16-bit accumulation.
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
    """Returns a chip by name."""
    if name not in CHIPS:
        raise ConfigError(f"unknown chip {shown(name)}; {nearest(name, CHIPS)}")
    return CHIPS[name]


@dataclass(frozen=True)
class Setting:
    """A workload: `batch` sentences with `source` and `target` tokens each.

    A language model has no source tokens. `element` is the size of a weight or activation in bytes.
    """

    batch: int
    source: int
    target: int
    beam: int = 1
    element: int = 2

    def __post_init__(self) -> None:
        check_bounds(self, "batch", "target", "beam", "element", ge=1)
        check_bounds(self, "source", ge=0)

    @property
    def rows(self) -> int:
        """Hypotheses per decoder step."""
        return self.batch * self.beam


@dataclass(frozen=True)
class Part:
    """The work of one kind of layer: operations, and bytes by category."""

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
        """Returns the part repeated `factor` times."""
        counts = (self.operations, self.weights, self.kv, self.activations)
        return Part(self.name, *(factor * count for count in counts))

    def floor(self, chip: Chip) -> float:
        """Lower bound of the time in seconds."""
        return max(self.operations / chip.flops, (self.weights + self.kv) / chip.bandwidth)


@dataclass(frozen=True)
class Work:
    """A sequence of parts."""

    parts: tuple[Part, ...]

    @property
    def operations(self) -> int:
        """Operations of all parts."""
        return sum(part.operations for part in self.parts)

    @property
    def bytes(self) -> int:
        """Bytes accessed by all parts."""
        return sum(part.bytes for part in self.parts)

    def floor(self, chip: Chip) -> float:
        """Lower bound of the time in seconds."""
        return sum(part.floor(chip) for part in self.parts)


def parameters(config: ModelConfig) -> dict[str, int]:
    """Parameters by part; their sum is the size of the model."""
    d, f = config.d, config.f
    feed_forward = 2 * d * f + (d + f if config.bias else 0)
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
    """Bytes of the KV cache: per target and source token, for each kind of attention, in total."""
    position = config.decoder_layers * config.decoder_attention.kv_size * setting.element
    source = position if config.encoder_layers else 0
    kept = setting.target if config.window is None else min(config.window, setting.target)
    own, encoder = setting.rows * kept * position, setting.batch * setting.source * source
    return {
        "target_token": position,
        "source_token": source,
        "self": own,
        "encoder": encoder,
        "total": own + encoder,
    }


def visible_pairs(n: int, window: int | None = None) -> int:
    """Pairs of query and memory position in causal attention over n positions."""
    w = n if window is None else min(window, n)
    return w * (w + 1) // 2 + (n - w) * w


def encoder(config: ModelConfig, setting: Setting, pairs: int | None = None) -> Work:
    """The encoder, including the projection of its output to K and V for the decoder.

    `pairs` are the visible pairs in the batch; without it, each row is one sequence.
    """
    if not config.encoder_layers:
        return Work(())
    pairs = setting.batch * setting.source**2 if pairs is None else pairs
    tokens, e, layers = setting.batch * setting.source, setting.element, config.encoder_layers
    return Work(
        (
            _product("encoder: projections", config, tokens, e).times(layers),
            _mixing("encoder: attention", config, tokens, pairs, 0, e).times(layers),
            _product("encoder: feed-forward", config, tokens, e).times(layers),
            _product("cross: K and V projected", config, tokens, e).times(config.decoder_layers),
        )
    )


def decoder_step(
    config: ModelConfig, setting: Setting, position: int | None = None, *, padded: bool = False
) -> Work:
    """One decoder step at `position` (from 0; the last by default).

    If `padded`, the step reads the whole capacity of the cache, as the paper's decoder did.
    """
    position = setting.target - 1 if position is None else position
    if not 0 <= position < setting.target:
        raise ConfigError(f"position={position} must be from 0 to {setting.target - 1}")
    m = setting.target if padded else position + 1
    return _decode(config, setting, 1, m if config.window is None else min(m, config.window))


def decoder_sequence(config: ModelConfig, setting: Setting, *, padded: bool = False) -> Work:
    """All `target` steps of the decoder."""
    n = setting.target
    pairs = n * min(n, config.window or n) if padded else visible_pairs(n, config.window)
    return _decode(config, setting, n, pairs)


def _decode(config: ModelConfig, setting: Setting, steps: int, pairs: int) -> Work:
    """`steps` steps in which each row reads `pairs` positions of its own memory in total."""
    rows, source, e = setting.rows, setting.source, setting.element
    tokens, position = rows * steps, e * config.decoder_attention.kv_size
    own = _mixing("self: K and V", config, tokens, rows * pairs, rows * pairs * position, e)
    once = setting.batch * source * steps * position  # the beams of a sentence share K and V
    cross = _mixing("cross: K and V", config, tokens, tokens * source, once, e)
    return _decoder(config, rows, steps, e, own, cross)


@dataclass(frozen=True)
class Pairs:
    """Visible pairs of query and memory position in a batch, by kind of attention."""

    encoder: int
    self: int
    cross: int


def training_step(config: ModelConfig, setting: Setting, pairs: Pairs | None = None) -> Work:
    """Forward and backward pass over a batch, without the optimizer.

    The backward pass computes two products for each one of the forward pass. Without `pairs`, each
    row is one sequence; packed rows have fewer pairs.
    """
    source, target, e = setting.source, setting.target, setting.element
    if pairs is None:
        own = visible_pairs(target, config.window)
        pairs = Pairs(*(setting.batch * count for count in (source**2, own, source * target)))
    tokens = setting.batch * target
    decoder = _decoder(
        config,
        tokens,
        1,
        e,
        _mixing("self: attention", config, tokens, pairs.self, 0, e),
        _mixing("cross: attention", config, tokens, pairs.cross, 0, e),
    )
    parts = (*encoder(config, setting, pairs.encoder).parts, *decoder.parts)
    return Work(tuple(part.times(3) for part in parts))


def memory_bytes(config: ModelConfig, setting: Setting) -> int:
    """Bytes of memory for decoding: weights, KV cache, search state and workspace."""
    return _weight_bytes(config, setting) + setting.batch * _sentence_bytes(config, setting)


def largest_batch(config: ModelConfig, setting: Setting, chip: Chip) -> int:
    """The largest batch that fits in the chip's memory."""
    free = chip.memory - _weight_bytes(config, setting)
    return max(0, int(free // _sentence_bytes(config, setting)))


def _weight_bytes(config: ModelConfig, setting: Setting) -> int:
    return sum(parameters(config).values()) * setting.element


def _sentence_bytes(config: ModelConfig, setting: Setting) -> int:
    """Bytes per sentence. A captured step keeps its workspace while the encoder runs."""
    d, e = config.d, setting.element
    one = dataclasses.replace(setting, batch=1)
    # residuals, their norm, a feed-forward layer and logits; the largest of each 32 logits, float32
    step = (2 * d + config.f + config.vocab_size) * e + config.vocab_size // 8
    encoding = 0
    if config.encoder_layers:
        attention = config.encoder_attention
        # the output of attention exists three times: as computed, masked, and with joined heads
        attending = attention.h * (attention.k + 3 * attention.v) + attention.kv_size
        encoding = setting.source * (d + max(d + config.f, attending)) * e
    search = setting.beam * (setting.target * SEARCH_BYTES + step)
    return kv_bytes(config, one)["total"] + search + encoding


def _decoder(config: ModelConfig, tokens: int, steps: int, e: int, own: Part, cross: Part) -> Work:
    """`steps` passes over `tokens` positions, with the attention of one layer over all passes."""
    layers = config.decoder_layers
    passes = layers * steps
    parts = [
        _product("self: projections", config, tokens, e).times(passes),
        own.times(layers),
        _product("feed-forward", config, tokens, e).times(passes),
        _product("output", config, tokens, e).times(steps),
    ]
    if config.encoder_layers:
        projections = _product("cross: projections", config, tokens, e).times(passes)
        parts[2:2] = [projections, cross.times(layers)]
    return Work(tuple(parts))


def _product(name: str, config: ModelConfig, tokens: int, e: int) -> Part:
    """The matrix products of one layer over `tokens` positions."""
    a, d, f = config.encoder_attention, config.d, config.f
    q, read, write = a.h * a.k, a.h * (a.k + a.v), a.kv_size
    sizes = {  # weights, biases, and elements read and written per token
        "self: projections": (d * (read + write), q + write + d, 2 * d + read + write),
        "cross: projections": (d * read, q + d, 2 * d + read),
        "cross: K and V projected": (d * write, write, d + write),
        "feed-forward": (2 * d * f, d + f, 2 * (d + f)),
        "output": (d * config.vocab_size, 0, d + config.vocab_size),
    }
    sizes["encoder: projections"] = sizes["self: projections"]
    sizes["encoder: feed-forward"] = sizes["feed-forward"]
    weights, biases, elements = sizes[name]
    stored = weights + biases if config.bias else weights
    return Part(name, 2 * tokens * weights, e * stored, 0, e * tokens * elements)


def _mixing(name: str, config: ModelConfig, tokens: int, pairs: int, kv: int, e: int) -> Part:
    """Attention logits and weighted sums of `tokens` queries over `pairs` visible pairs."""
    width = config.h * (config.k + config.v)
    return Part(name, 2 * pairs * width, 0, kv, e * tokens * width)
