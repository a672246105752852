"""Groups lines into windows and batches, and splits long lines into pieces."""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from writehead.data.tokenizer import MAX_PIECE
from writehead.schema import check_sizes, check_types

SENTENCE_END = re.compile(r"""[.!?…]["'”’»)\]]*\s+|[。！？]""")
SPACE = re.compile(r"\s+")
WORD_CHARACTERS = 1_000  # limit for a word, or for a sentence in a script without spaces
LONG_WORD = re.compile(rf"[^\s。！？]{{{WORD_CHARACTERS + 1},}}")
EXTRA_TOKENS = 50  # a translation may be this many tokens longer than its source
LINE_TOKENS = 32_768  # about 15 pages, with EXTRA_TOKENS for each sentence
WINDOW_TOKENS = 1 << 20  # limit for the lines of a window, sources and outputs


@dataclass(frozen=True)
class Batching:
    """The sizes of batches.

    `tokens` limits rows × beam × (longest source or prompt + longest output) of a batch. The
    default is 16,384 on a CPU and 131,072 elsewhere.
    """

    tokens: int | None = None
    lines: int = 4096  # read before decoding, so that a batch has lines of similar lengths

    def __post_init__(self) -> None:
        check_types(self)
        check_sizes(self, "tokens", "lines")

    def budget(self, device: str) -> int:
        """Returns the maximum number of tokens per batch on a device type, such as "cuda"."""
        return self.tokens or (16_384 if device == "cpu" else 131_072)


@dataclass(frozen=True, eq=False)
class Job:
    """One row to decode: a line, a piece of a long line, or a sample for a prompt."""

    tokens: list[int]  # source or prompt
    max_length: int
    seed: int = 0
    prefix: tuple[int, ...] = ()
    share: float = 1.0  # fraction of its line, for progress


def windows(lines: Iterable[list[Job]], most: int) -> Iterator[list[list[Job]]]:
    """Yields the jobs of up to `most` lines at a time, of fewer lines if they are long."""
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
    """Returns the indices of jobs, longest first, so that memory runs out early if at all."""
    lengths = [(len(job.tokens), job.max_length) for job in jobs]
    return sorted(range(len(jobs)), key=lengths.__getitem__, reverse=True)


def batch_cost(jobs: Sequence[Job], beam: int) -> int:
    """Returns the number of tokens in a batch, including padding."""
    longest = max(len(job.tokens) for job in jobs) + max(job.max_length for job in jobs)
    return len(jobs) * beam * longest


def take_batch(jobs: Sequence[Job], fits: Callable[[Sequence[Job]], bool]) -> int:
    """Returns how many of the first jobs fit in a batch, by bisection; at least one."""
    low, high = 1, len(jobs)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(jobs[:middle]) else (low, middle - 1)
    return low


def split_line(
    text: str, encode: Callable[[str], list[int]], limit: int
) -> tuple[list[list[int]], bool]:
    """Splits a line like `split_text`; also returns whether it was shortened, to bound its time."""
    most = max(limit + EXTRA_TOKENS, LINE_TOKENS)
    short = LONG_WORD.sub(lambda word: word[0][:WORD_CHARACTERS], text[: most * MAX_PIECE])
    pieces = split_text(short, encode, limit)
    totals = itertools.accumulate(len(piece) + EXTRA_TOKENS for piece in pieces)
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
