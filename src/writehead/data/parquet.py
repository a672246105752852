"""Opens parquet files; the extra `hub` installs the package that this needs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from writehead.errors import DataError
from writehead.util.extras import requires


@contextmanager
def parquet_file(path: Path) -> Iterator[Any]:
    """Opens a pyarrow ParquetFile; errors of the block are those of the file."""
    with requires("hub"):
        import pyarrow.parquet as parquet  # type: ignore[import-untyped]
    try:
        with parquet.ParquetFile(path, pre_buffer=False) as file:  # else memory grows with the file
            yield file
    except DataError:
        raise
    except (OSError, ValueError, NotImplementedError) as error:  # the bases of pyarrow's errors
        reason = (str(error).splitlines() or ["no reason given"])[0].rstrip(". ")
        raise DataError(f"{path} is not parquet ({reason}); copy it again") from error
