"""§4.1: the decoder-only language model."""

import torch
from torch import Tensor

from writehead.config import ModelConfig
from writehead.errors import ConfigError
from writehead.model.state import DecoderState
from writehead.model.transformer import Packing, Transformer, check_config, check_sizes


class LanguageModel(Transformer):
    """A decoder that reads only itself. `forward` trains; `start` then `step` generate."""

    def __init__(self, config: ModelConfig, backend: str = "auto") -> None:
        check_config(config)
        if config.task != "language":
            raise ConfigError(f"a {config.task} config makes a TranslationModel; use that class")
        super().__init__(config, backend)

    def forward(self, tokens: Tensor, *, packing: Packing | None = None) -> Tensor:
        """Logits [b, n, vocab_size]: at each position of tokens [b, n], those of the next one."""
        return self._decode(tokens, packing)

    @torch.no_grad()
    def start(
        self,
        prompt: Tensor,
        max_length: int,
        *,
        prompt_lengths: Tensor | None = None,
        beam: int = 1,
        rewindable: int = 0,
        padded: bool = False,
    ) -> DecoderState:
        """A state that has read all of `prompt` but its last token, which is `state.first`.

        prompt: [b, n], padded on the right to prompt_lengths [b] where they differ; the token
        `start` alone where there is none. `max_length` counts the prompt. The prompt is read once
        a row and shared by its beams.
        """
        check_sizes(max_length, beam)
        self._check_tokens("prompt", prompt)
        self._check_lengths("prompt_lengths", prompt_lengths, prompt, least=1)
        b, n = prompt.shape
        if n > max_length:
            raise ConfigError(
                f"a prompt of {n} tokens does not fit max_length={max_length}; raise it"
            )
        cache = self._new_cache(b, max_length, rewindable, padded)
        last = torch.full_like(prompt[:, 0], n) if prompt_lengths is None else prompt_lengths
        first = prompt.gather(1, (last.long() - 1).unsqueeze(1)).squeeze(1)
        state = DecoderState(cache, [], first)
        if n > 1:
            counts = None if prompt_lengths is None else prompt_lengths - 1
            self._extend(prompt[:, :-1], state, counts)
        return state if beam == 1 else state.expand(beam)
