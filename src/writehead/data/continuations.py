"""Decodes tokens to the text that continues a prompt, all at once or as a stream."""

from collections.abc import Iterator, Sequence

from writehead.data.tokenizer import Tokenizer, Tokens


def decode_groups(
    tokenizer: Tokenizer,
    groups: Sequence[Sequence[Tokens]],
    prompts: Sequence[Tokens] | None = None,
) -> Iterator[str]:
    """Yields the text of each sequence; with `prompts`, groups[i] continues prompts[i]."""
    tokens, skipped = [one for group in groups for one in group], [0] * len(groups)
    if prompts is not None:  # a token's text may depend on the tokens before it
        skipped = [len(text) for text in tokenizer.decode_all(prompts)]
        pairs = zip(prompts, groups, strict=True)
        tokens = [(*prompt, *one) for prompt, group in pairs for one in group]
    texts, counts = tokenizer.decode_all(tokens), map(len, groups)
    skips = (skip for skip, count in zip(skipped, counts, strict=True) for _ in range(count))
    return (text[skip:] for text, skip in zip(texts, skips, strict=True))


class StreamedText:
    """The text of a growing sequence of tokens, without the prompt that it continues."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer, self._tokens = tokenizer, list(prompt)
        self._length = len(tokenizer.decode(prompt))  # characters of the prompt and those returned

    def add(self, tokens: Sequence[int]) -> str:
        """Appends tokens; returns the new text that later tokens cannot change."""
        self._tokens += tokens
        end = len(self._tokens)
        while end and self._tokens[end - 1] in self._tokenizer.unsettled:
            end -= 1
        # the bytes of an incomplete character are decoded as replacement characters
        text = self._tokenizer.decode(self._tokens[:end])
        return self._next(text.rstrip("\N{REPLACEMENT CHARACTER}"))

    def rest(self) -> str:
        """Returns the remaining text after the last token."""
        return self._next(self._tokenizer.decode(self._tokens))

    def _next(self, text: str) -> str:
        piece, self._length = text[self._length :], max(self._length, len(text))
        return piece
