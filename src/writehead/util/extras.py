"""Explains how to install an optional package that is missing."""

from collections.abc import Iterator
from contextlib import contextmanager

from writehead.errors import MissingPackage


@contextmanager
def requires(extra: str) -> Iterator[None]:
    """Turns a failed import in the block into an error that names the extra to install."""
    try:
        yield
    except ImportError as error:
        package = (error.name or str(error)).partition(".")[0]
        raise MissingPackage(
            f"{package} is not installed; install it with pip install 'writehead[{extra}]'"
        ) from error
