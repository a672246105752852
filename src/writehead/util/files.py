"""Writes files and folders that appear complete or not at all.

They are written under a random hidden name next to their path, synced to disk and renamed. The
writer locks the hidden file; if the lock is free, the writer was killed, and the next writer of the
same path removes the file. While a folder is replaced, the old one briefly has a hidden name too;
`replaced_directory` finds it if the writer was killed at that moment.
"""

import errno
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from writehead.util.locks import lock_file

TEMPORARY, REPLACED = ".tmp", ".old"  # suffixes of hidden names
MAX_NAME = 200  # bytes of a file name that its hidden names repeat
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def write_file(path: Path, content: bytes | str, *, replace: bool = True) -> None:
    """Writes a whole file; see `atomic_file`."""
    with atomic_file(path, replace=replace) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def atomic_file(path: Path, *, replace: bool = True) -> Iterator[BinaryIO]:
    """Opens a file that appears at `path` if the block succeeds; symbolic links are followed.

    Without `replace`, raises FileExistsError at the end of the block if the path exists by then.
    """
    path = link_target(path)
    _remove_abandoned(path)
    fresh, descriptor = create_hidden(path, TEMPORARY, folder=False)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(descriptor)
            publish(fresh, path, replace=replace)
    finally:
        fresh.unlink(missing_ok=True)
    sync(path.parent)


@contextmanager
def atomic_directory(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Creates a folder that appears at `path` if the block succeeds; see `atomic_file`."""
    path = link_target(path)
    with hidden_directory(path) as fresh:
        yield fresh
        for inside in (*fresh.iterdir(), fresh):
            sync(inside)
        _move(fresh, path, replace)
    sync(path.parent)


@contextmanager
def hidden_directory(path: Path) -> Iterator[Path]:
    """Creates a folder under a hidden name next to `path`; removes it when the block ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path)
    fresh, descriptor = create_hidden(path, TEMPORARY, folder=True)
    try:
        yield fresh
    finally:
        os.close(descriptor)
        shutil.rmtree(fresh, ignore_errors=True)


def remove_directory(path: Path) -> None:
    """Deletes a folder; it is never seen with only some of its files."""
    with hidden_directory(path) as fresh:
        path.rename(fresh / path.name)


def replaced_directory(path: Path) -> Path | None:
    """Returns the hidden old folder of `path` if a writer was killed while replacing it."""
    return None if path.exists() else max(_hidden(path, REPLACED), default=None)


def link_target(path: Path) -> Path:
    """Resolves symbolic links; raises OSError if they form a loop."""
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return target


def sync(path: Path) -> None:
    """Waits until a file, or the list of entries of a folder, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def create_hidden(path: Path, suffix: str, *, folder: bool) -> tuple[Path, int]:
    """Creates and locks a hidden file or folder next to `path`; also returns its descriptor."""
    while True:
        fresh = _new_name(path, suffix)
        if folder:
            fresh.mkdir()
        else:
            os.close(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        # until it is locked, another process may remove it as abandoned
        with suppress(FileNotFoundError):
            descriptor = os.open(fresh, os.O_RDONLY if folder else os.O_WRONLY)
            if lock_file(descriptor) is not False and fresh.exists():
                return fresh, descriptor
            os.close(descriptor)


def abandoned(path: Path, suffix: str) -> Iterator[tuple[Path, int]]:
    """Yields hidden files of `path` that killed processes left, locked; the caller closes them."""
    for hidden in _hidden(path, suffix):
        with suppress(FileNotFoundError):
            descriptor = os.open(hidden, os.O_RDONLY | os.O_NOFOLLOW)
            if lock_file(descriptor) and hidden.exists():  # else its owner has just published it
                yield hidden, descriptor
            else:
                os.close(descriptor)


def publish(fresh: Path, path: Path, *, replace: bool) -> None:
    """Moves a complete file to `path`; without `replace`, raises FileExistsError if it exists."""
    if not replace:
        try:
            os.link(fresh, path)
            return
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))  # reserves the name
    os.replace(fresh, path)


def _new_name(path: Path, suffix: str) -> Path:
    return path.with_name(f"{_prefix(path)}{secrets.token_hex(4)}{suffix}")


def _prefix(path: Path) -> str:
    """Returns the start of all hidden names of `path`, short enough for the file system."""
    name = os.fsencode(path.name)
    if len(name) > MAX_NAME:
        name = name[:MAX_NAME] + hashlib.sha256(name).hexdigest()[:8].encode()
    return f".{os.fsdecode(name)}."


def _hidden(path: Path, suffix: str) -> list[Path]:
    """Lists the hidden files and folders of `path`, without links and files of other users."""
    name = re.compile(f"{re.escape(_prefix(path))}[0-9a-f]{{8}}{re.escape(suffix)}")
    with suppress(OSError):  # the folder does not exist or cannot be read
        return sorted(
            Path(entry.path)
            for entry in os.scandir(path.parent)
            if name.fullmatch(entry.name)
            and not entry.is_symlink()
            and entry.stat().st_uid == os.geteuid()
        )
    return []


def _remove_abandoned(path: Path) -> None:
    """Removes the hidden files and folders that killed processes left next to `path`."""
    for old in _hidden(path, REPLACED) if path.exists() else ():
        shutil.rmtree(old, ignore_errors=True)
    for hidden, descriptor in abandoned(path, TEMPORARY):
        if hidden.is_dir():
            shutil.rmtree(hidden, ignore_errors=True)
        else:
            hidden.unlink(missing_ok=True)
        os.close(descriptor)


def _move(fresh: Path, path: Path, replace: bool) -> None:
    """Renames a folder to `path`; with `replace`, hides an existing one first and removes it."""
    try:
        fresh.rename(path)
        return
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise
        if not replace:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
    old = _new_name(path, REPLACED)
    path.rename(old)
    try:
        fresh.rename(path)
    except OSError:
        with suppress(OSError):
            old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)
