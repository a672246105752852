"""§4.1: the encoder-decoder model for translation, and the decoder-only language model."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from writehead.config import ModelConfig, Task
from writehead.errors import ConfigError, ShapeError
from writehead.model.attention import Memory
from writehead.model.cache import DecoderState, EncoderMemory, check_integers
from writehead.model.layers import Stack
from writehead.model.transformer import Packing, Transformer, check_config
from writehead.ops.visibility import Visibility


class TranslationModel(Transformer):
    """An encoder and a decoder. `forward` is for training; `start` and `step` are for decoding.

    Source and target share one embedding, unless `source_vocab_size` is set. The output projection
    shares the target's if `tied`.
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
        for a padded source. In packed rows, segment s of the target attends to segment s of the
        source.
        """
        if (source_packing is None) != (target_packing is None):
            raise ShapeError("pass both source_packing and target_packing, or neither")
        M = self.encode(source, source_lengths=source_lengths, packing=source_packing)
        visibility = Visibility(lengths=source_lengths)
        if source_packing is not None and target_packing is not None:
            visibility = Visibility(
                query_segments=target_packing.segments, memory_segments=source_packing.segments
            )
        memories = [Memory(K, V, visibility) for K, V in self.decoder.project_memory(M)]
        E, stack = self.tokens.weight, self.decoder
        X = self._run_whole("target", target, E, stack, target_packing, memories=memories)
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
        shared = self.config.source_vocab_size is None
        E, stack = (self.tokens if shared else self.source_tokens).weight, self.encoder
        M = self._run_whole("source", source, E, stack, packing, lengths=source_lengths)
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
        M = self.encode(source, source_lengths=source_lengths)
        b, m = source.shape
        memory = self.new_memory(b, m)
        memory.write(self.decoder.project_memory(M), torch.arange(b * m, device=source.device))
        memory.lengths.fill_(m)
        if source_lengths is not None:
            memory.lengths.copy_(source_lengths)
        return replace(self.new_state(b, max_length, beam, padded), memory=memory)

    def new_memory(self, sentences: int, positions: int) -> EncoderMemory:
        """Returns an empty memory for the encoder's K and V."""
        attention, layers = self.config.cross_attention, self.config.decoder_layers
        shape = (layers, sentences, positions, attention.g)
        K, V = (
            torch.zeros(*shape, depth, dtype=self.dtype, device=self.device).transpose(2, 3)
            for depth in (attention.k, attention.v)
        )
        return EncoderMemory(K, V, torch.ones(sentences, dtype=torch.long, device=self.device))


class LanguageModel(Transformer):
    """A decoder without an encoder. `forward` is for training; `start` and `step` decode."""

    task: Task = "language"

    def forward(self, tokens: Tensor, *, packing: Packing | None = None) -> Tensor:
        """Tokens [b, n] -> logits of the next token at each position [b, n, vocab_size]."""
        X = self._run_whole("tokens", tokens, self.tokens.weight, self.decoder, packing)
        return self._logits(X)

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
        counts, lengths = None, torch.full_like(prompt[:, 0], n)
        if prompt_lengths is not None:
            check_integers("prompt_lengths", prompt_lengths, [b], prompt.device, least=1, most=n)
            counts, lengths = prompt_lengths - 1, prompt_lengths
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
