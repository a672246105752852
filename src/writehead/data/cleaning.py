"""What is made of a line of text, and which lines are left out and why."""

import hashlib
import re
import unicodedata
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

EMPTY = "empty"
TOO_LONG = "too long"
IDENTICAL = "source and target identical"
RATIO = "lengths too unlike"
DUPLICATE = "duplicate"
HELD_OUT = "also in the held-out text"
REASONS = (EMPTY, TOO_LONG, IDENTICAL, RATIO, DUPLICATE, HELD_OUT)

# tokens by which the longer side may exceed the ratio: a word more decides nothing in "Yes."
GRACE = 4

# Control characters that are not white space, and invisible characters without meaning: soft
# hyphens, zero-width spaces, byte order marks, directional and interlinear marks. Joiners are kept
# because emoji and several scripts need them.
_UNSEEN = re.compile(
    "[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064"
    "\u2066-\u206f\ufeff\ufff9-\ufffb]"
)
# Runs of more than 30 characters from ranges that include all combining marks. Normalising takes
# quadratic time in the number of consecutive marks, so Unicode's Stream-Safe Text Format allows at
# most 30 in a row; no language needs more.
_MARKS = re.compile(
    "[\u0300-\u20ff\u2cef-\u2dff\u302a-\u309a\ua66f-\uabff\ufb1e-\ufe2f\U000101fd-\U0001efff]{31,}"
)
MAX_MARKS = 30
_SURROGATE = re.compile("[\ud800-\udfff]")
_PLAIN = re.compile("[!-~]+(?: [!-~]+)*")


def normalise(text: str) -> str:
    """Normalises text for the tokenizer: NFC, one space between words, none at the ends.

    Removes control characters, other invisible characters, and combining marks after 30 in a row.
    Replaces U+2581, which sentencepiece uses for a space, with an underscore. Normalising a second
    time changes nothing.
    """
    if _PLAIN.fullmatch(text):
        return text
    if not text.isascii():
        text = _SURROGATE.sub("\ufffd", text).replace("\u2581", "_")
    text = _UNSEEN.sub("", text)
    text = unicodedata.normalize("NFC", _MARKS.sub(_limit_marks, text))
    return " ".join(_MARKS.sub(_limit_marks, text).split())  # some marks decompose into two


def _limit_marks(run: re.Match[str]) -> str:
    """Removes the combining marks that follow 30 others."""
    kept, marks = [], 0
    for character in run[0]:
        marks = marks + 1 if unicodedata.combining(character) else 0
        if marks <= MAX_MARKS:
            kept.append(character)
    return "".join(kept)


def fingerprint(texts: Sequence[str]) -> int:
    """Eight bytes that stand for a line, or a pair of lines, when looking for duplicates."""
    joined = "\n".join(texts).encode()  # no text has a line break within
    return int.from_bytes(hashlib.blake2b(joined, digest_size=8).digest(), "little")


def unlike(lengths: Sequence[int], max_ratio: float) -> bool:
    """Whether the longer of two sides is so much longer that one cannot translate the other."""
    return max(lengths) > max_ratio * (min(lengths) + GRACE)


class Seen:
    """A set of fingerprints at eight bytes each, asked and extended by whole arrays.

    Sorted runs, merged when the last is no larger than the new one, so that there are few of them
    and each fingerprint is moved a logarithmic number of times.
    """

    def __init__(self) -> None:
        self._runs: list[NDArray[np.uint64]] = []

    def __len__(self) -> int:
        return sum(map(len, self._runs))

    def contains(self, values: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Which of the values were added before."""
        found = np.zeros(len(values), dtype=np.bool_)
        for run in self._runs:
            place = np.searchsorted(run, values)
            found |= run[np.minimum(place, len(run) - 1)] == values
        return found

    def add(self, values: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Which of the values are new, the first of several equal ones only; adds them."""
        new = np.zeros(len(values), dtype=np.bool_)
        new[np.unique(values, return_index=True)[1]] = True
        new &= ~self.contains(values)
        run = np.sort(values[new])
        while self._runs and len(self._runs[-1]) <= len(run):
            run = np.sort(np.concatenate((self._runs.pop(), run)), kind="stable")
        if len(run):
            self._runs.append(run)
        return new
