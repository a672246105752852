"""Opens Parquet files, with pyarrow from the extra `hub`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from writehead.errors import DataError
from writehead.util.extras import requires


def is_text(kind: Any) -> bool:
    """Returns whether a pyarrow DataType is a string, possibly as a dictionary."""
    from pyarrow import types  # type: ignore[import-untyped]

    if types.is_dictionary(kind):
        kind = kind.value_type
    is_view = getattr(types, "is_string_view", lambda kind: False)  # from pyarrow 16
    return bool(types.is_string(kind) or types.is_large_string(kind) or is_view(kind))


def load_pyarrow() -> Any:
    """Imports pyarrow.parquet, or raises an error that names the extra to install."""
    with requires("hub"):
        import pyarrow.parquet as parquet  # type: ignore[import-untyped]
    return parquet


@contextmanager
def parquet_file(path: Path) -> Iterator[Any]:
    """Opens a pyarrow ParquetFile; turns errors of pyarrow in the block into DataErrors."""
    parquet = load_pyarrow()
    try:
        # with pre_buffer, memory use would grow with the file
        with parquet.ParquetFile(path, pre_buffer=False) as file:
            yield file
    except DataError:
        raise
    except (OSError, ValueError, NotImplementedError) as error:  # base classes of pyarrow's errors
        reason = (str(error).splitlines() or ["no reason given"])[0].rstrip(". ")
        raise DataError(
            f"{path} is not a Parquet file ({reason}); copy or create it again"
        ) from error
