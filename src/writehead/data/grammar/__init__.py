"""The embedded corpus: a synchronous grammar of English and German that needs no download.

A tree says what a sentence means (`tree`); `english` and `german` say it. `sentences`, `clauses`
and `phrases` choose trees that make sense, out of the words in `nouns`, `verbs` and `modifiers`.
"""

import hashlib
import re
from collections.abc import Iterator

from writehead.data.grammar import english, german
from writehead.data.grammar.dice import Dice
from writehead.data.grammar.sentences import draw
from writehead.errors import DataError, nearest

# eighths of all sentences
SPLITS = {"train": range(0, 6), "dev": range(6, 7), "test": range(7, 8)}
# a run that finds nothing new in so many draws will not find much more
PATIENCE = 100_000


# words that German may tell apart by nothing, or by a capital only: sie, Sie, ihr, Ihr; groß
_SAME = re.compile(r"\b(?:you|they|them|her|your|their)\b")


def split_of(sentence: str) -> str:
    """The split that an English sentence belongs to, today and on every machine.

    Sentences that differ only in words that are the same in German share a split, so that the
    German sentences of two splits differ too.
    """
    words = _SAME.sub("they", sentence.lower()).replace("tall", "big")
    eighth = _fingerprint(words) % 8
    return next(name for name, eighths in SPLITS.items() if eighth in eighths)


def _fingerprint(text: str) -> int:
    """Sixty-four bits of a text, the same everywhere."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def pairs(
    split: str, count: int, seed: int = 0, max_words: int | None = None
) -> Iterator[tuple[str, str]]:
    """`count` different pairs of an English sentence and its German translation.

    The same seed gives the same pairs everywhere, and fewer of them are the first of more; those
    of at most `max_words` English words are the short ones among them all. No sentence belongs to
    two splits, whatever the seeds.
    """
    if split not in SPLITS:
        raise DataError(f"there is no split {split!r}; {nearest(split, SPLITS)}")
    if count < 0:
        raise DataError(f"count={count} is not a number of pairs; ask for 0 or more")
    if max_words is not None and max_words < 2:
        raise DataError(f"max_words={max_words} leaves no sentence; the shortest have 2 words")
    return _pairs(split, count, seed, max_words)


def _pairs(split: str, count: int, seed: int, max_words: int | None) -> Iterator[tuple[str, str]]:
    dice = Dice(f"writehead {split} {seed}")
    seen: set[int] = set()  # fingerprints: millions of sentences would not fit as well
    misses = 0
    while len(seen) < count:
        tree = draw(dice)
        source = english.sentence(tree)
        mark = _fingerprint(source)
        long = max_words is not None and len(source.split()) > max_words
        if long or mark in seen or split_of(source) != split:
            misses += 1
            if misses > PATIENCE:
                raise DataError(
                    f"the grammar has run dry after {len(seen)} of {count} pairs; ask for fewer"
                )
            continue
        misses = 0
        seen.add(mark)
        yield source, german.sentence(tree)
