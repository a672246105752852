"""SHA-256 checksums of the files in a folder, in the format of `sha256sum`."""

import hashlib
from pathlib import Path

from writehead.errors import DamagedRun, RunError

CHECKSUMS, MAX_CHECKSUMS = "checksums.sha256", 1 << 20  # bytes
COPY_AGAIN = "copy or save the run again"


def write_checksums(directory: Path) -> None:
    """Writes the checksums of all files in a folder."""
    lines = [f"{sha256(path)}  {path.name}\n" for path in sorted(directory.iterdir())]
    (directory / CHECKSUMS).write_text("".join(lines), encoding="ascii")


def check_checksum(path: Path) -> None:
    """Raises DamagedRun if a file does not match its checksum; accepts a folder without any."""
    checksums = path.with_name(CHECKSUMS)
    if not path.is_file() or not checksums.is_file():
        return
    try:
        with checksums.open("rb") as file:
            lines = file.read(MAX_CHECKSUMS).decode("ascii", "replace").splitlines()
        line = f"{sha256(path)}  {path.name}"
    except OSError as error:
        raise RunError(f"{error.filename} cannot be read: {error.strerror}") from error
    if line not in lines:
        raise DamagedRun(
            f"{path} does not match its SHA-256 in {CHECKSUMS}",
            f"{COPY_AGAIN}; if you changed the file yourself, delete {CHECKSUMS}",
        )


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file as 64 hex digits; takes about a second per gigabyte."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
