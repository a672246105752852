"""Splits lines that are too long for a model into pieces."""

import itertools
import re
from collections.abc import Callable

from writehead.data.bpe import MAX_PIECE

SENTENCE_END = re.compile(r"""[.!?…]["'”’»)\]]*\s+|[。！？]""")
SPACE = re.compile(r"\s+")
WORD_CHARACTERS = 1_000  # limit for a word, or for a sentence in a script without spaces
LONG_WORD = re.compile(rf"[^\s。！？]{{{WORD_CHARACTERS + 1},}}")
EXTRA_TOKENS = 50  # a translation may be this many tokens longer than its source
LINE_TOKENS = 32_768  # of a line and its translation


def split_line(
    text: str, encode: Callable[[str], list[int]], limit: int
) -> tuple[list[list[int]], bool]:
    """Splits a line like `split_text`; also returns whether text was left out, to bound the time.

    The pieces and their translations have about LINE_TOKENS tokens, if a translation is twice as
    long as its source or EXTRA_TOKENS longer, whichever is less.
    """
    most = max(2 * limit, LINE_TOKENS)
    short = LONG_WORD.sub(lambda word: word[0][:WORD_CHARACTERS], text[: most * MAX_PIECE])
    pieces = split_text(short, encode, limit)
    totals = itertools.accumulate(len(piece) + min(len(piece), EXTRA_TOKENS) for piece in pieces)
    kept = [piece for piece, total in zip(pieces, totals, strict=True) if total <= most]
    return kept, len(short) < len(text) or len(kept) < len(pieces)


def split_text(text: str, encode: Callable[[str], list[int]], limit: int) -> list[list[int]]:
    """Splits a text into pieces of at most `limit` tokens; returns none for an empty text.

    A longer text is split into sentences, on which most models are trained, and a longer sentence
    at the space nearest to its middle, or inside a word.
    """
    tokens = encode(text)
    if not tokens:
        return []
    if len(tokens) <= limit:
        return [tokens]
    if len(text) == 1:  # a character with more byte tokens than `limit`
        return [tokens[i : i + limit] for i in range(0, len(tokens), limit)]
    bounds = sorted({0, *(match.end() for match in SENTENCE_END.finditer(text)), len(text)})
    if len(bounds) == 2:
        bounds.insert(1, _middle(text))
    sentences = (text[begin:end] for begin, end in itertools.pairwise(bounds))
    return [piece for sentence in sentences for piece in split_text(sentence, encode, limit)]


def _middle(text: str) -> int:
    """Returns where to split a sentence, so that neither part is empty."""
    middle = len(text) // 2
    places = [match.end() for match in SPACE.finditer(text) if match.end() < len(text)]
    return min(places, key=lambda place: abs(place - middle)) if places else middle
