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
from contextlib import suppress
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


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Writes a result as JSON, whole or not at all; where there is a link, to what it leads to."""
    place = _led_to(path)
    fresh = place.with_name(f".{place.name}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(finite(result), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        fresh.write_text(text, encoding="utf-8")
        os.replace(fresh, place)
    except OSError as error:
        with suppress(OSError):
            fresh.unlink()
        raise RunError(f"{path} could not be written: {error.strerror}") from error


def _led_to(path: Path) -> Path:
    """Where a path leads to, through links."""
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:  # of a loop, which the next Python calls an OSError
        raise RunError(f"{path} could not be written: its links lead nowhere") from error


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
        fresh = place.with_name(f".{place.name}.{os.getpid()}")  # others may look at the same time
        fresh.touch()
        fresh.unlink()
    except OSError as error:
        raise RunError(f"{path} could not be written: {error.strerror}") from error


def check_output(path: Path | None, force: bool, bench: str | None = None) -> None:
    """Raises RunError where a result cannot be written, or would replace a whole one unasked.

    What an interrupted run of the same `bench` left may be replaced.
    """
    if path is None:
        return
    if path.is_file() and not force and not _is_partial(path, bench):
        raise RunError(f"{path} exists; choose another place, or pass --force to replace it")
    check_writable(path)


def _is_partial(path: Path, bench: str | None) -> bool:
    """Whether a file is a result of a bench that says of itself that a run was interrupted."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if not isinstance(result, dict) or result.get("bench") != bench:
        return False
    return result.get("partial") is True


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
