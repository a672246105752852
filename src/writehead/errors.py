"""One tree of errors: each says what came, what was expected and what to do."""

import difflib
from collections.abc import Iterable


class WriteheadError(Exception):
    """Everything this library raises on purpose; the command line prints it as one line."""


class ConfigError(WriteheadError, ValueError):
    """A size, option or preset that cannot be meant."""


class ShapeError(WriteheadError, ValueError):
    """A tensor whose shape, dtype or device does not fit."""


class TokenError(WriteheadError, ValueError):
    """A token id outside the vocabulary, or a sequence no model can start from."""


class CacheError(WriteheadError, ValueError):
    """A request that a cache cannot honour."""


class CacheFull(CacheError):
    """A position past the capacity that the cache was started with."""


class BackendError(WriteheadError, RuntimeError):
    """A backend asked for by name that cannot do the work; the message says why."""


class SearchError(WriteheadError, RuntimeError):
    """A search that cannot go on, such as one over scores that are not numbers."""


class OutOfRoom(SearchError):
    """A batch that does not fit the device's memory; the message names the largest that does."""


class DataError(WriteheadError, ValueError):
    """Text, a tokenizer or a dataset that cannot be used as it is."""


class TrainingError(WriteheadError, RuntimeError):
    """Training that cannot go on, such as one whose loss is not a number."""


class RunError(WriteheadError, RuntimeError):
    """A run directory that cannot be read or written."""


class DamagedRun(RunError):
    """A file of a run that is not as it was written; `fault` is the message without the advice."""

    def __init__(self, fault: str, advice: str) -> None:
        super().__init__(fault, advice)
        self.fault, self.advice = fault, advice

    def __str__(self) -> str:
        return f"{self.fault}; {self.advice}"


def shown(value: object, limit: int = 60) -> str:
    """A value as messages quote it: its repr without control characters, cut to `limit`."""
    is_huge = isinstance(value, int) and value.bit_length() > 10_000  # repr refuses so many digits
    text = f"{value:#x}" if is_huge else repr(value)
    text = "".join(letter if letter.isprintable() else "?" for letter in text[: limit + 1])
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence: the known name closest to `name`, or some of them if none is close."""
    names = sorted(known)
    close = difflib.get_close_matches(name[:100], names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return f"known: {', '.join(names[:12])}{more}"
