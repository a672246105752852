"""§4.1: the encoder-decoder Transformer for translation."""

import torch
from torch import Tensor, nn

from writehead.config import ModelConfig, Task
from writehead.errors import ShapeError
from writehead.model.attention import Memory, WholeSequence
from writehead.model.cache import DecoderState, EncoderMemory, check_integers
from writehead.model.layers import Stack
from writehead.model.transformer import Packing, Transformer
from writehead.ops.norm import normalize
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
        self._check_tokens("target", target)
        if len(M) != len(target):
            raise ShapeError(f"source has {len(M)} rows, but target has {len(target)}")
        visibility = Visibility(lengths=source_lengths)
        if source_packing is not None and target_packing is not None:
            visibility = Visibility(
                query_segments=target_packing.segments, memory_segments=source_packing.segments
            )
        memories = [Memory(K, V, visibility) for K, V in self.decoder.project_memory(M)]
        return self._decode(target, target_packing, memories)

    def encode(
        self,
        source: Tensor,
        *,
        source_lengths: Tensor | None = None,
        packing: Packing | None = None,
    ) -> Tensor:
        """Returns the output of the encoder M [b, m, d] for source [b, m]."""
        self._check_tokens("source", source, self.config.source_vocab_size)
        if source_lengths is not None:
            b, m = source.shape
            check_integers("source_lengths", source_lengths, [b], source.device, most=m)
        if source_lengths is not None and packing is not None:
            raise ShapeError("a packed source has padding in segment 0; omit source_lengths")
        limit = self.config.source_positions
        positions = self._whole_positions("source", source, packing, limit)
        segments = None if packing is None else packing.segments
        visibility = Visibility(
            lengths=source_lengths, query_segments=segments, memory_segments=segments
        )
        contexts = [WholeSequence(visibility, positions)] * self.config.encoder_layers
        shared = self.config.source_vocab_size is None
        E = self.tokens.weight if shared else self.source_tokens.weight
        M: Tensor = self.encoder(self._embed(source, E, self.encoder, positions), contexts)
        norm = self.encoder.final_norm
        Y: Tensor = self.encoder.dropout(M if norm is None else normalize(M, norm))
        return Y

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
        cache = self._new_cache(b, beam, max_length, padded)
        memory = self.new_memory(b, m)
        memory.write(self.decoder.project_memory(M))
        if source_lengths is None:
            memory.lengths.fill_(m)
        else:
            memory.lengths.copy_(source_lengths)
        first = torch.full((b * beam,), self.config.bos, device=source.device)
        return DecoderState(cache, memory, first)

    def new_memory(self, sentences: int, positions: int) -> EncoderMemory:
        """Returns an empty memory for the encoder's K and V."""
        return EncoderMemory.make(
            self.config.cross_attention,
            layers=self.config.decoder_layers,
            sentences=sentences,
            positions=positions,
            dtype=self.dtype,
            device=self.device,
        )
