"""What every result says of itself: hardware, versions, commit, date, command, and the run.

Where the code runs without its git history, as from an installed package or a copied tree, the
variable WRITEHEAD_COMMIT may say which commit it is.
"""

import errno
import json
import math
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from writehead import __version__, cost
from writehead.errors import RunError
from writehead.model.runs import (
    read_config,
    read_quantization,
    run_bytes,
    run_fingerprint,
)
from writehead.util.files import hidden_directory, link_target, write_file
from writehead.util.json_files import Shape, read_json

MAX_RESULT = 256 << 20  # bytes


def environment(device: torch.device) -> dict[str, Any]:
    """The facts that a figure depends on."""
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else _processor()
    return {
        "hardware": {"device": name, "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "versions": {
            "writehead": __version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda if cuda else None,
            "triton": version_of("triton"),
            "python": platform.python_version(),
        },
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["writehead", *sys.argv[1:]]),
    }


def run_facts(run: Path) -> dict[str, Any]:
    """Which model a figure is of: its sizes, its bits and bytes on disk, and which weights."""
    config, quantization = read_config(run), read_quantization(run)
    return {
        "model": config.to_json(),
        "parameters": sum(cost.parameters(config).values()),
        "quantization": None if quantization is None else quantization.to_json(),
        "bytes": run_bytes(run),
        "fingerprint": run_fingerprint(run),
    }


def finite(value: Any) -> Any:
    """A value with None for numbers that are infinite or none at all, which JSON cannot say."""
    if isinstance(value, dict):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_result(path: Path, result: dict[str, Any], *, replace: bool = True) -> None:
    """Writes a result as JSON, complete or not at all; if `path` is a link, to its target."""
    place = _led_to(path)
    text = json.dumps(finite(result), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_file(place, text, replace=replace)
    except FileExistsError as error:
        raise _written_meanwhile(path) from error
    except OSError as error:
        raise RunError(f"{path} could not be written: {error.strerror}") from error


def _written_meanwhile(path: Path) -> RunError:
    return RunError(
        f"another process has written {path} in the meantime, and it is kept; choose another path"
    )


class ResultFile:
    """A file for one result, which one process writes again as the result grows.

    A file that another process writes in the meantime is kept, except with `force`.
    """

    def __init__(self, path: Path, force: bool) -> None:
        self.path, self._force = path, force
        self._seen = self._identity()

    def write(self, result: dict[str, Any]) -> None:
        """Writes the result; raises RunError if another process has written the file."""
        found = self._identity()
        if not self._force and found not in (None, self._seen):
            raise _written_meanwhile(self.path)
        write_result(self.path, result, replace=self._force or found is not None)
        self._seen = self._identity()

    def _identity(self) -> tuple[int, int] | None:
        """Identifies the current file; None if there is no file."""
        try:
            status = self.path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns


def _led_to(path: Path) -> Path:
    """Where a path leads to, through links."""
    try:
        return link_target(path)
    except OSError as error:
        raise RunError(f"{path} could not be written: {error.strerror}") from error


def check_writable(path: Path) -> None:
    """Raises RunError unless a result can be written there; makes its folder."""
    place = _led_to(path)
    try:
        if path.parent.exists() and not path.parent.is_dir():
            raise RunError(f"{path.parent} is no folder, and one is wanted; choose another place")
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.exists() and not path.is_file():
            raise RunError(f"{path} is a pipe or a device, which nothing replaces; name a file")
        with hidden_directory(place):
            pass
    except OSError as error:
        raise RunError(f"{path} could not be written: {error.strerror}") from error


def check_output(path: Path | None, force: bool, bench: str | None = None) -> ResultFile | None:
    """Returns the file for a result; raises RunError if it exists or cannot be written.

    An existing file is replaced with `force`, or if it is a partial result of the same `bench`.
    """
    if path is None:
        return None
    file = ResultFile(path, force)
    if path.is_file() and not force and not _is_partial(path, bench):
        raise RunError(f"{path} exists; choose another place, or pass --force to replace it")
    check_writable(path)
    return file


def _is_partial(path: Path, bench: str | None) -> bool:
    """Whether a file is a result of a bench that says of itself that a run was interrupted."""
    try:
        result = read_result_file(path, {"bench?": str, "partial": bool})
    except RunError:
        return False
    return result.get("bench") == bench and result["partial"] is True


def read_result_file(path: Path, shape: Shape, advice: str = "") -> Any:
    """Reads a result file, which must have the given shape; see `check_shape`."""
    return read_json(path, shape, RunError, advice, max_bytes=MAX_RESULT)


def version_of(package: str) -> str | None:
    """The version of an installed package; None where there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    """The name of the CPU: Linux has it in a file, and Python does not look there."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "cpu"


def _commit() -> str | None:
    """The commit of the code that runs, with a + where it was changed since.

    WRITEHEAD_COMMIT, where it is set and not empty, is taken at its word and marked as told;
    without it, and outside git, the answer is None.
    """
    if said := os.environ.get("WRITEHEAD_COMMIT"):
        return f"{said} (told)"
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        )
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")
