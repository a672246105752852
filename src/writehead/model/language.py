"""§4.1: the decoder-only language model."""

import torch
from torch import Tensor

from writehead.config import ModelConfig
from writehead.errors import ConfigError
from writehead.model.state import DecoderState
from writehead.model.transformer import Packing, Transformer, check_config


class LanguageModel(Transformer):
    """A decoder without an encoder. `forward` is for training; `start` and `step` decode."""

    def __init__(self, config: ModelConfig, backend: str = "auto") -> None:
        check_config(config)
        if config.task != "language":
            raise ConfigError("this config is for a TranslationModel; use that class")
        super().__init__(config, backend)

    def forward(self, tokens: Tensor, *, packing: Packing | None = None) -> Tensor:
        """Tokens [b, n] -> logits of the next token at each position [b, n, vocab_size]."""
        return self._decode(tokens, packing)

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

        prompt: [b, n], right-padded if prompt_lengths [b] are given; at least the token `bos`.
        `max_length` includes the prompt. The beams of a row share its prompt.
        """
        self._check_tokens("prompt", prompt)
        self._check_lengths("prompt_lengths", prompt_lengths, prompt, least=1)
        b, n = prompt.shape
        cache = self._new_cache(b, 1, max_length, padded)
        if n > max_length:
            raise ConfigError(f"a prompt of {n} tokens exceeds max_length={max_length}; raise it")
        last = torch.full_like(prompt[:, 0], n) if prompt_lengths is None else prompt_lengths
        first = prompt.gather(1, (last.long() - 1).unsqueeze(1)).squeeze(1)
        state = DecoderState(cache, [], first)
        if n > 1:
            counts = None if prompt_lengths is None else prompt_lengths - 1
            self._extend(prompt[:, :-1], state, counts)
        return state if beam == 1 else state.expand(beam)
