"""Checksums of the files in a run, in one file that `sha256sum --check` can read."""

import hashlib
from pathlib import Path

from writehead.errors import DamagedRun, RunError

CHECKSUMS = "checksums.sha256"
MAX_BYTES = 1 << 20


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file as 64 hex digits; takes about a second per gigabyte."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_checksums(directory: Path) -> None:
    """Writes the checksums of all files in a folder."""
    lines = [_line(path) + "\n" for path in sorted(directory.iterdir())]
    (directory / CHECKSUMS).write_text("".join(lines), encoding="ascii")


def check_checksum(path: Path) -> None:
    """Raises DamagedRun if a file does not match its checksum; accepts a folder without any."""
    checksums = path.with_name(CHECKSUMS)
    if not path.is_file() or not checksums.is_file():
        return
    try:
        with checksums.open("rb") as file:
            lines = file.read(MAX_BYTES).decode("ascii", "replace").splitlines()
    except OSError as error:
        raise RunError(f"{checksums} cannot be read: {error.strerror}") from error
    if _line(path) not in lines:
        raise DamagedRun(
            f"{path} does not match its SHA-256 in {CHECKSUMS}",
            f"copy or save the run again; if you changed the file yourself, delete {CHECKSUMS}",
        )


def _line(path: Path) -> str:
    return f"{sha256(path)}  {path.name}"
