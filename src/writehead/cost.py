"""Counts the operations and bytes of a config, and computes a lower bound of their time on a chip.

Operations are the multiplications and additions of matrix products; attention counts only visible
pairs. Bytes are those of weights, and of the K and V that a step reads. Norms, softmax and
activations are left out, because fused kernels can avoid most of their memory traffic. The floor
of a part is the larger of operations / FLOPS and bytes / bandwidth. The floors of parts add up.
"""

import dataclasses
from dataclasses import dataclass

from writehead.config import AttentionConfig, ModelConfig
from writehead.errors import ConfigError, nearest, shown
from writehead.schema import check_bounds, check_types

# per position of a row: int32 history (two), forced prefix and ancestors; float32 random numbers
SEARCH_BYTES = 20
MAX_PARAMETERS = 10**15  # so that their size in bytes fits in 64 bits


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
    """Returns the parameters of each part; their sum is the size of the model."""
    d, encoders, decoders = config.d, config.encoder_layers, config.decoder_layers
    learned = config.target_positions + config.position_offset
    if encoders:
        learned += config.source_positions + config.position_offset
    biases = config.relative_buckets * config.h * (2 if encoders else 1)
    positions = {"learned": learned * d, "relative": biases}
    final_norms = 0 if config.norm_place == "post" else 2 if encoders else 1
    norms = 2 * (encoders + decoders) + config.cross_layers + final_norms
    counts = {
        "token embedding": config.vocab_size * d,
        "source embedding": (config.source_vocab_size or 0) * d,
        "output embedding": 0 if config.tied else config.vocab_size * d,
        "output bias": config.vocab_size if config.output_bias else 0,
        "positions": positions.get(config.positions, 0),
        "encoder attention": encoders * config.encoder_attention.parameters,
        "encoder feed-forward": encoders * config.feed_forward_parameters,
        "decoder self-attention": decoders * config.decoder_attention.parameters,
        "encoder-decoder attention": config.cross_layers * config.cross_attention.parameters,
        "decoder feed-forward": decoders * config.feed_forward_parameters,
        "norms": norms * d * (2 if config.norm == "layer" and config.bias else 1),
    }
    return {name: count for name, count in counts.items() if count}


def check_config(config: object) -> None:
    """Raises ConfigError if `config` is not a ModelConfig or has too many parameters."""
    if not isinstance(config, ModelConfig):
        raise ConfigError(f"config must be a ModelConfig, not {shown(config)}; use preset()")
    count = sum(parameters(config).values())
    if count > MAX_PARAMETERS:
        raise ConfigError(f"a model of {count:,} parameters is too large; choose smaller sizes")


def kv_bytes(config: ModelConfig, setting: Setting) -> dict[str, int]:
    """Returns the bytes of K and V: per token, for each kind of attention, and in total."""
    position = config.decoder_layers * config.decoder_attention.kv_size * setting.element
    source = config.cross_layers * config.cross_attention.kv_size * setting.element
    kept = setting.target if config.window is None else min(config.window, setting.target)
    own, encoder = setting.rows * kept * position, setting.batch * setting.source * source
    tokens = {"target_token": position, "source_token": source}
    return {**tokens, "self": own, "encoder": encoder, "total": own + encoder}


def visible_pairs(n: int, window: int | None = None) -> int:
    """Returns the pairs of query and memory position in causal attention over n positions."""
    w = n if window is None else min(window, n)
    return w * (w + 1) // 2 + (n - w) * w


def encoder(config: ModelConfig, setting: Setting, pairs: int | None = None) -> Work:
    """Returns the work of the encoder and of the projection of its output to K and V.

    `pairs` is for packed rows.
    """
    if not config.encoder_layers:
        return Work(())
    pairs = setting.batch * setting.source**2 if pairs is None else pairs
    tokens, e, layers = setting.batch * setting.source, setting.element, config.encoder_layers
    own, cross = config.encoder_attention, config.cross_attention
    projection = _projections("cross: K and V projected", cross, tokens, e, queries=False)
    return Work(
        (
            _projections("encoder: projections", own, tokens, e).times(layers),
            _mixing("encoder: attention", config, pairs).times(layers),
            _feed_forward("encoder: feed-forward", config, tokens, e).times(layers),
            projection.times(config.cross_layers),
        )
    )


def decoder_step(config: ModelConfig, setting: Setting, position: int | None = None) -> Work:
    """Returns the work of one step at `position`, counted from 0; the default is the last."""
    position = setting.target - 1 if position is None else position
    if not 0 <= position < setting.target:
        raise ConfigError(f"position={position} must be from 0 to {setting.target - 1}")
    return _decode(config, setting, 1, min(position + 1, config.window or setting.target))


def decoder_sequence(config: ModelConfig, setting: Setting, *, padded: bool = False) -> Work:
    """Returns the work of all `target` steps; if `padded`, each reads the whole cache (§4.3)."""
    n = setting.target
    pairs = n * min(n, config.window or n) if padded else visible_pairs(n, config.window)
    return _decode(config, setting, n, pairs)


def _decode(config: ModelConfig, setting: Setting, steps: int, pairs: int) -> Work:
    """Returns the work of `steps` steps, in which a row reads `pairs` cache positions in total."""
    rows, source, e = setting.rows, setting.source, setting.element
    own_bytes = e * rows * pairs * config.decoder_attention.kv_size
    # the beams of a sentence share K and V
    cross_bytes = e * setting.batch * source * steps * config.cross_attention.kv_size
    own = _mixing("self: K and V", config, rows * pairs, own_bytes)
    cross = _mixing("cross: K and V", config, rows * steps * source, cross_bytes)
    return _decoder(config, setting, rows, steps, own, cross)


@dataclass(frozen=True)
class Pairs:
    """Visible pairs of query and memory position in a batch, by kind of attention."""

    encoder: int
    self: int
    cross: int


def training_step(config: ModelConfig, setting: Setting, pairs: Pairs | None = None) -> Work:
    """Returns the work of a forward and backward pass, without the optimizer.

    The backward pass has two products for each product of the forward pass. `pairs` is for packed
    rows.
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
    """Returns the largest batch that can be decoded in the chip's memory."""
    weights = sum(parameters(config).values()) * setting.element
    return max(0, int((chip.memory - weights) // sentence_bytes(config, setting)))


def sentence_bytes(config: ModelConfig, setting: Setting) -> int:
    """Returns the bytes needed to decode a sentence: K and V, the search, and the workspace."""
    d, e = config.d, setting.element
    sentence = dataclasses.replace(setting, batch=1)
    inner = 3 * config.f if config.gated else config.f  # both factors and their product
    # residuals, their norm, a feed-forward layer, logits, and a float32 maximum per 32 logits
    step = (2 * d + inner + config.vocab_size) * e + config.vocab_size // 8
    encoding = 0
    if config.encoder_layers:
        attention = config.encoder_attention
        # attention has three copies of its output: as computed, masked, and with joined heads
        attending = attention.h * (attention.k + 3 * attention.v) + attention.kv_size
        encoding = setting.source * (d + max(d + inner, attending)) * e
        if config.positions == "relative":  # as computed, and masked
            encoding += 2 * attention.h * setting.source**2 * e
    search = setting.beam * (setting.target * SEARCH_BYTES + step)
    return kv_bytes(config, sentence)["total"] + search + encoding


def _decoder(
    config: ModelConfig, setting: Setting, tokens: int, steps: int, own: Part, cross: Part
) -> Work:
    """Returns the work of `steps` passes over `tokens` positions.

    own, cross: the attention of one layer, summed over all passes.
    """
    layers, e = config.decoder_layers, setting.element
    self_projections = _projections("self: projections", config.decoder_attention, tokens, e)
    parts = [self_projections.times(layers * steps), own.times(layers)]
    if config.encoder_layers:
        read = _projections("cross: projections", config.cross_attention, tokens, e, memory=False)
        parts += [read.times(layers * steps), cross.times(layers)]
    parts.append(_feed_forward("feed-forward", config, tokens, e).times(layers * steps))
    bias = config.vocab_size if config.output_bias else 0
    parts.append(_product("output", config.d * config.vocab_size, bias, tokens, e).times(steps))
    return Work(tuple(parts))


def _product(name: str, weights: int, biases: int, tokens: int, e: int) -> Part:
    """Returns the work of matrix products over `tokens` positions."""
    return Part(name, 2 * tokens * weights, e * (weights + biases))


def _projections(
    name: str,
    attention: AttentionConfig,
    tokens: int,
    e: int,
    *,
    queries: bool = True,
    memory: bool = True,
) -> Part:
    """Returns the projections of an attention layer: P_q, P_o (queries) and P_k, P_v (memory)."""
    d, h, k, v = attention.d, attention.h, attention.k, attention.v
    write = attention.kv_size if memory else 0
    weights = d * (h * (k + v) * queries + write)
    biases = (h * k + d) * queries + write if attention.bias else 0
    return _product(name, weights, biases, tokens, e)


def _feed_forward(name: str, config: ModelConfig, tokens: int, e: int) -> Part:
    """Returns the products of one feed-forward layer; a gated one has a third."""
    wide = 2 * config.f if config.gated else config.f
    biases = wide + config.d if config.bias else 0
    return _product(name, config.d * (wide + config.f), biases, tokens, e)


def _mixing(name: str, config: ModelConfig, pairs: int, kv: int = 0) -> Part:
    """Returns the attention logits and weighted sums over `pairs` visible pairs."""
    return Part(name, 2 * pairs * config.h * (config.k + config.v), 0, kv)
