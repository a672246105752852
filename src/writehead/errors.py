"""The exceptions of this library, and helpers to format untrusted values in messages."""

import reprlib
from collections.abc import Iterable


class WriteheadError(Exception):
    """Base class of this library's errors; the command line prints them as one line."""


class ConfigError(WriteheadError, ValueError):
    """An invalid size, option or preset."""


class ShapeError(WriteheadError, ValueError):
    """A tensor with the wrong shape, dtype or device."""


class TokenError(WriteheadError, ValueError):
    """A token id outside the vocabulary."""


class CacheError(WriteheadError, ValueError):
    """An operation that a KV cache does not support."""


class CacheFull(CacheError):
    """A position beyond the capacity of a KV cache."""


class BackendError(WriteheadError, RuntimeError):
    """A backend that cannot run here or does not support these inputs."""


class SearchError(WriteheadError, RuntimeError):
    """A search that cannot continue, for example because the logits are NaN."""


class OutOfRoom(SearchError):
    """Requests that do not fit in the device's memory."""


class DataError(WriteheadError, ValueError):
    """Text, a tokenizer or a dataset that cannot be used."""


class TrainingError(WriteheadError, RuntimeError):
    """Training that cannot continue, for example because the loss is NaN."""


class MissingPackage(WriteheadError, RuntimeError):
    """An optional package that is not installed; the message names the extra to install."""


class RunError(WriteheadError, RuntimeError):
    """A run directory that cannot be read or written."""


class DamagedRun(RunError):
    """A file of a run that has changed since it was written; `fault` lacks the advice."""

    def __init__(self, fault: str, advice: str) -> None:
        super().__init__(f"{fault}; {advice}")
        self.fault = fault


# characters that could move a terminal's cursor, change its colors or reorder its text
_CONTROL = {
    code: " "
    for first, last in ((0x00, 0x1F), (0x7F, 0x9F), (0x2028, 0x202E), (0x2066, 0x2069))
    for code in range(first, last + 1)
}


def one_line(text: str, limit: int = 2_000) -> str:
    """Replaces control characters with spaces and truncates to `limit` characters."""
    text = text[: limit + 1].translate(_CONTROL)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def shown(value: object, limit: int = 60) -> str:
    """Formats an untrusted value for a message: escaped, at most `limit` characters."""
    if isinstance(value, int) and value.bit_length() > 3 * limit:  # Python may refuse to print it
        return f"{'-' if value < 0 else ''}10^{round(value.bit_length() * 0.30103)}"
    text = repr(value[:limit]) if isinstance(value, str) else reprlib.repr(value)
    return one_line(text, limit)


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns a hint for an unknown name: the closest known name, or else the known names."""
    import difflib  # slow to import, and this module is imported first

    names = sorted(known)
    close = difflib.get_close_matches(name[:100], names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {shown(close[0])}?"
    return one_line(f"choose from {', '.join(names)}", 190)
