"""Log probabilities of the tokens of completions, in the format of OpenAI's API."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from writehead.data.continuations import StreamedText
from writehead.data.tokenizer import Tokenizer
from writehead.engine import Engine
from writehead.engine.scheduler import Request
from writehead.model import DecoderState, LanguageModel

CONTEXT = 8  # the tokens before a token that its text may depend on; a character has up to 4


class Scored(NamedTuple):
    """The log probability of a token, and the likeliest other tokens with theirs."""

    log_p: float
    others: Sequence[tuple[int, float]] = ()


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
        """The positions of the KV cache, summed over all sequences."""
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
        return [*map(Scored, chosen)]
    best = log_p.topk(min(top, log_p.shape[1]), dim=1)
    rows = zip(tokens.tolist(), best.indices.tolist(), best.values.tolist(), strict=True)
    others = [
        [(i, p) for i, p in zip(ids, some, strict=True) if i != token] for token, ids, some in rows
    ]
    return [*map(Scored, chosen, others)]


@torch.no_grad()
def score_whole(
    engine: Engine, prompt: Sequence[int], tokens: Sequence[int], top: int
) -> list[Scored]:
    """Returns the scores of all tokens after a prompt, from one forward pass."""
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

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], offset: int, top: int) -> None:
        self._tokenizer, self._context = tokenizer, [*prompt[-CONTEXT:]]
        self._offset, self._top = offset, top  # where the text of the first token starts
        self._texts: list[str] = []
        self._log_p: list[float | None] = []
        self._others: list[dict[str, float] | None] = []

    def add(self, text: str, token: int, scored: Scored | None) -> None:
        """Appends a token; without a score if no token comes before it."""
        self._texts.append(text)
        self._log_p.append(None if scored is None else scored.log_p)
        self._others.append(None if scored is None else self._spelled(scored))
        self._context = [*self._context, token][-CONTEXT:]

    def end(self, text: str) -> None:
        """Appends text to the last token, if it has not been taken."""
        if self._texts:
            self._texts[-1] += text

    def take(self) -> dict[str, Any]:
        """Returns the tokens since the last call."""
        texts, log_p, others = self._texts, self._log_p, self._others
        self._texts, self._log_p, self._others = [], [], []
        *offsets, self._offset = accumulate(map(len, texts), initial=self._offset)
        tops = [_with_chosen(*one) for one in zip(texts, log_p, others, strict=True)]
        return {
            "tokens": texts,
            "token_logprobs": log_p,
            "top_logprobs": tops if self._top else None,
            "text_offset": offsets,
        }

    def _spelled(self, scored: Scored) -> dict[str, float]:
        """Returns the likeliest other tokens by the text that each would add."""
        if not scored.others:
            return {}
        rows = [self._context, *([*self._context, token] for token, _ in scored.others)]
        for row in rows:
            while row and row[-1] in self._tokenizer.unsettled:
                row.pop()
        texts = self._tokenizer.decode_all(rows)
        # as in `StreamedText`, the bytes of an incomplete character are no text
        before, *texts = [text.rstrip("\N{REPLACEMENT CHARACTER}") for text in texts]
        found: dict[str, float] = {}
        for text, (_, log_p) in zip(texts, scored.others, strict=True):
            found.setdefault(text[len(before) :], log_p)  # the likeliest comes first
        return found


def list_whole(
    engine: Engine,
    prompt: Sequence[int],
    tokens: Sequence[int],
    scores: Sequence[Scored],
    top: int,
    echo: str | None = None,
) -> dict[str, Any]:
    """Lists a whole completion; with `echo`, the text of the prompt, also the prompt's tokens.

    The first token of a prompt has no score.
    """
    parts = [(len(echo or ""), prompt, tokens)]
    left: Iterator[Scored | None] = iter(scores)
    if echo is not None:
        parts, left = [(0, prompt[:0], prompt), *parts], chain([None], scores)
    taken = []
    for offset, before, some in parts:
        listing = Listing(engine.tokenizer, before, offset, top)
        for text, token in zip(texts_of(engine, before, some), some, strict=True):
            listing.add(text, token, next(left))
        taken.append(listing.take())
    return {
        name: None if lists is None else [item for one in taken for item in one[name]]
        for name, lists in taken[0].items()
    }


def _with_chosen(
    text: str, log_p: float | None, others: dict[str, float] | None
) -> dict[str, float] | None:
    """Adds a token to the others, likeliest first; of two with the same text, one remains."""
    if log_p is None or others is None:
        return None
    found = {**others, text: max(log_p, others.get(text, log_p))}
    return dict(sorted(found.items(), key=lambda item: -item[1]))
