"""One tree of errors: each says what came, what was expected and what to do."""

import reprlib
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


class MissingPackage(WriteheadError, RuntimeError):
    """An optional package that is not installed; the message names the extra to install."""


class RunError(WriteheadError, RuntimeError):
    """A run directory that cannot be read or written."""


class DamagedRun(RunError):
    """A file of a run that is not as it was written; `fault` is the message without the advice."""

    def __init__(self, fault: str, advice: str) -> None:
        super().__init__(fault, advice)
        self.fault, self.advice = fault, advice

    def __str__(self) -> str:
        return f"{self.fault}; {self.advice}"


# characters that could move a terminal's cursor, change its colours or reorder its text
_CONTROL = {
    code: " "
    for codes in ((0x00, 0x1F), (0x7F, 0x9F), (0x2028, 0x202E), (0x2066, 0x2069))
    for code in range(codes[0], codes[1] + 1)
}


def one_line(text: str, limit: int = 2_000) -> str:
    """Replaces control characters with spaces and cuts the text to `limit` characters."""
    text = text[: limit + 1].translate(_CONTROL)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def shown(value: object, limit: int = 60) -> str:
    """Formats a value for a message: escaped, on one line, at most `limit` characters."""
    if isinstance(value, int) and value.bit_length() > 3 * limit:
        return f"{'-' if value < 0 else ''}10^{round(value.bit_length() * 0.30103)}"
    if isinstance(value, str):
        text = repr(value[:limit])
        if len(value) <= limit and len(text) <= limit + 2:
            return text
        return f"{text[: limit - 2]}…{text[-1]}"
    quoted = reprlib.Repr()
    quoted.maxother = quoted.maxstring = limit
    return one_line(quoted.repr(value), limit)


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns a hint for a message: the known name closest to `name`, or some names otherwise."""
    import difflib  # slow to import, and this module is imported first

    names = sorted(known)
    close = difflib.get_close_matches(name[:100], names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {shown(close[0])}?"
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return f"known: {', '.join(one_line(one, 60) for one in names[:12])}{more}"
