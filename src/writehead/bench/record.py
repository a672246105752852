"""Writes results as JSON files; other files are overwritten only on request."""

import json
import math
from pathlib import Path
from typing import Any

from writehead import cost
from writehead.errors import RunError
from writehead.interop.pretrained import RunFacts
from writehead.util.files import hidden_directory, link_target, write_file
from writehead.util.json_files import read_json


def run_facts(run: Path) -> dict[str, Any]:
    """Returns the config, quantization, size on disk and fingerprint of a model."""
    facts = RunFacts.read(run)
    return {
        "model": facts.config.to_json(),
        "parameters": sum(cost.parameters(facts.config).values()),
        "quantization": facts.quantization and facts.quantization.to_json(),
        "bytes": facts.bytes,
        "fingerprint": facts.fingerprint,
    }


def finite(value: Any) -> Any:
    """Replaces infinities and NaN, which JSON does not have, with None."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_result(path: Path, result: dict[str, Any], *, replace: bool = True) -> None:
    """Writes a result; if `path` is a symbolic link, writes its target."""
    text = json.dumps(finite(result), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        link_target(path).parent.mkdir(parents=True, exist_ok=True)
        write_file(path, text, replace=replace)
    except FileExistsError as error:
        raise RunError(
            f"another process has written {path} in the meantime; choose another path"
        ) from error
    except OSError as error:
        raise RunError(f"{path} could not be written: {error.strerror}") from error


class ResultFile:
    """A file that one process rewrites as its result grows.

    Without `force`, it does not replace a file that another process has written in the meantime.
    """

    def __init__(self, path: Path, force: bool) -> None:
        self.path, self._force = path, force
        self._seen = self._identity()

    def write(self, result: dict[str, Any]) -> None:
        """Writes the result; raises RunError if another process has written the file."""
        is_ours = self._force or (self.path.exists() and self._identity() == self._seen)
        write_result(self.path, result, replace=is_ours)
        self._seen = self._identity()

    def _identity(self) -> tuple[int, int] | None:
        status = self.path.stat() if self.path.exists() else None
        return status and (status.st_ino, status.st_mtime_ns)


def check_output(path: Path | None, force: bool, bench: str | None = None) -> ResultFile | None:
    """Returns the file for a result; raises RunError if it exists or cannot be written.

    With `force`, or if it is a partial result of the same `bench`, it may exist.
    """
    if path is None:
        return None
    file = ResultFile(path, force)
    if path.is_file() and not force and not _is_partial(path, bench):
        raise RunError(f"{path} exists; choose another path, or force its replacement")
    check_writable(path)
    return file


def check_writable(path: Path) -> None:
    """Raises RunError unless a file can be written at `path`; creates its folder."""
    try:
        if path.exists() and not path.is_file():
            raise RunError(f"{path} is not a regular file; choose another path")
        with hidden_directory(link_target(path)):
            pass
    except OSError as error:
        raise RunError(f"{path} could not be written: {error.strerror}") from error


def _is_partial(path: Path, bench: str | None) -> bool:
    try:
        result = read_json(path, {"bench": str, "partial": bool}, RunError)
    except RunError:
        return False
    return bool(result["bench"] == bench and result["partial"])
