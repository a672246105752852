"""Checksums of the files in a run, in one file that `sha256sum --check` can read."""

import hashlib
import re
from pathlib import Path

from writehead.errors import DamagedRun, RunError

CHECKSUMS = "checksums.sha256"
MAX_BYTES = 1 << 20
LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](\S+)\r?")


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file as 64 hex digits; takes about a second per gigabyte."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_checksums(directory: Path) -> None:
    """Writes the checksums of all files in a folder."""
    lines = [f"{sha256(path)}  {path.name}\n" for path in sorted(directory.iterdir())]
    (directory / CHECKSUMS).write_text("".join(lines), encoding="ascii")


def check_checksum(path: Path) -> None:
    """Raises DamagedRun if a file does not match its checksum; passes if its folder has none."""
    checksums = path.with_name(CHECKSUMS)
    if not path.is_file() or not checksums.is_file():
        return
    expected = _read(checksums).get(path.name)
    if expected != sha256(path):
        fault = "is not listed in" if expected is None else "does not match its SHA-256 in"
        raise DamagedRun(
            f"{path} {fault} {CHECKSUMS}",
            f"copy or save the run again; if you changed the file yourself, delete {CHECKSUMS}",
        )


def _read(path: Path) -> dict[str, str]:
    """Reads checksums by file name."""
    try:
        with path.open("rb") as file:
            lines = file.read(MAX_BYTES).decode("ascii", "replace").split("\n")
    except OSError as error:
        raise RunError(
            f"{path} cannot be read: {error.strerror}; make it readable, or delete it"
        ) from error
    matches = [LINE.fullmatch(line) for line in lines if line]
    if not matches or None in matches:
        raise RunError(f"{path} has no valid SHA-256 checksums; copy it again, or delete it")
    return {match[2]: match[1].lower() for match in matches if match is not None}
