"""Cleans and encodes lines of text."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from writehead.config import PrepareConfig
from writehead.data.bpe import MAX_PIECE
from writehead.data.dataset import id_count, token_dtype
from writehead.data.sources import Row
from writehead.data.tokenizer import Tokenizer

EMPTY, TOO_LONG, DUPLICATE = "empty", "too long", "duplicate"
IDENTICAL, RATIO = "source and target identical", "lengths too unlike"
HELD_OUT, EXCLUDED = "also in the held-out text", "in the excluded text"
REASONS = (EMPTY, TOO_LONG, IDENTICAL, RATIO, DUPLICATE, HELD_OUT, EXCLUDED)
RATIO_SLACK = 4  # tokens added to the shorter side, because ratios of few tokens mean little
CHUNK_LINES, CHUNK_CHARACTERS = 2000, 1 << 20
_NOT_LETTERS = re.compile(r"[\W_]+")


def chunked(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Groups rows into chunks of limited size."""
    chunk: list[Row] = []
    characters = 0
    for row in rows:
        chunk.append(row)
        characters += sum(map(len, row))
        if len(chunk) == CHUNK_LINES or characters > CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


@dataclass(frozen=True, eq=False)
class Encoded:
    """The lines of a chunk that are kept, as indices into its `total` lines.

    `lengths` and `tokens` have one array per side. `dropped` counts the other lines by reason.
    """

    total: int
    lines: NDArray[np.int64]
    hashes: NDArray[np.uint64]
    lengths: tuple[NDArray[np.int64], ...]
    tokens: tuple[NDArray[np.unsignedinteger], ...]
    dropped: Counter[str]
    normalised: int  # lines that normalising changed


def encode_chunk(
    chunk: list[Row],
    tokenizer: Tokenizer,
    config: PrepareConfig,
    is_train: bool,
    threads: int,
    excluded: Set[str] = frozenset(),
) -> Encoded:
    """Encodes a chunk, and drops lines with a side whose `line_key` is in `excluded`.

    With `is_train`, also drops pairs with identical sides or unlike lengths.
    """
    # longer texts are dropped, because our tokens have at most MAX_PIECE characters
    cut = None if config.token_limit is None else config.token_limit * MAX_PIECE + 1
    texts = [tuple(map(tokenizer.normalise, row)) for row in chunk]
    tokenizers = (tokenizer, tokenizer.target)[-len(texts[0]) :]
    ids = [
        own.encode_all([text[:cut] for text in side], threads=threads)
        for own, side in zip(tokenizers, zip(*texts, strict=True), strict=True)
    ]
    reasons = [
        _reason(text, list(map(len, tokens)), config, is_train)
        or (EXCLUDED if excluded and not excluded.isdisjoint(map(line_key, text)) else None)
        for text, tokens in zip(texts, zip(*ids, strict=True), strict=True)
    ]
    kept = [i for i, reason in enumerate(reasons) if reason is None]
    sides = [[side[i] for i in kept] for side in ids]
    dtype, no_tokens = token_dtype(id_count(tokenizer)), np.empty(0, np.int32)
    return Encoded(
        total=len(chunk),
        lines=np.array(kept, dtype=np.int64),
        hashes=np.array([_hash(texts[i]) for i in kept], dtype=np.uint64),
        lengths=tuple(np.array(list(map(len, side)), dtype=np.int64) for side in sides),
        tokens=tuple(np.concatenate([no_tokens, *side]).astype(dtype) for side in sides),
        dropped=Counter(reason for reason in reasons if reason is not None),
        normalised=sum(a != b for a, b in zip(chunk, texts, strict=True)),
    )


def _reason(
    texts: Sequence[str], lengths: Sequence[int], config: PrepareConfig, is_train: bool
) -> str | None:
    """Returns the reason to drop a line, or None."""
    limit = config.token_limit
    if not all(map(str.strip, texts)) or not all(lengths):
        return EMPTY
    if limit is not None and max(map(len, texts)) > limit * MAX_PIECE:
        return TOO_LONG
    if is_train and len(texts) == 2 and texts[0] == texts[1]:
        return IDENTICAL
    if limit is not None and max(lengths) > limit:
        return TOO_LONG
    if is_train and max(lengths) > config.max_ratio * (min(lengths) + RATIO_SLACK):
        return RATIO
    return None


def line_key(text: str) -> str:
    """Returns the letters and digits of a line in lower case, or the line if it has none."""
    return _NOT_LETTERS.sub("", text.casefold()) or text


def _hash(texts: Iterable[str]) -> int:
    """Returns a 64-bit hash of a line, to find duplicates."""
    joined = "\n".join(texts).encode()
    return int.from_bytes(hashlib.blake2b(joined, digest_size=8).digest(), "little")
