"""§4.1: the encoder-decoder model for translation, and the decoder-only language model."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from writehead.config import ModelConfig, Task
from writehead.cost import check_config
from writehead.errors import BackendError, ConfigError, ShapeError, TokenError, shown
from writehead.model.attention import Memory, WholeSequence
from writehead.model.cache import DecoderState, EncoderMemory, KVCache
from writehead.model.layers import Layer, Stack
from writehead.model.projections import Projections, make_projection
from writehead.ops.cpu_weights import int8_name, quantize_rows, why_not_int8
from writehead.ops.decode_attention import INVARIANT_POSITIONS, round_up
from writehead.ops.embedding import QuantizedTable, embed
from writehead.ops.linear import Weight, linear
from writehead.ops.norm import Norm
from writehead.ops.visibility import Visibility
from writehead.schema import INT32
from writehead.util.tensors import check_integers

L2_RESIDENT_FRACTION = 0.5  # of the L2 cache can hold weights from one step to the next


@dataclass(frozen=True, eq=False)
class Packing:
    """Several sequences in one row (§4.1)."""

    segments: Tensor  # [b, n], the sequence of each position: 1, 2, …, or 0 for padding
    positions: Tensor  # [b, n], the position within the sequence


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
            self.output = make_projection(config.d, config.vocab_size)
        if config.output_bias:
            self.output_bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.packed_output: Weight | None = None
        self.quantized_tables: dict[nn.Module, QuantizedTable] = {}

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self._parameter.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights and of the KV cache."""
        return self._parameter.dtype

    @property
    def is_int8(self) -> bool:
        """Whether `pack` has replaced the weights by int8 weights."""
        return self.packed_output is not None and self.packed_output.is_quantized

    @property
    def weights_name(self) -> str:
        """How the weights are stored: a dtype, or int8, which has fewer bits on some CPUs."""
        return int8_name() if self.is_int8 else str(self.dtype).removeprefix("torch.")

    @property
    def _parameter(self) -> Tensor:
        """A parameter that int8 weights never replace."""
        return next(self.decoder.layers[0].get_submodule("norm_attention").parameters())

    def new_state(
        self, rows: int, capacity: int, beam: int = 1, padded: bool = False
    ) -> DecoderState:
        """Returns an empty state of rows × beam rows, without the encoder's K and V."""
        if self.training and self.config.dropout > 0.0:
            raise ConfigError("the model is in training mode with dropout; call model.eval() first")
        if beam < 1:
            raise ConfigError(f"beam={beam} must be at least 1")
        positions = self.config.target_positions
        if not 1 <= capacity <= positions:
            raise ConfigError(
                f"max_length={capacity} must be from 1 to the model's {positions} positions"
            )
        cache = KVCache(
            self.config.decoder_attention,
            layers=self.config.decoder_layers,
            rows=rows * beam,
            capacity=capacity,
            beam=beam,
            padded=padded,
            batch_invariant=self.is_int8,
            dtype=self.dtype,
            device=self.device,
        )
        first = torch.full((rows * beam,), self.config.bos, device=self.device)
        return DecoderState(cache, None, first)

    def step(self, tokens: Tensor, state: DecoderState) -> Tensor:
        """Feeds one token per row [rows]; returns the logits of the next [rows, vocab_size]."""
        if not isinstance(tokens, Tensor) or tokens.dim() != 1:
            raise ShapeError(f"step takes a tensor [rows], not {shown(tokens)}")
        return self.extend(tokens.unsqueeze(1), state).squeeze(1)

    @torch.no_grad()
    def extend(self, tokens: Tensor, state: DecoderState, counts: Tensor | None = None) -> Tensor:
        """Feeds n tokens per row [rows, n]; returns logits [rows, n, vocab_size].

        With counts [rows], only row i's first counts[i] tokens are fed; later logits are undefined.
        """
        return self._logits(self.feed(tokens, state, counts))

    @torch.no_grad()
    def feed(self, tokens: Tensor, state: DecoderState, counts: Tensor | None = None) -> Tensor:
        """Feeds tokens as `extend` does; returns the decoder's output [rows, n, d], no logits."""
        self._check_tokens("tokens", tokens, self.config.vocab_size)
        cache, config, (rows, n) = state.cache, self.config, tokens.shape
        expected = config.decoder_attention, config.decoder_layers, self.dtype, self.task
        task = "language" if state.memory is None else "translation"
        if (cache.attention, len(cache.K), cache.K.dtype, task) != expected:
            raise ShapeError("this state is from another model; use one from this model's start")
        if rows != cache.rows:
            raise ShapeError(f"tokens have {rows} rows, but the state has {cache.rows}")
        cache.reserve(n, counts)
        positions = cache.lengths.unsqueeze(1) + torch.arange(n, device=tokens.device)
        X = self._embed(tokens, self.decoder, positions)
        memories = None if state.memory is None else state.memory.layers(cache)
        contexts = cache.layers(counts=counts, bias=self.decoder.bias())
        Y: Tensor = self.decoder(X, contexts, memories)
        cache.advance(n, counts)
        return Y

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
        positions = cache.lengths[: len(tokens)]
        X = self._embed(tokens, self.decoder, positions, slots=slots, beam=cache.beam)
        memories = None if memory is None else memory.layers(cache, slots)
        contexts = cache.layers(slots, bias=self.decoder.bias())
        return self._logits(self.decoder(X.unsqueeze(1), contexts, memories)).squeeze(1)

    def pack(self, *, int8: bool = False) -> Self:
        """Prepares the weights for inference; `train`, `load_state_dict` and `to` undo it.

        int8: replace the weights by int8 weights, to save memory on a CPU. This cannot be undone.
        """
        if self.is_int8:
            return self
        if int8 and (reason := self.why_not_int8()):
            raise BackendError(f"the weights cannot be converted to int8: {reason}")
        output, streamed = self._output_weight(), False
        if self.device.type == "cuda":  # does a step read more than stays in the L2 cache?
            size = torch.cuda.get_device_properties(self.device).L2_cache_size
            weights = (*self.decoder.layers.parameters(), output.W)
            streamed = sum(W.nbytes for W in weights) > L2_RESIDENT_FRACTION * size
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, Layer):
                    module.pack(streamed=streamed, int8=int8)
                elif isinstance(module, Stack):
                    module.packed_bias = module.bias()
            folded = output.fold(scale=self.config.effective_logit_scale)
            self.packed_output = folded.pack(streamed=streamed, int8=int8)
        if int8:  # frees the parameters that int8 weights replace
            tables = [one for one in self.children() if isinstance(one, nn.Embedding)]
            self.quantized_tables = {
                one: QuantizedTable(*quantize_rows(one.weight)) for one in tables
            }
            for module in (*tables, *([] if self.config.tied else [self.output])):
                module.to("meta")
            self.requires_grad_(False)
        return self.eval()

    def why_not_int8(self) -> str | None:
        """Returns why `pack(int8=True)` would fail, or None."""
        return why_not_int8(self._parameter)

    def unpack(self) -> None:
        """Drops the packed weights, so that the model uses its parameters."""
        self.check_has_floats()
        self.packed_output = None
        for module in self.modules():
            if isinstance(module, Projections):
                module.packed = {}
            elif isinstance(module, Stack):
                module.packed_bias = None

    def check_has_floats(self) -> None:
        """Raises ConfigError if int8 weights have replaced the original ones."""
        if self.is_int8:
            raise ConfigError(
                "a model with int8 weights cannot be trained, changed, moved or saved; load it "
                "with quantize='none'"
            )

    def train(self, mode: bool = True) -> Self:
        """Sets training mode, which drops packed weights."""
        if mode:
            self.unpack()
        return super().train(mode)

    def __getstate__(self) -> dict[str, Any]:
        self.check_has_floats()
        return self.__dict__

    def _save_to_state_dict(self, *args: Any) -> None:
        self.check_has_floats()
        super()._save_to_state_dict(*args)

    def _load_from_state_dict(self, *args: Any) -> None:
        self.unpack()  # also if a module that contains this one is loaded
        super()._load_from_state_dict(*args)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        self.unpack()  # before the weights move to another device or dtype
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _table(self, stack: Stack) -> Tensor | QuantizedTable:
        """Returns the embeddings of the tokens that a stack reads."""
        is_own = not stack.causal and self.config.source_vocab_size is not None
        module = self.get_submodule("source_tokens" if is_own else "tokens")
        return self.quantized_tables.get(module) or module.get_parameter("weight")

    def _embed(self, tokens: Tensor, stack: Stack, positions: Tensor, **options: Any) -> Tensor:
        """Returns the embeddings [..., d] of tokens at positions; see `embed` for the options."""
        P, scale = stack.position_table, self.config.embedding_scale or 1.0
        at = None if P is None else positions
        return embed(tokens, self._table(stack), positions=at, P=P, scale=scale, **options)

    def _run_whole(
        self,
        name: str,
        tokens: Tensor,
        stack: Stack,
        packing: Packing | None,
        lengths: Tensor | None = None,
        memories: list[Memory] | None = None,
    ) -> Tensor:
        """Runs the encoder or the decoder on whole sequences of tokens [b, n]: X [b, n, d]."""
        self._check_tokens(name, tokens, len(self._table(stack)))
        (b, n), device, segments = tokens.shape, tokens.device, None
        if lengths is not None:
            check_integers(f"{name}_lengths", lengths, [b], device, most=n)
        if memories is not None and len(memories[0].K) != b:
            raise ShapeError(f"source has {len(memories[0].K)} rows, but target has {b}")
        if packing is not None:
            positions, segments = packing.positions, packing.segments
            for T, most in ((segments, INT32), (positions, stack.limit - 1)):
                check_integers(f"the packing of {name}", T, [b, n], device, most=most)
        elif n <= stack.limit:
            positions = torch.arange(n, device=device).unsqueeze(0)
        else:
            raise ShapeError(
                f"the length of {name}, {n}, exceeds the model's {stack.limit} positions"
            )
        visibility = Visibility(
            stack.causal, stack.window, lengths, query_segments=segments, memory_segments=segments
        )
        contexts = [WholeSequence(visibility, positions, stack.bias())] * len(stack.layers)
        X: Tensor = stack(self._embed(tokens, stack, positions), contexts, memories)
        return X

    def _logits(self, X: Tensor) -> Tensor:
        """Returns the logits of the decoder's output X [..., d]."""
        if self.packed_output is not None and self.packed_output.is_usable:
            return linear(X, self.packed_output)
        weight, scale = self._output_weight(), self.config.effective_logit_scale
        if not self.training:
            return linear(X, weight, scale=scale)
        return linear(self.decoder.finish(X) * scale, replace(weight, norm=None))

    def _output_weight(self) -> Weight:
        W = self.tokens.weight if self.config.tied else self.output.weight
        bias, norm = self.output_bias if self.config.output_bias else None, self.decoder.norm
        return Weight(W, bias, None if norm is None else Norm.of(norm))

    def _check_tokens(self, name: str, tokens: Tensor, vocab_size: int) -> None:
        if isinstance(tokens, Tensor) and (tokens.dim() != 2 or 0 in tokens.shape):
            raise ShapeError(f"{name} must be [b, n] and not empty, not {list(tokens.shape)}")
        shape = getattr(tokens, "shape", ())
        check_integers(name, tokens, shape, self.device, most=vocab_size - 1, error=TokenError)


class TranslationModel(Transformer):
    """An encoder and a decoder. `forward` is for training; `start` and `step` are for decoding.

    Source and target share one embedding, unless `source_vocab_size` is set. If `tied`, the output
    projection is the target's embedding.
    """

    task: Task = "translation"

    def __init__(self, config: ModelConfig, backend: str = "auto") -> None:
        super().__init__(config, backend)
        self.encoder = Stack(config, encoder=True, backend=backend)
        if config.source_vocab_size is not None:
            self.source_tokens = nn.Embedding(config.source_vocab_size, config.d)

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        *,
        source_lengths: Tensor | None = None,
        source_packing: Packing | None = None,
        target_packing: Packing | None = None,
    ) -> Tensor:
        """Returns logits [b, n, vocab_size] for source [b, m] and target [b, n].

        The target starts with bos, and logits are those of the next token. source_lengths [b] are
        for a padded source. In packed rows, a segment of the target attends to that of the source.
        """
        if (source_packing is None) != (target_packing is None):
            raise ShapeError("pass both source_packing and target_packing, or neither")
        M = self.encode(source, source_lengths=source_lengths, packing=source_packing)
        packings = target_packing, source_packing
        own, theirs = (None if one is None else one.segments for one in packings)
        visibility = Visibility(lengths=source_lengths, query_segments=own, memory_segments=theirs)
        memories = [Memory(K, V, visibility) for K, V in self.decoder.project_memory(M)]
        X = self._run_whole("target", target, self.decoder, target_packing, memories=memories)
        return self._logits(X)

    def encode(
        self,
        source: Tensor,
        *,
        source_lengths: Tensor | None = None,
        packing: Packing | None = None,
    ) -> Tensor:
        """Returns the output of the encoder M [b, m, d] for source [b, m]."""
        if source_lengths is not None and packing is not None:
            raise ShapeError("a packed source has padding in segment 0; omit source_lengths")
        M = self._run_whole("source", source, self.encoder, packing, source_lengths)
        return self.encoder.finish(M)

    @torch.no_grad()
    def start(
        self,
        source: Tensor,
        max_length: int,
        *,
        source_lengths: Tensor | None = None,
        beam: int = 1,
        padded: bool = False,
    ) -> DecoderState:
        """Encodes source [b, m]; returns a state of b × beam rows for up to `max_length` tokens.

        source_lengths [b] are for a padded source. See `KVCache` for `padded`.
        """
        config = self.config
        self._check_tokens("source", source, config.source_vocab_size or config.vocab_size)
        b, m = source.shape
        memory = self.new_memory(b, m)
        KV = self.decoder.project_memory(self.encode(source, source_lengths=source_lengths))
        rows, positions = (torch.arange(count, device=self.device) for count in (b, m))
        memory.write(KV, rows.unsqueeze(1), positions)
        memory.lengths[:] = m if source_lengths is None else source_lengths
        return replace(self.new_state(b, max_length, beam, padded), memory=memory)

    @torch.no_grad()
    def fill_packed(self, memory: EncoderMemory, tokens: Tensor) -> None:
        """Encodes n tokens [n, 5]: token, segment, position, row of the memory, and its length."""
        source, *packing, rows, lengths = tokens.t().contiguous().long().unsqueeze(1).unbind()
        KV = self.decoder.project_memory(self.encode(source, packing=Packing(*packing)))
        memory.write(KV, rows, packing[1])
        memory.lengths.scatter_(0, rows.flatten(), lengths.flatten())

    def new_memory(self, sentences: int, positions: int) -> EncoderMemory:
        """Returns an empty memory for the encoder's K and V."""
        attention, layers = self.config.cross_attention, self.config.decoder_layers
        if self.is_int8:
            positions = round_up(positions, INVARIANT_POSITIONS)
        heads_first = self.device.type == "cpu"
        inner = (attention.g, positions) if heads_first else (positions, attention.g)
        K, V = (
            torch.zeros(layers, sentences, *inner, depth, dtype=self.dtype, device=self.device)
            for depth in (attention.k, attention.v)
        )
        if not heads_first:
            K, V = K.transpose(2, 3), V.transpose(2, 3)
        lengths = torch.ones(sentences, dtype=torch.long, device=self.device)
        return EncoderMemory(K, V, lengths, batch_invariant=self.is_int8)


class LanguageModel(Transformer):
    """A decoder without an encoder. `forward` is for training; `start` and `step` decode."""

    task: Task = "language"

    def forward(self, tokens: Tensor, *, packing: Packing | None = None) -> Tensor:
        """Tokens [b, n] -> logits of the next token at each position [b, n, vocab_size]."""
        return self._logits(self._run_whole("tokens", tokens, self.decoder, packing))

    @torch.no_grad()
    def start(
        self,
        prompt: Tensor,
        max_length: int,
        *,
        prompt_lengths: Tensor | None = None,
        beam: int = 1,
        padded: bool = False,
    ) -> DecoderState:
        """Prefills a state with all of `prompt` but its last token, which becomes `state.first`.

        prompt: [b, n], starts with `bos`; it is right-padded if prompt_lengths [b] are given.
        `max_length` includes the prompt. The beams of a row share its prompt.
        """
        self._check_tokens("prompt", prompt, self.config.vocab_size)
        b, n = prompt.shape
        lengths = torch.full_like(prompt[:, 0], n)
        if prompt_lengths is not None:
            check_integers("prompt_lengths", prompt_lengths, [b], prompt.device, least=1, most=n)
            lengths = prompt_lengths
        # with int8 weights, a prompt of one token must be computed as in a batch of longer ones
        counts = None if prompt_lengths is None and not self.is_int8 else lengths - 1
        state = self.new_state(b, max_length, padded=padded)
        if n > max_length:
            raise ConfigError(f"a prompt of {n} tokens exceeds max_length={max_length}; raise it")
        if n > 1:
            self.feed(prompt[:, :-1], state, counts)
        last = (lengths.long() - 1).unsqueeze(1)
        state = replace(state, first=prompt.gather(1, last).squeeze(1))
        return state if beam == 1 else state.expand(beam)


def make_model(config: ModelConfig, backend: str = "auto") -> TranslationModel | LanguageModel:
    """Returns a model with random weights."""
    check_config(config)
    kind = TranslationModel if config.task == "translation" else LanguageModel
    return kind(config, backend)
