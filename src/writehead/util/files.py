"""Files and folders that appear complete or not at all.

A file or folder is written under a random hidden name beside its path, synced to disk and renamed.
The writer locks the hidden file. If the lock is free, the writer was killed, and the next writer to
the same path removes the file. While a folder is replaced, the old one briefly has a hidden name;
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

ENDING, OLD = ".tmp", ".old"  # of hidden names: what is being written, and what is being replaced
LONGEST = 200  # bytes of a place's name that its hidden names repeat
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def write_file(path: Path, content: bytes | str, *, replace: bool = True) -> None:
    """Writes a whole file; see `atomic_file`."""
    with atomic_file(path, replace=replace) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def atomic_file(path: Path, *, replace: bool = True) -> Iterator[BinaryIO]:
    """Opens a file that appears at `path` when the block ends without an error.

    Without `replace`, raises FileExistsError at the end of the block if the file exists by then,
    and keeps it. If `path` is a symbolic link, its target is written.
    """
    path = link_target(path)
    _remove_abandoned(path)
    fresh, descriptor = create_hidden(path, ENDING, folder=False)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(descriptor)
            publish(fresh, path, replace=replace)
    finally:
        with suppress(FileNotFoundError):
            fresh.unlink()
    sync(path.parent)


@contextmanager
def atomic_directory(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Creates a folder that appears at `path` when the block ends without an error.

    With `replace`, it replaces an existing folder. Without, an existing folder is kept and the
    block ends with FileExistsError. If `path` is a symbolic link, its target is written.
    """
    path = link_target(path)
    with hidden_directory(path) as fresh:
        yield fresh
        for inside in (*fresh.iterdir(), fresh):
            sync(inside)
        _move(fresh, path, replace)
    sync(path.parent)


@contextmanager
def hidden_directory(path: Path) -> Iterator[Path]:
    """Creates a folder under a hidden name beside `path`; removes it when the block ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path)
    fresh, descriptor = create_hidden(path, ENDING, folder=True)
    try:
        yield fresh
    finally:
        os.close(descriptor)
        shutil.rmtree(fresh, ignore_errors=True)


def remove_directory(path: Path) -> None:
    """Deletes a folder; it is never partly deleted under its own name."""
    with hidden_directory(path) as fresh:
        path.rename(fresh / path.name)


def replaced_directory(path: Path) -> Path | None:
    """Returns the old folder of `path` if a writer was killed while replacing it."""
    if path.exists() or not path.parent.is_dir():
        return None
    return max(_hidden(path, OLD), default=None)


def link_target(path: Path) -> Path:
    """The path without symbolic links; raises OSError if they form a loop."""
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return target


def sync(path: Path) -> None:
    """Waits until a file, or the entries of a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def create_hidden(path: Path, ending: str, *, folder: bool) -> tuple[Path, int]:
    """Creates a hidden file or folder beside `path`; also returns the descriptor that locks it."""
    while True:
        fresh = path.with_name(f"{_prefix(path)}{secrets.token_hex(4)}{ending}")
        with suppress(FileExistsError):
            if folder:
                fresh.mkdir()
            else:
                os.close(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            # before it is locked, another process may remove it as abandoned
            with suppress(FileNotFoundError):
                descriptor = os.open(fresh, os.O_RDONLY if folder else os.O_WRONLY)
                if lock_file(descriptor) is not False and fresh.exists():
                    return fresh, descriptor
                os.close(descriptor)


def abandoned(path: Path, ending: str) -> Iterator[tuple[Path, int]]:
    """Yields and locks the hidden files and folders beside `path` that killed processes left.

    The caller must close the descriptors, which releases the locks.
    """
    for left in _hidden(path, ending):
        try:
            descriptor = os.open(left, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            continue
        # else its owner has finished it meanwhile
        if lock_file(descriptor) and left.exists():
            yield left, descriptor
        else:
            os.close(descriptor)


def publish(fresh: Path, path: Path, *, replace: bool) -> None:
    """Moves a complete file to `path`; without `replace`, raises FileExistsError if that exists."""
    if replace:
        os.replace(fresh, path)
        return
    try:
        os.link(fresh, path)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))  # reserves the name
        try:
            os.replace(fresh, path)
        except OSError:
            path.unlink()
            raise


def _prefix(path: Path) -> str:
    """Returns the prefix of hidden names for `path`, shortened to fit the file system's limit."""
    name = os.fsencode(path.name)
    if len(name) > LONGEST:
        name = name[:LONGEST] + hashlib.sha256(name).hexdigest()[:8].encode()
    return f".{os.fsdecode(name)}."


def _hidden(path: Path, ending: str) -> list[Path]:
    """Lists the hidden files and folders for `path` that have this suffix."""
    name = re.compile(f"{re.escape(_prefix(path))}[0-9a-f]{{8}}{re.escape(ending)}")
    try:
        names = sorted(filter(name.fullmatch, os.listdir(path.parent)))
    except OSError:  # the folder does not exist or may not be read
        return []
    return [place for one in names if _is_ours(place := path.parent / one)]


def _is_ours(path: Path) -> bool:
    """Whether this user made a file or folder; in a shared folder, others may plant names."""
    try:
        return path.lstat().st_uid == os.geteuid() and not path.is_symlink()
    except OSError:
        return False


def _remove_abandoned(path: Path) -> None:
    """Removes the hidden files and folders that killed processes left beside `path`."""
    for old in _hidden(path, OLD) if path.exists() else ():
        shutil.rmtree(old, ignore_errors=True)
    for left, descriptor in abandoned(path, ENDING):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)
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
    old = path.with_name(f"{_prefix(path)}{secrets.token_hex(4)}{OLD}")
    path.rename(old)
    try:
        fresh.rename(path)
    except OSError:
        if not path.exists():
            old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)
