"""Checks lines of text, and splits those that are too long for a model into pieces."""

import itertools
import logging
import re
from collections.abc import Callable, Iterable, Iterator

from writehead.data.bpe import MAX_PIECE
from writehead.data.tokenizer import Tokens
from writehead.errors import DataError

log = logging.getLogger(__name__)

SENTENCE_END = re.compile(r"""[.!?…]["'”’»)\]]*\s+|[。！？]""")
SPACE = re.compile(r"\s+")
WORD_CHARACTERS = 1_000  # limit for a word, or for a sentence in a script without spaces
LONG_WORD = re.compile(rf"[^\s。！？]{{{WORD_CHARACTERS + 1},}}")
EXTRA_TOKENS = 50  # a translation may be this many tokens longer than its source
LINE_TOKENS = 32_768  # of a line and its translation
SEPARATORS = "\t\n\v\f\r\x85\u2028\u2029"  # tabs precede scores; the others may end lines
ONE_LINE: dict[int, str | None] = {
    **dict.fromkeys((*range(0x20), *range(0x7F, 0xA0))),  # control characters
    **{ord(separator): " " for separator in SEPARATORS},
}


def decode_line(raw: bytes, errors: str = "strict") -> str:
    """Decodes a line of a UTF-8 file, without its line end.

    errors: what to do with invalid UTF-8. "strict" raises UnicodeDecodeError, "replace" inserts
    U+FFFD, and "skip" returns an empty line.
    """
    raw = raw.removesuffix(b"\n").removesuffix(b"\r")
    try:
        return raw.decode("utf-8", "replace" if errors == "replace" else "strict")
    except UnicodeDecodeError:
        if errors == "strict":
            raise
        return ""


def plain_line(text: str) -> str:
    """Removes control characters and replaces line separators with spaces."""
    return text.translate(ONE_LINE)


def checked_texts(texts: Iterable[str], kind: str) -> Iterator[str]:
    """Yields the texts; raises DataError if one is not a str or cannot be encoded as UTF-8."""
    if isinstance(texts, str | bytes) or not isinstance(texts, Iterable):
        raise DataError(f"pass a list of texts, not {type(texts).__name__}")
    return (_checked_text(text, kind, i) for i, text in enumerate(texts, start=1))


def _checked_text(text: str, kind: str, i: int) -> str:
    if not isinstance(text, str):
        raise DataError(f"{kind} {i} must be a str, not {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        place = error.start + 1
        raise DataError(f"{kind} {i} is not UTF-8 (character {place}); convert it") from error
    return text


def paired_texts(lines: Iterable[str], prefixes: Iterable[str] | None) -> Iterator[tuple[str, str]]:
    """Yields each line with its prefix, by default an empty one; checks both."""
    checked = None if prefixes is None else checked_texts(prefixes, "prefix")
    return _paired(checked_texts(lines, "line"), checked)


def _paired(lines: Iterable[str], prefixes: Iterable[str] | None) -> Iterator[tuple[str, str]]:
    if prefixes is None:
        yield from ((line, "") for line in lines)
        return
    for i, (line, prefix) in enumerate(itertools.zip_longest(lines, prefixes), start=1):
        if line is None or prefix is None:
            raise DataError(f"line {i} or its prefix is missing; pass one prefix per line")
        yield line, prefix


def encoded_pieces(
    number: int, text: str, tokens: Tokens, encode: Callable[[str], list[int]], limit: int
) -> list[Tokens]:
    """Returns the tokens of a line, split if there are more than `limit`; none if it is empty."""
    if len(tokens) <= limit:
        return [tokens] if len(tokens) else []
    pieces, is_cut = split_line(text, encode, limit)
    log.warning(
        "line %d is longer than the model's limit of %d source tokens; translating "
        "it in %d pieces%s",
        *(number, limit, len(pieces)),
        ", without the parts that do not fit" if is_cut else "",
    )
    return [*pieces]


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
