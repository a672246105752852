"""Finds the input files of a bulk job: one file, all files in a folder, or a glob pattern."""

import glob
import os
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
        base = Path(given)
        paths = [path for path in base.rglob("*") if not _is_hidden(path.relative_to(base))]
    elif is_pattern(given):
        base, paths = _fixed_part(given), [*map(Path, glob.iglob(given, recursive=True))]
    else:
        base, paths = Path(given).parent, [Path(given)]
        if not os.path.isfile(given):
            problem = "is not a regular file" if os.path.exists(given) else "does not exist"
            raise DataError(f"{given} {problem}; check the path")
    files = {path.relative_to(base).as_posix(): path for path in paths if path.is_file()}
    if any(".." in Path(name).parts for name in files):
        raise DataError(f"{given} has .. after a wildcard; use a pattern without it")
    target = output.resolve()
    names = sorted(name for name in files if not files[name].resolve().is_relative_to(target))
    if files and not names:
        raise DataError(f"{output} is also the input; choose another folder for the output")
    if not names:
        raise DataError(f"there are no files to translate in {given}; check the path")
    return [InputFile(files[name].absolute(), name) for name in names]


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _fixed_part(pattern: str) -> Path:
    """Returns the path of a pattern before its first wildcard."""
    parts = Path(pattern).parts
    count = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    return Path(*parts[:count])
