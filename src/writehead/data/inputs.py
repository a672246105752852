"""Finds the input files of a bulk job: one file, all files in a folder, or a glob pattern."""

import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from writehead.errors import DataError


class InputFile(NamedTuple):
    """A file to translate, and the name of its translation in the output folder."""

    path: Path
    name: str


def is_pattern(text: str) -> bool:
    """Returns whether a path is a glob pattern such as `news/*.en`, not the name of a file."""
    return glob.has_magic(text) and not os.path.exists(text)


def find_inputs(given: str, output: Path) -> list[InputFile]:
    """Returns the files to translate, sorted by name; skips hidden files and the output folder.

    Names are relative to the folder or, for a pattern, to the folder before its first wildcard.
    """
    if os.path.isdir(given):
        base, paths = Path(given), [*_walk(given)]
    elif is_pattern(given):
        base, paths = _fixed_part(given), [*map(Path, glob.iglob(given, recursive=True))]
    else:
        base, paths = Path(given).parent, [Path(given)]
        if not os.path.isfile(given):
            problem = "is not a regular file" if os.path.exists(given) else "does not exist"
            raise DataError(f"{given} {problem}; check the path")
    files = {path.relative_to(base).as_posix(): path for path in paths if not path.is_dir()}
    if any(".." in Path(name).parts for name in files):
        raise DataError(f"{given} has .. after a wildcard; use a pattern without it")
    target = output.resolve()
    names = sorted(name for name in files if not files[name].resolve().is_relative_to(target))
    if files and not names:
        raise DataError(f"{output} is also the input; choose another folder for the output")
    if not names:
        raise DataError(f"there are no files to translate in {given}; check the path")
    for name in names:
        if not files[name].is_file():
            raise DataError(f"{files[name]} is not a regular file; move it out of the input")
    return [InputFile(files[name].absolute(), name) for name in names]


def _walk(folder: str) -> Iterator[Path]:
    """Yields all files in a folder and its subfolders that are not hidden."""
    for place, folders, names in os.walk(folder, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in folders:
            if (link := Path(place, name)).is_symlink():
                raise DataError(f"{link} is a link to a folder; replace it with the folder itself")
        yield from (Path(place, name) for name in names if not name.startswith("."))


def _refuse(error: OSError) -> None:
    raise DataError(
        f"{error.filename} cannot be read ({error.strerror}); check its permissions"
    ) from error


def _fixed_part(pattern: str) -> Path:
    """Returns the path of a pattern before its first wildcard."""
    parts = Path(pattern).parts
    count = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    return Path(*parts[:count])
