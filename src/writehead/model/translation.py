"""§4.1: the encoder-decoder Transformer for translation."""

import torch
from torch import Tensor

from writehead.config import ModelConfig, Task
from writehead.errors import ShapeError
from writehead.kernels import Visibility
from writehead.model.attention import WholePast
from writehead.model.cache import check_integers
from writehead.model.layers import Stack
from writehead.model.state import DecoderState
from writehead.model.transformer import Packing, Transformer


class TranslationModel(Transformer):
    """An encoder and a decoder. `forward` is for training; `start` and `step` decode.

    The token embedding is shared by source, target and, if `tied`, the output.
    """

    task: Task = "translation"

    def __init__(self, config: ModelConfig, backend: str = "auto") -> None:
        super().__init__(config, backend)
        self.encoder = Stack(config, encoder=True, backend=backend)

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        *,
        source_lengths: Tensor | None = None,
        source_packing: Packing | None = None,
        target_packing: Packing | None = None,
    ) -> Tensor:
        """Source [b, m] and target [b, n] -> logits of the next target token [b, n, vocab_size].

        The target starts with bos. source_lengths [b] are for a padded source. In packed rows,
        segment s of the target attends to segment s of the source.
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
        return self._decode(target, target_packing, self.decoder.memorize(M, visibility))

    def encode(
        self,
        source: Tensor,
        *,
        source_lengths: Tensor | None = None,
        packing: Packing | None = None,
    ) -> Tensor:
        """Runs the encoder: source [b, m] -> M [b, m, d]."""
        self._check_tokens("source", source)
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
        pasts = [WholePast(visibility)] * self.config.encoder_layers
        M: Tensor = self.encoder(self.tokens(source), positions, pasts)
        return M

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
        """Encodes source [b, m] into a state of b × beam rows, to decode up to `max_length` tokens.

        source_lengths [b] are for a padded source; for `padded`, see `KVCache`.
        """
        M = self.encode(source, source_lengths=source_lengths)
        cache = self._new_cache(source.shape[0], beam, max_length, padded)
        if beam > 1:
            cache.share()
        memories = self.decoder.memorize(M, Visibility(lengths=source_lengths))
        first = torch.full((source.shape[0] * beam,), self.config.bos, device=source.device)
        return DecoderState(cache, memories, first, beam)
