"""§4.1: the decoder-only language model."""

import torch
from torch import Tensor

from writehead.config import Task
from writehead.errors import ConfigError
from writehead.model.cache import DecoderState, check_integers
from writehead.model.transformer import Packing, Transformer


class LanguageModel(Transformer):
    """A decoder without an encoder. `forward` is for training; `start` and `step` decode."""

    task: Task = "language"

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

        prompt: [b, n], starts with `bos`; it is right-padded if prompt_lengths [b] are given.
        `max_length` includes the prompt. The beams of a row share its prompt.
        """
        self._check_tokens("prompt", prompt)
        b, n = prompt.shape
        if prompt_lengths is not None:
            check_integers("prompt_lengths", prompt_lengths, [b], prompt.device, least=1, most=n)
        cache = self._new_cache(b, 1, max_length, padded)
        if n > max_length:
            raise ConfigError(f"a prompt of {n} tokens exceeds max_length={max_length}; raise it")
        last = torch.full_like(prompt[:, 0], n) if prompt_lengths is None else prompt_lengths
        first = prompt.gather(1, (last.long() - 1).unsqueeze(1)).squeeze(1)
        state = DecoderState(cache, None, first)
        if n > 1:
            counts = None if prompt_lengths is None else prompt_lengths - 1
            self._extend(prompt[:, :-1], state, counts)
        return state if beam == 1 else state.expand(beam)

    def new_state(self, rows: int, capacity: int) -> DecoderState:
        """Returns an empty state, for prompts that are fed in pieces."""
        cache = self._new_cache(rows, 1, capacity, padded=False)
        return DecoderState(cache, None, torch.full((rows,), self.config.bos, device=self.device))
