"""Log probabilities of the tokens of completions, in the format of OpenAI's API."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from writehead.data.continuations import StreamedText
from writehead.engine import Engine
from writehead.engine.scheduler import Request
from writehead.model import DecoderState, LanguageModel


class Scored(NamedTuple):
    """The log probability of a token and, if requested, those of the likeliest tokens."""

    log_p: float
    top: dict[str, float] | None


class Scorer:
    """Scores the tokens of growing completions, with a KV cache of its own.

    The cache is allocated at the first token. Call the scorer only in the worker's thread.
    """

    def __init__(self, engine: Engine, requests: Sequence[Request], top: int) -> None:
        self._engine, self._requests, self._top = engine, requests, top
        self._state: DecoderState | None = None
        self._last: list[int] = []  # the next token to feed to each row
        longest = max(len(one.tokens) + one.max_length for one in requests)
        self._capacity = min(longest, self._model.config.target_positions)

    @property
    def positions(self) -> int:
        """The positions of the KV cache: of all sequences together."""
        return len(self._requests) * self._capacity

    @torch.no_grad()
    def __call__(self, new: Sequence[tuple[int, int]]) -> list[Scored]:
        """Scores new tokens, given as pairs of the index of a request and a token."""
        model = self._model
        state = self._state = self._state or self._start()
        rows: list[list[int]] = [[] for _ in self._requests]
        for i, token in new:
            rows[i].append(token)
        counts = torch.tensor([*map(len, rows)], device=model.device)
        fed = torch.full((len(rows), max(map(len, rows))), model.config.pad)
        for i, row in enumerate(rows):
            if row:
                fed[i, : len(row)] = torch.tensor([self._last[i], *row[:-1]])
                self._last[i] = row[-1]
        logits = model.extend(fed.to(model.device), state, counts)
        used = torch.arange(fed.shape[1], device=model.device) < counts.unsqueeze(1)
        chosen = torch.tensor([token for row in rows for token in row], device=model.device)
        scored = iter(score(self._engine, logits[used], chosen, self._top))
        by_row = [iter([next(scored) for _ in row]) for row in rows]
        return [next(by_row[i]) for i, _ in new]

    @property
    def _model(self) -> LanguageModel:
        assert isinstance(self._engine.model, LanguageModel)
        return self._engine.model

    def _start(self) -> DecoderState:
        """Prefills the prompts."""
        model, prompts = self._model, [one.tokens for one in self._requests]
        lengths = torch.tensor([*map(len, prompts)])
        padded = torch.full((len(prompts), int(lengths.max())), model.config.pad)
        for row, prompt in zip(padded, prompts, strict=True):
            row[: len(prompt)] = torch.as_tensor([*map(int, prompt)])
        self._last = [int(prompt[-1]) for prompt in prompts]
        return model.start(
            padded.to(model.device), self._capacity, prompt_lengths=lengths.to(model.device)
        )


def score(engine: Engine, logits: Tensor, tokens: Tensor, top: int) -> list[Scored]:
    """Returns the scores of tokens [m], given the logits [m, vocab] that predicted them."""
    log_p = logits[:, : engine.tokenizer.vocab_size].float().log_softmax(dim=1)
    chosen = log_p.gather(1, tokens.unsqueeze(1)).squeeze(1).tolist()
    if not top:
        return [Scored(p, None) for p in chosen]
    best = log_p.topk(min(top, log_p.shape[1]), dim=1)
    tops = [
        {engine.tokenizer.decode([i]): p for p, i in zip(*row, strict=True)}
        for row in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]
    return [*map(Scored, chosen, tops)]


@torch.no_grad()
def score_whole(
    engine: Engine, prompt: Sequence[int], tokens: Sequence[int], top: int
) -> list[Scored]:
    """Returns the scores of a whole completion, from one forward pass."""
    assert isinstance(engine.model, LanguageModel)
    if not tokens:
        return []
    ids = torch.tensor([[*prompt, *tokens]], device=engine.model.device)
    logits = engine.model(ids[:, :-1])[0, len(prompt) - 1 :]
    return score(engine, logits, ids[0, len(prompt) :], top)


def texts_of(engine: Engine, prompt: Sequence[int], tokens: Sequence[int]) -> list[str]:
    """Returns the text of each token after a prompt; it is empty until a character is complete."""
    text = StreamedText(engine.tokenizer, prompt)
    pieces = [text.add([token]) for token in tokens]
    return [*pieces[:-1], pieces[-1] + text.rest()] if pieces else []


class Listing:
    """The lists of OpenAI's `logprobs`: of a whole completion, or of each part of a stream."""

    def __init__(self, offset: int, top: int) -> None:
        self._offset, self._top = offset, top  # where the text of the first token starts
        self._texts: list[str] = []
        self._scores: list[Scored] = []

    def add(self, text: str, scored: Scored) -> Self:
        """Appends a token."""
        self._texts.append(text)
        self._scores.append(scored)
        return self

    def end(self, text: str) -> None:
        """Appends text to the last token, if it has not been taken."""
        if self._texts:
            self._texts[-1] += text

    def take(self) -> dict[str, Any]:
        """Returns the tokens since the last call."""
        texts, scores = self._texts, self._scores
        self._texts, self._scores = [], []
        *offsets, self._offset = accumulate(map(len, texts), initial=self._offset)
        return {
            "tokens": texts,
            "token_logprobs": [one.log_p for one in scores],
            "top_logprobs": [one.top for one in scores] if self._top else None,
            "text_offset": offsets,
        }
