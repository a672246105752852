"""The checksum of a run's file: another one beside it, in the form that `sha256sum -c` reads."""

import hashlib
import re
from pathlib import Path

from writehead.errors import DamagedRun, RunError

ENDING = ".sha256"


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in 64 digits; about a second for each gigabyte."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_checksum(path: Path) -> None:
    """Puts the checksum of a file beside it."""
    beside = path.with_name(path.name + ENDING)
    beside.write_text(f"{sha256(path)}  {path.name}\n", encoding="ascii")


def check_checksum(path: Path) -> None:
    """Raises where a file is not the one whose checksum is beside it; there may be none."""
    beside = path.with_name(path.name + ENDING)
    if not beside.is_file():
        return
    try:
        said = re.match(rb"[0-9a-fA-F]{64}\b", beside.read_bytes())
    except OSError as error:
        raise RunError(
            f"{beside} cannot be read: {error.strerror}; make it readable, or delete it"
        ) from error
    if said is None:
        raise RunError(f"{beside} holds no SHA-256; copy it again, or delete it")
    if sha256(path) != said[0].decode().lower():
        raise DamagedRun(
            f"{path} is not as it was written: its SHA-256 is not the one in {beside.name}",
            "copy or save the run again, or delete that file if you changed the weights yourself",
        )
