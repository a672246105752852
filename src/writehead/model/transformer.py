"""The base class of both models: embeddings, the decoder, its output, and decoding steps."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from writehead import cost
from writehead.config import ModelConfig, Task
from writehead.errors import ConfigError, ShapeError, TokenError, shown
from writehead.kernels import Visibility
from writehead.model.attention import Memory, WholePast
from writehead.model.cache import KVCache, check_integers
from writehead.model.layers import Stack
from writehead.model.state import DecoderState
from writehead.schema import INT32

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
    """The decoder of both models. `backend` selects the implementation of `attend`."""

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
        return self._logits(self._extend(tokens.unsqueeze(1), state)).squeeze(1)

    @torch.no_grad()
    def extend(self, tokens: Tensor, state: DecoderState, counts: Tensor | None = None) -> Tensor:
        """Feeds n tokens per row [rows, n]; returns logits [rows, n, vocab_size].

        With counts [rows], only the first counts[i] tokens of row i are fed; the logits after them
        are undefined.
        """
        return self._logits(self._extend(tokens, state, counts))

    def _extend(self, tokens: Tensor, state: DecoderState, counts: Tensor | None = None) -> Tensor:
        """Feeds tokens [rows, n] to the decoder; returns its output [rows, n, d]."""
        self._check_tokens("tokens", tokens)
        cache, layers = state.cache, self.config.decoder_layers
        memories = layers if self.config.encoder_layers else 0
        actual = (cache.attention, len(cache.K), len(state.memories), cache.K.dtype)
        if actual != (self.config.decoder_attention, layers, memories, self.dtype):
            raise ShapeError("this state is from another model; use one from this model's start")
        if tokens.shape[0] != state.rows:
            raise ShapeError(f"tokens have {tokens.shape[0]} rows, but the state has {state.rows}")
        reservation = cache.reserve(tokens.shape[1], counts)
        # positions beyond a row's count are unused, but must be valid
        positions = reservation.positions.clamp(max=self.config.target_positions - 1)
        pasts = [reservation.layer(i) for i in range(layers)]
        X: Tensor = self.decoder(self.tokens(tokens), positions, pasts, state.memories)
        cache.advance(reservation)
        return X

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
        pasts = [WholePast(visibility)] * self.config.decoder_layers
        return self._logits(self.decoder(self.tokens(tokens), positions, pasts, memories))

    def _logits(self, X: Tensor) -> Tensor:
        X = X * self.config.effective_logit_scale
        weight = self.tokens.weight if self.config.tied else self.output.weight
        return nn.functional.linear(X, weight)

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

    def _check_tokens(self, name: str, tokens: Tensor) -> None:
        if isinstance(tokens, Tensor) and (tokens.dim() != 2 or 0 in tokens.shape):
            raise ShapeError(f"{name} must be [b, n] and not empty, not {list(tokens.shape)}")
        shape, most = getattr(tokens, "shape", ()), self.config.vocab_size - 1
        check_integers(name, tokens, shape, self.device, most=most, error=TokenError)


def check_config(config: object) -> None:
    """Raises ConfigError if `config` is not a ModelConfig or has too many parameters."""
    if not isinstance(config, ModelConfig):
        raise ConfigError(f"config must be a ModelConfig, not {shown(config)}; use preset()")
    count = sum(cost.parameters(config).values())
    if count > MAX_PARAMETERS:
        raise ConfigError(f"a model of {count:,} parameters is too large; choose smaller sizes")
