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
    paths = sorted(path for path in directory.iterdir() if path.name != CHECKSUMS)
    lines = "".join(f"{sha256(path)}  {path.name}\n" for path in paths)
    (directory / CHECKSUMS).write_text(lines, encoding="ascii")


def check_checksum(path: Path) -> None:
    """Raises DamagedRun if a file does not match its checksum; without a checksum, passes.

    Older runs have model.safetensors.sha256 instead, which covers only the weights.
    """
    beside = path.with_name(CHECKSUMS)
    if not beside.is_file():
        beside = path.with_name(f"{path.name}.sha256")
    if not path.is_file() or not beside.is_file():
        return
    expected = _read(beside).get(path.name)
    if expected is None and beside.name == CHECKSUMS:
        raise DamagedRun(
            f"{path} is not listed in {CHECKSUMS}",
            f"copy or save the run again, or delete {CHECKSUMS} if you added the file yourself",
        )
    if expected not in (None, sha256(path)):
        raise DamagedRun(
            f"{path} is not as it was written: its SHA-256 is not the one in {beside.name}",
            f"copy or save the run again; if you changed the file yourself, delete {beside.name}",
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
    found = [LINE.fullmatch(line) for line in lines if line]
    if not found or None in found:
        raise RunError(f"{path} holds no SHA-256 checksums; copy it again, or delete it")
    return {match[2]: match[1].lower() for match in found if match is not None}
