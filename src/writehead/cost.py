"""Counts the operations and bytes of a config, and a lower bound of their time on a chip.

Operations are the multiplications and additions of matrix products, with attention over visible
pairs only; bytes are those of weights and of the K and V that a step reads. Norms, softmax and
activations are left out, because fused kernels can avoid most of their memory traffic. The floor
of a part is the larger of operations / FLOPS and bytes / bandwidth; floors of parts add up.
"""

import dataclasses
from dataclasses import dataclass

from writehead.config import ModelConfig
from writehead.errors import ConfigError, nearest, shown
from writehead.schema import check_bounds, check_types

# per position of a row: int32 history (two), int32 forced prefix, int64 ancestors
SEARCH_BYTES = 20


@dataclass(frozen=True)
class Chip:
    """An accelerator: bytes of memory, bytes per second, and operations per second."""

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
    """A workload: `batch` sentences with `source` and `target` tokens each."""

    batch: int
    source: int  # 0 for a language model
    target: int
    beam: int = 1
    element: int = 2  # bytes of a weight or activation

    def __post_init__(self) -> None:
        check_bounds(self, "batch", "target", "beam", "element", ge=1)
        check_bounds(self, "source", ge=0)

    @property
    def rows(self) -> int:
        """Hypotheses per decoder step."""
        return self.batch * self.beam


@dataclass(frozen=True)
class Part:
    """The work of one kind of layer: operations, and bytes of weights and of K and V."""

    name: str
    operations: int
    weights: int
    kv: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of weights, K and V."""
        return self.weights + self.kv

    def times(self, factor: int) -> "Part":
        """Returns this part, repeated `factor` times."""
        return Part(self.name, factor * self.operations, factor * self.weights, factor * self.kv)

    def floor(self, chip: Chip) -> float:
        """Lower bound of the time in seconds."""
        return max(self.operations / chip.flops, self.bytes / chip.bandwidth)


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
        """Bytes of all parts."""
        return sum(part.bytes for part in self.parts)

    def floor(self, chip: Chip) -> float:
        """Lower bound of the time in seconds."""
        return sum(part.floor(chip) for part in self.parts)


def parameters(config: ModelConfig) -> dict[str, int]:
    """Parameters by part; their sum is the size of the model."""
    d, f = config.d, config.f
    feed_forward = 2 * d * f + (d + f if config.bias else 0)
    layers = config.encoder_layers + config.decoder_layers
    norms = config.attention_layers + layers + 1 + bool(config.encoder_layers)
    norm_size = d * (2 if config.norm == "layer" and config.bias else 1)
    attention = config.encoder_attention.parameters
    counts = {
        "token embedding": config.vocab_size * d,
        "output embedding": 0 if config.tied else config.vocab_size * d,
        "positions": (config.source_positions + config.target_positions) * d,
        "encoder attention": config.encoder_layers * attention,
        "encoder feed-forward": config.encoder_layers * feed_forward,
        "decoder self-attention": config.decoder_layers * attention,
        "encoder-decoder attention": (config.attention_layers - layers) * attention,
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
    tokens = {"target_token": position, "source_token": source}
    return {**tokens, "self": own, "encoder": encoder, "total": own + encoder}


def visible_pairs(n: int, window: int | None = None) -> int:
    """Pairs of query and memory position in causal attention over n positions."""
    w = n if window is None else min(window, n)
    return w * (w + 1) // 2 + (n - w) * w


def encoder(config: ModelConfig, setting: Setting, pairs: int | None = None) -> Work:
    """The encoder, with the projection of its output to K and V; `pairs` is for packed rows."""
    if not config.encoder_layers:
        return Work(())
    pairs = setting.batch * setting.source**2 if pairs is None else pairs
    tokens, e, layers = setting.batch * setting.source, setting.element, config.encoder_layers
    return Work(
        (
            _product("encoder: projections", config, tokens, e).times(layers),
            _mixing("encoder: attention", config, pairs).times(layers),
            _product("encoder: feed-forward", config, tokens, e).times(layers),
            _product("cross: K and V projected", config, tokens, e).times(config.decoder_layers),
        )
    )


def decoder_step(config: ModelConfig, setting: Setting, position: int | None = None) -> Work:
    """One decoder step at `position`, which counts from 0 and defaults to the last."""
    position = setting.target - 1 if position is None else position
    if not 0 <= position < setting.target:
        raise ConfigError(f"position={position} must be from 0 to {setting.target - 1}")
    return _decode(config, setting, 1, min(position + 1, config.window or setting.target))


def decoder_sequence(config: ModelConfig, setting: Setting, *, padded: bool = False) -> Work:
    """All `target` steps; if `padded`, each reads the whole cache, as the paper's decoder did."""
    n = setting.target
    pairs = n * min(n, config.window or n) if padded else visible_pairs(n, config.window)
    return _decode(config, setting, n, pairs)


def _decode(config: ModelConfig, setting: Setting, steps: int, pairs: int) -> Work:
    """`steps` steps in which each row reads `pairs` positions of its own memory in total."""
    rows, source = setting.rows, setting.source
    position = setting.element * config.decoder_attention.kv_size
    own = _mixing("self: K and V", config, rows * pairs, rows * pairs * position)
    once = setting.batch * source * steps * position  # the beams of a sentence share K and V
    cross = _mixing("cross: K and V", config, rows * steps * source, once)
    return _decoder(config, setting, rows, steps, own, cross)


@dataclass(frozen=True)
class Pairs:
    """Visible pairs of query and memory position in a batch, by kind of attention."""

    encoder: int
    self: int
    cross: int


def training_step(config: ModelConfig, setting: Setting, pairs: Pairs | None = None) -> Work:
    """Forward and backward pass, without the optimizer; `pairs` is for packed rows.

    The backward pass computes two products for each one of the forward pass.
    """
    source, target = setting.source, setting.target
    if pairs is None:
        own = visible_pairs(target, config.window)
        pairs = Pairs(*(setting.batch * count for count in (source**2, own, source * target)))
    own_part = _mixing("self: attention", config, pairs.self)
    cross = _mixing("cross: attention", config, pairs.cross)
    decoder = _decoder(config, setting, setting.batch * target, 1, own_part, cross)
    parts = (*encoder(config, setting, pairs.encoder).parts, *decoder.parts)
    return Work(tuple(part.times(3) for part in parts))


def largest_batch(config: ModelConfig, setting: Setting, chip: Chip) -> int:
    """The largest batch that can be decoded in the chip's memory."""
    weights = sum(parameters(config).values()) * setting.element
    return max(0, int((chip.memory - weights) // _sentence_bytes(config, setting)))


def _sentence_bytes(config: ModelConfig, setting: Setting) -> int:
    """Bytes per sentence, including the workspace of the step, also while the encoder runs."""
    d, e = config.d, setting.element
    sentence = dataclasses.replace(setting, batch=1)
    # residuals, their norm, a feed-forward layer and logits; the largest of each 32 logits, float32
    step = (2 * d + config.f + config.vocab_size) * e + config.vocab_size // 8
    encoding = 0
    if config.encoder_layers:
        attention = config.encoder_attention
        # the output of attention exists three times: as computed, masked, and with joined heads
        attending = attention.h * (attention.k + 3 * attention.v) + attention.kv_size
        encoding = setting.source * (d + max(d + config.f, attending)) * e
    search = setting.beam * (setting.target * SEARCH_BYTES + step)
    return kv_bytes(config, sentence)["total"] + search + encoding


def _decoder(
    config: ModelConfig, setting: Setting, tokens: int, steps: int, own: Part, cross: Part
) -> Work:
    """`steps` passes over `tokens` positions, with the attention of one layer over all passes."""
    layers, e = config.decoder_layers, setting.element
    parts = [
        _product("self: projections", config, tokens, e).times(layers * steps),
        own.times(layers),
        _product("feed-forward", config, tokens, e).times(layers * steps),
        _product("output", config, tokens, e).times(steps),
    ]
    if config.encoder_layers:
        projections = _product("cross: projections", config, tokens, e).times(layers * steps)
        parts[2:2] = [projections, cross.times(layers)]
    return Work(tuple(parts))


def _product(name: str, config: ModelConfig, tokens: int, e: int) -> Part:
    """The matrix products of one layer over `tokens` positions."""
    a, d, f = config.encoder_attention, config.d, config.f
    q, read, write = a.h * a.k, a.h * (a.k + a.v), a.kv_size
    weights, biases = {
        "projections": (d * (read + write), q + write + d),
        "cross: projections": (d * read, q + d),
        "cross: K and V projected": (d * write, write),
        "feed-forward": (2 * d * f, d + f),
        "output": (d * config.vocab_size, 0),
    }[name.removeprefix("encoder: ").removeprefix("self: ")]
    return Part(name, 2 * tokens * weights, e * (weights + biases if config.bias else weights))


def _mixing(name: str, config: ModelConfig, pairs: int, kv: int = 0) -> Part:
    """Attention logits and weighted sums over `pairs` visible pairs."""
    return Part(name, 2 * pairs * config.h * (config.k + config.v), 0, kv)
