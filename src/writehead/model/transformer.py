"""What the two models share: embeddings, the decoder, its output, and decoding step by step."""

import operator
from dataclasses import dataclass
from typing import SupportsIndex

import torch
from torch import Tensor, nn

from writehead import cost
from writehead.config import ModelConfig
from writehead.errors import ConfigError, ShapeError, TokenError
from writehead.kernels import Visibility
from writehead.model.attention import Memory, WholePast
from writehead.model.cache import KVCache
from writehead.model.layers import Stack
from writehead.model.state import DecoderState

MAX_PARAMETERS = 10**15  # so that their size in bytes fits into 64 bits

_INTEGERS = (torch.int64, torch.int32)


@dataclass(frozen=True, eq=False)
class Packing:
    """Several sequences in one row (§4.1): which one each position belongs to, and where in it.

    segments: [b, n], 1, 2, … and 0 for padding. positions: [b, n], from 0 in each segment.
    """

    segments: Tensor
    positions: Tensor

    @classmethod
    def from_segments(cls, segments: Tensor) -> "Packing":
        """The packing whose positions start again wherever a segment does; padding stays at 0."""
        if segments.dim() != 2:
            raise ShapeError(f"segments must be [b, n]; they are {list(segments.shape)}")
        index = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
        begins = torch.ones_like(segments, dtype=torch.bool)
        begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
        starts = torch.where(begins, index, 0).cummax(dim=1).values
        return cls(segments, torch.where(segments == 0, 0, index - starts))


class Transformer(nn.Module):
    """The decoder side of either model. `backend` is the one that `attend` is asked for."""

    def __init__(self, config: ModelConfig, backend: str = "auto") -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.d)
        self.decoder = Stack(
            config,
            config.decoder_attention,
            layers=config.decoder_layers,
            positions=config.target_positions,
            cross=config.encoder_layers > 0,
            backend=backend,
        )
        if not config.tied:
            self.output = nn.Linear(config.d, config.vocab_size, bias=False)
            nn.init.normal_(self.output.weight, std=config.d**-0.5)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights, and so of the caches."""
        return self.tokens.weight.dtype

    @torch.no_grad()
    def step(self, tokens: Tensor, state: DecoderState) -> Tensor:
        """Feeds one token a row, [rows] -> logits of the next [rows, vocab_size].

        The position advances here and nowhere else. Nothing waits for the device.
        """
        _check_tensor("tokens", tokens)
        if tokens.dim() != 1:
            raise ShapeError(f"step takes tokens [rows]; these are {list(tokens.shape)}")
        return self._logits(self._extend(tokens.unsqueeze(1), state)).squeeze(1)

    @torch.no_grad()
    def extend(self, tokens: Tensor, state: DecoderState, counts: Tensor | None = None) -> Tensor:
        """Feeds n tokens a row at once, [rows, n] -> logits [rows, n, vocab_size].

        With counts [rows], only the first counts[i] tokens of row i are real; the logits after
        them mean nothing.
        """
        return self._logits(self._extend(tokens, state, counts))

    def _extend(self, tokens: Tensor, state: DecoderState, counts: Tensor | None = None) -> Tensor:
        """The last layer's output [rows, n, d] at the next n positions of `state`."""
        self._check_tokens("tokens", tokens)
        cache = state.cache
        layers = self.config.decoder_layers
        memories = layers if self.config.encoder_layers else 0
        if (cache.attention, cache.K.shape[0], len(state.memories)) != (
            self.config.decoder_attention,
            layers,
            memories,
        ):
            raise ShapeError("this state is another model's; use the one that start returned")
        if tokens.shape[0] != state.rows:
            raise ShapeError(f"{tokens.shape[0]} rows of tokens for a state of {state.rows} rows")
        reservation = cache.reserve(tokens.shape[1], counts)
        # rows past their count stand nowhere: any learned position will do
        positions = reservation.positions.clamp(max=self.config.target_positions - 1)
        pasts = [reservation.layer(i) for i in range(layers)]
        X: Tensor = self.decoder(self.tokens(tokens), positions, pasts, state.memories)
        cache.advance(reservation)
        return X

    def _decode(
        self, tokens: Tensor, packing: Packing | None, memories: list[Memory] | None = None
    ) -> Tensor:
        """Logits [b, n, vocab_size] of a whole sequence: training's form."""
        self._check_tokens("target" if memories else "tokens", tokens)
        limit = self.config.target_positions
        positions = self._whole_positions("target", tokens, packing, limit)
        segments = None if packing is None else packing.segments
        visibility = Visibility(
            causal=True,
            window=self.config.window,
            query_segments=segments,
            memory_segments=segments,
        )
        pasts = [WholePast(visibility)] * self.config.decoder_layers
        return self._logits(self.decoder(self.tokens(tokens), positions, pasts, memories))

    def _logits(self, X: Tensor) -> Tensor:
        X = X * self.config.effective_logit_scale
        weight = self.tokens.weight if self.config.tied else self.output.weight
        return nn.functional.linear(X, weight)

    def _new_cache(self, rows: int, max_length: int, rewindable: int, padded: bool) -> KVCache:
        """An empty cache, once it is sure that the model can decode that far."""
        if self.training and self.config.dropout > 0.0:
            raise ConfigError(
                "the model is in training mode, where dropout would change every step; call "
                "model.eval() first"
            )
        if not 1 <= max_length <= self.config.target_positions:
            raise ConfigError(
                f"max_length={max_length} must be from 1 to {self.config.target_positions}, the "
                f"learned positions of this model"
            )
        return KVCache(
            self.config.decoder_attention,
            layers=self.config.decoder_layers,
            rows=rows,
            capacity=max_length,
            rewindable=rewindable,
            padded=padded,
            dtype=self.dtype,
            device=self.device,
        )

    def _whole_positions(
        self, name: str, tokens: Tensor, packing: Packing | None, limit: int
    ) -> Tensor:
        """Positions [b or 1, n] of a sequence given at once, checked against the learned ones."""
        if packing is None:
            if tokens.shape[1] > limit:
                raise ShapeError(
                    f"a {name} of {tokens.shape[1]} tokens is longer than the {limit} learned "
                    f"positions; shorten it, or train with more"
                )
            return torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        for field, T in (("segments", packing.segments), ("positions", packing.positions)):
            if T.shape != tokens.shape or T.dtype not in _INTEGERS:
                raise ShapeError(
                    f"the packing's {field} are {T.dtype} {list(T.shape)}; the {name} needs "
                    f"integers {list(tokens.shape)}"
                )
            if T.device != tokens.device:
                raise ShapeError(
                    f"the packing's {field} are on {T.device} and the {name} on {tokens.device}"
                )
        if not _within(packing.positions, 0, limit - 1):
            raise ShapeError(f"packed {name} positions must be from 0 to {limit - 1}")
        return packing.positions

    def _check_tokens(self, name: str, tokens: Tensor) -> None:
        _check_tensor(name, tokens)
        if tokens.dim() != 2 or 0 in tokens.shape:
            raise ShapeError(f"{name} must be [b, n] and not empty; they are {list(tokens.shape)}")
        if tokens.dtype not in _INTEGERS:
            raise ShapeError(f"{name} must be integers, not {tokens.dtype}")
        if tokens.device != self.device:
            raise ShapeError(f"{name} are on {tokens.device} and the model on {self.device}")
        if not _within(tokens, 0, self.config.vocab_size - 1):
            outside = tokens[(tokens < 0) | (tokens >= self.config.vocab_size)]
            raise TokenError(
                f"token {int(outside[0])} in {name} is outside the vocabulary of "
                f"{self.config.vocab_size}; ids are from 0 to {self.config.vocab_size - 1}"
            )

    def _check_lengths(self, name: str, lengths: Tensor | None, tokens: Tensor, least: int) -> None:
        if lengths is None:
            return
        _check_tensor(name, lengths)
        b, n = tokens.shape
        if list(lengths.shape) != [b] or lengths.dtype not in _INTEGERS:
            raise ShapeError(
                f"{name} must be {b} integers; they are {lengths.dtype} {list(lengths.shape)}"
            )
        if lengths.device != tokens.device:
            raise ShapeError(f"{name} are on {lengths.device} and the tokens on {tokens.device}")
        if not _within(lengths, least, n):
            raise ShapeError(f"{name} must be from {least} to {n}, the tokens there are")


def check_config(config: object) -> None:
    """Raises ConfigError if `config` is not a ModelConfig or has too many parameters."""
    if not isinstance(config, ModelConfig):
        raise ConfigError(
            f"a model is made of a ModelConfig, not of {config!r:.60}; preset(name) gives one"
        )
    count = sum(cost.parameters(config).values())
    if count > MAX_PARAMETERS:
        raise ConfigError(f"a model of {count:,} parameters is too large; choose smaller sizes")


def check_sizes(max_length: object, beam: object) -> None:
    """Raises where what a state is started for are no whole numbers, or there is no beam."""
    for name, value in (("max_length", max_length), ("beam", beam)):
        if not isinstance(value, SupportsIndex):
            raise ConfigError(f"{name}={value!r} is not a whole number")
        if name == "beam" and operator.index(value) < 1:
            raise ConfigError(f"beam={value!r} must be at least 1")


def _check_tensor(name: str, given: object) -> None:
    if not isinstance(given, Tensor):
        raise ShapeError(
            f"{name} came as {type(given).__name__}; give a tensor of integers, as torch.tensor "
            f"makes of a list"
        )


def _within(values: Tensor, least: int, most: int) -> bool:
    """Whether all values are in range, as far as that can be seen without waiting for a device."""
    if values.device.type != "cpu":
        return True
    return least <= int(values.min()) and int(values.max()) <= most
