"""The built-in corpus: English sentences and their German translations from a small grammar.

`sentences` draws clauses that make sense from the words of `lexicon.txt`; `english` and `german`
render them as text. The corpus needs no download and is the same on every machine.
"""

import hashlib
from collections.abc import Iterator

from writehead.data.corpus.sentences import Dice, draw
from writehead.errors import DataError, nearest

# the share of all sentences in each split, in eighths
SPLITS = {"train": range(0, 6), "dev": range(6, 7), "test": range(7, 8)}
MAX_CONSECUTIVE_MISSES = 100_000


def pairs(
    split: str, count: int, seed: int = 0, max_words: int | None = None
) -> Iterator[tuple[str, str]]:
    """Yields `count` distinct pairs of an English sentence and its German translation.

    The same arguments give the same pairs on every machine, and a smaller `count` their first ones.
    `max_words` keeps sentences of at most that many English words. No sentence of either language
    is in two splits, whatever the seeds.
    """
    if split not in SPLITS:
        raise DataError(f"unknown split {split!r}; {nearest(split, SPLITS)}")
    if count < 0:
        raise DataError(f"count must be 0 or more, not {count}")
    if max_words is not None and max_words < 2:
        raise DataError(f"max_words must be 2 or more, not {max_words}")
    return _pairs(split, count, seed, max_words)


def _pairs(split: str, count: int, seed: int, max_words: int | None) -> Iterator[tuple[str, str]]:
    dice = Dice(f"writehead {split} {seed}")
    seen: set[int] = set()  # hashes take less memory than sentences
    misses = 0
    while len(seen) < count:
        source, target = draw(dice)
        # "sie" (they) and "Sie" (you) often differ in nothing else, so case is ignored
        digest = hashlib.blake2b(target.lower().encode(), digest_size=8).digest()
        key = int.from_bytes(digest, "big")
        too_long = max_words is not None and len(source.split()) > max_words
        if too_long or key in seen or key % 8 not in SPLITS[split]:
            misses += 1
            if misses > MAX_CONSECUTIVE_MISSES:
                raise DataError(f"there are only about {len(seen):,} such pairs; ask for fewer")
            continue
        misses = 0
        seen.add(key)
        yield source, target
