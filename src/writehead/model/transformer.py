"""The base class of both models: embeddings, decoder, output projection and decoding steps."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from writehead import cost
from writehead.config import ModelConfig, Task
from writehead.errors import ConfigError, ShapeError, TokenError, shown
from writehead.model.attention import Memory, WholeSequence
from writehead.model.cache import DecoderState, EncoderMemory, KVCache, check_integers
from writehead.model.layers import Layer, Stack
from writehead.ops.embedding import embed
from writehead.ops.linear import Weight, linear
from writehead.ops.norm import normalize
from writehead.ops.visibility import Visibility
from writehead.schema import INT32

L2_RESIDENT_FRACTION = 0.5  # of the L2 cache can hold weights from one step to the next
MAX_PARAMETERS = 10**15  # so that their size in bytes fits in 64 bits


@dataclass(frozen=True, eq=False)
class Packing:
    """Several sequences in one row (§4.1)."""

    segments: Tensor  # [b, n], the sequence of each position: 1, 2, …, or 0 for padding
    positions: Tensor  # [b, n], the position within the sequence

    @classmethod
    def from_segments(cls, segments: Tensor) -> "Packing":
        """Computes the positions from the segments; padding has position 0."""
        if segments.dim() != 2:
            raise ShapeError(f"segments must be [b, n], not {list(segments.shape)}")
        index = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
        begins = torch.ones_like(segments, dtype=torch.bool)
        begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
        starts = torch.where(begins, index, 0).cummax(dim=1).values
        return cls(segments, torch.where(segments == 0, 0, index - starts))


class Transformer(nn.Module):
    """The decoder of both models. `backend` selects the implementation of attention."""

    task: Task

    def __init__(self, config: ModelConfig, backend: str = "auto") -> None:
        super().__init__()
        check_config(config)
        if config.task != self.task:
            raise ConfigError(f"task={config.task!r} needs another class; use make_model")
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.d)
        self.decoder = Stack(config, encoder=False, backend=backend)
        if not config.tied:
            self.output = nn.Linear(config.d, config.vocab_size, bias=False)
            nn.init.normal_(self.output.weight, std=config.d**-0.5)
        if config.output_bias:
            self.output_bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.packed_output: Weight | None = None

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights and of the KV cache."""
        return self.tokens.weight.dtype

    @torch.no_grad()
    def step(self, tokens: Tensor, state: DecoderState) -> Tensor:
        """Feeds one token per row [rows]; returns the logits of the next [rows, vocab_size]."""
        if not isinstance(tokens, Tensor) or tokens.dim() != 1:
            raise ShapeError(f"step takes a tensor [rows], not {shown(tokens)}")
        return self.extend(tokens.unsqueeze(1), state).squeeze(1)

    @torch.no_grad()
    def extend(self, tokens: Tensor, state: DecoderState, counts: Tensor | None = None) -> Tensor:
        """Feeds n tokens per row [rows, n]; returns logits [rows, n, vocab_size].

        With counts [rows], only the first counts[i] tokens of row i are fed; the logits after them
        are undefined.
        """
        return self._logits(self._extend(tokens, state, counts))

    @torch.no_grad()
    def feed(self, tokens: Tensor, state: DecoderState, counts: Tensor | None = None) -> None:
        """Feeds tokens as `extend` does, without computing logits."""
        self._extend(tokens, state, counts)

    def decode(
        self,
        tokens: Tensor,
        cache: KVCache,
        memory: EncoderMemory | None,
        slots: Tensor | None = None,
    ) -> Tensor:
        """Feeds one token to each of the first rows of a cache; returns logits [rows, vocab_size].

        With slots [R], only these sentences are fed; tokens are those of all rows, and the logits
        are [R × beam, vocab_size]. The cache does not advance. Arguments are not checked, so that a
        CUDA graph can capture the call.
        """
        X = self._embed_next(tokens, cache, slots)
        return self._logits(self._run_decoder(X, cache, memory, slots)).squeeze(1)

    def pack(self) -> Self:
        """Prepares the weights for inference; `train`, `load_state_dict` and `to` undo it."""
        output, streamed = self._output_weight(), self._is_streamed()
        with torch.no_grad():
            for layer in self.modules():
                if isinstance(layer, Layer):
                    layer.pack(streamed=streamed)
            packed = output.fold(scale=self.config.effective_logit_scale)
            self.packed_output = replace(packed, streamed=streamed)
        return self.eval()

    def _is_streamed(self) -> bool:
        """Returns whether a step reads more weights than stay in the L2 cache until the next."""
        if self.device.type != "cuda":
            return False
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size
        weights = (*self.decoder.layers.parameters(), self._output_weight().W)
        return sum(W.nbytes for W in weights) > L2_RESIDENT_FRACTION * cache

    def unpack(self) -> None:
        """Drops the packed weights, so that the model uses its parameters."""
        self.packed_output = None
        for layer in self.modules():
            if isinstance(layer, Layer):
                layer.unpack()

    def train(self, mode: bool = True) -> Self:
        """Sets training mode, which drops packed weights."""
        if mode:
            self.unpack()
        return super().train(mode)

    def _load_from_state_dict(self, *args: Any) -> None:
        self.unpack()  # also if a module that contains this one is loaded
        super()._load_from_state_dict(*args)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        self.unpack()  # before the weights move to another device or dtype
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _extend(self, tokens: Tensor, state: DecoderState, counts: Tensor | None = None) -> Tensor:
        """Feeds tokens [rows, n] to the decoder; returns its output [rows, n, d]."""
        self._check_tokens("tokens", tokens)
        cache, n = state.cache, tokens.shape[1]
        expected = (self.config.decoder_attention, self.config.decoder_layers, self.dtype)
        has_memory = state.memory is not None
        actual = (cache.attention, len(cache.K), cache.K.dtype)
        if actual != expected or has_memory != (self.config.encoder_layers > 0):
            raise ShapeError("this state is from another model; use one from this model's start")
        if tokens.shape[0] != state.rows:
            raise ShapeError(f"tokens have {tokens.shape[0]} rows, but the state has {state.rows}")
        cache.reserve(n, counts)
        positions = cache.lengths.unsqueeze(1) + torch.arange(n, device=tokens.device)
        # positions beyond a row's count are unused, but must be valid
        positions = positions.clamp(max=self.config.target_positions - 1)
        X = self._embed(tokens, self.tokens.weight, self.decoder, positions)
        X = self._run_decoder(X, cache, state.memory, None, counts)
        cache.advance(n, counts)
        return X

    def _run_decoder(
        self,
        X: Tensor,
        cache: KVCache,
        memory: EncoderMemory | None,
        slots: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> Tensor:
        """Runs the decoder on the next positions X [rows, n, d] of `slots`, by default all."""
        layers = range(self.config.decoder_layers)
        memories = None if memory is None else [memory.layer(i, cache, slots) for i in layers]
        contexts = [cache.layer(i, slots, counts) for i in layers]
        Y: Tensor = self.decoder(X, contexts, memories)
        return Y

    def _embed(self, tokens: Tensor, E: Tensor, stack: Stack, positions: Tensor) -> Tensor:
        """Returns the embeddings X [b, n, d] of tokens [b, n] at positions [b or 1, n]."""
        table, scale = stack.position_table, self.config.embedding_scale or 1.0
        at = None if table is None else positions
        return embed(tokens, E, positions=at, P=table, scale=scale)

    def _embed_next(self, tokens: Tensor, cache: KVCache, slots: Tensor | None) -> Tensor:
        """Returns the embeddings X [R × beam, 1, d] of the next tokens of `slots`."""
        table, scale = self.decoder.position_table, self.config.embedding_scale or 1.0
        X = embed(
            tokens,
            self.tokens.weight,
            positions=None if table is None else cache.lengths[: len(tokens)],
            P=table,
            scale=scale,
            slots=slots,
            beam=cache.beam,
        )
        return X.unsqueeze(1)

    def _decode(
        self, tokens: Tensor, packing: Packing | None, memories: list[Memory] | None = None
    ) -> Tensor:
        """Returns the logits [b, n, vocab_size] of whole sequences, for training."""
        self._check_tokens("target" if memories else "tokens", tokens)
        limit = self.config.target_positions
        positions = self._whole_positions("target", tokens, packing, limit)
        segments = None if packing is None else packing.segments
        visibility = Visibility(
            True, self.config.window, query_segments=segments, memory_segments=segments
        )
        contexts = [WholeSequence(visibility, positions)] * self.config.decoder_layers
        X = self._embed(tokens, self.tokens.weight, self.decoder, positions)
        return self._logits(self.decoder(X, contexts, memories))

    def _logits(self, X: Tensor) -> Tensor:
        """Returns the logits of the decoder's output X [..., d]."""
        scale, norm = self.config.effective_logit_scale, self.decoder.final_norm
        if self.packed_output is not None and not torch.is_grad_enabled():
            return linear(X, self.packed_output)
        if not self.training:
            return linear(X, self._output_weight(), scale=scale)
        X = self.decoder.dropout(X if norm is None else normalize(X, norm))
        weight = self._output_weight()
        return linear(X * scale, Weight(weight.W, weight.bias))

    def _output_weight(self) -> Weight:
        W = self.tokens.weight if self.config.tied else self.output.weight
        bias = self.output_bias if self.config.output_bias else None
        return Weight(W, bias, self.decoder.final_norm)

    def _new_cache(self, rows: int, beam: int, max_length: int, padded: bool) -> KVCache:
        """Returns an empty cache of rows × beam rows."""
        if self.training and self.config.dropout > 0.0:
            raise ConfigError("the model is in training mode with dropout; call model.eval() first")
        if beam < 1:
            raise ConfigError(f"beam={beam} must be at least 1")
        positions = self.config.target_positions
        if not 1 <= max_length <= positions:
            raise ConfigError(
                f"max_length={max_length} must be from 1 to the model's {positions} positions"
            )
        return KVCache(
            self.config.decoder_attention,
            layers=self.config.decoder_layers,
            rows=rows * beam,
            capacity=max_length,
            beam=beam,
            padded=padded,
            dtype=self.dtype,
            device=self.device,
        )

    def _whole_positions(
        self, name: str, tokens: Tensor, packing: Packing | None, limit: int
    ) -> Tensor:
        """Returns the positions [b or 1, n] of whole sequences; raises if they reach `limit`."""
        if packing is None:
            if tokens.shape[1] > limit:
                raise ShapeError(
                    f"a {name} of {tokens.shape[1]} tokens exceeds the model's {limit} positions"
                )
            return torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        for T, most in ((packing.segments, INT32), (packing.positions, limit - 1)):
            check_integers(f"the packing of {name}", T, tokens.shape, tokens.device, most=most)
        return packing.positions

    def _check_tokens(self, name: str, tokens: Tensor, vocab_size: int | None = None) -> None:
        if isinstance(tokens, Tensor) and (tokens.dim() != 2 or 0 in tokens.shape):
            raise ShapeError(f"{name} must be [b, n] and not empty, not {list(tokens.shape)}")
        shape, most = getattr(tokens, "shape", ()), (vocab_size or self.config.vocab_size) - 1
        check_integers(name, tokens, shape, self.device, most=most, error=TokenError)


def check_config(config: object) -> None:
    """Raises ConfigError if `config` is not a ModelConfig or has too many parameters."""
    if not isinstance(config, ModelConfig):
        raise ConfigError(f"config must be a ModelConfig, not {shown(config)}; use preset()")
    count = sum(cost.parameters(config).values())
    if count > MAX_PARAMETERS:
        raise ConfigError(f"a model of {count:,} parameters is too large; choose smaller sizes")
