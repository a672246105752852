"""What is decoded together: windows of lines, batches within a budget, long lines in pieces."""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from writehead.data.tokenizer import MAX_PIECE
from writehead.errors import ConfigError
from writehead.schema import check_types

SENTENCE_END = re.compile(r"""[.!?…]["'”’»)\]]*\s+|[。！？]""")
SPACE = re.compile(r"\s+")
WORD_CHARACTERS = 1_000  # limit for a word, or for a sentence in a script without spaces
LONG_WORD = re.compile(rf"[^\s。！？]{{{WORD_CHARACTERS + 1},}}")
EXTRA_TOKENS = 50  # a translation may be this many tokens longer than its source
LINE_TOKENS = 32_768  # about 15 pages, with EXTRA_TOKENS for each sentence
WINDOW_TOKENS = 1 << 20  # what a window may hold, however few its lines


@dataclass(frozen=True)
class Batching:
    """How much an engine does at once.

    `tokens` is the budget of a batch: rows × beam × (longest source or prompt + longest output),
    padding included; by default 16,384 on a CPU and 131,072 elsewhere. `lines` are read before
    any is decoded, so that lines of like length meet in a batch.
    """

    tokens: int | None = None
    lines: int = 4096

    def __post_init__(self) -> None:
        check_types(self)
        for name, value in (("tokens", self.tokens), ("lines", self.lines)):
            if value is not None and value < 1:
                raise ConfigError(f"{value} {name} a batch are too few; give 1 or more")

    def budget(self, device: str) -> int:
        """Tokens a batch on a kind of device."""
        if self.tokens is not None:
            return self.tokens
        return 16_384 if device == "cpu" else 131_072


@dataclass(frozen=True, eq=False)
class Job:
    """One row to decode: a line, a piece of a long one, or one of several samples of a prompt."""

    tokens: list[int]  # what the model starts from
    max_length: int
    seed: int = 0
    prefix: tuple[int, ...] = ()
    share: float = 1.0  # of its line's work


def windows(lines: Iterable[list[Job]], most: int) -> Iterator[list[list[Job]]]:
    """The jobs of up to `most` lines at a time, fewer where they are long."""
    window: list[list[Job]] = []
    tokens = 0
    for jobs in lines:
        window.append(jobs)
        tokens += sum(len(job.tokens) + job.max_length for job in jobs)
        if len(window) == most or tokens >= WINDOW_TOKENS:
            yield window
            window, tokens = [], 0
    if window:
        yield window


def longest_first(jobs: Sequence[Job]) -> list[int]:
    """The places of jobs, longest first: what does not fit the memory is met at once."""
    return sorted(
        range(len(jobs)),
        key=lambda i: (len(jobs[i].tokens), jobs[i].max_length),
        reverse=True,
    )


def batch_cost(jobs: Sequence[Job], beam: int) -> int:
    """Tokens that a batch of these jobs holds at its end, padding included."""
    longest = max(len(job.tokens) for job in jobs) + max(job.max_length for job in jobs)
    return len(jobs) * beam * longest


def take_batch(jobs: Sequence[Job], fits: Callable[[Sequence[Job]], bool]) -> int:
    """How many of the first jobs make one batch; one does, whatever its size."""
    low, high = 1, len(jobs)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(jobs[:middle]) else (low, middle - 1)
    return low


def split_line(
    text: str, encode: Callable[[str], list[int]], limit: int
) -> tuple[list[list[int]], bool]:
    """Splits a line into pieces as `split_text` does; also returns whether it was shortened.

    A word is cut to 1,000 characters, and a line to 32,768 tokens with 50 more for each piece, so
    that no line takes unbounded time. A line of one piece is kept whole.
    """
    most = max(limit + EXTRA_TOKENS, LINE_TOKENS)
    short = LONG_WORD.sub(lambda word: word[0][:WORD_CHARACTERS], text[: most * MAX_PIECE])
    pieces = split_text(short, encode, limit)
    totals = itertools.accumulate(len(piece) + EXTRA_TOKENS for piece in pieces)
    kept = [piece for piece, total in zip(pieces, totals, strict=True) if total <= most]
    return kept, len(short) < len(text) or len(kept) < len(pieces)


def split_text(text: str, encode: Callable[[str], list[int]], limit: int) -> list[list[int]]:
    """The tokens of a text in pieces of at most `limit`; none where the text says nothing.

    A text that is longer comes in its sentences, one a piece: several at once are more than most
    models were trained to answer. A sentence that is longer is cut at the space nearest its middle,
    so that no piece is a short remainder, else inside a word.
    """
    tokens = encode(text)
    if not tokens:
        return []
    if len(tokens) <= limit:
        return [tokens]
    if len(text) == 1:  # a character of more bytes than the model has positions
        return [tokens[i : i + limit] for i in range(0, len(tokens), limit)]
    bounds = sorted({0, *(match.end() for match in SENTENCE_END.finditer(text)), len(text)})
    if len(bounds) == 2:
        bounds.insert(1, _middle(text))
    parts = (text[begin:end] for begin, end in itertools.pairwise(bounds))
    return [piece for part in parts for piece in split_text(part, encode, limit)]


def _middle(text: str) -> int:
    """Where to cut a sentence of several characters in two, neither of them empty."""
    middle = len(text) // 2
    places = [match.end() for match in SPACE.finditer(text) if match.end() < len(text)]
    return min(places, key=lambda place: abs(place - middle)) if places else middle
